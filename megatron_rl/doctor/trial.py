"""`megatron-rl doctor --gpu`: try the GPUs of a node with a run's processes, one check a promise.

A line is a function of the node that yields checks as work goes on; an exception is a failed check.
"""

import json
import platform
import signal
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_rl.check import Check, report
from megatron_rl.config.settings import Settings, TrainingSettings
from megatron_rl.doctor import on_rank
from megatron_rl.doctor.machine import check_import, check_package, examine, library_problems, loaded_libraries, pinned_libraries
from megatron_rl.doctor.node import Node
from megatron_rl.engines.sampling import Sampling
from megatron_rl.errors import DeadlineError, MegatronRLError, UserError, counted
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.read_spec import read_model_spec
from megatron_rl.planning.measurement import measure
from megatron_rl.planning.run_plan import CONTEXT_BYTES, make_job, stage_memories
from megatron_rl.planning.step_time import ModelSize, Rates, Step
from megatron_rl.runtime.colocation import Phase, SharedDevices
from megatron_rl.system.files import write_atomic
from megatron_rl.system.versions import installed_version, transformer_engine_release
from megatron_rl.training.offload import PARTS
from megatron_rl.types import Floats, Prompt
from megatron_rl.weights.parity import sample_probe

RESULT_FILE = "trial.json"
LEAST_GB_PER_S = {"cuda": 20.0, "cpu": 0.01}
"""Lowest rate of an all-reduce; less on a GPU means a way through host memory or the wrong network."""
PLAN_TOLERANCE = 0.1
LAYOUT_TOLERANCE = {"cuda": 4e-2, "cpu": 1e-5}  # mean |Δ log-prob|, nats; two attentions in bfloat16 gave 2.4e-2
GRADIENT_TOLERANCE = {"cuda": 2e-2, "cpu": 1e-4}
"""Relative tolerance of a gradient norm."""
UPDATE_TOLERANCE = {"cuda": 0.2, "cpu": 1e-3}
"""The same of a step's change in log-probs: Adam starts with signs, and rounding turns small gradients."""
RUN_TOLERANCE = {"cuda": 0.15, "cpu": 1e-4}
"""Limit of the mean |engine - trainer| log-prob of a step, nats; bfloat16 gives 0.08 at low temperatures."""
STEP_SECONDS = {"cuda": (0.7, 2.0), "cpu": (0.5, 5.0)}
"""Least and most of a step's seconds over the arithmetic's seconds at bare device rates.

The arithmetic leaves out overheads: on a CPU with one thread a step takes 1.2 times as long with
1,024 channels, 1.9 with 256. On a GPU, attention that writes out the T x T scores is beyond twice.
A ratio below 0.7 would show wrong arithmetic.
"""
OF_0_6B: dict[str, Any] = {"hidden": 1024, "layers": 28, "head_dim": 128, "num_attention_heads": 16, "num_key_value_heads": 8}
LEAST_FREED = 0.9
"""Least share of an engine's cache and weights freed by sleep."""
WAKES = 3
CACHE_TOKENS = {"cuda": 2**22, "cpu": 16384}
"""Cache tokens of a colocated engine, enough to make its sleep visible."""
STEP_SEQUENCES, MICRO_BATCH_SEQUENCES, STEP_TURNS = 8, 4, 3
"""Sequences of a rank's step and micro-batches, so many that a GPU's host is faster; steps of which the fastest counts."""
LINE_TIMEOUT_S = {"cuda": 300.0, "cpu": 900.0}
"""Seconds of one line; on a CPU all processes share few cores."""


def judged(promise: str, text: str, problems: Sequence[str]) -> Check:
    """Return a check that is broken by `problems`, and names the problems."""
    return Check(promise, "broken" if problems else "ok", "; ".join([text, *problems]))


