"""What one GPU does, with published figures beside: the language model head's statistics, and train steps.

    python tools/bench/gpu.py [--only kernels|training] [--tokens 8192] [--vocab 151936] [--hidden 4096]

kernels   log-prob, entropy and varentropy of the head, forward and backward, with Triton's kernels and with torch, and their parts:
          the bare matrix products, and statistics and gradient of one chunk's logits. Smaller and larger sizes show where the rule of
          `device.chosen_row_maths` would have to change.
training  MFU, tokens/s and peak memory of 0.6B and 4B at 16k and 64k packed tokens, as in tools/bench/training.py.

Without --only all parts run. Where there is no GPU it says so and measures nothing.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial

import torch
import training
from torch import Tensor

from megatron_rl.algorithms.head_statistics import add_product, head_statistics
from megatron_rl.algorithms.log_prob import TORCH_ROWS, RowMaths, Shard, gather_partials

PARTS = ("kernels", "training")
DEVICE = "cuda"
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
    """The fastest of `repeats` calls in ms, after two to warm up and compile, and the peak memory in GiB, inputs included."""
    times = []
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


def bench_kernels(*, tokens: int, vocab: int, hidden: int) -> None:
    """Print time and memory of both row maths at the size asked for, with their parts, and the time at other sizes."""
    both = row_maths_on_gpus()
    print(f"head of {vocab:,} x {hidden:,}, {tokens:,} tokens, log-prob + entropy + varentropy, forward + backward")
    _bench_size(Head(tokens, vocab, hidden), both)
    print(PUBLISHED)
    print(f"  {'other sizes':<40}" + "".join(f"{rows.name + ' ms':>10}" for rows in both))
    for size in other_sizes(vocab):
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
    parser = argparse.ArgumentParser(description="Benchmark the language model head and train steps on one GPU.")
    parser.add_argument("--only", choices=PARTS, help="one part; all when not given")
    parser.add_argument("--tokens", type=int, default=8192, help="rows of the kernels part")
    parser.add_argument("--vocab", type=int, default=151_936, help="vocabulary of the kernels part")
    parser.add_argument("--hidden", type=int, default=4096, help="hidden size of the kernels part")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu: nothing was measured, because this machine has no GPU that torch can use; run it on one with CUDA.")
        return 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if arguments.only in (None, "kernels"):
        bench_kernels(tokens=arguments.tokens, vocab=arguments.vocab, hidden=arguments.hidden)
        torch.cuda.empty_cache()
    if arguments.only in (None, "training"):
        training.bench_gpu(token_counts=(16_384, 65_536))
    return 0


if __name__ == "__main__":
    sys.exit(main())
