"""How long, in seconds, each wait may take that no setting bounds; acceptance has its own. What ends here names what it waited for.

Those that depend on the model or the user are settings: training.step_timeout_s, rollout.request_timeout_s, rollout.startup_timeout_s,
weights.sync_timeout_s, reward.timeout_s.
"""

# The start of a run. All of these are long, because a machine may be busy and a file system slow.
NODES_START_S = 1800.0
"""Until a cluster has as many nodes as were asked for."""
RAY_START_S = 300.0
"""Ray's own parts among each other, 30 to 60 s by default, and its node."""
PLACEMENT_S = 120.0
"""Until Ray has reserved what ranks and engines need."""
RANKS_START_S = 600.0
"""The processes of the ranks, then the model on each of them."""
REWARDS_START_S = 300.0
"""All reward workers."""
REWARD_IMPORT_S = 120.0
"""The module of the user's reward function."""
PLUGIN_PROBE_S = 60.0
"""A rollout function that is tried before the run."""
ENGINE_STORE_S = 600.0
"""The processes of one engine, until they have met."""
ENGINE_READY_S = 10.0
"""One question whether an engine is ready; it is asked again."""
PLANNING_S = 900.0
"""A process that measures layouts."""
IMPORT_S = 180.0
"""A package that doctor imports."""

# Calls in a run that no work of a model is behind.
ENGINE_CONTROL_S = 60.0
"""A call that controls an engine."""
ENGINE_MEMORY_S = 60.0
"""Engines that free their memory or take it again."""
ENGINE_ABORT_S = 5.0
"""The abort of a request that nobody waits for any more."""
RANK_ANSWER_S = 60.0
"""Within it a rank that has nothing to do takes a call, also on a machine that is overloaded."""
BUFFER_LOCK_S = 30.0
"""Somebody else who reads or writes the buffer's file."""

# A failure waits for the death that explains it: a call to a dead engine fails at once with a refused connection, but its process, which
# is looked at twice a second, is only then found dead.
CAUSE_S = 5.0
"""Until a watched actor tells its death, with exit status and log."""
DEATH_S = 5.0
"""Until an engine leaves the pool."""

# The end of a run.
CLOSE_S = 60.0
"""Each part of a run that closes on the event loop."""
LOOP_STOP_S = 10.0
"""The event loop itself."""
ENGINES_STOP_S = 30.0
"""The actor of an engine; within it ENGINE_STOP_S."""
ENGINE_STOP_S = 10.0
"""The server, before it is killed."""
RAY_STOP_S = 10.0
"""Ray's processes, before they are killed."""
