"""The parts of gpu.py that have ranks and engines: train steps, weight syncs, sleep and wake, whole GRPO steps.

Ranks, engines and their turns are those of `megatron-rl doctor --gpu`, in a real model's size, or small on a CPU that stands for GPUs.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from grpo import ROOT, run_and_watch
from training import MODELS, make_model, make_settings
from weights import Peak, memory_bytes

from megatron_rl.config.gpus import Gpu
from megatron_rl.config.settings import Settings
from megatron_rl.doctor import on_rank
from megatron_rl.doctor.node import Joined, Node
from megatron_rl.errors import MegatronRLError
from megatron_rl.system.device import quiet_megatron_imports
from megatron_rl.weights.sync import TRANSPORTS
from megatron_rl.weights.transport import BUCKET_BYTES

with quiet_megatron_imports():
    from megatron_rl.models.read_spec import read_model_spec
    from megatron_rl.planning.run_plan import plan_layouts
    from megatron_rl.planning.step_time import Flops, ModelSize
    from megatron_rl.runtime.colocation import Phase, SharedDevices

GPU_PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Dense bf16 FLOP/s by the vendor's data sheets."""
MICRO_BATCHES, LONGEST, TURNS, GRPO_STEPS = 4, 4096, 3, 5
PROMPT_TOKENS = 16
FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
COIN = "def score(*, sample):\n    return float(len(sample.response_text) % 2)\n"
PUBLISHED = {
    "training": "41 % MFU of a GPT of 2.1B to 48 % of 462B, H100s, tensor and pipeline parallel (Megatron-LM's README)",
    "weights": "slime, Qwen3-30B-A3B, 61 GB, by ipc on 8 H100s: 7 s or 0.11 s/GB, 60 s before (hebiao064.github.io/rl-weight-sync)",
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured: train steps of `models` at `token_counts` tokens, the rest with `model`; of a step prompts, samples and tokens."""

    models: tuple[str, ...]
    token_counts: tuple[int, ...]
    model: str
    step: tuple[int, int, int]


ON_GPU = Sizes(("0.6B", "4B"), (16_384, 65_536), "0.6B", (64, 8, 512))
REHEARSED = Sizes(("small",), (128, 256), "small", (4, 2, 8))


# Train steps


def bench_training(node: Node, sizes: Sizes) -> None:
    """Print MFU, tokens/s and memory of data parallel train steps on all GPUs; published figures beside."""
    print(f"train steps on {node.num_gpus} ranks, {node.dtype}, {MICRO_BATCHES} micro-batches each; published: {PUBLISHED['training']}")
    for name in sizes.models:
        model = make_model(node.directory, name, dtype=getattr(torch, node.dtype))
        for tokens in sizes.token_counts:
            try:
                said = _train_case(node, name, model, tokens)
            except MegatronRLError as error:
                # A rank that died of too little memory, say; the next case begins with new ones.
                node.close()
                said = f"failed: {error}"
            print(f"  {name}, {tokens:,} packed tokens: {said}", flush=True)


def _train_case(node: Node, name: str, model: Path, tokens: int) -> str:
    longest = min(LONGEST, tokens // 4)
    lengths = np.full(node.num_gpus * MICRO_BATCHES * tokens // longest, longest)
    settings, recomputed = _first_that_fits(node, model, tokens=tokens, sequences=len(lengths), longest=longest)
    if settings is None:
        return f"does not fit on {node.num_gpus} GPUs by the plan, {recomputed}"
    batch = node.batch(list(lengths - 1))
    node.ranks.open(settings)
    node.ranks.apply(on_rank.step, batch=batch)
    seconds = min(max(metrics["seconds"] for metrics in node.ranks.apply(on_rank.step, batch=batch)) for _ in range(TURNS))
    held, peaks = node.ranks.apply(on_rank.state_bytes), node.ranks.apply(on_rank.peak_of_step, batch=batch)
    peak = max(map(sum, zip(held, peaks, strict=True)))
    flops = Flops.of(ModelSize.of(read_model_spec(model)), lengths)
    # Forward and backward as MFU counts: a backward is two forwards, nothing twice (PaLM, appendix B).
    speed = 3 * (flops.layers + flops.attention + flops.head) / seconds / node.num_gpus
    possible = next((flops for gpu, flops in GPU_PEAK_FLOPS.items() if gpu in device_name(node)), None)
    mfu = "unknown, no peak FLOP/s for this device" if possible is None else f"{speed / possible:.1%}"
    rate = lengths.sum() / seconds
    return f"{rate:,.0f} tokens/s, {rate / node.num_gpus:,.0f} a rank, MFU {mfu}, peak {peak / 2**30:.2f} GiB, {recomputed}"


def _first_that_fits(node: Node, model: Path, *, tokens: int, sequences: int, longest: int) -> tuple[Settings | None, str]:
    """Settings without, else with recomputation of activations, and which; None and the plan's sentence where neither fits."""
    capability = torch.cuda.get_device_capability() if node.kind == "cuda" else (9, 0)  # the attention of a CPU is torch's
    host_bytes = psutil.virtual_memory().total
    gpu = Gpu("this", capability, memory_of(node), per_node=node.num_gpus, host_bytes=host_bytes)
    ways: dict[str, Mapping[str, Any]] = {"nothing recomputed": {}, "full recompute": FULL_RECOMPUTE}
    variants = [_training_settings(node, model, tokens=tokens, sequences=sequences, longest=longest, megatron=way) for way in ways.values()]
    said = "nothing planned"
    for way, settings, plan in zip(ways, variants, plan_layouts(variants, read_model_spec(model), gpu=gpu, num_nodes=1), strict=True):
        if not isinstance(plan, str) and plan.peak <= gpu.memory_bytes:
            return settings, way
        said = plan if isinstance(plan, str) else plan.verdict
    return None, said


def _training_settings(node: Node, model: Path, *, tokens: int, sequences: int, longest: int, megatron: Mapping[str, Any]) -> Settings:
    settings = make_settings(model, num_ranks=node.num_gpus, max_tokens=tokens)
    changes = {
        "model": {**settings.model.model_dump(), "dtype": node.dtype, "megatron": dict(megatron)},
        "data": {**settings.data.model_dump(), "prompts_per_step": sequences, "samples_per_prompt": 1, "max_prompt_tokens": 1},
        "rollout": {"sampling": {"max_response_tokens": longest - 1}},
        "training": {
            **settings.training.model_dump(),
            "optimizer": {"lr": 1e-5, "use_distributed_optimizer": node.num_gpus > 1},
        },
    }
    return Settings.model_validate({**settings.model_dump(), **changes})


def device_name(node: Node) -> str:
    """What torch calls the first device."""
    return torch.cuda.get_device_name() if node.kind == "cuda" else "CPU"


def memory_of(node: Node) -> int:
    """Bytes of a rank's device."""
    return torch.cuda.get_device_properties(0).total_memory if node.kind == "cuda" else psutil.virtual_memory().total


# Weight syncs


def bench_weights(node: Node, sizes: Sizes) -> None:
    """Print seconds per GB and peak memory of a sync from one rank to one engine, by transport."""
    model = make_model(node.directory, sizes.model, dtype=getattr(torch, node.dtype))
    num_bytes = node.weight_bytes(model)
    print(f"weight syncs of {num_bytes / 1e9:.2f} GB in buckets of {BUCKET_BYTES / 1e6:.0f} MB; published: {PUBLISHED['weights']}")
    for gpu, transports in sync_places(node).items():
        for transport in transports:
            readings = _readings(node, gpu)
            settings = _sync_settings(node, model, transport, beside=gpu == 0 and node.kind == "cuda")
            with node.ranks_and_engine(settings) as joined:
                seconds, peaks = _timed_syncs(joined, beside=settings.runtime.colocate, of=readings)
            memory = ", ".join(f"{end} {peak / BUCKET_BYTES:.2f}" for end, peak in zip(readings, peaks, strict=True))
            print(f"  {transport:<10}{seconds / (num_bytes / 1e9):>8.3f} s/GB; peak in buckets: {memory}", flush=True)


def _sync_settings(node: Node, model: Path, transport: str, *, beside: bool) -> Settings:
    runtime = {"colocate": beside or transport == "ipc"}
    engines = {"runtime": runtime, "weights": {"transport": transport}, "rollout": {"sglang": {"max_total_tokens": 16384}}}
    return Settings.model_validate(node.run_settings(f"sync-{transport}", model, engines=engines, topology={"num_ranks": 1}))


def sync_places(node: Node) -> dict[int, list[str]]:
    """Transports by the GPU of their engine: rank 0's, whose memory ipc shares, or the second, without which NCCL has no two ends."""
    if node.kind == "cpu":
        return {0: list(TRANSPORTS)}
    away = [name for name in TRANSPORTS if name != "ipc"]
    return {1: away, 0: ["ipc"]} if node.num_gpus > 1 else {0: [name for name in TRANSPORTS if name != "broadcast"]}


def _readings(node: Node, gpu: int) -> dict[str, Callable[[], int]]:
    """What is read for the memory of both ends: of their GPUs, or of all processes here."""
    if node.kind == "cpu":
        return {"both ends": partial(memory_bytes, psutil.Process().children(recursive=True))}
    if gpu == 0:
        return {"both ends": partial(_used_bytes, 0)}
    return {"rank": partial(_used_bytes, 0), "engine": partial(_used_bytes, gpu)}


def _used_bytes(gpu: int) -> int:
    free, total = torch.cuda.mem_get_info(gpu)
    return total - free


def _timed_syncs(joined: Joined, *, beside: bool, of: Mapping[str, Callable[[], int]]) -> tuple[float, Sequence[int]]:
    """Seconds of the fastest sync after one to warm up, and the peak of each reading beyond what it was before, over all others."""
    seconds, peaks = [], [0] * len(of)
    if beside:
        SharedDevices(joined.ranks, joined.client, watchdog=joined.watchdog).take(Phase.SYNC)
    for version in range(1, 2 + TURNS):
        with Peak(*of.values()) as peak:
            start = time.perf_counter()
            joined.wait(joined.sync.run(version=version), name="weight sync")
            seconds.append(time.perf_counter() - start)
        if version > 1:
            peaks = list(map(max, peaks, peak.bytes))
    joined.wait(joined.sync.disconnect(), name="parting")
    return min(seconds[1:]), peaks


# Sleep and wake


def bench_sleep(node: Node, sizes: Sizes) -> None:
    """Print the seconds of each turn of a rank and an engine on one device, and what the device holds in it."""
    model = make_model(node.directory, sizes.model, dtype=getattr(torch, node.dtype))
    print(f"turns on one device, {sizes.model}; no published figure of this size is known")
    with node.ranks_and_engine(_sync_settings(node, model, "ipc", beside=True)) as joined:
        turns = SharedDevices(joined.ranks, joined.client, watchdog=joined.watchdog)
        seconds: dict[Phase, list[float]] = {turn: [] for turn in (Phase.SYNC, Phase.GENERATION, Phase.TRAINING)}
        engine: dict[Phase, int] = {}
        for version in range(1, 1 + TURNS):
            for turn, taken in seconds.items():
                start = time.perf_counter()
                turns.take(turn)
                taken.append(time.perf_counter() - start)
                engine[turn] = joined.ranks.apply(on_rank.foreign_bytes)[0]
                if turn is Phase.SYNC:
                    joined.wait(joined.sync.run(version=version), name="weight sync")
        joined.wait(joined.sync.disconnect(), name="parting")
    for turn, taken in seconds.items():
        held = f"{engine[turn] / 2**30:.2f} GiB beside the rank's" if node.kind == "cuda" else "no device to look at"
        print(f"  to {turn.name.lower():<12}{min(taken[1:]):>8.3f} s, {held}", flush=True)


# A GRPO step


def bench_step(node: Node, sizes: Sizes) -> None:
    """Print the seconds of a GRPO step with its parts: `megatron-rl train` on all GPUs, ranks and engines in turns."""
    prompts, samples, tokens = sizes.step
    with _task(node, sizes) as (settings, environment):
        run = node.directory / "run-of-a-step"
        command = [sys.executable, "-m", "megatron_rl", "train", str(settings), f"run.directory={run}", f"run.num_steps={GRPO_STEPS}"]
        found = run_and_watch(command, run / "metrics.jsonl", environment=environment, steps=GRPO_STEPS)
    parts = ", ".join(f"{name} {value:.2f} s" for name, value in found.items())
    rate = prompts * samples * tokens / found["step"]
    print(
        f"GRPO step, {sizes.model}, {prompts} prompts x {samples} samples of {tokens} tokens, {node.num_gpus} ranks and engines in turns;"
    )
    print(f"  {parts}; {rate:,.0f} response tokens/s; against TRL on a CPU: tools/bench/grpo.py", flush=True)


@contextmanager
def _task(node: Node, sizes: Sizes) -> Iterator[tuple[Path, dict[str, str]]]:
    """Settings and environment of a run: a model that draws every token alike, so that all responses are of full length."""
    prompts, samples, tokens = sizes.step
    model = make_model(node.directory, sizes.model, dtype=getattr(torch, node.dtype))
    words = _write_tokenizer(model, MODELS[sizes.model]["vocab_size"])
    random = np.random.default_rng(0)
    with (node.directory / "train.jsonl").open("w") as file:
        for _ in range(4 * prompts):
            file.write(
                json.dumps({"prompt": " ".join(words[index] for index in random.integers(2, len(words), PROMPT_TOKENS)), "label": ""})
                + "\n"
            )
    (node.directory / "coin.py").write_text(COIN)
    several = node.num_gpus > 1
    settings = {
        "run": {"save_interval": 0},
        "model": {"path": str(model), "dtype": node.dtype},
        "data": {"train": str(node.directory / "train.jsonl"), "prompts_per_step": prompts, "samples_per_prompt": samples}
        | {"max_prompt_tokens": PROMPT_TOKENS},
        "objective": {"preset": "grpo"},
        "rollout": {"num_engines": node.num_gpus, "sampling": {"max_response_tokens": tokens}},
        "reward": {"function": "coin:score"},
        "training": {
            "topology": {"num_ranks": node.num_gpus},
            "max_tokens_per_micro_batch": 16_384 if node.kind == "cuda" else 256,
            "optimizer": {"lr": 1e-6, "use_distributed_optimizer": several},
        },
        "runtime": {"colocate": True},
    }
    path = node.directory / "step.yaml"
    # YAML reads JSON.
    path.write_text(json.dumps(settings))
    yield path, {**os.environ, "PYTHONPATH": f"{ROOT}:{node.directory}"}


def _write_tokenizer(model: Path, vocab: int) -> list[str]:
    """A tokenizer of `vocab` words beside the model; its words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", *(f"w{index}" for index in range(2, vocab))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(model)
    return words


PARTS = {"training": bench_training, "weights": bench_weights, "sleep": bench_sleep, "step": bench_step}
