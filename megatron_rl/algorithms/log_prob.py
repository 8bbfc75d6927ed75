"""Log-probability, entropy and varentropy of next tokens from logits that may be sharded over the vocabulary.

One pass over the logits, never written to, in row chunks that stay in cache; nothing of the logits'
size is kept for the backward pass, which recomputes the softmax chunk by chunk.

Legend: T tokens, V vocabulary columns of this rank, R ranks of the vocabulary-parallel group.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

# exp() of this is exactly 0 in float32 and float64, so that p s is 0 and not NaN where a logit is -inf.
_FLOOR = -1e4
# A chunk and its two or three temporaries fit a core's cache on CPU; on GPU a chunk fills the device.
_CHUNK_ELEMENTS = {"cpu": 2**18, "cuda": 2**26}
_DEFAULT_CHUNK_ELEMENTS = 2**22


@dataclass(frozen=True, slots=True, eq=False)
class TokenStatistics:
    """Of softmax(logits / temperature), nats, differentiable: `log_prob` [T]; if asked `entropy` and `varentropy` [T].

    The softmax is over the candidates where there are any; `full_entropy` [T], not differentiable, is
    then that over the vocabulary.
    """

    log_prob: Tensor
    entropy: Tensor | None
    varentropy: Tensor | None
    full_entropy: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's vocabulary columns: `columns` real ones from index `start`, padding behind; logits over `temperature`."""

    temperature: float
    start: int
    columns: int

    @classmethod
    def of(cls, *, num_columns: int, temperature: float, vocab_size: int, vocab_start: int) -> "Shard":
        """Return the shard of `num_columns` columns, with padding. Raises ValueError when `temperature` is not positive."""
        if not temperature > 0:
            raise ValueError(
                f"token_statistics got temperature {temperature}, needs a positive one; greedy sampling has no entropy to train on"
            )
        return cls(temperature, vocab_start, max(0, min(num_columns, vocab_size - vocab_start)))


@dataclass(frozen=True, slots=True, eq=False)
class CandidateColumns:
    """The vocabulary's columns that a softmax of T rows is over: `columns` [K] with their `rows` [K], row after row.

    `counts` [T] are those of each row, and `offsets` [T + 1], on the host, count them up. A row with
    none has the whole vocabulary.
    """

    columns: Tensor
    rows: Tensor
    counts: Tensor
    offsets: Sequence[int]

    def restricted(self, logits: Tensor, part: slice, shard: Shard, *, in_place: bool) -> Tensor:
        """Return `logits` [rows of `part`, V] with -inf in all columns but the candidates'."""
        own, width = slice(self.offsets[part.start], self.offsets[part.stop]), logits.shape[1]
        rows, columns = self.rows[own].long() - part.start, self.columns[own].long() - shard.start
        dropped = torch.empty(logits.numel() + 1, dtype=torch.bool, device=logits.device)
        plane = dropped[:-1].view_as(logits)
        plane.copy_((self.counts[part] > 0).unsqueeze(1).expand_as(plane))
        # Candidates of other ranks meet behind the plane: choosing this rank's would wait for the device.
        here = (columns >= 0) & (columns < shard.columns)
        dropped.index_fill_(0, torch.where(here, rows * width + columns, logits.numel()), False)
        return logits.masked_fill_(plane, float("-inf")) if in_place else logits.masked_fill(plane, float("-inf"))


