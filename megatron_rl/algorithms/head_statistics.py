"""Log-probability, entropy and varentropy of next tokens from hidden states, where the logits of all rows never exist at once.

Rows go through the language model head in chunks of a fixed number of logits. A chunk is dropped as soon as five numbers of each row
are known, and made again for the gradient: memory depends neither on the number of rows nor on what stands between them.

Legend: N rows, H hidden channels, V vocabulary columns of this rank.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rl.algorithms.log_prob import Shard, TokenStatistics, gather_partials, local_partials, logit_gradient

# Logits of a chunk: enough rows for the products with the head's weight to be compute-bound at any vocabulary.
_CHUNK_LOGITS = {"cpu": 2**24, "cuda": 2**28}
_DEFAULT_CHUNK_LOGITS = 2**24


def head_statistics(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
    with_entropy: bool = True,
    gradient_buffer: Tensor | None = None,
) -> TokenStatistics:
    """What `token_statistics` says of the logits `hidden` [N, H] x `weight` [V, H] transposed, at `targets` [N].

    With `group` each of its ranks gets the gradient of `hidden` that comes from its own columns: the sum over ranks is the caller's.
    Collective over `group` in the forward pass, once whatever N, and not in the backward pass.

    `gradient_buffer` [V, H] is where the gradients of `weight` will be summed in the end: all chunks' but the last are added to it
    right away, the last one's is returned. Without it they are summed in float32 (float64 for float64 weights).

    Raises ValueError when shapes disagree, the temperature is not positive or a target is outside the vocabulary.
    """
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or targets.shape != hidden.shape[:1]:
        shapes = [tuple(tensor.shape) for tensor in (hidden, weight, targets)]
        raise ValueError(f"head_statistics got hidden, weight and targets of shapes {shapes}, needs [N, H], [V, H] and [N]")
    shard = Shard.of(targets, num_columns=len(weight), temperature=temperature, vocab_size=vocab_size, vocab_start=vocab_start)
    log_prob, entropy, varentropy = _HeadStatistics.apply(hidden, weight, targets, shard, group, with_entropy, gradient_buffer)
    return TokenStatistics(log_prob, entropy if with_entropy else None, varentropy if with_entropy else None)


def _chunks(num_rows: int, num_columns: int, device: torch.device) -> list[slice]:
    rows = max(1, _CHUNK_LOGITS.get(device.type, _DEFAULT_CHUNK_LOGITS) // max(1, num_columns))
    return [slice(start, min(start + rows, num_rows)) for start in range(0, num_rows, rows)]


class _HeadStatistics(torch.autograd.Function):
    """One node of the graph for all chunks, so that whoever waits for the weight's gradient is told once, when it is whole."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        shard: Shard,
        group: dist.ProcessGroup | None,
        with_entropy: bool,
        gradient_buffer: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        slices = _chunks(len(hidden), len(weight), hidden.device) or [slice(0, 0)]
        # No name holds a chunk's logits while the next chunk's are made.
        parts = [local_partials(hidden[rows] @ weight.t(), targets[rows], shard=shard, with_entropy=with_entropy) for rows in slices]
        log_prob, saved = gather_partials(torch.cat(parts), group)
        _, _, entropy, varentropy, _ = saved
        ctx.save_for_backward(hidden, weight, targets, *saved)
        ctx.shard, ctx.gradient_buffer = shard, gradient_buffer
        ctx.set_materialize_grads(False)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy, varentropy)
        return log_prob, entropy, varentropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        hidden, weight, targets, *saved = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        hidden_gradient = torch.empty_like(hidden) if wants_hidden else None
        weight_sum = _WeightSum(weight, ctx.gradient_buffer) if wants_weight else None
        for rows in _chunks(len(hidden), len(weight), hidden.device):
            inputs = hidden[rows], weight, targets[rows], ctx.shard
            chunk = _chunk_gradient(*inputs, [row[rows] for row in saved], [None if row is None else row[rows] for row in gradients])
            if hidden_gradient is not None:
                torch.mm(chunk, weight, out=hidden_gradient[rows])
            if weight_sum is not None:
                weight_sum.add(chunk, hidden[rows])
            del chunk
        return hidden_gradient, None if weight_sum is None else weight_sum.last(), None, None, None, None, None


def _chunk_gradient(
    hidden: Tensor, weight: Tensor, targets: Tensor, shard: Shard, saved: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> Tensor:
    """The gradient [rows, V] of a chunk's logits, which are made again."""
    gradient = logit_gradient(hidden @ weight.t(), targets, shard, saved, gradients)
    assert gradient is not None, "autograd asks for a gradient only where something has one"
    return gradient


class _WeightSum:
    """The weight's gradient over chunks. Each is a product in the weight's dtype; their sum is not, or it would lose digits."""

    def __init__(self, weight: Tensor, buffer: Tensor | None) -> None:
        self._weight = weight
        self._own = buffer is None
        self._buffer = buffer
        self._pending: Tensor | None = None

    def add(self, chunk: Tensor, hidden: Tensor) -> None:
        """Add the product of a chunk's gradient [rows, V] and its hidden states [rows, H]."""
        self._flush()
        self._pending = chunk.t() @ hidden

    def _flush(self) -> None:
        if self._pending is None:
            return
        if self._buffer is None:
            self._buffer = torch.zeros_like(self._weight, dtype=torch.promote_types(self._weight.dtype, torch.float32))
        self._buffer.add_(self._pending)
        self._pending = None

    def last(self) -> Tensor:
        """What is not in the caller's buffer: the last chunk's gradient [V, H], all of it without such a buffer, zeros without chunks."""
        if self._pending is None:
            return torch.zeros_like(self._weight)
        if not self._own or self._buffer is None:
            return self._pending
        self._flush()
        return self._buffer.to(self._weight.dtype)
