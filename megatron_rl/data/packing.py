"""From a batch of sequences to the micro-batches of every rank: pure index arithmetic, no processes.

Two values come out. A `Shard` says which sequences a data-parallel rank trains on and how they fall into optimizer steps and
micro-batches. `MicroBatchTokens` say which tokens one context-parallel rank holds of a packed micro-batch, and which
token each position predicts. The shift from token-aligned arrays to model positions happens here and nowhere else.

Legend: B sequences of the batch, S sequences of a micro-batch, T tokens that one context-parallel rank holds.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.data.trajectories import Trajectories
from megatron_rl.types import Bools, Doubles, Ints, Shard, StepTotals, TrainBatch

ATTENTION_LENGTH = 24_576
"""Sequence length at which causal attention costs as much as everything else in a layer: 12 x hidden size, here of 2,048."""


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatchTokens:
    """The packed tokens of one micro-batch that one context-parallel rank holds, as index arrays.

    Arrays have length T: `token_index`, the position in the batch's token arrays, -1 on padding; `target_index`, the
    position there of the token that is predicted, -1 where none is; `position_ids` in the sequence; `sequence_index` in
    [0, S). `cu_seqlens` and `cu_seqlens_padded` [S + 1] count the sequences' tokens over all context-parallel ranks,
    without and with padding. `num_sequences` is S, and 0 for a micro-batch of padding alone, which still has one offset pair.
    """

    token_index: Ints
    target_index: Ints
    position_ids: Ints
    sequence_index: Ints
    cu_seqlens: Ints
    cu_seqlens_padded: Ints
    num_sequences: int


def sequence_multiple(cp_size: int) -> int:
    """The number of tokens that every sequence is padded to a multiple of: 2 chunks for each context-parallel rank."""
    return 2 * cp_size if cp_size > 1 else 1


def _padded_lengths(lengths: Ints, *, cp_size: int, pad_to: int) -> Ints:
    """Lengths [S] padded to whole chunks, the last one further until a rank's token count is a multiple of `pad_to`."""
    unit = sequence_multiple(cp_size)
    padded = -(-np.maximum(lengths, 1) // unit) * unit
    for _ in range(pad_to):
        if (padded.sum() // cp_size) % pad_to == 0:
            return padded
        padded[-1] += unit
    raise ValueError(f"no padding makes a multiple of {pad_to} tokens out of chunks of {unit} over {cp_size} context-parallel ranks")


def micro_batch_tokens(batch: TrainBatch, rows: Ints, *, cp_size: int = 1, cp_rank: int = 0, pad_to: int = 1) -> MicroBatchTokens:
    """The tokens of the sequences `rows` [S] of `batch` that context-parallel rank `cp_rank` of `cp_size` holds.

    A sequence is cut into 2 x cp_size equal chunks, of which rank r holds chunks r and 2 x cp_size - 1 - r, so that every rank
    has the same causal attention to do (Megatron's zigzag). The rank's token count is a multiple of `pad_to`, which sequence
    parallelism needs. No rows give one short sequence of padding, so that the rank still joins every collective.
    """
    lengths = batch.lengths[rows] if len(rows) else np.zeros(1, np.int64)
    starts = batch.cu_seqlens[rows] if len(rows) else np.zeros(1, np.int64)
    padded = _padded_lengths(lengths, cp_size=cp_size, pad_to=pad_to)
    local = padded // cp_size
    sequence = np.repeat(np.arange(len(local)), local)
    offset = np.arange(local.sum()) - np.repeat(np.cumsum(local) - local, local)
    if cp_size > 1:
        chunk = (local // 2)[sequence]
        second = (2 * cp_size - 1 - cp_rank) * chunk + offset - chunk
        position = np.where(offset < chunk, cp_rank * chunk + offset, second)
    else:
        position = offset
    start, length = starts[sequence], lengths[sequence]
    return MicroBatchTokens(
        token_index=np.where(position < length, start + position, -1),
        target_index=np.where(position + 1 < length, start + position + 1, -1),
        position_ids=position,
        sequence_index=sequence,
        cu_seqlens=_offsets(np.maximum(lengths, 1)),
        cu_seqlens_padded=_offsets(padded),
        num_sequences=len(rows),
    )


def _offsets(lengths: Ints) -> Ints:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


def sequence_cost(lengths: Ints, *, attention_length: float = ATTENTION_LENGTH) -> Doubles:
    """Relative work of sequences of `lengths` tokens [B]: linear layers plus causal attention's quadratic part."""
    return lengths * (1.0 + lengths / attention_length)


def _fill(lengths: Ints, costs: Doubles, *, num_bins: int, max_tokens: float) -> list[Ints] | None:
    """Put items, dearest first, into the cheapest bin with room for their tokens; None when some item finds no room.

    An item longer than `max_tokens` takes a whole bin. The bins hold ascending indices. Costs rise with lengths, so that this
    order is also the one by length.
    """
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    tokens = [0] * num_bins
    cheapest = [(0.0, index) for index in range(num_bins)]
    # Bins without room for the item at hand, the emptiest first. A later item is no longer, so that a bin waits here once for each item
    # in it: looking at all of them for every item would be quadratic.
    full: list[tuple[int, float, int]] = []
    order = np.lexsort((np.arange(len(costs)), -costs))
    for item, length, cost in zip(order.tolist(), lengths[order].tolist(), costs[order].tolist(), strict=True):
        while full and full[0][0] + length <= max_tokens:
            _, held, index = heapq.heappop(full)
            heapq.heappush(cheapest, (held, index))
        while cheapest and tokens[cheapest[0][1]] and tokens[cheapest[0][1]] + length > max_tokens:
            held, index = heapq.heappop(cheapest)
            heapq.heappush(full, (tokens[index], held, index))
        if not cheapest:
            return None
        held, index = cheapest[0]
        bins[index].append(item)
        tokens[index] += length
        heapq.heapreplace(cheapest, (held + cost, index))
    return [np.sort(np.asarray(items, dtype=np.int64)) for items in bins]


def pack(lengths: Ints, *, num_ranks: int, max_tokens: int, attention_length: float = ATTENTION_LENGTH) -> tuple[tuple[Ints, ...], ...]:
    """Partition sequences of `lengths` [B] tokens into equally many micro-batches for each of `num_ranks` ranks.

    Micro-batches hold at most `max_tokens` tokens, except one that a single longer sequence fills alone. Ranks are balanced by
    `sequence_cost`, and so are the micro-batches of a rank, of which the dearest come first: experts make the ranks wait for each
    other within every micro-batch, so those that meet are alike. One micro-batch fewer would not hold them, filled this way. The result
    [rank][micro-batch] holds ascending indices; some may be empty.
    """
    costs = sequence_cost(lengths, attention_length=attention_length)
    ranks = _fill(lengths, costs, num_bins=num_ranks, max_tokens=float("inf"))
    assert ranks is not None, "bins without a limit have room for everything"
    count = max(1, *(_fewest(lengths[rows], max_tokens=max_tokens) for rows in ranks))
    failed, step = count - 1, 1
    while (packed := _fill_ranks(ranks, lengths, costs, count=count, max_tokens=max_tokens)) is None:
        failed, count, step = count, count + step, 2 * step
    while count - failed > 1:
        middle = (failed + count) // 2
        found = _fill_ranks(ranks, lengths, costs, count=middle, max_tokens=max_tokens)
        failed, count, packed = (middle, count, packed) if found is None else (failed, middle, found)
    return packed


def _fewest(lengths: Ints, *, max_tokens: int) -> int:
    """Micro-batches that sequences of `lengths` need at least: for all tokens, and one for each that leaves no room for its like."""
    return max(-(-int(np.minimum(lengths, max_tokens).sum()) // max_tokens), int((2 * lengths > max_tokens).sum()))


def _fill_ranks(
    ranks: Sequence[Ints], lengths: Ints, costs: Doubles, *, count: int, max_tokens: int
) -> tuple[tuple[Ints, ...], ...] | None:
    """`count` micro-batches of each rank's sequences, the dearest first; None when those of some rank do not fit."""
    packed = []
    for rows in ranks:
        parts = _fill(lengths[rows], costs[rows], num_bins=count, max_tokens=max_tokens)
        if parts is None:
            return None
        packed.append(tuple(sorted((rows[part] for part in parts), key=lambda part: -costs[part].sum())))
    return tuple(packed)


def _step_rows(trajectories: Trajectories, *, optimizer_steps: int, seed: int) -> list[Ints]:
    """Rows of each optimizer step: a random partition into parts of as many whole trajectories, up to one."""
    chosen = np.arange(len(trajectories.first))
    if optimizer_steps > 1:
        chosen = np.random.default_rng(seed).permutation(chosen)
    return [np.flatnonzero(np.isin(trajectories.index, part)) for part in np.array_split(chosen, optimizer_steps)]


def make_shards(
    batch: TrainBatch,
    *,
    dp: int,
    optimizer_steps: int,
    max_tokens_per_micro_batch: int,
    seed: int,
    cp: int = 1,
    attention_length: float = ATTENTION_LENGTH,
) -> tuple[Shard, ...]:
    """Divide `batch` over `dp` data-parallel ranks, `optimizer_steps` optimizer steps and micro-batches.

    The budget `max_tokens_per_micro_batch` counts the tokens on each of the `cp` context-parallel ranks, padding included. Steps are
    random parts of the batch by `seed`, equal in trajectories up to one: no step has a part of one, though ranks and micro-batches may.
    Every sequence is in exactly one micro-batch of one rank; all ranks have equally many micro-batches in a step. Totals are those of the
    whole step, over all ranks.

    Raises ValueError when a sequence's first token is marked trainable: no position predicts it.
    """
    if batch.loss_mask[batch.cu_seqlens[:-1]].any():
        raise ValueError(
            "TrainBatch.loss_mask is True on the first token of a sequence, which nothing predicts; give it a prompt of a token or more"
        )
    unit = sequence_multiple(cp)
    lengths = -(-batch.lengths // unit) * unit
    trainable = batch.trainable_tokens
    trajectories = Trajectories.of(batch.trajectory_ids)
    steps: list[list[tuple[Ints, ...]]] = [[] for _ in range(dp)]
    totals: list[StepTotals] = []
    for rows in _step_rows(trajectories, optimizer_steps=optimizer_steps, seed=seed):
        counted = trainable[rows] > 0
        totals.append(
            StepTotals(
                num_tokens=int(trainable[rows].sum()),
                num_trajectories=len(np.unique(trajectories.index[rows][counted])),
                num_sequences=int(counted.sum()),
                num_sequence_tokens=int(batch.lengths[rows][counted].sum()),
            )
        )
        packed = pack(lengths[rows], num_ranks=dp, max_tokens=max_tokens_per_micro_batch * cp, attention_length=attention_length)
        for rank, micro_batches in enumerate(packed):
            steps[rank].append(tuple(rows[part] for part in micro_batches))
    return tuple(_shard(batch, own, tuple(totals), trainable) for own in steps)


def _shard(batch: TrainBatch, steps: list[tuple[Ints, ...]], totals: tuple[StepTotals, ...], trainable: Ints) -> Shard:
    """A rank's shard: its sequences as a separate batch, with the steps renumbered to the rows of that batch."""
    rows = np.sort(np.concatenate([np.empty(0, np.int64), *(part for step in steps for part in step)]))
    return Shard(
        batch=batch.select(rows, may_cut=True),
        rows=rows,
        steps=tuple(tuple(np.searchsorted(rows, part) for part in step) for step in steps),
        totals=totals,
        all_rewards=batch.rewards,
        all_group_ids=batch.group_ids,
        all_trajectory_ids=batch.trajectory_ids,
        all_trainable_tokens=trainable,
        all_reward_components=batch.reward_components,
    )


def trainable_targets(held: MicroBatchTokens, loss_mask: Bools) -> Ints:
    """Positions [N] of `held` whose predicted token is trainable under `loss_mask`, the mask of the whole batch's tokens."""
    positions = np.flatnonzero(held.target_index >= 0)
    return positions[loss_mask[held.target_index[positions]]]