def _chunks(logits: Tensor, columns: int) -> tuple[list[slice], Tensor]:
    """Return row slices of about the device's chunk size, and three scratch planes [3, rows, columns]."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    budget = _CHUNK_ELEMENTS.get(logits.device.type, _DEFAULT_CHUNK_ELEMENTS)
    rows = min(max(1, budget // max(1, columns)), max(1, logits.shape[0]))
    slices = [slice(start, min(start + rows, logits.shape[0])) for start in range(0, logits.shape[0], rows)]
    return slices, torch.empty(3, rows, columns, dtype=dtype, device=logits.device)


def _scaled(chunk: Tensor, temperature: float, scratch: Tensor) -> Tensor:
    """Return `chunk` / temperature in the dtype of `scratch`, written there unless nothing changes."""
    if chunk.dtype == scratch.dtype and temperature == 1.0:
        return chunk
    return scratch.copy_(chunk).div_(temperature)


def local_partials(logits: Tensor, targets: Tensor, *, shard: Shard, with_entropy: bool) -> Tensor:
    """Return five numbers of this rank for each row, [T, 5]: m, Z, mean of s, variance of s, target's z.

    z = logits / temperature and s = z - m over this rank's real columns, with maximum m and
    normaliser Z = sum e^s; mean and variance are under the rank's own softmax. A row without a
    finite logit has m = -inf and Z = 0, and another rank's target z = -inf.
    """
    slices, scratch = _chunks(logits, shard.columns)
    out = torch.zeros(logits.shape[0], 5, dtype=scratch.dtype, device=logits.device)
    out[:, 0] = float("-inf")
    out[:, 4] = float("-inf")
    if shard.columns == 0 or logits.shape[0] == 0:
        return out
    for rows in slices:
        chunk = logits[rows, : shard.columns]
        _chunk_partials(chunk, out[rows], scratch[:, : chunk.shape[0]], shard.temperature, with_entropy)
    out[:, 1:4] = torch.where(out[:, :1] == float("-inf"), 0.0, out[:, 1:4])
    local = targets - shard.start
    here = (local >= 0) & (local < shard.columns)
    picked = logits.gather(1, local.clamp(0, shard.columns - 1).unsqueeze(1)).squeeze(1).to(out.dtype) / shard.temperature
    out[:, 4] = torch.where(here, picked, out[:, 4])
    return out


def _chunk_partials(chunk: Tensor, out: Tensor, scratch: Tensor, temperature: float, with_entropy: bool) -> None:
    """Fill the first four columns of `out` [rows, 5] from `chunk` [rows, columns], using `scratch` [3, rows, columns]."""
    shifted, weights, product = scratch.unbind(0)
    scaled = _scaled(chunk, temperature, shifted)
    maximum = scaled.amax(-1, keepdim=True)
    out[:, 0] = maximum.squeeze(1)
    # softmax is much faster than exp on CPU, and the largest entry of softmax is 1 / Z.
    torch.softmax(scaled, -1, out=weights)
    out[:, 1] = 1 / weights.amax(-1)
    if not with_entropy:
        return
    torch.sub(scaled, maximum, out=shifted).clamp_(min=_FLOOR)
    mean = torch.mul(weights, shifted, out=product).sum(-1)
    out[:, 2] = mean
    out[:, 3] = shifted.sub_(mean.unsqueeze(1)).square_().mul_(weights).sum(-1)


def gather_partials(local: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, list[Tensor]]:
    """Return `merged_rows` of the partials [T, 5] of all ranks of `group`. Collective over `group`."""
    partials = local.unsqueeze(0)
    if group is not None:
        gathered = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, local, group=group)
        partials = torch.stack(gathered)
    return merged_rows(local, partials)


def merged_rows(local: Tensor, partials: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the log-prob [T] and the inputs of `logit_gradient` for the rank with partials `local`
    [T, 5] among all [R, T, 5].

    The inputs are maximum, log normaliser, entropy, varentropy, the rank's share of the mass, and a
    mask of finite logits there, [T] each: the share underflows where its logits are about 104 nats
    below the maximum. The variance merges by the parallel form of Chan, Golub and LeVeque (1983),
    so nothing cancels.
    """
    maximum_RT, normaliser_RT, mean_RT, variance_RT, target_RT = partials.unbind(-1)
    maximum = maximum_RT.amax(0)
    offset_RT = torch.where(normaliser_RT > 0, maximum_RT - maximum, _FLOOR)
    weight_RT = normaliser_RT * offset_RT.exp()
    normaliser = weight_RT.sum(0)
    log_normaliser = normaliser.log()
    absolute_mean_RT = torch.where(weight_RT > 0, mean_RT + offset_RT, 0.0)
    mean = (weight_RT * absolute_mean_RT).sum(0) / normaliser
    varentropy = (weight_RT * (variance_RT + (absolute_mean_RT - mean).square())).sum(0) / normaliser
    # Rounding alone can put the entropy of a one-hot row below 0.
    entropy = (log_normaliser - mean).clamp(min=0)
    log_prob = (target_RT.amax(0) - maximum) - log_normaliser
    has_mass = local[:, 1] > 0
    share = torch.where(has_mass, (local[:, 0] - maximum).exp() * local[:, 1] / log_normaliser.exp(), 0.0)
    return log_prob, [maximum, log_normaliser, entropy, varentropy, share, has_mass]


