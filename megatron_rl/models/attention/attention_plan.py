"""Packed sequences as a few rectangular attention calls.

Pure index arithmetic in numpy, made once per micro-batch.

Legend: T tokens on this context parallel rank, S sequences of a bucket, L padded tokens of a whole
sequence in the bucket, C = L / (2 cp) tokens of a chunk. Context parallelism is Megatron's zigzag:
of the 2 cp chunks of every sequence a rank holds chunk r and chunk 2 cp - 1 - r, in this order.

Sequences of similar length share a bucket [S, L], so thousands of short sequences cost a handful of
calls. Padding sits at the end of a row, hidden by causality.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_rl.data.packing import local_positions
from megatron_rl.system.device import to_device

Ints = NDArray[np.int64]
# Shorter blocks of a windowed layer's queries are not worth a separate call.
_SHORTEST_BLOCK = 128


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The next `query_length` queries of every sequence of a bucket, and a range of keys.

    The range has `key_length` keys from `first_key` on. `mask` is True when a query sees a key, [S
    or 1, 1, query_length, key_length]; None is the plain causal triangle. `positions` [S or 1,
    query_length] are the positions of queries in their sequences, in host memory.
    """

    query_length: int
    key_length: int
    mask: torch.Tensor | None
    positions: Ints
    first_key: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """`num_sequences` S sequences of at most `length` L tokens, stored consecutively from `first_query` and `first_key`.

    Queries are laid out [S, queries of all parts], keys [S, L].
    """

    num_sequences: int
    length: int
    first_query: int
    first_key: int
    parts: tuple[Part, ...]

    @property
    def num_queries(self) -> int:
        """Query slots, padding included."""
        return self.num_sequences * sum(part.query_length for part in self.parts)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """Source and destination of every token. Index tensors are int64 on the model's device.

    `query_tokens` [slots] local token of each query slot (padding reads token 0), `token_queries`
    [T] its inverse, `query_padding` the padding slots. `key_tokens` [slots] row of the keys gathered
    over context parallel ranks, [cp T], and `token_keys` [cp T] its inverse. `identity` is True when
    slots are tokens in order, so no token has to move.
    """

    query_tokens: torch.Tensor
    token_queries: torch.Tensor
    query_padding: torch.Tensor
    key_tokens: torch.Tensor
    token_keys: torch.Tensor
    buckets: tuple[Bucket, ...]
    identity: bool


