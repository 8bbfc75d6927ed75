"""Each line of the acceptance: what it tries on the node, when that is good enough, and the number that it is judged by.

A function yields its lines as it goes; what it raises is a line that failed.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple
from typing import Any

import numpy as np
import torch

from megatron_rl.acceptance.judging import (
    GRADIENT_TOLERANCE,
    LEAST_GB_PER_S,
    PLAN_TOLERANCE,
    STEP_SECONDS,
    UPDATE_TOLERANCE,
    Line,
    judged,
    sleep_problems,
)
from megatron_rl.acceptance.node import VOCAB, Node, has_transformer_engine
from megatron_rl.acceptance.stack import versions
from megatron_rl.config.settings import Settings
from megatron_rl.device import quiet_megatron_imports
from megatron_rl.errors import MegatronRLError, counted
from megatron_rl.rollout.engine import EngineAddress
from megatron_rl.rollout.sampling import Sampling
from megatron_rl.types import Floats, TrainBatch

with quiet_megatron_imports():
    from megatron_rl.models.model_spec import ModelSpec
    from megatron_rl.models.read_spec import read_model_spec
    from megatron_rl.planning.measurement import Job, measure
    from megatron_rl.planning.run_plan import on_gpu, stage_memories
    from megatron_rl.planning.step_time import Flops, ModelSize, Rates, Step, full_lengths
    from megatron_rl.runtime.colocation import SharedDevices, Turn
    from megatron_rl.runtime.watchdog import Watchdog
    from megatron_rl.training.offload import PARTS

TINY_BUCKET = 65536
WAKES = 3
STEP_SEQUENCES, MICRO_BATCH_SEQUENCES, STEP_TURNS = 8, 4, 3
"""Of a rank's step and of its micro-batches, so many that a GPU and not its host takes the time; and steps of which the fastest counts."""


def all_reduce(node: Node) -> Iterator[Line]:
    """The ranks' bandwidth: 2 (n - 1) / n bytes cross the network for each byte that is summed."""
    num_bytes, count = 2**30 if node.kind == "cuda" else 2**24, node.ranks.count
    seconds = max(node.ranks.all_reduce(num_bytes=num_bytes, repeats=5))
    gigabytes = 2 * (count - 1) / count * num_bytes / seconds / 1e9
    passed = count == 1 or gigabytes >= LEAST_GB_PER_S[node.kind]
    yield Line(f"all-reduce of {num_bytes >> 20} MiB over {counted(count, 'rank')}", passed, f"{gigabytes:.2f} GB/s")


def weight_sync(node: Node) -> Iterator[Line]:
    """Three buckets, twice."""
    yield from _sync(node, "qwen3", parts=3)


def weight_sync_latent(node: Node) -> Iterator[Line]:
    """Tiny buckets of a model whose engine fuses tensors."""
    yield from _sync(node, "deepseek_v3", parts=None)


