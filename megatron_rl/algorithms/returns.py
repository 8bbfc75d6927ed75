"""Token-level rewards, returns and generalised advantage estimation over whole sequences.

Legend: T tokens of S whole, un-sharded sequences laid end to end; `cu_seqlens` [S + 1] are their
offsets. Tokens outside the loss mask are no states: recurrences step from one trainable token to
the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from megatron_rl.algorithms.aggregation import identity
from megatron_rl.algorithms.lazy_torch import Tensor, torch

# Columns summed by one matrix product; more cost more arithmetic, fewer more passes.
_BLOCK = 16
# Tokens of one table of padded rows, to keep the copies few.
_TABLE_TOKENS = 2**18
CONSTANT_TOLERANCE = 1e-12
"""Spread in units of the mean below which numbers count as equal: float64 sums cannot tell it from rounding."""
# Large values are counted in units of the bound where their squares overflow float64.
_LARGE_UNIT = 2.0**512


def token_rewards(*, rewards: Tensor, loss_mask: Tensor, cu_seqlens: Tensor, kl: Tensor | None = None, kl_coef: float = 0.0) -> Tensor:
    """Return [T]: -kl_coef x kl on trainable tokens, plus the sequence's reward [S] on its last one, if any.

    `kl` [T] raw, in nats, may hold anything at masked positions.
    """
    dtype = torch.float64 if rewards.dtype == torch.float64 else torch.float32
    shaped = torch.zeros(loss_mask.shape, dtype=dtype, device=loss_mask.device)
    if kl is not None and kl_coef != 0.0:
        shaped = torch.where(loss_mask, -kl_coef * kl.to(dtype), 0.0)
    last = last_trainable(loss_mask, cu_seqlens)
    present = last >= 0
    return shaped.index_add(0, last[present], rewards[present].to(dtype))


def last_trainable(loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the flat position [S] of each sequence's last trainable token, else -1."""
    positions = torch.where(loss_mask, torch.arange(len(loss_mask), device=loss_mask.device), -1)
    running = torch.cat([positions.new_full((1,), -1), positions.cummax(0).values if len(positions) else positions])
    found = running[cu_seqlens[1:]]
    return torch.where(found >= cu_seqlens[:-1], found, -1)


