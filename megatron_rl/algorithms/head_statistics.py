"""Log-probability, entropy and varentropy of next tokens from hidden states, without full logits.

Rows go through the language model head in chunks of a fixed number of logits. A chunk is dropped as
soon as five numbers of each row are known, and computed again for the gradient, so memory does not
depend on the number of rows.

Legend: N rows, H hidden channels, V vocabulary columns of this rank.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rl.algorithms.entropy_aware import EntropyAware, reshaped
from megatron_rl.algorithms.log_prob import TORCH_ROWS, CandidateColumns, RowMaths, Shard, TokenStatistics, gather_partials

LEAST_LOG_PROB = -30.0
"""Log-prob, in nats, of a token that should not have been drawn: far beyond any bound of parity, and finite in a mean."""

# Logits of a chunk: enough rows for the products with the head's weight to be compute-bound at any vocabulary.
_CHUNK_LOGITS = {"cpu": 2**24, "cuda": 2**29}
_DEFAULT_CHUNK_LOGITS = 2**24
# Rows of a chunk come in whole steps: only the last chunk of a GPU's matrix products has a ragged last tile.
_ROW_STEP = 1024


def token_statistics(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
    with_entropy: bool = True,
    candidates: CandidateColumns | None = None,
) -> TokenStatistics:
    """Return statistics of the policy softmax(logits / temperature) at `targets` [T], global token ids.

    Results are float32 (float64 for float64 logits). `logits` [T, V] are the columns `vocab_start
    ... vocab_start + V`; those at or beyond `vocab_size` are padding, with any content. A logit may
    be -inf. With `group`, the columns of all ranks make up the vocabulary: each rank gets the whole
    result and the gradient of its columns. Entropy H = -sum p ln p, varentropy = sum p (ln p +
    H)^2; the softmax is over `candidates` where given. Raises ValueError when shapes disagree, the
    temperature is not positive or a target is outside the vocabulary.

    Example: `token_statistics(logits[:-1], ids[1:], temperature=1.0, vocab_size=n).log_prob` of one
    sequence `ids`.
    """
    if logits.ndim != 2 or targets.shape != logits.shape[:1]:
        raise ValueError(f"token_statistics got logits {tuple(logits.shape)} and targets {tuple(targets.shape)}, needs [T, V] and [T]")
    if targets.numel() and not (int(targets.min()) >= 0 and int(targets.max()) < vocab_size):
        raise ValueError(f"token_statistics got targets in [{int(targets.min())}, {int(targets.max())}], needs them in [0, {vocab_size})")
    shard = Shard.of(num_columns=logits.shape[1], temperature=temperature, vocab_size=vocab_size, vocab_start=vocab_start)
    return _statistics(logits, None, targets, shard, group, with_entropy, None, TORCH_ROWS, candidates)


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
    rows: RowMaths = TORCH_ROWS,
    candidates: CandidateColumns | None = None,
) -> TokenStatistics:
    """Return `token_statistics` of the logits `hidden` [N, H] x `weight` [V, H] transposed, at `targets` [N].

    With `group` each rank gets the gradient of `hidden` from its own columns: the sum over ranks is
    the caller's. Collective over `group` in the forward pass, once for any N, and not in the
    backward pass.

    `gradient_buffer` [V, H] is the place of the summed gradients of `weight`, except the last
    chunk's, which is returned. Without it all are summed in float32 (float64 for float64 weights).
    `rows` does a chunk's maths; the matrix products are always torch's. A target outside the
    vocabulary has log-prob -inf: a check would wait for the device. Raises ValueError when shapes
    disagree or the temperature is not positive.
    """
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or targets.shape != hidden.shape[:1]:
        shapes = [tuple(tensor.shape) for tensor in (hidden, weight, targets)]
        raise ValueError(f"head_statistics got hidden, weight and targets of shapes {shapes}, needs [N, H], [V, H] and [N]")
    shard = Shard.of(num_columns=len(weight), temperature=temperature, vocab_size=vocab_size, vocab_start=vocab_start)
    return _statistics(hidden, weight, targets, shard, group, with_entropy, gradient_buffer, rows, candidates)


def _statistics(*inputs: Any) -> TokenStatistics:
    """Return the statistics of `inputs`, those of `_Statistics.forward`."""
    log_prob, entropy, varentropy, full_entropy = _Statistics.apply(*inputs)
    with_entropy = inputs[5]
    return TokenStatistics(log_prob, entropy if with_entropy else None, varentropy if with_entropy else None, full_entropy)


@torch.no_grad()
def drawn_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    entropy: EntropyAware,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """Return log-probs [N] of `targets` [N] under the distribution by which `entropy` draws at `temperature`.

    `hidden` [N, H] and `weight` [V, H] are those of `head_statistics`. A target outside of its
    candidates has LEAST_LOG_PROB. A chunk has the logits of all ranks. Collective over `group`.
    """
    numbers, num_ranks, found = [entropy.numbers(temperature=temperature)], 1 if group is None else dist.get_world_size(group), []
    for part in _chunks(len(hidden), len(weight) * num_ranks, hidden.device) or [slice(0, 0)]:
        shards = [hidden[part] @ weight.t()]
        if group is not None:
            own, shards = shards[0], [torch.empty_like(shards[0]) for _ in range(num_ranks)]
            dist.all_gather(shards, own, group=group)
        logits = reshaped(torch.cat(shards, -1)[:, :vocab_size], numbers) / temperature
        found.append(torch.log_softmax(logits, -1).gather(1, targets[part].unsqueeze(1)).squeeze(1))
    return torch.cat(found).clamp(min=LEAST_LOG_PROB)


def _chunks(num_rows: int, num_columns: int, device: torch.device) -> list[slice]:
    rows = max(1, _CHUNK_LOGITS.get(device.type, _DEFAULT_CHUNK_LOGITS) // max(1, num_columns))
    rows = rows // _ROW_STEP * _ROW_STEP or rows
    return [slice(start, min(start + rows, num_rows)) for start in range(0, num_rows, rows)]


class _Statistics(torch.autograd.Function):
    """One node of the graph for all chunks, so a hook on the weight's gradient runs once, when complete.

    Without a weight the hidden states are the logits, in one chunk that stays as it is.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor | None,
        targets: Tensor,
        shard: Shard,
        group: dist.ProcessGroup | None,
        with_entropy: bool,
        gradient_buffer: Tensor | None,
        rows: RowMaths,
        candidates: CandidateColumns | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        def partials(logits: Tensor, part: slice) -> list[Tensor]:
            own = partial(rows.partials, targets=targets[part], shard=shard, with_entropy=with_entropy)
            whole = [own(logits)] if candidates is None or with_entropy else []
            if candidates is None:
                return whole
            return [own(candidates.restricted(logits, part, shard, in_place=weight is not None)), *whole]

        if weight is None:
            parts = [partials(hidden, slice(0, len(hidden)))]
        else:
            slices = _chunks(len(hidden), len(weight), hidden.device) or [slice(0, 0)]
            # No name holds a chunk's logits while the next chunk's are made.
            parts = [partials(hidden[part] @ weight.t(), part) for part in slices]
        # Rows over the candidates, and then the same ones over the vocabulary.
        log_prob, saved = gather_partials(torch.cat([torch.cat(each) for each in zip(*parts, strict=True)]), group)
        full_entropy = saved[2][len(hidden) :] if candidates is not None and with_entropy else None
        log_prob, saved = log_prob[: len(hidden)], [numbers[: len(hidden)] for numbers in saved]
        _, _, entropy, varentropy, *_ = saved
        ctx.save_for_backward(hidden, weight, targets, *saved)
        ctx.shard, ctx.gradient_buffer, ctx.rows, ctx.candidates = shard, gradient_buffer, rows, candidates
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*([] if with_entropy else [entropy, varentropy]), *([] if full_entropy is None else [full_entropy]))
        return log_prob, entropy, varentropy, full_entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        hidden, weight, targets, *saved = ctx.saved_tensors
        gradients, candidates = gradients[:3], ctx.candidates
        if weight is None:
            if candidates is not None:
                hidden = candidates.restricted(hidden, slice(0, len(hidden)), ctx.shard, in_place=False)
            return ctx.rows.gradient(hidden, targets, ctx.shard, saved, gradients), *[None] * 8
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        hidden_gradient = torch.empty_like(hidden) if wants_hidden else None
        parts = _chunks(len(hidden), len(weight), hidden.device)
        weight_gradient, total, sums = None, ctx.gradient_buffer, wants_weight and ctx.gradient_buffer is None and len(parts) > 1
        if sums:
            # In the weight's own dtype the sum over chunks would lose digits.
            total = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        for part in parts:
            own_saved, own_gradients = [row[part] for row in saved], [None if row is None else row[part] for row in gradients]
            # The logits are made again, and their gradient takes their place.
            logits = hidden[part] @ weight.t()
            if candidates is not None:
                candidates.restricted(logits, part, ctx.shard, in_place=True)
            chunk = ctx.rows.gradient(logits, targets[part], ctx.shard, own_saved, own_gradients, in_place=True)
            assert chunk is not None, "autograd asks for a gradient only where something has one"
            if hidden_gradient is not None:
                torch.mm(chunk, weight, out=hidden_gradient[part])
            if wants_weight and (sums or part is not parts[-1]):
                add_product(total, chunk.t(), hidden[part])
            elif wants_weight:
                weight_gradient = chunk.t() @ hidden[part]
            # No name holds a chunk while the next one is made.
            del logits, chunk
        if wants_weight and weight_gradient is None:
            weight_gradient = total.to(weight.dtype) if sums else torch.zeros_like(weight)
        return hidden_gradient, weight_gradient, *[None] * 7


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left` [A, B] x `right` [B, C] to `total` [A, C]; GPUs add to a wider dtype without rounding to the narrow one."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif left.device.type == "cpu":
        # torch has the product of narrow numbers into wide ones on GPUs only.
        total.add_(left @ right)
    else:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
