"""Time and memory of the objective module on one CPU core.

    python tools/bench/objective.py [--tokens 4096] [--vocab 32768] [--sequences 1024] [--length 4096]

1. log-prob + entropy + varentropy, forward and backward, against log_softmax, gather and entropy at the row chunking that is
   best for it (fastest, and smallest), and against the log-prob alone.
2. GAE against one torch.cumsum over the same data; estimator + weights + losses of the same batch in seconds.
3. the head's statistics from hidden states over recorded candidates, against those over the whole vocabulary; bytes of a record.

Memory is the peak of resident memory above that of the inputs, measured in a child process each.
"""

import argparse
import functools
import multiprocessing
import re
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_rl.algorithms.advantage import group_advantages
from megatron_rl.algorithms.aggregation import LossInputs
from megatron_rl.algorithms.head_statistics import head_statistics, token_statistics
from megatron_rl.algorithms.log_prob import CandidateColumns
from megatron_rl.algorithms.loss import compute_loss
from megatron_rl.algorithms.objective import Objective
from megatron_rl.algorithms.returns import gae

_MIB = 2**20


def ours(logits: Tensor, targets: Tensor, upstream: Tensor, with_entropy: bool = True) -> Tensor:
    """Gradient [T, V] of a weighted sum of the statistics."""
    leaf = logits.detach().requires_grad_()
    statistics = token_statistics(leaf, targets, temperature=1.0, vocab_size=logits.shape[1], with_entropy=with_entropy)
    loss = (upstream[0] * statistics.log_prob).sum()
    if statistics.entropy is not None:
        loss = loss + (upstream[1] * statistics.entropy).sum()
    loss.backward()
    assert leaf.grad is not None
    return leaf.grad