def logit_gradient(
    logits: Tensor,
    targets: Tensor,
    shard: Shard,
    saved: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    *,
    in_place: bool = False,
) -> Tensor | None:
    """Return the gradient [T, V] in the logits' dtype, 0 for padding columns; with `in_place` it replaces the logits.

    `saved` [T] each come from `merged_rows`. `gradients` [T] are of log-prob, entropy and
    varentropy; the result is None when all three are. With u = ln p + H: d log_prob = onehot - p, d
    entropy = -p u, d varentropy = p (u^2 + 2 u - varentropy), all over temperature.
    """
    if all(gradient is None for gradient in gradients):
        return None
    out = logits if in_place else torch.empty_like(logits, memory_format=torch.contiguous_format)
    out[:, shard.columns :] = 0
    if shard.columns == 0 or logits.shape[0] == 0:
        return out
    maximum, _, _, _, share, has_mass = saved
    grad_target, polynomial = gradient_polynomial(saved, gradients, shard.temperature)
    coefficients = [coefficient * share for coefficient in polynomial]
    local = targets - shard.start
    here = (local >= 0) & (local < shard.columns)
    index = local.clamp(0, shard.columns - 1).unsqueeze(1)
    at_target = torch.where(here, grad_target, 0.0).unsqueeze(1)
    slices, scratch = _chunks(logits, shard.columns)
    for rows in slices:
        chunk = logits[rows, : shard.columns]
        shifted, weights, spare = scratch[:, : chunk.shape[0]].unbind(0)
        scaled = _scaled(chunk, shard.temperature, shifted)
        torch.softmax(scaled, -1, out=weights)
        result = out[rows, : shard.columns] if out.dtype == weights.dtype else spare
        if len(coefficients) > 1:
            torch.sub(scaled, maximum[rows].unsqueeze(1), out=shifted).clamp_(min=_FLOOR)
        torch.mul(weights, _polynomial(shifted, [c[rows].unsqueeze(1) for c in coefficients], spare), out=result)
        result.scatter_add_(1, index[rows], at_target[rows])
        if result is spare:
            out[rows, : shard.columns] = spare
    if not bool(has_mass.all()):
        out.masked_fill_(~has_mass.unsqueeze(1), 0)
    return out


def gradient_polynomial(saved: Sequence[Tensor], gradients: Sequence[Tensor | None], temperature: float) -> tuple[Tensor, list[Tensor]]:
    """Return the gradient at the target [T], and c_k [T]: a column's gradient is p x sum_k c_k (z - maximum)^k."""
    maximum, log_normaliser, entropy, varentropy, *_ = saved
    zero = torch.zeros_like(maximum)
    g_l, g_h, g_v = (zero if gradient is None else gradient / temperature for gradient in gradients)
    # u = s + b, and the gradient per p is -g_l - g_h u + g_v (u^2 + 2 u - varentropy), expanded in s.
    b = entropy - log_normaliser
    c0 = -g_l - g_h * b + g_v * (b * (b + 2) - varentropy)
    c1 = -g_h + 2 * g_v * (b + 1)
    if gradients[2] is not None:
        return g_l, [c0, c1, g_v]
    return g_l, [c0, c1] if gradients[1] is not None else [c0]


def _polynomial(x: Tensor, coefficients: list[Tensor], scratch: Tensor) -> Tensor:
    """Return c0 + c1 x + c2 x^2 for up to three coefficients [rows, 1]; overwrites `x` and `scratch` [rows, columns]."""
    if len(coefficients) == 1:
        return coefficients[0]
    if len(coefficients) == 2:
        return x.mul_(coefficients[1]).add_(coefficients[0])
    return torch.mul(x, coefficients[2], out=scratch).add_(coefficients[1]).mul_(x).add_(coefficients[0])


@dataclass(frozen=True, slots=True)
class RowMaths:
    """Every row's maths on one kind of hardware, equal to `TORCH_ROWS` to rounding; `name` is for people."""

    name: str
    partials: Callable[..., Tensor]
    gradient: Callable[..., Tensor | None]


TORCH_ROWS = RowMaths("torch", local_partials, logit_gradient)
