"""Deadlines in seconds of every wait, except doctor's.

An expired deadline's error names the wait. Deadlines dependent on the user's code are settings,
such as rollout.timeout_s and reward.timeout_s.
"""

# `config/derived.py` adds time for a model's bytes and tokens; model.deadline_s replaces each.
START_S = 900.0
"""Start of the ranks, and of the engines: imports, first compiles, CUDA graphs."""
SYNC_S = 600.0
"""One weight sync, and engines freeing or taking memory again."""
STEP_S = 3600.0
"""One training step, and a collective in the step."""
REQUEST_S = 600.0
"""One generation request, retries included."""
MODEL_BYTES_PER_S = 0.25e9
"""Least bytes a second of one model copy, while all ranks and engines read or send."""
REQUEST_TOKENS_PER_S = 4.0
"""Least tokens a second of one response, on a full engine."""

# The start of a run. All of these are long, because a machine may be busy and a file system slow.
NODES_START_S = 1800.0
"""Time until a cluster has all requested nodes."""
RAY_START_S = 300.0
"""Connections among Ray's own parts, 30 to 60 s by default, and its node."""
RAY_ANSWER_S = 5.0
"""A connection to Ray's control service, which the kernel accepts on a busy machine, too."""
RAY_JOIN_S = 60.0
"""Time for this process to join an existing Ray cluster."""
RAY_SILENT_S = 8.0
"""Time without Ray's control service until a run ends.

Ray itself ends the driver after 60 s, a local Ray after RAY_START_S.
"""
PLACEMENT_S = 120.0
"""Time for Ray to reserve the needs of ranks and engines."""
RANKS_START_S = 600.0
"""The processes of the ranks, before they build the model."""
REWARDS_START_S = 300.0
"""All reward workers."""
AGENTS_START_S = 300.0
"""Processes for agents on other nodes."""
PLUGIN_IMPORT_S = 120.0
"""The module of a plug-in."""
PLUGIN_PROBE_S = 60.0
"""Trial of a rollout function before the run."""
ENGINE_STORE_S = 600.0
"""Time for the processes of one engine to meet."""
ENGINE_READY_S = 10.0
"""One readiness request to an engine, repeated until ready."""
PLANNING_S = 900.0
"""A process that measures layouts."""
IMPORT_S = 180.0
"""Import of a package by doctor."""

# Calls in a run without work of a model behind.
ENGINE_CONTROL_S = 60.0
"""A call that controls an engine."""
ENGINE_LOAD_S = 5.0
"""The question of an engine's load, which goes unanswered without harm."""
ENGINE_ABORT_S = 5.0
"""Abort of a request without a waiting caller."""
RANK_ANSWER_S = 60.0
"""Time for an idle rank to take a call, also on an overloaded machine."""
BUFFER_LOCK_S = 30.0
"""Another program's transaction on the buffer's file."""
REWARD_TAKE_S = 60.0
"""A call without a free reward worker, before the workers are replaced.

A worker that starts on a busy machine takes less.
"""
NAMED_S = 5.0
"""A wait for others worth a line of output."""
LATE_S = 20.0
"""Least seconds of a wait that is late against its usual time, and has the stacks of the run's processes written."""
STACK_S = 5.0
"""Python stacks of one process."""

# Failures wait for the explaining death: a call to a dead engine fails at once with a refused
# connection, but the process is checked twice a second, and found dead only then.
CAUSE_S = 5.0
"""Time for a watched actor to report death, with exit status and log."""
SILENT_S = 30.0
"""Without a step or an answer of an engine that has requests or calls of a sync, until its processes are looked at."""
DEATH_S = 5.0
"""Time for an engine to leave the pool."""
LEAVE_S = 60.0
"""The same, of an engine that is ended because it failed: requests that have no other one wait for that long."""

# The end of a run.
REPORT_S = 900.0
"""The report, written by a process of its own."""
CLOSE_S = 60.0
"""Each part of a run that closes on the event loop."""
LOOP_STOP_S = 10.0
"""The event loop itself."""
ENGINES_STOP_S = 30.0
"""The actors of all engines; within it ENGINE_STOP_S."""
ENGINE_STOP_S = 10.0
"""The server, before it is killed."""
EXIT_S = 30.0
"""Threads of the user's code that go on after a command's end."""
RAY_LEAVE_S = 1.0
"""The driver's farewell to a Ray of its own, before the processes of that are killed."""
RAY_STOP_S = 10.0
"""The farewell to a Ray cluster, and Ray's processes after they were killed."""