def gae(
    *,
    rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    gamma: float,
    lam: float,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (advantages [T], returns [T]); both 0 at masked positions, not whitened (Schulman et
    al., arXiv 1506.02438).

    delta = r + gamma V' - V and A = delta + gamma lam A', primes at the next trainable token;
    returns = A + V. After the last trainable token V' is `bootstrap` [S] (truncated responses), 0
    when None. Computed from the returns, R = r + gamma ((1 - lam) V' + lam R'): the same with one
    pass over the tokens less.
    """
    dtype = torch.float64 if torch.float64 in (rewards.dtype, values.dtype) else torch.float32
    # As bytes, because a reduction of bools is slower than the recurrence itself on CPU.
    everything = not loss_mask.numel() or bool(loss_mask.view(torch.uint8).amin())
    positions = torch.empty(0) if everything else loss_mask.nonzero().squeeze(1)
    kept_rewards, kept_values = (x.to(dtype) if everything else x[positions].to(dtype) for x in (rewards, values))
    counts = cu_seqlens.diff() if everything else torch.searchsorted(positions, cu_seqlens).diff()
    end = kept_rewards.new_zeros(len(counts)) if bootstrap is None else bootstrap.to(dtype)
    advantages, returns = _ragged_gae(kept_rewards, kept_values, counts=counts, bootstrap=end, gamma=gamma, lam=lam)
    if everything:
        return advantages, returns
    flat = torch.zeros(loss_mask.shape, dtype=dtype, device=rewards.device)
    return flat.index_copy(0, positions, advantages), flat.index_copy(0, positions, returns)


def _ragged_gae(rewards: Tensor, values: Tensor, *, counts: Tensor, bootstrap: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Return GAE of trainable tokens [N] laid end to end, `counts` [S] of them per sequence."""
    sizes: list[int] = counts.tolist()
    advantages, returns = torch.empty_like(rewards), torch.empty_like(rewards)
    if sizes and min(sizes) == max(sizes) > 0:
        # One table, without copies; a division in parts that fit caches takes longer.
        table = [flat.view(len(sizes), -1) for flat in (rewards, values, advantages, returns)]
        _dense_gae(table, lengths=counts, bootstrap=bootstrap, gamma=gamma, lam=lam)
        return advantages, returns
    flats = [flat.split(sizes) for flat in (rewards, values, advantages, returns)]
    for group in _rows_of_like_size(sizes):
        table = [torch.nn.utils.rnn.pad_sequence([flat[row] for row in group], batch_first=True) for flat in flats]
        chosen = torch.tensor(group, device=rewards.device)
        _dense_gae(table, lengths=counts[chosen], bootstrap=bootstrap[chosen], gamma=gamma, lam=lam)
        for flat, results in zip(flats[2:], table[2:], strict=True):
            for row, line in zip(group, results, strict=True):
                flat[row].copy_(line[: sizes[row]])
    return advantages, returns


def _rows_of_like_size(sizes: list[int]) -> Iterator[list[int]]:
    """Yield row numbers by rising size, in groups whose padding to the longest at most doubles the work."""
    group: list[int] = []
    for row in sorted(range(len(sizes)), key=sizes.__getitem__):
        if group and (sizes[row] > 2 * max(1, sizes[group[0]]) or sizes[row] * len(group) > _TABLE_TOKENS):
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def _dense_gae(table: Sequence[Tensor], *, lengths: Tensor, bootstrap: Tensor, gamma: float, lam: float) -> None:
    """Fill the advantages and returns of `table` = rewards, values, advantages, returns, each [S, W].

    Rows are a sequence's trainable tokens, left-aligned; rewards and values hold zeros beyond
    `lengths` [S]. `bootstrap` [S] is the value behind the last token.
    """
    rewards, values, advantages, returns = table
    if not rewards.numel():
        return
    # The advantages' place holds the terms of the sum first: one array less to fetch and, if new, to map.
    terms = advantages
    torch.add(rewards[:, :-1], values[:, 1:], alpha=gamma * (1.0 - lam), out=terms[:, :-1])
    terms[:, -1] = rewards[:, -1]
    last = torch.where(lengths > 0, gamma * bootstrap, 0.0).to(terms.dtype)
    terms.scatter_add_(1, (lengths - 1).clamp(min=0).unsqueeze(1), last.unsqueeze(1))
    _reverse_scan(terms, gamma * lam, out=returns)
    torch.sub(returns, values, out=advantages)


def _reverse_scan(x: Tensor, decay: float, *, out: Tensor) -> Tensor:
    """Compute y[t] = x[t] + decay y[t + 1] along the rows of `x` [S, W] into `out` [S, W]; overwrite `x`.

    Within a block of columns the sum is a product with a triangular matrix of powers of `decay`. A
    block's input from the right comes from the same recurrence over whole blocks, with decay
    decay^block.
    """
    rows, width = x.shape
    if decay == 0.0 or width <= 1:
        return out.copy_(x)
    exponents = torch.arange(_BLOCK, dtype=torch.float64, device=x.device)
    distance = exponents.unsqueeze(1) - exponents
    triangle = torch.where(distance >= 0, decay ** distance.clamp(min=0), 0.0).to(x.dtype)
    padding = -width % _BLOCK
    if padding:
        x = torch.nn.functional.pad(x, (0, padding))
    blocks = x.view(-1, _BLOCK)
    if x.shape[1] > _BLOCK:
        heads = (blocks @ triangle[:, 0].contiguous()).view(rows, -1)
        heads = _reverse_scan(heads, decay**_BLOCK, out=torch.empty_like(heads))
        x[:, _BLOCK - 1 : -1 : _BLOCK].add_(heads[:, 1:], alpha=decay)
    if padding or not out.is_contiguous():
        return out.copy_((blocks @ triangle).view(rows, -1)[:, :width])
    torch.mm(blocks, triangle, out=out.view(-1, _BLOCK))
    return out


def discounted_returns(*, rewards: Tensor, loss_mask: Tensor, cu_seqlens: Tensor, gamma: float) -> Tensor:
    """Return G = r + gamma G' over trainable tokens, [T], 0 at masked positions (REINFORCE++, arXiv 2501.03262)."""
    zero = torch.zeros_like(rewards)
    return gae(rewards=rewards, values=zero, loss_mask=loss_mask, cu_seqlens=cu_seqlens, gamma=gamma, lam=1.0)[0]


def whiten(values: Tensor, *, mask: Tensor, all_reduce_sum: Callable[[Tensor], Tensor] = identity) -> Tensor:
    """Return `values` [T] with mean 0 and unbiased variance 1 over the `mask` [T] of all ranks, 0 at masked positions.

    A spread within the rounding of float64 sums gives 0. `all_reduce_sum` adds over ranks with
    different tokens; each, also without a token, makes three calls, and one more where squares
    overflow.
    """
    wide = torch.where(mask, values.double(), 0.0)
    first = all_reduce_sum(torch.stack([mask.sum().double(), wide.sum()]))
    count = first[0].clamp(min=1)
    centred = torch.where(mask, wide - first[1] / count, 0.0)
    # The mean's own rounding is taken out by a second pass.
    centred = torch.where(mask, centred - all_reduce_sum(centred.sum()) / count, 0.0)
    variance, mean = all_reduce_sum(centred.square().sum()) / (count - 1).clamp(min=1), first[1] / count
    if bool(variance.isinf()) and bool(mean.isfinite()):
        # An infinite spread would turn every value into 0.
        centred, mean = centred / _LARGE_UNIT, mean / _LARGE_UNIT
        variance = all_reduce_sum(centred.square().sum()) / (count - 1).clamp(min=1)
    constant = variance.sqrt() <= CONSTANT_TOLERANCE * mean.abs()
    scale = torch.where(constant, 0.0, 1.0 / torch.where(constant, 1.0, variance).sqrt())
    return (centred * scale).to(values.dtype if values.is_floating_point() else torch.float64)
