"""Causal attention of many requests over a paged cache in a few calls of torch.

Legend: B requests, R requests of one bucket, N new tokens of all requests, Q new tokens and L all
tokens of a request, both padded, H query heads, G key-value heads, D head size, C cache slots.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatron_rl.algorithms.invariant_attention import attend_invariantly


@dataclass(frozen=True, slots=True)
class Bucket:
    """Requests of similar length, padded to the longest.

    `slots` [R, L] in the cache and `queries` [R, Q], positions among the N new tokens, are 0 in the
    padding; `is_query` [R, Q]; `mask` [R, 1, Q, L] is True where a query may look.
    """

    slots: Tensor
    queries: Tensor
    is_query: Tensor
    mask: Tensor


def make_buckets(slots_of_row: Tensor, rows: Tensor, lengths: Tensor, new_lengths: Tensor) -> Iterator[Bucket]:
    """Yield buckets over requests of `lengths` [B] tokens, the last `new_lengths` [B] of them new.

    `slots_of_row` [rows, context] holds the cache slot of each token, `rows` [B] the row of each
    request. Padding at most doubles either length: a bucket's agree up to a factor of two.
    """
    starts = torch.cumsum(new_lengths, 0) - new_lengths
    sizes = torch.stack([lengths, new_lengths]).double().log2().ceil()
    _, members = torch.unique(sizes, dim=1, return_inverse=True)
    for bucket in range(int(members.max()) + 1):
        chosen = torch.nonzero(members == bucket).flatten()
        length, new = lengths[chosen, None], new_lengths[chosen, None]
        position, query = torch.arange(int(length.max())), torch.arange(int(new.max()))
        # A padding query looks where the last real one does, to be finite; it is dropped.
        last_visible = (length - new + query).clamp(max=length - 1)
        yield Bucket(
            slots=slots_of_row[rows[chosen], : len(position)].long() * (position < length),
            queries=torch.where(query < new, starts[chosen, None] + query, 0),
            is_query=query < new,
            mask=(position <= last_visible[:, :, None])[:, None],
        )


def attend(
    query: Tensor,
    output: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    buckets: Iterable[Bucket],
    scale: float | None,
    *,
    sinks: Tensor | None = None,
    window: int | None = None,
    invariant: bool = False,
) -> None:
    """Write attention of `query` [N, H, D] over the caches [C, G, D] into `output` [N, H, D].

    `sinks` [H] are scores with a share in the softmax of their head and no value. With `window` a
    query sees that many tokens before itself. `invariant` gives a request the same bits in any batch.
    """
    for bucket in buckets:
        keys, values = (cache[bucket.slots].to(query.dtype).transpose(1, 2) for cache in (key_cache, value_cache))
        mask = bucket.mask if window is None else bucket.mask & _within(window, bucket.mask)
        if sinks is not None:
            # A token in front with the sink as score, because its key is zero, and no value.
            keys, values = (torch.nn.functional.pad(tokens, (0, 0, 1, 0)) for tokens in (keys, values))
            scores = torch.zeros(mask.shape, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
            shares = sinks.to(query.dtype)[:, None, None]
            mask = torch.cat([shares.expand(len(mask), -1, mask.shape[2], 1), scores.expand(-1, len(sinks), -1, -1)], dim=-1)
        queries, grouped = query[bucket.queries].transpose(1, 2), query.shape[1] != key_cache.shape[1]
        if invariant:
            attended = attend_invariantly(queries, keys, values, mask, scale=scale)
        else:
            attended = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=grouped)
        output[bucket.queries[bucket.is_query]] = attended.transpose(1, 2)[bucket.is_query]


def _within(window: int, mask: Tensor) -> Tensor:
    """Return True where a token is at most `window` before the query's own, in `mask`'s shape."""
    own = mask.sum(dim=-1, keepdim=True) - 1
    return torch.arange(mask.shape[-1]) >= own - window
