"""What GPUs do, with published figures beside: the language model head's statistics, train steps, weight syncs, turns, GRPO steps.

    python tools/bench/gpu.py [--only kernels|training|weights|sleep|step] [--tokens 8192] [--vocab 151936] [--hidden 4096] [--rehearse]

kernels   log-prob, entropy and varentropy of the head, forward and backward, with Triton's kernels and with torch, and their parts:
          the bare matrix products, and statistics and gradient of one chunk's logits. Smaller and larger sizes show where the rule of
          `device.chosen_row_maths` would have to change.
training  MFU, tokens/s and peak memory of 0.6B and 4B at 16k and 64k packed tokens, data parallel on all GPUs, with activations
          recomputed where the plan needs it.
weights   seconds per GB and peak memory of a sync of the 0.6B from a rank to an engine, by transport.
sleep     seconds of the turns that a rank and an engine of the 0.6B take on one GPU, and what stays on it.
step      whole GRPO steps of the 0.6B by `megatron-rl train`, ranks and engines in turns on all GPUs.

Without --only all parts run; one that fails says why and lets the others run. Where there is no GPU it says so and measures nothing, but
with --rehearse it runs all parts in small sizes, Triton's kernels in its interpreter: that tries this script and measures nothing else.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from megatron_rl.algorithms.head_statistics import add_product, head_statistics
from megatron_rl.algorithms.log_prob import TORCH_ROWS, RowMaths, Shard, gather_partials
from megatron_rl.errors import MegatronRLError

PARTS = ("kernels", "training", "weights", "sleep", "step")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STAND_INS = 2
"""Processes in the place of GPUs."""
GIB = 2**30
PUBLISHED = """\
  published on one H100 at 8,192 tokens, vocabulary 151,936, hidden 4,096, bfloat16 (huggingface/trl#7244):
    TRL chunked_nll, chunks of 256     167 ms   13.1 GiB
    Liger fused linear cross-entropy   192 ms    6.1 GiB
    all logits at once                  59 ms   19.9 GiB
    the three matrix products           42 ms
    Triton, lse + entropy of 8,192 rows of logits, forward   0.89 ms
  goal: at most 80 ms and 6.5 GiB; statistics of the logits at most 1.0 ms"""


def measured(call: Callable[[], object], repeats: int = 10) -> tuple[float, float]:
    """The fastest of `repeats` calls in ms, after two to warm up and compile, and the peak memory in GiB, inputs included.

    On a CPU one call, and nothing of memory.
    """
    times = []
    if DEVICE == "cpu":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3, 0.0
    for number in range(repeats + 2):
        if number == 2:
            torch.cuda.reset_peak_memory_stats()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times[2:]), torch.cuda.max_memory_allocated() / GIB


class Head:
    """Hidden states, a head's weight and the float32 buffer that megatron sums its gradients in, all bfloat16 but the last."""

    def __init__(self, tokens: int, vocab: int, hidden: int) -> None:
        generator = torch.Generator(DEVICE).manual_seed(0)
        options = {"device": DEVICE, "dtype": torch.bfloat16, "generator": generator}
        self.hidden = torch.randn(tokens, hidden, **options).requires_grad_()
        self.weight = (torch.randn(vocab, hidden, **options) * hidden**-0.5).requires_grad_()
        self.targets = torch.randint(0, vocab, (tokens,), device=DEVICE, generator=generator)
        self.upstream = torch.randn(3, tokens, device=DEVICE, generator=generator)
        self.buffer = torch.zeros(vocab, hidden, device=DEVICE)

    def statistics(self, rows: RowMaths) -> tuple[Tensor, Tensor]:
        """Forward and backward of a weighted sum of the three statistics [T]; the gradients of hidden states and of the weight."""
        self.hidden.grad = self.weight.grad = None
        found = head_statistics(
            self.hidden,
            self.weight,
            self.targets,
            temperature=1.0,
            vocab_size=len(self.weight),
            gradient_buffer=self.buffer.zero_(),
            rows=rows,
        )
        assert found.entropy is not None and found.varentropy is not None
        (self.upstream * torch.stack([found.log_prob, found.entropy, found.varentropy])).sum().backward()
        assert self.hidden.grad is not None and self.weight.grad is not None
        # As megatron does it when a gradient is whole.
        self.buffer.add_(self.weight.grad)
        return self.hidden.grad, self.buffer

    def products(self) -> None:
        """The three matrix products of chunks of 2,048 rows, without anything between them."""
        for start in range(0, len(self.hidden), 2048):
            hidden = self.hidden.detach()[start : start + 2048]
            logits = hidden @ self.weight.detach().t()
            torch.mm(logits, self.weight.detach())
            add_product(self.buffer, logits.t(), hidden)


def bench_kernels(tokens: int, vocab: int, hidden: int, *, others: Sequence[tuple[int, int, int]]) -> None:
    """Print time and memory of both row maths at the size asked for, with their parts, and the time at `others`."""
    both = row_maths_on_gpus()
    print(f"head of {vocab:,} x {hidden:,}, {tokens:,} tokens, log-prob + entropy + varentropy, forward + backward")
    _bench_size(Head(tokens, vocab, hidden), both)
    print(PUBLISHED)
    print(f"  {'other sizes':<40}" + "".join(f"{rows.name + ' ms':>10}" for rows in both))
    for size in others:
        case = Head(*size)
        times = [measured(partial(case.statistics, rows), 5)[0] for rows in both]
        print(f"  {'{:,} tokens, {:,} x {:,}'.format(*size):<40}" + "".join(f"{ms:>10.2f}" for ms in times))


def row_maths_on_gpus() -> tuple[RowMaths, RowMaths]:
    """The kernels, and torch that judges them."""
    from megatron_rl.models.head_kernels import TRITON_ROWS

    return TRITON_ROWS, TORCH_ROWS


def other_sizes(vocab: int) -> list[tuple[int, int, int]]:
    """Tokens, vocabulary and hidden size: a few tokens, a small vocabulary, a vocabulary over 8 ranks, many tokens."""
    return [(16, 2048, 1024), (64, vocab, 1024), (1024, 32_768, 2048), (1024, vocab // 8, 4096), (65_536, vocab // 8, 1024)]


def _bench_size(head: Head, both: tuple[RowMaths, RowMaths]) -> None:
    have, want = ([tensor.clone() for tensor in head.statistics(rows)] for rows in both)
    apart = [float((one - other).norm() / other.norm()) for one, other in zip(have, want, strict=True)]
    print(f"  Triton and torch differ by {apart[0]:.1e} of the hidden states' gradient and {apart[1]:.1e} of the weight's")
    del have, want
    for rows in both:
        ms, gib = measured(partial(head.statistics, rows))
        print(f"  {rows.name:<32}{ms:>7.1f} ms  {gib:>5.1f} GiB")
    print(f"  {'the three matrix products':<32}{measured(head.products)[0]:>7.1f} ms")
    for rows in both:
        _bench_rows(rows, head)


def _bench_rows(rows: RowMaths, head: Head) -> None:
    """Print the times of statistics and of the gradient alone, for the logits of 2,048 rows, scaled to all rows."""
    chosen = head.targets[:2048]
    logits, shard = (head.hidden[:2048] @ head.weight.t()).detach(), Shard(1.0, 0, len(head.weight))
    factor = len(head.hidden) / len(logits)
    _, saved = gather_partials(rows.partials(logits, chosen, shard=shard, with_entropy=True), None)
    upstream = [row[:2048] for row in head.upstream]
    forward, _ = measured(lambda: rows.partials(logits, chosen, shard=shard, with_entropy=True))
    backward, _ = measured(lambda: rows.gradient(logits, chosen, shard, saved, upstream, in_place=True))
    print(f"  {rows.name + ', statistics of the logits':<32}{forward * factor:>7.2f} ms, their gradient {backward * factor:.2f} ms")


def main() -> int:
    """Run the parts asked for."""
    parser = argparse.ArgumentParser(description="Benchmark the language model head, train steps, weight syncs and GRPO steps on GPUs.")
    parser.add_argument("--only", choices=PARTS, help="one part; all when not given")
    parser.add_argument("--tokens", type=int, default=8192, help="rows of the kernels part")
    parser.add_argument("--vocab", type=int, default=151_936, help="vocabulary of the kernels part")
    parser.add_argument("--hidden", type=int, default=4096, help="hidden size of the kernels part")
    parser.add_argument("--rehearse", action="store_true", help="run every part in small sizes on the CPU, to try this script")
    arguments = parser.parse_args()
    if arguments.rehearse and DEVICE == "cuda":
        parser.error("--rehearse is for a machine without GPUs; on this one leave it out")
    if DEVICE == "cpu" and not arguments.rehearse:
        print("gpu: nothing was measured, because this machine has no GPU that torch can use; run it on one with CUDA.")
        return 0
    print(f"a rehearsal on the CPU, torch {torch.__version__}" if arguments.rehearse else f"{torch.cuda.get_device_name()}, {_stack()}")
    failed = [part for part in PARTS if arguments.only in (None, part) and not run_part(part, arguments)]
    if failed:
        print(f"gpu: failed: {', '.join(failed)}")
    return int(bool(failed))


def _stack() -> str:
    return f"{torch.cuda.device_count()} of them, torch {torch.__version__}, CUDA {torch.version.cuda}"


def run_part(part: str, arguments: argparse.Namespace) -> bool:
    """Run one part, with ranks and engines of its own; False when it failed, which it says."""
    try:
        if part != "kernels":
            _run_on_node(part, rehearse=arguments.rehearse)
        elif arguments.rehearse:
            # The kernels read it when they are imported; ranks and engines are not to have it.
            with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
                bench_kernels(4, 64, 8, others=[])
        else:
            bench_kernels(arguments.tokens, arguments.vocab, arguments.hidden, others=other_sizes(arguments.vocab))
            torch.cuda.empty_cache()
    except (MegatronRLError, RuntimeError) as error:
        print(f"{part}: failed: {error}", flush=True)
        return False
    return True


def _run_on_node(part: str, *, rehearse: bool) -> None:
    # Imported here: the kernels need no ranks.
    import gpu_system

    from megatron_rl.doctor.node import Node

    sizes = gpu_system.REHEARSED if rehearse else gpu_system.ON_GPU
    num_gpus = STAND_INS if rehearse else torch.cuda.device_count()
    with tempfile.TemporaryDirectory(prefix=f"gpu-{part}-") as directory:
        # A sync has one rank and one engine, each on a GPU of its own where there are two.
        count = min(2, num_gpus) if part in ("weights", "sleep") else num_gpus
        with closing(Node("cpu" if rehearse else "cuda", num_gpus=count, directory=Path(directory))) as node:
            gpu_system.PARTS[part](node, sizes)


if __name__ == "__main__":
    sys.exit(main())