def plan_attention(cu_seqlens: Ints, *, cp_size: int = 1, cp_rank: int = 0, device: torch.device | str = "cpu") -> AttentionPlan:
    """Return the plan of one micro-batch on one context parallel rank.

    `cu_seqlens` [sequences + 1] are the offsets of the whole (unsharded) sequences, padding
    included. Raises ValueError when a length is not a multiple of 2 cp under context parallelism.
    """
    cu_seqlens = np.asarray(cu_seqlens, np.int64)
    check_splits(cu_seqlens, cp_size=cp_size)
    lengths, chunks = np.diff(cu_seqlens), (0,) if cp_size == 1 else (cp_rank, 2 * cp_size - 1 - cp_rank)
    num_chunks, num_queries, num_keys = len(chunks) * cp_size, 0, 0
    buckets: list[Bucket] = []
    # Of each sequence: the first slot of its queries, of its keys, and the query slots of a chunk.
    first_query, first_key, chunk_slots = np.zeros((3, len(lengths)), np.int64)
    for rows in _similar_lengths(lengths):
        bucket = Bucket(len(rows), int(lengths[rows].max()), num_queries, num_keys, _parts(lengths[rows], chunks, num_chunks, device))
        chunk_slots[rows] = bucket.length // num_chunks
        first_query[rows] = num_queries + np.arange(len(rows)) * chunk_slots[rows] * len(chunks)
        first_key[rows] = num_keys + np.arange(len(rows)) * bucket.length
        num_queries, num_keys = num_queries + bucket.num_queries, num_keys + len(rows) * bucket.length
        buckets.append(bucket)
    sequence = np.repeat(np.arange(len(lengths)), lengths // cp_size)
    local, chunk_length = np.arange(len(sequence)) - cu_seqlens[sequence] // cp_size, lengths[sequence] // num_chunks
    token_queries = first_query[sequence] + local // chunk_length * chunk_slots[sequence] + local % chunk_length
    positions = np.concatenate([local_positions(lengths, cp_size=cp_size, cp_rank=rank) for rank in range(cp_size)])
    token_keys = np.tile(first_key[sequence], cp_size) + positions
    query_tokens, key_tokens = _inverse(token_queries, num_queries), _inverse(token_keys, num_keys)
    tensor = partial(to_device, device=device)
    return AttentionPlan(
        query_tokens=tensor(np.maximum(query_tokens, 0)),
        token_queries=tensor(token_queries),
        query_padding=tensor(np.flatnonzero(query_tokens < 0)),
        key_tokens=tensor(np.maximum(key_tokens, 0)),
        token_keys=tensor(token_keys),
        buckets=tuple(buckets),
        identity=cp_size == 1 and np.array_equal(query_tokens, np.arange(len(sequence))),
    )


def check_splits(cu_seqlens: Ints, *, cp_size: int) -> None:
    """Raise ValueError when a sequence between the offsets `cu_seqlens` [sequences + 1] cannot be split in 2 cp chunks."""
    lengths = np.diff(cu_seqlens)
    if cp_size > 1 and (lengths % (2 * cp_size)).any():
        raise ValueError(f"a sequence of {lengths[lengths % (2 * cp_size) > 0][0]} tokens cannot be split in {2 * cp_size} chunks; pad it")


def with_window(plan: AttentionPlan, window: int) -> AttentionPlan:
    """Return the plan for queries seeing only the last `window` tokens of their sequence.

    The window includes the querying token. The parts are blocks of queries against the keys seen by
    any query of the block. So the cost grows with the length, not with its square.
    """
    device = plan.query_tokens.device
    buckets = (replace(bucket, parts=tuple(_windowed(bucket.parts, window, device))) for bucket in plan.buckets)
    return replace(plan, buckets=tuple(buckets))


def _windowed(parts: Iterable[Part], window: int, device: torch.device) -> Iterator[Part]:
    size = max(window, _SHORTEST_BLOCK)
    for part in parts:
        if window >= part.key_length:
            yield part
            continue
        for start in range(0, part.query_length, size):
            block = part.positions[:, start : start + size]
            first, last = max(0, int(block.min()) - window + 1), int(block.max())
            keys, queries = torch.arange(first, last + 1, device=device), to_device(block, device)[:, None, :, None]
            yield Part(block.shape[1], len(keys), (keys <= queries) & (keys > queries - window), block, first)


def _similar_lengths(lengths: Ints) -> list[Ints]:
    """Group rows whose lengths differ by at most an eighth, or by four tokens."""
    order = np.argsort(-lengths, kind="stable")
    ordered = lengths[order]
    groups, start = [], 0
    while start < len(order):
        longest = int(ordered[start])
        stop = int(np.searchsorted(-ordered, -(longest - max(4, longest // 8)), side="right"))
        groups.append(np.sort(order[start:stop]))
        start = stop
    return groups


def _inverse(token_slots: Ints, num_slots: int) -> Ints:
    """Return the token of each slot, -1 for padding."""
    tokens = np.full(num_slots, -1, np.int64)
    tokens[token_slots] = np.arange(len(token_slots))
    return tokens


def _parts(lengths: Ints, chunks: tuple[int, ...], num_chunks: int, device: torch.device | str) -> tuple[Part, ...]:
    """Return the parts of a bucket of sequences of whole `lengths` [S] for the rank with `chunks` of the `num_chunks`."""
    longest = int(lengths.max()) // num_chunks
    if num_chunks == 1:
        return (Part(longest, longest, None, np.arange(longest)[None]),)
    return tuple(_part(chunk, lengths // num_chunks, longest, device) for chunk in chunks)


def _part(chunk: int, chunk_lengths: Ints, longest: int, device: torch.device | str) -> Part:
    """Query j of chunk c is at position c C_i + j of row i and sees the keys up to itself; a padded one sees what the last one does."""
    distinct = np.unique(chunk_lengths)
    chunk_length = (distinct if len(distinct) == 1 else chunk_lengths)[:, None]
    positions = chunk * chunk_length + np.minimum(np.arange(longest), chunk_length - 1)
    keys = torch.arange((chunk + 1) * longest, device=device)
    return Part(longest, len(keys), keys <= to_device(positions, device)[:, None, :, None], positions)