def plain(logits: Tensor, targets: Tensor, upstream: Tensor, rows: int) -> Tensor:
    """The same from log_softmax, forward and backward chunk by chunk, which is the best that formulation can do."""
    gradient = torch.empty_like(logits)
    for start in range(0, logits.shape[0], rows):
        part = slice(start, start + rows)
        leaf = logits[part].detach().requires_grad_()
        log_p = torch.log_softmax(leaf, -1)
        log_prob = log_p.gather(1, targets[part, None]).squeeze(1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        ((upstream[0, part] * log_prob).sum() + (upstream[1, part] * entropy).sum()).backward()
        assert leaf.grad is not None
        gradient[part] = leaf.grad
    return gradient


def seconds(calls: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """The fastest of `repeats` calls of each after one to warm up, in seconds; taken in turns, so that other load hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: min(taken[1:]) for name, taken in times.items()}


def _log_prob_inputs(tokens: int, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(tokens, vocab), torch.randint(0, vocab, (tokens,)), torch.randn(2, tokens)


def high_water_bytes() -> int:
    """Peak resident memory of this process (Linux). getrusage would also report what the parent held before exec."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, "/proc/self/status has no VmHWM"
    return int(found[1]) * 1024


def _peak_child(connection: Connection, tokens: int, vocab: int, rows: int | None) -> None:
    torch.set_num_threads(1)
    logits, targets, upstream = _log_prob_inputs(tokens, vocab)
    ours(logits[:8], targets[:8], upstream[:, :8])
    plain(logits[:8], targets[:8], upstream[:, :8], 8)
    before = high_water_bytes()
    if rows is None:
        ours(logits, targets, upstream)
    else:
        plain(logits, targets, upstream, rows)
    connection.send(high_water_bytes() - before)


def peak_mib(tokens: int, vocab: int, rows: int | None) -> float:
    """Peak resident memory above the inputs, in MiB, of `ours` (rows None) or of `plain`."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_peak_child, args=(sender, tokens, vocab, rows))
    child.start()
    child.join()
    return receiver.recv() / _MIB


def bench_log_prob(tokens: int, vocab: int, repeats: int) -> None:
    """Print part 1."""
    inputs = _log_prob_inputs(tokens, vocab)
    chunks = [rows for rows in (4, 8, 16, 64) if rows <= tokens]
    calls: dict[str, Callable[[], object]] = {"ours": lambda: ours(*inputs), "alone": lambda: ours(*inputs, with_entropy=False)}
    calls |= {str(rows): functools.partial(plain, *inputs, rows) for rows in chunks}
    taken = seconds(calls, repeats)
    own, alone = taken["ours"], taken["alone"]
    times = {rows: taken[str(rows)] for rows in chunks}
    peaks = {rows: peak_mib(tokens, vocab, rows) for rows in chunks}
    own_peak = peak_mib(tokens, vocab, None)
    best, smallest = min(times.values()), min(peaks.values())
    print(f"log-prob, entropy, varentropy [{tokens}, {vocab}] float32, forward and backward, {torch.get_num_threads()} thread")
    print(
        f"  ours {own:.3f} s, log_softmax {best:.3f} s at {min(times, key=times.__getitem__)} rows: ratio {own / best:.2f} (target <= 1.15)"
    )
    print(f"  log-prob alone {alone:.3f} s: ratio {own / alone:.2f}")
    print(f"  peak above inputs: ours {own_peak:.0f} MiB, log_softmax {smallest:.0f} MiB: ratio {own_peak / smallest:.3f} (target <= 1.0)")


def bench_step(sequences: int, length: int, repeats: int) -> None:
    """Print part 2."""
    torch.manual_seed(0)
    total = sequences * length
    values, rewards = torch.randn(2, total)
    mask = torch.ones(total, dtype=torch.bool)
    cu_seqlens = torch.arange(sequences + 1) * length
    calls: dict[str, Callable[[], object]] = {
        "scan": lambda: values.view(sequences, length).cumsum(1),
        "gae": lambda: gae(rewards=rewards, values=values, loss_mask=mask, cu_seqlens=cu_seqlens, gamma=0.99, lam=0.95),
        "step": lambda: one_step(sequences, length, values, mask),
    }
    taken = seconds(calls, repeats)
    scan, call = taken["scan"], taken["gae"]
    print(f"GAE of {sequences} x {length} tokens float32: {call:.4f} s, cumsum {scan:.4f} s: ratio {call / scan:.2f} (target <= 3)")
    print(f"estimator, weights and losses, forward and backward: {taken['step']:.3f} s (target <= 0.5)")


def one_step(sequences: int, length: int, log_probs: Tensor, mask: Tensor) -> None:
    """Group advantages, aggregation weights and the clipped loss of one batch."""
    objective = Objective()
    index = torch.arange(sequences).repeat_interleave(length)
    tokens = torch.full((sequences,), length)
    advantages = group_advantages(
        objective.advantage, rewards=log_probs[:sequences].double(), group_ids=torch.arange(sequences) // 8, lengths=tokens
    )
    leaf = log_probs.detach().requires_grad_()
    inputs = LossInputs(
        loss_mask=mask,
        sequence_index=index,
        sequence_tokens=tokens,
        log_probs=leaf,
        old_log_probs=log_probs + 0.01,
        rollout_log_probs=log_probs,
        advantages=advantages.float()[index],
    )
    compute_loss(objective, inputs, num_tokens=sequences * length, num_trajectories=sequences).loss.backward()


def candidates_as_published(tokens: int, vocab: int) -> CandidateColumns:
    """Random candidates in published numbers: one for about half of the tokens, 8 on average, some with more than 80."""
    random = np.random.default_rng(0)
    counts = np.where(random.random(tokens) < 0.47, 1, 1 + random.lognormal(1.8, 1.25, tokens)).astype(np.int32).clip(1, vocab)
    ids = np.concatenate([random.choice(vocab, count, replace=False) for count in counts]).astype(np.int32)
    rows, offsets = np.repeat(np.arange(tokens, dtype=np.int32), counts), [0, *np.cumsum(counts).tolist()]
    return CandidateColumns(torch.from_numpy(ids), torch.from_numpy(rows), torch.from_numpy(counts), offsets)


def bench_candidates(tokens: int, vocab: int, channels: int, repeats: int) -> None:
    """Print part 3."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, channels, requires_grad=True)
    # Logits of a model's size: with larger ones a CPU spends its time on numbers near the smallest of float32.
    weight = (2 * torch.randn(vocab, channels) / channels**0.5).requires_grad_()
    candidates = candidates_as_published(tokens, vocab)
    targets = candidates.columns[torch.tensor(candidates.offsets[:-1])].long()

    def train(candidates: CandidateColumns | None) -> None:
        found = head_statistics(hidden, weight, targets, temperature=1.0, vocab_size=vocab, candidates=candidates)
        assert found.entropy is not None
        (found.log_prob.sum() + found.entropy.sum()).backward()

    taken = seconds({"with": lambda: train(candidates), "without": lambda: train(None)}, repeats)
    print(f"head's statistics of [{tokens}, {channels}] x [{vocab}, {channels}] float32, forward and backward")
    print(f"  over candidates {taken['with']:.3f} s, over the vocabulary {taken['without']:.3f} s: {taken['with'] / taken['without']:.2f}")
    counts = candidates.counts.double()
    print(
        f"  candidates: mean {counts.mean():.1f}, p99 {counts.quantile(0.99):.0f}, alone {(counts == 1).double().mean():.0%}, "
        f"{4 * (1 + counts.mean()):.0f} bytes a token in samples and buffer"
    )


def main() -> int:
    """Run all parts."""
    parser = argparse.ArgumentParser(description="Benchmark the objective module on one CPU core.")
    parser.add_argument("--tokens", type=int, default=4096, help="rows of logits")
    parser.add_argument("--vocab", type=int, default=32768, help="columns of logits")
    parser.add_argument("--sequences", type=int, default=1024, help="sequences of the batch")
    parser.add_argument("--length", type=int, default=4096, help="tokens of each sequence")
    parser.add_argument("--channels", type=int, default=1024, help="hidden channels of the head")
    parser.add_argument("--repeats", type=int, default=5, help="timed calls, of which the fastest counts")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    bench_log_prob(arguments.tokens, arguments.vocab, arguments.repeats)
    bench_step(arguments.sequences, arguments.length, arguments.repeats)
    bench_candidates(arguments.tokens, arguments.vocab, arguments.channels, arguments.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