def machine(node: Node) -> Iterator[Check]:
    """Check everything from `doctor`, and the loaded libraries of a node of GPUs."""
    yield from examine(node.directory)
    if node.kind == "cuda":
        release = transformer_engine_release()
        yield replace(check_package(release, installed_version(release.distribution)), promise="kernels that are tried")
        yield check_import("transformer_engine.pytorch")
        libraries = loaded_libraries()
        text = ", ".join(f"{name} {version}" for name, version in libraries.items())
        yield judged("libraries that torch was released with", text, library_problems(libraries, pinned_libraries()))


# Ranks


def all_reduce(node: Node) -> Iterator[Check]:
    """Check the ranks' bandwidth: 2 (n - 1) / n bytes cross the network for each summed byte."""
    num_bytes, count = 2**30 if node.kind == "cuda" else 2**24, node.num_gpus
    node.ranks.open(node.settings(node.model("reduced"), num_ranks=count))
    seconds = max(node.ranks.apply(on_rank.all_reduce, num_bytes=num_bytes, repeats=5))
    speed, least = 2 * (count - 1) / count * num_bytes / seconds / 1e9, LEAST_GB_PER_S[node.kind]
    problems = [f"needs {least:g}"] if count > 1 and speed < least else []
    yield judged(f"all-reduce of {num_bytes >> 20} MiB over {counted(count, 'rank')}", f"{speed:.2f} GB/s", problems)


def layouts(node: Node) -> Iterator[Check]:
    """Compare log-probs, gradient norms and a step of every layout and attention with torch on one rank."""
    one, tp2 = {"num_ranks": 1}, {"num_ranks": 2, "tp": 2}
    dense = {"one": one, "tp2": tp2, "cp2": {"num_ranks": 2, "cp": 2}, "tp2 cp2": {"num_ranks": 4, "tp": 2, "cp": 2}}
    experts = {"one": one, "tp2": tp2, "ep2 etp1": {**tp2, "ep": 2, "etp": 1}, "ep2 etp2": {"num_ranks": 4, "tp": 2, "ep": 2, "etp": 2}}
    dense["tp2 pp2"] = experts["tp2 pp2"] = {"num_ranks": 4, "tp": 2, "pp": 2}
    window = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    for name, config, tried in (("qwen3", {}, dense), ("qwen3 with windows", window, dense), ("deepseek_v3", {}, experts)):
        try:
            yield _layouts(node, name, config, tried)
        except UserError as error:
            # Kernels that refuse one model say nothing of the next, which gets new ranks.
            node.close()
            yield Check(f"layouts of {name}", "broken", str(error))


def _layouts(node: Node, name: str, config: Mapping[str, Any], tried: Mapping[str, Mapping[str, Any]]) -> Check:
    model, batch = node.model(f"layouts of {name}", family=name.partition(" ")[0], **config), node.batch()
    ways = ["torch", "transformer_engine"] if node.kind == "cuda" else ["torch"]
    seen: dict[str, tuple[Floats, float, Floats]] = {}
    for attention in ways:
        for layout, topology in tried.items():
            # Transformer Engine has no windows in packed sequences over several ranks.
            refused = attention == "transformer_engine" and "cp" in topology and "sliding_window" in config
            if topology["num_ranks"] <= node.num_gpus and not refused:
                node.ranks.open(node.settings(model, attention=attention, **topology))
                before = node.ranks.log_probs(batch, temperature=1.0)[batch.loss_mask]
                norm = node.ranks.apply(on_rank.step, batch=batch)[0]["train/grad_norm"]
                after = node.ranks.log_probs(batch, temperature=1.0)[batch.loss_mask]
                seen[f"{attention} {layout}"] = before, norm, after - before
    log_probs, grad_norm, update = seen.pop("torch one")
    limits = LAYOUT_TOLERANCE[node.kind], GRADIENT_TOLERANCE[node.kind], UPDATE_TOLERANCE[node.kind]
    problems, said = [], []
    for way, (found, norm, moved) in seen.items():
        changed = np.abs(moved - update).mean() / np.abs(update).mean()
        apart = float(np.abs(found - log_probs).mean()), abs(norm / grad_norm - 1), float(changed)
        said.append(f"{way} " + ", ".join(f"{number:.1e}" for number in apart))
        if not all(number <= limit for number, limit in zip(apart, limits, strict=True)):
            problems.append(f"{way} needs {', '.join(f'{limit:.0e}' for limit in limits)}")
    text = f"mean |Δ log-prob|, relative Δ of gradient norm and of what a step changes: {'; '.join(said)}"
    return judged(f"layouts of {name} against torch on one rank", text, problems if seen else ["nothing to compare with"])


