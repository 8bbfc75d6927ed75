"""Speed of a train step against transformers, and how well sequences are packed and balanced.

    python tools/bench/training.py [--only packing|step]

packing  padding, micro-batches and imbalance over data-parallel ranks against the best possible, on three mixes of 1,024 lengths.
step     tokens/s of supervised train steps, one thread per rank, of one rank and of two, against the same model in transformers
         on the same tokens, padded and packed; all take turns in the same processes. Share of the step outside forward,
         backward and optimizer.

Without --only both run. On GPUs tools/bench/gpu.py measures train steps. Tokens are real ones, never padding.
"""

import argparse
import math
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from torch import Tensor, distributed, nn

from megatron_rl.config.settings import Settings
from megatron_rl.data.packing import make_shards, micro_batch_tokens, pack, sequence_cost, sequence_multiple
from megatron_rl.system.device import quiet_megatron_imports
from megatron_rl.types import Ints, Shard, TrainBatch

PARTS = ("packing", "step")

SMALL = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
QWEN3_06B = {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
QWEN3_4B = {"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
MODELS: dict[str, dict[str, Any]] = {
    "small": {**SMALL, "intermediate_size": 768, "vocab_size": 2048, "tie_word_embeddings": False},
    "0.6B": {**QWEN3_06B, "intermediate_size": 3072, "vocab_size": 151_936, "tie_word_embeddings": True},
    "4B": {**QWEN3_4B, "intermediate_size": 9728, "vocab_size": 151_936, "tie_word_embeddings": True},
}


def length_mixes(count: int, *, longest: int, seed: int = 0) -> dict[str, Ints]:
    """Lengths [count] in tokens: uniform, log-normal, and a long tail with 1 % at the maximum."""
    random = np.random.default_rng(seed)
    tail = random.lognormal(math.log(longest / 32), 0.5, count)
    tail[random.permutation(count)[: max(1, count // 100)]] = longest
    mixes = {
        "uniform": random.uniform(1, longest, count),
        "log-normal": random.lognormal(math.log(longest / 8), 0.8, count),
        "long tail": tail,
    }
    return {name: np.clip(lengths, 2, longest).astype(np.int64) for name, lengths in mixes.items()}


def make_batch(lengths: Ints, *, vocab_size: int, seed: int = 0) -> TrainBatch:
    """Random tokens, every one but the first of a sequence trainable."""
    random = np.random.default_rng(seed)
    total, count = int(lengths.sum()), len(lengths)
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    mask = np.ones(total, np.bool_)
    mask[cu_seqlens[:-1]] = False
    return TrainBatch(
        tokens=random.integers(0, vocab_size, total),
        cu_seqlens=cu_seqlens,
        prompt_lengths=np.ones(count, np.int64),
        loss_mask=mask,
        rollout_log_probs=np.zeros(total, np.float32),
        weight_versions=np.full(total, -1),
        rewards=np.zeros(count),
        group_ids=np.arange(count),
        truncated=np.zeros(count, np.bool_),
    )


# Packing


def bench_packing(*, count: int, longest: int, dp: int) -> None:
    """Print padding, micro-batches and imbalance of every mix, without and with context and sequence parallelism."""
    print(f"{count:,} sequences of at most {longest:,} tokens, {dp} data-parallel ranks, budget of {longest:,} tokens for each cp rank")
    print(f"  {'mix':<11}{'layout':<13}{'padding':>9}{'micro-batches':>15}{'(best)':>8}{'imbalance':>11}{'(best)':>9}{'seconds':>9}")
    for name, lengths in length_mixes(count, longest=longest).items():
        for layout, cp, pad_to in (("cp1", 1, 1), ("cp4, tp8 sp", 4, 8)):
            row = packing_figures(lengths, dp=dp, cp=cp, pad_to=pad_to, max_tokens=longest * cp)
            print(
                f"  {name:<11}{layout:<13}{row['padding']:>9.2%}{row['micro_batches']:>15.0f}{row['fewest']:>8.0f}"
                f"{row['imbalance']:>11.2%}{row['best_imbalance']:>9.2%}{row['seconds']:>9.3f}"
            )


def packing_figures(lengths: Ints, *, dp: int, cp: int, pad_to: int, max_tokens: int) -> dict[str, float]:
    """Shares and counts of one packing; imbalance is the dearest rank's cost above the mean, best what a single sequence forces."""
    batch, unit = make_batch(lengths, vocab_size=8), sequence_multiple(cp)
    padded = -(-lengths // unit) * unit
    start = time.perf_counter()
    packed = pack(padded, num_ranks=dp, max_tokens=max_tokens)
    seconds = time.perf_counter() - start
    held = sum(
        cp * len(micro_batch_tokens(batch, rows, cp_size=cp, cp_rank=0, pad_to=pad_to).token_index) for rank in packed for rows in rank
    )
    costs = sequence_cost(padded)
    ranks = [float(sum(costs[rows].sum() for rows in rank)) for rank in packed]
    mean = float(costs.sum()) / dp
    return {
        "padding": held / float(lengths.sum()) - 1,
        "micro_batches": len(packed[0]),
        "fewest": math.ceil(int(padded.sum()) / dp / max_tokens),
        "imbalance": max(ranks) / mean - 1,
        "best_imbalance": max(mean, float(costs.max())) / mean - 1,
        "seconds": seconds,
    }


# Train steps against transformers


def make_model(directory: Path, name: str, *, dtype: torch.dtype) -> Path:
    """A Qwen3 directory with random weights."""
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**MODELS[name], max_position_embeddings=40_960)
    transformers.Qwen3ForCausalLM(config).to(dtype).save_pretrained(directory / name)
    return directory / name


def make_settings(model: Path, *, num_ranks: int, max_tokens: int) -> Settings:
    """Supervised training, data parallel over `num_ranks`."""
    return Settings.model_validate(
        {
            "run": {"directory": model.parent / "run"},
            "model": {"path": model},
            "data": {"train": "unused.jsonl"},
            "objective": {"policy_loss": {"kind": "sft"}, "aggregation": "token_mean"},
            "training": {"topology": {"num_ranks": num_ranks}, "max_tokens_per_micro_batch": max_tokens, "optimizer": {"lr": 1e-5}},
        }
    )


class Peer:
    """The same model in transformers with torch's AdamW; gradients are summed over ranks once a step."""

    def __init__(self, model: Path) -> None:
        self._model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(model, attn_implementation="sdpa").train()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-5, weight_decay=0.0, foreach=True)

    def step(self, shard: Shard, *, packed: bool) -> None:
        """One optimizer step on the micro-batches of `shard`."""
        self._optimizer.zero_grad()
        (micro_batches,), (totals,) = shard.steps, shard.totals
        for rows in micro_batches:
            loss = self._packed(shard.batch.select(rows)) if packed else self._padded(shard.batch.select(rows))
            (loss / totals.num_tokens).backward()
        if distributed.is_initialized() and distributed.get_world_size() > 1:
            gradients = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
            total = nn.utils.parameters_to_vector(gradients)
            distributed.all_reduce(total)
            nn.utils.vector_to_parameters(total, gradients)
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()

    def _padded(self, batch: TrainBatch) -> Tensor:
        """Minus the log-probs of all trainable tokens, from one row per sequence."""
        rows = [torch.from_numpy(part.copy()) for part in np.split(batch.tokens, batch.cu_seqlens[1:-1])]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        real = torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
        logits = self._model(input_ids=ids, attention_mask=real.long(), use_cache=False).logits
        return nn.functional.cross_entropy(logits[:, :-1][real[:, 1:]], ids[:, 1:][real[:, 1:]], reduction="sum")

    def _packed(self, batch: TrainBatch) -> Tensor:
        """The same from one row; positions that start again tell transformers where a sequence begins."""
        tokens = torch.from_numpy(batch.tokens.copy())
        positions = np.arange(len(batch.tokens)) - np.repeat(batch.cu_seqlens[:-1], batch.lengths)
        logits = self._model(input_ids=tokens[None], position_ids=torch.from_numpy(positions)[None], use_cache=False).logits[0]
        follows = torch.from_numpy(positions > 0)[1:]
        return nn.functional.cross_entropy(logits[:-1][follows], tokens[1:][follows], reduction="sum")


@contextmanager
def timed_inside(parts: dict[str, float]) -> Iterator[None]:
    """Inside, the seconds spent in forward and backward and in the optimizer are added to `parts`."""
    from megatron_rl.training import passes, step

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                parts[name] = parts.get(name, 0.0) + time.perf_counter() - start

        return call

    with (
        mock.patch.object(passes, "forward_backward", timed("forward_backward", passes.forward_backward)),
        mock.patch.object(step, "optimizer_step", timed("optimizer", vars(step)["optimizer_step"])),
    ):
        yield


def rank_main(rank: int, num_ranks: int, directory: str, steps: int, results: Any) -> None:
    """Body of a rank: ours, padded and packed in turns; rank 0 reports the fastest step of each in seconds."""
    with quiet_megatron_imports():
        from megatron_rl.training.trainer import Trainer

    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    model, max_tokens = Path(directory) / "small", 2048
    lengths = length_mixes(64, longest=1024)["log-normal"]
    batch = make_batch(lengths, vocab_size=MODELS["small"]["vocab_size"])
    shards = make_shards(batch, dp=num_ranks, optimizer_steps=1, max_tokens_per_micro_batch=max_tokens, seed=0)
    trainer = Trainer.of(
        make_settings(model, num_ranks=num_ranks, max_tokens=max_tokens), rank=rank, init_method=f"file://{directory}/meet-{num_ranks}"
    )
    peer, shard = Peer(model), shards[trainer.dp_rank]
    inside: list[dict[str, float]] = []

    def ours() -> None:
        inside.append({})
        with timed_inside(inside[-1]):
            trainer.train_shard(shard)

    calls = {
        "megatron_rl": ours,
        "transformers, padded": lambda: peer.step(shard, packed=False),
        "transformers, packed": lambda: peer.step(shard, packed=True),
    }
    taken = take_turns(calls, steps)
    if rank == 0:
        outside = [1 - sum(parts.values()) / total for parts, total in zip(inside[1:], taken["megatron_rl"], strict=True)]
        results.put({"tokens": int(lengths.sum()), "outside": statistics.median(outside), **{name: min(t) for name, t in taken.items()}})
    distributed.destroy_process_group()


def take_turns(calls: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """Seconds of `repeats` calls of each after one to warm up, in turns, so that other load hits all alike; ranks start together."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            distributed.barrier()
            start = time.perf_counter()
            call()
            distributed.barrier()
            taken[name].append(time.perf_counter() - start)
    return {name: seconds[1:] for name, seconds in taken.items()}


def bench_step(*, steps: int) -> None:
    """Print tokens/s of one and of two ranks."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        make_model(Path(directory), "small", dtype=torch.float32)
        for num_ranks in (1, 2):
            results = context.SimpleQueue()
            ranks = [context.Process(target=rank_main, args=(rank, num_ranks, directory, steps, results)) for rank in range(num_ranks)]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join()
            failed = [process.exitcode for process in ranks if process.exitcode]
            if failed:
                raise RuntimeError(f"a rank of the benchmark ended with exit code {failed[0]}")
            _print_step(results.get(), num_ranks)


def _print_step(figures: dict[str, float], num_ranks: int) -> None:
    tokens, outside = figures.pop("tokens"), figures.pop("outside")
    own = figures["megatron_rl"]
    print(f"{num_ranks} rank{'s' * (num_ranks > 1)}, {tokens:,} tokens a step, float32, one thread each")
    for name, seconds in figures.items():
        ratio = "" if name == "megatron_rl" else f"   megatron_rl is {seconds / own:.2f} times as fast"
        print(f"  {name:<22}{tokens / seconds:>9,.0f} tokens/s{ratio}")
    print(f"  share of our step outside forward, backward and optimizer: {outside:.1%}")


def main() -> int:
    """Run the parts asked for."""
    parser = argparse.ArgumentParser(description="Benchmark packing and train steps.")
    parser.add_argument("--only", choices=PARTS, help="one part; both when not given")
    parser.add_argument("--sequences", type=int, help="sequences of the packing part; a small and a large batch when not given")
    parser.add_argument("--longest", type=int, default=16_384, help="longest sequence and token budget of the packing part")
    parser.add_argument("--dp", type=int, default=8, help="data-parallel ranks of the packing part")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each, of which the fastest counts")
    arguments = parser.parse_args()
    parts: Sequence[str] = PARTS if arguments.only is None else [arguments.only]
    if "packing" in parts:
        bench_packing(count=arguments.sequences or 1024, longest=arguments.longest, dp=arguments.dp)
        if arguments.sequences is None:
            # Of a few tokens each, because the batch is made: padding them to chunks of context parallel ranks shows.
            bench_packing(count=131_072, longest=512, dp=128)
    if "step" in parts:
        bench_step(steps=arguments.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