def _sync(node: Node, family: str, *, parts: int | None) -> Iterator[Line]:
    """Sync an engine of its own twice, with a step between; each time it holds what a fresh one holds of the ranks' checkpoint."""
    gpus = node.engine_gpus()
    model, other = (node.model(f"{family}-{seed}", family=family, seed=seed) for seed in (0, 1))
    exported = [node.directory / f"{family}-exported-{number}" for number in (1, 2)]
    num_bytes = node.weight_bytes(model)
    bucket_bytes = TINY_BUCKET if parts is None else -(-num_bytes // parts)
    node.ranks.open(node.settings(model, num_ranks=node.num_trainers, tp=2))

    async def run(address: EngineAddress) -> tuple[list[str], float]:
        found, seconds = [], 0.0
        async with node.client(address) as client:
            sync = node.weight_sync(client, "broadcast", model=model, bucket_bytes=bucket_bytes)
            await sync.connect()
            for version, directory in enumerate(exported, start=1):
                start = time.perf_counter()
                await sync.run(version=version)
                seconds = time.perf_counter() - start
                found.append(await client.checksum())
                node.ranks.call("save_hf", directory=directory)
                node.ranks.call("train", batch=node.batch())
            await sync.disconnect()
        return found, seconds

    with node.serving(other, gpus=gpus, name=f"{family}-engine") as address:
        found, seconds = asyncio.run(run(address))
    expected = [node.checksum(directory, gpus=gpus, name=f"{family}-fresh-{number}") for number, directory in enumerate(exported)]
    passed = found == expected and found[0] != found[1]
    said = "equal" if passed else f"engine {found}, fresh engines {expected}"
    yield Line(
        f"weight sync of {family} by broadcast, twice, against fresh engines",
        passed,
        f"checksums {said}, {num_bytes / seconds / 1e9:.3f} GB/s in buckets of {bucket_bytes} bytes",
    )


def layouts(node: Node) -> Iterator[Line]:
    """Log-probs, gradient norms and a step of every layout and attention against torch's on one rank."""
    one, tp2 = {"num_ranks": 1}, {"num_ranks": 2, "tp": 2}
    dense = {"one": one, "tp2": tp2, "cp2": {"num_ranks": 2, "cp": 2}, "tp2 cp2": {"num_ranks": 4, "tp": 2, "cp": 2}}
    experts = {"one": one, "tp2": tp2, "ep2 etp1": {**tp2, "ep": 2, "etp": 1}, "ep2 etp2": {"num_ranks": 4, "tp": 2, "ep": 2, "etp": 2}}
    dense["tp2 pp2"] = experts["tp2 pp2"] = {"num_ranks": 4, "tp": 2, "pp": 2}
    window = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    yield _layouts(node, "qwen3", {}, dense)
    yield _layouts(node, "qwen3", window, dense)
    yield _layouts(node, "deepseek_v3", {}, experts)


def _layouts(node: Node, family: str, config: Mapping[str, Any], tried: Mapping[str, Mapping[str, Any]]) -> Line:
    name = f"{family}{' with windows' if config else ''}"
    model, batch = node.model(f"layouts of {name}", family=family, **config), node.batch()
    ways = ["torch", "transformer_engine"] if has_transformer_engine() else ["torch"]
    seen: dict[str, tuple[Floats, float, Floats]] = {}
    for attention in ways:
        for layout, topology in tried.items():
            # Transformer Engine has no windows in packed sequences that are divided over ranks.
            refused = attention == "transformer_engine" and "cp" in topology and "sliding_window" in config
            if topology["num_ranks"] <= node.ranks.count and not refused:
                node.ranks.open(node.settings(model, attention=attention, **topology))
                before = node.ranks.call("log_probs", batch=batch, temperature=1.0)[0][batch.loss_mask]
                norm = node.ranks.call("train", batch=batch)[0]["train/grad_norm"]
                after = node.ranks.call("log_probs", batch=batch, temperature=1.0)[0][batch.loss_mask]
                seen[f"{attention} {layout}"] = before, norm, after - before
    log_probs, grad_norm, update = seen.pop("torch one")
    limits = node.tolerance, GRADIENT_TOLERANCE[node.kind], UPDATE_TOLERANCE[node.kind]
    apart = {}
    for way, (found, norm, moved) in seen.items():
        changed = np.abs(moved - update).mean() / np.abs(update).mean()
        apart[way] = float(np.abs(found - log_probs).mean()), abs(norm / grad_norm - 1), float(changed)
    passed = all(found <= limit for way in apart.values() for found, limit in zip(way, limits, strict=True))
    text = "; ".join(f"{way} {log_prob:.1e}, {norm:.1e}, {moved:.1e}" for way, (log_prob, norm, moved) in apart.items())
    said = f"mean |Δ log-prob|, relative Δ of gradient norm and of what a step changes: {text or 'nothing to compare with'}"
    return Line(f"layouts of {name} against torch on one rank", passed and bool(apart), said)


def put_away(node: Node) -> Iterator[Line]:
    """What a rank frees, and that it comes back bit for bit."""
    model, batch = node.model("put-away"), node.batch()
    node.ranks.open(node.settings(model, num_ranks=1))
    node.ranks.call("train", batch=batch)
    before, there = node.ranks.call("log_probs", batch=batch, temperature=1.0)[0], node.ranks.call("state_bytes")[0]
    node.ranks.put_away(PARTS)
    away = node.ranks.call("state_bytes")[0]
    node.ranks.take_back(PARTS)
    after, back = node.ranks.call("log_probs", batch=batch, temperature=1.0)[0], node.ranks.call("state_bytes")[0]
    passed = away <= 0.05 * there and back == there and bool(np.array_equal(before, after))
    yield Line("put away and take back", passed, f"{there} bytes, {away} while away, {back} after")


class OneEngine:
    """The engines' side of `SharedDevices`, of one engine."""

    def __init__(self, node: Node, address: EngineAddress) -> None:
        self._node, self._address = node, address

    async def release_memory(self, parts: Any) -> None:
        """Free these parts."""
        async with self._node.client(self._address) as client:
            await client.release_memory(parts)

    async def restore_memory(self, parts: Any) -> None:
        """Allocate them again."""
        async with self._node.client(self._address) as client:
            await client.restore_memory(parts)


def colocated(node: Node) -> Iterator[Line]:
    """Ranks and an engine on the same devices take turns; after each wake the engine generates what the ranks would.

    Between the first two wakes nothing is trained, so that the engine has to say the same again.
    """
    tp = node.engine_tp
    model, other = node.model("colocated"), node.model("colocated-start", seed=1)
    node.ranks.open(node.settings(model, num_ranks=tp, tp=tp))
    # A first step loads kernels and opens communicators, whose memory is not the engine's.
    node.ranks.call("train", batch=node.batch())
    node.ranks.put_away(PARTS)
    differences: dict[float, list[float]] = {1.0: [], 0.7: []}
    seconds, awake, asleep, said = [], [], [], []
    with node.serving(other, gpus=range(tp), name="colocated", colocated=True) as address, Watchdog() as watchdog:
        turns = SharedDevices(node.ranks, OneEngine(node, address), watchdog=watchdog)
        for version in range(1, WAKES + 1):
            turns.take(Turn.SYNC)
            seconds.append(asyncio.run(_sync_by_ipc(node, address, model=model, version=version)))
            turns.take(Turn.GENERATION)
            said.append(asyncio.run(_generate(node, address, 0.0)).tokens)
            made = {temperature: asyncio.run(_generate(node, address, temperature)) for temperature in differences}
            awake.append(node.ranks.call("foreign_bytes")[0])
            turns.take(Turn.TRAINING)
            asleep.append(node.ranks.call("foreign_bytes")[0])
            for temperature, batch in made.items():
                by_trainer = node.ranks.call("log_probs", batch=batch, temperature=temperature)[0]
                delta = np.abs(by_trainer - batch.rollout_log_probs)[batch.loss_mask]
                differences[temperature].append(float(delta.mean()))
            if 1 < version < WAKES:
                node.ranks.call("train", batch=node.batch())
    problems = sleep_problems(awake=awake, asleep=asleep, pool=node.pool_bytes(model))
    if not np.array_equal(said[0], said[1]):
        problems.append("with the same weights it says something else after it has slept")
    held = f", {min(awake)} bytes awake, {max(asleep)} asleep" if node.kind == "cuda" else ""
    speed = node.weight_bytes(model) / min(seconds) / 1e9
    yield judged(
        f"sleep and wake of a colocated engine, {WAKES} times, generating after each", f"weights by ipc {speed:.3f} GB/s{held}", problems
    )
    for temperature, found in differences.items():
        passed = max(found) <= node.tolerance
        yield Line(f"log-probs of engine and trainer at temperature {temperature:g}", passed, f"mean |Δ| {max(found):.1e} nats")


async def _sync_by_ipc(node: Node, address: EngineAddress, *, model: Any, version: int) -> float:
    async with node.client(address) as client:
        sync = node.weight_sync(client, "ipc", model=model, bucket_bytes=-(-node.weight_bytes(model) // 3))
        await sync.connect()
        start = time.perf_counter()
        await sync.run(version=version)
        seconds = time.perf_counter() - start
        await sync.disconnect()
        return seconds


async def _generate(node: Node, address: EngineAddress, temperature: float) -> TrainBatch:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, VOCAB, length) for length in (3, 9, 20, 33)]
    async with node.client(address) as client:
        sampling = Sampling(temperature=temperature, max_tokens=24)
        made = [(await client.generate(prompt, sampling=sampling))[0] for prompt in prompts]
    return TrainBatch.from_sequences(
        prompts=prompts,
        responses=[generation.token_ids for generation in made],
        rollout_log_probs=[generation.log_probs for generation in made],
    )


def plan(node: Node) -> Iterator[Line]:
    """Memory and seconds of a step, data parallel on all ranks, against the plan's."""
    sizes: dict[str, Any] = {"hidden": 1024, "layers": 28, "head_dim": 128, "num_attention_heads": 16, "num_key_value_heads": 8}
    model = node.model("planned", **(sizes if node.kind == "cuda" else {"hidden": 256, "layers": 4}))
    spec, count, length = read_model_spec(model), node.ranks.count, node.longest
    num_sequences = count * STEP_SEQUENCES
    settings = node.settings(model, training={"max_tokens_per_micro_batch": MICRO_BATCH_SEQUENCES * length}, num_ranks=count)
    sampling = settings.rollout.sampling.model_copy(update={"max_response_tokens": length - 1})
    settings = settings.model_copy(
        update={
            "data": settings.data.model_copy(update={"prompts_per_step": num_sequences, "max_prompt_tokens": 1}),
            "rollout": settings.rollout.model_copy(update={"sampling": sampling}),
        }
    )
    planned = _planned_bytes(node, spec, settings)
    batch = node.batch([length - 1] * num_sequences)
    node.ranks.open(settings)
    node.ranks.call("train", batch=batch)
    seconds = min(max(metrics["seconds"] for metrics in node.ranks.call("train", batch=batch)) for _ in range(STEP_TURNS))
    peak = max(node.ranks.call("peak_of_step", batch=batch))
    yield Line(
        "memory of a step against the plan",
        abs(peak / planned - 1) <= PLAN_TOLERANCE,
        f"{peak} bytes, plan {planned} ({peak / planned - 1:+.1%})",
    )
    measured = node.ranks.call("rates", spec=spec, num_tokens=MICRO_BATCH_SEQUENCES * length, length=length, dtype=node.dtype)
    # The slowest rank's, for which the others wait.
    rates = Rates(*map(min, zip(*map(astuple, measured), strict=True)))
    size, itemsize = ModelSize.of(spec), getattr(torch, node.dtype).itemsize
    step = Step.of(settings, size, Flops.of(size, full_lengths(settings)), per_node=count, itemsize=itemsize)
    parts = step.parts(rates)
    ratio, (least, most) = seconds / sum(parts.values()), STEP_SECONDS[node.kind]
    of_parts = ", ".join(f"{name} {value:.3f}" for name, value in parts.items())
    yield Line(
        "seconds of a step against the arithmetic of bare work",
        least <= ratio <= most,
        f"{seconds:.3f} s, {ratio:.2f} of {sum(parts.values()):.3f} s ({of_parts}), needs {least:g} to {most:g} of it; bare products "
        f"{rates.products / 1e12:.3g} TFLOP/s, attention {rates.attention / 1e12:.3g}, memory {rates.memory / 1e9:.3g} GB/s",
    )


def _planned_bytes(node: Node, spec: ModelSpec, settings: Settings) -> int:
    """Bytes of a step beyond weights, gradients and optimizer, as planned."""
    fused = node.kind == "cuda"
    planned_as = on_gpu(settings) if fused else settings
    (answer,) = measure([Job(planned_as, spec, fused=fused)])
    if answer.refused is not None:
        raise MegatronRLError(f"the plan refused the layout: {answer.refused}")
    (stage,) = stage_memories(planned_as, answer, frees_outputs=fused)
    return stage.trained


def checkpoints(node: Node) -> Iterator[Line]:
    """A checkpoint of one layout, continued in another."""
    model, batch, directory = node.model("saved"), node.batch(), node.directory / "checkpoint"
    tp = min(node.num_trainers, node.ranks.count)
    node.ranks.open(node.settings(model, num_ranks=tp, tp=tp))
    node.ranks.call("train", batch=batch)
    expected = node.ranks.call("log_probs", batch=batch, temperature=1.0)[0]
    node.ranks.call("save", directory=directory)
    node.ranks.open(node.settings(model, num_ranks=1))
    untrained = node.ranks.call("log_probs", batch=batch, temperature=1.0)[0]
    node.ranks.call("load", directory=directory)
    found = node.ranks.call("log_probs", batch=batch, temperature=1.0)[0]
    delta, moved = (float(np.abs(expected - other)[batch.loss_mask].mean()) for other in (found, untrained))
    passed = delta <= node.tolerance < moved
    yield Line(f"save with tp {tp}, load with tp 1", passed, f"mean |Δ log-prob| {delta:.1e}, without the checkpoint {moved:.1e}")


LINES: Mapping[str, Callable[[Node], Iterator[Line]]] = {
    "versions": versions,
    "all-reduce": all_reduce,
    "weight sync": weight_sync,
    "weight sync of latent attention": weight_sync_latent,
    "layouts": layouts,
    "put away and take back": put_away,
    "colocation": colocated,
    "plan": plan,
    "checkpoints": checkpoints,
}
"""What is tried, in this order."""
LIMITS_S: Mapping[str, float] = {
    "versions": 50.0,
    "all-reduce": 50.0,
    "weight sync": 150.0,
    "weight sync of latent attention": 150.0,
    "layouts": 230.0,
    "put away and take back": 30.0,
    "colocation": 120.0,
    "plan": 80.0,
    "checkpoints": 40.0,
}
"""How long each may take on a node of GPUs: 15 minutes together. What takes longer has failed."""