def put_away(node: Node) -> Iterator[Check]:
    """Check the memory freed by a rank, and the content after taking the memory back."""
    batch, ranks = node.batch(), node.ranks
    # Workspaces of cuBLAS and Transformer Engine stay, 97 MiB on an H200, and are little beside the state of a model of this size.
    ranks.open(node.settings(node.model("put away", **(OF_0_6B if node.kind == "cuda" else {})), num_ranks=1))
    ranks.apply(on_rank.step, batch=batch)
    before, there = ranks.log_probs(batch, temperature=1.0), ranks.apply(on_rank.state_bytes)[0]
    ranks.call("put_away", frozenset(PARTS))
    away = ranks.apply(on_rank.state_bytes)[0]
    ranks.call("take_back", frozenset(PARTS))
    after, back = ranks.log_probs(batch, temperature=1.0), ranks.apply(on_rank.state_bytes)[0]
    problems = [f"needs at most {there // 20} away"] if away > 0.05 * there else []
    # A pass leaves small tables behind.
    problems += [f"needs {there} after"] * (abs(back - there) > there // 100)
    problems += ["other log-probs after"] * (not np.array_equal(before, after))
    yield judged("put away and take back", f"{there} bytes, {away} while away, {back} after", problems)


def plan(node: Node) -> Iterator[Check]:
    """Compare memory and seconds of a step, data parallel on all ranks, with the plan's."""
    model = node.model("planned", **(OF_0_6B if node.kind == "cuda" else {"hidden": 256, "layers": 4}))
    spec, count, length, ranks = read_model_spec(model), node.num_gpus, node.longest, node.ranks
    num_sequences, num_tokens = count * STEP_SEQUENCES, MICRO_BATCH_SEQUENCES * length
    sections = {
        "data": {"train": "unused.jsonl", "prompts_per_step": num_sequences, "max_prompt_tokens": 1},
        "rollout": {"sampling": {"max_response_tokens": length - 1}},
    }
    settings = node.settings(model, training={"max_tokens_per_micro_batch": num_tokens}, sections=sections, num_ranks=count)
    fused = node.kind == "cuda"
    job = make_job(settings, spec, attention="transformer_engine" if fused else None)
    (answer,) = measure([job])
    if answer.refused is not None:
        raise MegatronRLError(f"the plan refused the layout: {answer.refused}")
    (stage,) = stage_memories(job, answer, frees_outputs=fused)
    batch = node.batch([length - 1] * num_sequences)
    ranks.open(settings)
    ranks.apply(on_rank.step, batch=batch)
    seconds = min(max(metrics["seconds"] for metrics in ranks.apply(on_rank.step, batch=batch)) for _ in range(STEP_TURNS))
    peak = max(ranks.apply(on_rank.peak_of_step, batch=batch))
    apart = peak / stage.trained - 1
    problems = [f"needs {PLAN_TOLERANCE:.0%}"] if abs(apart) > PLAN_TOLERANCE else []
    yield judged("memory of a step against the plan", f"{peak} bytes, plan {stage.trained} ({apart:+.1%})", problems)
    # The plan leaves these out: every process group that was used has buffers.
    beside = max(ranks.apply(on_rank.foreign_bytes))
    problems = ["needs less"] if beside > CONTEXT_BYTES else []
    yield judged("memory of CUDA and NCCL against the plan", f"{beside} bytes, plan {CONTEXT_BYTES} or less", problems)
    yield _against_bare_work(node, settings.training, spec, longest=length, num_sequences=num_sequences, seconds=seconds)


def _against_bare_work(
    node: Node, training: TrainingSettings, spec: ModelSpec, *, longest: int, num_sequences: int, seconds: float
) -> Check:
    """Compare the `seconds` of a step with arithmetic at the rates of the device in bare work."""
    tokens = training.max_tokens_per_micro_batch
    measured = node.ranks.apply(on_rank.device_rates, spec=spec, num_tokens=tokens, length=longest, dtype=node.dtype)
    # Other ranks wait for the slowest rank.
    rates = Rates(*map(min, zip(*map(astuple, measured), strict=True)))
    sizes = {"longest": longest, "num_sequences": num_sequences, "per_node": node.num_gpus}
    step = Step.of(training, ModelSize.of(spec), recompute=None, itemsize=getattr(torch, node.dtype).itemsize, **sizes)
    parts = step.parts(rates)
    ratio, (least, most) = seconds / sum(parts.values()), STEP_SECONDS[node.kind]
    text = (
        f"{seconds:.3f} s, {ratio:.2f} of {sum(parts.values()):.3f} s ({', '.join(f'{name} {value:.3f}' for name, value in parts.items())})"
        f"; bare products {rates.products / 1e12:.3g} TFLOP/s, attention {rates.attention / 1e12:.3g}, memory {rates.memory / 1e9:.3g} GB/s"
    )
    problems = [] if least <= ratio <= most else [f"needs {least:g} to {most:g} of it"]
    return judged("seconds of a step against the arithmetic of bare work", text, problems)


def checkpoints(node: Node) -> Iterator[Check]:
    """Continue a checkpoint of one layout in another."""
    model, batch, ranks, tp = node.model("saved"), node.batch(), node.ranks, min(2, node.num_gpus)
    checkpoint = node.directory / "checkpoint"
    ranks.open(node.settings(model, num_ranks=tp, tp=tp))
    ranks.apply(on_rank.step, batch=batch)
    expected = ranks.log_probs(batch, temperature=1.0)
    ranks.call("begin_save", checkpoint)
    ranks.call("finish_save")
    ranks.open(node.settings(model, num_ranks=1))
    untrained = ranks.log_probs(batch, temperature=1.0)
    ranks.load(checkpoint, weights_only=False)
    found = ranks.log_probs(batch, temperature=1.0)
    delta, moved = (float(np.abs(expected - other)[batch.loss_mask].mean()) for other in (found, untrained))
    problems = [] if delta <= node.tolerance < moved else [f"needs {node.tolerance:g} in between"]
    yield judged(f"save with tp {tp}, load with tp 1", f"mean |Δ log-prob| {delta:.1e}, without the checkpoint {moved:.1e}", problems)


# Ranks and engines


def sleep(node: Node) -> Iterator[Check]:
    """Put an engine on the ranks' devices to sleep and wake it, with weights from the ranks in between."""
    tp = 2 if node.kind == "cuda" and node.num_gpus > 1 else 1
    model = node.model("sleeper")
    arguments: dict[str, Any] = {"tp_size": tp, "max_total_tokens": CACHE_TOKENS[node.kind]}
    arguments |= {"mem_fraction_static": 0.5} if node.kind == "cuda" else {}
    engines = {"rollout": {"sglang": arguments}, "runtime": {"colocate": True}}
    topology = {"num_ranks": tp, "tp": tp, "sequence_parallel": tp > 1}
    settings = Settings.model_validate(node.run_settings("sleeping", model, engines=engines, topology=topology))
    prompts = [Prompt(id=str(length), token_ids=np.arange(2, 2 + length), text="") for length in (3, 9, 20, 33)]
    greedy = Sampling(temperature=0.0, max_tokens=24)
    awake, asleep, seconds, said = [], [], [], []
    with node.ranks_and_engine(settings) as joined:
        turns = SharedDevices(joined.ranks, joined.client, watchdog=joined.watchdog)
        for version in range(1, 1 + WAKES):
            turns.take(Phase.SYNC)
            start = time.perf_counter()
            joined.wait(joined.sync.run(version=version), name="weight sync")
            seconds.append(time.perf_counter() - start)
            turns.take(Phase.GENERATION)
            said.append(joined.wait(sample_probe(prompts, joined.pool, sampling=greedy), name="generation").batch.tokens)
            awake.append(joined.ranks.apply(on_rank.foreign_bytes)[0])
            turns.take(Phase.TRAINING)
            asleep.append(joined.ranks.apply(on_rank.foreign_bytes)[0])
        joined.wait(joined.sync.disconnect(), name="parting")
    problems = sleep_problems(awake=awake, asleep=asleep, pool=pool_bytes(node, model, tp))
    if not all(np.array_equal(said[0], again) for again in said):
        problems.append("with the same weights it says something else after it has slept")
    held = f", {min(awake)} bytes awake, {max(asleep)} asleep" if node.kind == "cuda" else ""
    text = f"weights by ipc {node.weight_bytes(model) / min(seconds) / 1e9:.3f} GB/s{held}"
    yield judged(f"sleep and wake of a colocated engine, {WAKES} times, generating after each", text, problems)


def pool_bytes(node: Node, model: Path, tp: int) -> int:
    """Return the bytes of cache and weights that an engine gives back on each of `tp` GPUs, 0 without GPUs."""
    if node.kind == "cpu":
        return 0
    spec = read_model_spec(model)
    cache = CACHE_TOKENS[node.kind] * spec.num_layers * 2 * spec.num_kv_heads * spec.head_dim * torch.bfloat16.itemsize
    return (cache + node.weight_bytes(model)) // tp


def sleep_problems(*, awake: Sequence[int], asleep: Sequence[int], pool: int) -> list[str]:
    """Return the faults of an engine by a device's bytes at each turn, of which `pool`, if any, have to go."""
    if not pool:
        return []
    freed = min(before - after for before, after in zip(awake, asleep, strict=True))
    problems = [f"a sleep frees {freed} bytes of {pool}"] if freed < LEAST_FREED * pool else []
    if max(asleep) - asleep[0] > (1 - LEAST_FREED) * pool:
        problems.append(f"asleep it holds {max(asleep) - asleep[0]} bytes more than after its first sleep")
    return problems


# Runs


def runs(node: Node) -> Iterator[Check]:
    """Start runs as a user does: a mixture with replay and latent attention by broadcast, engines beside ranks.

    Each run compares its first sync bit by bit, and log-probs of sampled tokens.
    """
    node.close()
    num_ranks = 4 if node.num_gpus >= 6 else 2
    engine = {"rollout": {"sglang": {"tp_size": 2 if node.kind == "cuda" and node.num_gpus >= 6 else 1}}}
    tp2 = {"num_ranks": num_ranks, "tp": 2, "sequence_parallel": True}
    for family, training in (("qwen3_moe", {"routing_replay": True, "topology": tp2}), ("deepseek_v3", {"topology": tp2})):
        promise = f"a run of {family} by broadcast{' with routing replay' if 'routing_replay' in training else ''}"
        if node.kind == "cuda" and node.num_gpus <= num_ranks:
            yield Check(promise, "skipped", f"{num_ranks} ranks and an engine need {num_ranks + 1} GPUs, this node has {node.num_gpus}")
        elif node.kind == "cpu" and family == "deepseek_v3":
            yield Check(promise, "skipped", "engines on a CPU generate nothing with latent attention")
        else:
            yield _run(node, promise, node.model(f"run {family}", family=family), engines=engine, **training)
    engines = node.num_gpus if node.kind == "cuda" else 1
    in_turns = {"rollout": {"num_engines": engines}, "runtime": {"colocate": True}}
    promise = "a run of qwen3 with engines beside ranks, temperature 0.7"
    yield _run(node, promise, node.model("run in turns"), engines=in_turns, temperature=0.7, topology={"num_ranks": node.num_gpus})


def _run(node: Node, promise: str, model: Path, *, engines: Mapping[str, Any], **training: Any) -> Check:
    first, *steps = node.run(node.run_settings(model.name + "-run", model, engines=engines, **training))
    apart, limit = max(step["train/log_prob_diff"] for step in steps), RUN_TOLERANCE[node.kind]
    problems = [] if apart <= limit else [f"needs {limit:g}"]
    stale = [step for step in steps if step["weights/version"] != step["step"]]
    problems += [f"step {step['step']} served weights {step['weights/version']}" for step in stale]
    seconds = ", ".join(f"{step['time/rollout'] + step['time/train'] + step['time/sync']:.1f}" for step in steps)
    speed = node.weight_bytes(model) / min(step["time/sync"] for step in steps) / 1e9
    text = f"started in {first['time/start']:.0f} s, steps in {seconds} s, weights {speed:.3f} GB/s, mean |Δ log-prob| {apart:.1e} nats"
    return judged(promise, text, problems)


LINES: Mapping[str, Callable[[Node], Iterator[Check]]] = {
    "machine": machine,
    "all-reduce": all_reduce,
    "layouts": layouts,
    "put away and take back": put_away,
    "plan": plan,
    "checkpoints": checkpoints,
    "sleep": sleep,
    "runs": runs,
}
"""All lines of the trial, in order."""


# The verdict


def accept(directory: Path, *, stand_ins: int = 0, only: Collection[str] = tuple(LINES)) -> bool:
    """Run the lines; return True when nothing is broken.

    Logs and trial.json, for an issue, are in a new directory below `directory`. `stand_ins`
    processes on the CPU try the trial itself, otherwise the trial takes all GPUs of the node.
    Raises UserError where there is no GPU, and for stand-ins where there is one.
    """
    on_cpu, found = stand_ins > 0, torch.cuda.device_count()
    if not on_cpu and not found:
        raise UserError("doctor --gpu found no GPU here; run it on a node of GPUs, or add --on-cpu to try the trial itself")
    if on_cpu and found:
        # Ranks and engines would take the GPUs.
        raise UserError(
            f"--on-cpu was given on a machine with {counted(found, 'GPU')}; leave it out, or hide them with CUDA_VISIBLE_DEVICES=''"
        )
    directory.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix="trial-", dir=directory)).absolute()
    print(f"logs are in {place}", flush=True)
    gpus = [] if on_cpu else [torch.cuda.get_device_name(gpu) for gpu in range(found)]
    written: dict[str, Any] = {"host": platform.node(), "gpus": gpus, "complete": False, "checks": []}

    def tried() -> Iterator[Check]:
        with closing(Node("cpu" if on_cpu else "cuda", num_gpus=stand_ins or found, directory=place)) as node:
            for check in (check for title in only for check in _timed(node, title)):
                written["checks"].append(asdict(check))
                # Written after each check, so that an aborted command leaves the finished checks.
                write_atomic(place / RESULT_FILE, json.dumps(written, indent=2) + "\n")
                yield check
        written["complete"] = True
        write_atomic(place / RESULT_FILE, json.dumps(written, indent=2) + "\n")

    return report(tried())


def _timed(node: Node, title: str) -> Iterator[Check]:
    """Yield the checks of a line with their seconds, the last broken where the line raises or takes too long."""
    start = time.monotonic()
    try:
        with _within(LINE_TIMEOUT_S[node.kind] * (3 if title == "runs" else 1), what=title):
            for check in LINES[title](node):
                yield replace(check, text=f"{check.text}  [{time.monotonic() - start:.0f} s]")
                start = time.monotonic()
    except Exception as error:
        yield Check(title, "broken", f"{type(error).__name__}: {error}")
        # Ranks may be in any state, so the next line begins with new ranks.
        node.close()


@contextmanager
def _within(seconds: float, *, what: str) -> Iterator[None]:
    """Raise DeadlineError inside the block, wherever the main thread waits, after `seconds`."""

    def stop(*_: object) -> None:
        raise DeadlineError(f"{what} took longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
