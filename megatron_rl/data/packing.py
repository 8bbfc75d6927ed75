"""From a batch of sequences to the micro-batches of every rank: pure index arithmetic, no processes.

The shift from token-aligned arrays to model positions happens here and nowhere else.

Legend: B sequences of the batch, J trajectories, S sequences of a micro-batch, T tokens on one context-parallel rank.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.types import Bools, Doubles, Ints, Shard, StepTotals, TrainBatch

ATTENTION_LENGTH = 24_576
"""Length at which causal attention costs as much as the rest of a layer: 12 x hidden size 2,048."""


@dataclass(frozen=True, slots=True, eq=False)
class Trajectories:
    """Trajectories numbered by first sequence: `first` [J], its rows; `index` [B] in [0, J)."""

    first: Ints
    index: Ints

    @classmethod
    def of(cls, trajectory_ids: Ints) -> "Trajectories":
        """Number the trajectories of ids [B], equal for the sequences of one."""
        _, first, by_id = np.unique(trajectory_ids, return_index=True, return_inverse=True)
        order = np.argsort(first)
        number = np.empty_like(order)
        number[order] = np.arange(len(order))
        return cls(first[order], number[by_id])

    @property
    def single(self) -> bool:
        """Return True when each sequence is a trajectory: `first` and `index` count the rows."""
        return len(self.first) == len(self.index)

    def sum(self, values: Ints) -> Ints:
        """Return integers [B] added over each trajectory's sequences, [J]."""
        total = np.zeros(len(self.first), np.int64)
        np.add.at(total, self.index, values)
        return total


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatchTokens:
    """The packed tokens of one micro-batch on one context-parallel rank, as index arrays.

    Arrays have length T: `token_index`, the position in the batch's token arrays, -1 on padding;
    `target_index`, the position there of the predicted token, -1 without one; `position_ids` in the
    sequence; `sequence_index` in [0, S). `cu_seqlens` and `cu_seqlens_padded` [S + 1] count tokens
    over all context-parallel ranks. `num_sequences` is S, or 0 for one sequence of padding alone.
    """

    token_index: Ints
    target_index: Ints
    position_ids: Ints
    sequence_index: Ints
    cu_seqlens: Ints
    cu_seqlens_padded: Ints
    num_sequences: int


def sequence_multiple(cp_size: int) -> int:
    """Return the unit in tokens of padded sequences: 2 chunks for each context-parallel rank."""
    return 2 * cp_size if cp_size > 1 else 1


def _padded_lengths(lengths: Ints, *, cp_size: int, pad_to: int) -> Ints:
    """Return lengths [S] of whole chunks, the last one longer to give ranks a multiple of `pad_to`."""
    unit = sequence_multiple(cp_size)
    padded = -(-np.maximum(lengths, 1) // unit) * unit
    for _ in range(pad_to):
        if (padded.sum() // cp_size) % pad_to == 0:
            return padded
        padded[-1] += unit
    raise ValueError(f"no padding makes a multiple of {pad_to} tokens out of chunks of {unit} over {cp_size} context-parallel ranks")


def micro_batch_tokens(batch: TrainBatch, rows: Ints, *, cp_size: int = 1, cp_rank: int = 0, pad_to: int = 1) -> MicroBatchTokens:
    """Return the tokens of the sequences `rows` [S] of `batch` on a context-parallel rank.

    Of 2 x cp_size equal chunks of a sequence, rank r holds r and 2 x cp_size - 1 - r, for equal
    work in causal attention (Megatron's zigzag). The rank's token count is a multiple of `pad_to`,
    as sequence parallelism needs. No rows give a short sequence of padding for the collectives.
    """
    lengths = batch.lengths[rows] if len(rows) else np.zeros(1, np.int64)
    starts = batch.cu_seqlens[rows] if len(rows) else np.zeros(1, np.int64)
    padded = _padded_lengths(lengths, cp_size=cp_size, pad_to=pad_to)
    sequence = np.repeat(np.arange(len(padded)), padded // cp_size)
    position = local_positions(padded, cp_size=cp_size, cp_rank=cp_rank)
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


def local_positions(lengths: Ints, *, cp_size: int, cp_rank: int) -> Ints:
    """Return the position in its sequence of `lengths` [S] of each token of a context-parallel rank, [T]."""
    local = lengths // cp_size
    position = np.arange(local.sum()) - np.repeat(np.cumsum(local) - local, local)
    if cp_size == 1:
        return position
    chunk = np.repeat(local // 2, local)
    return np.where(position < chunk, cp_rank * chunk, (2 * cp_size - 2 - cp_rank) * chunk) + position


def _offsets(lengths: Ints) -> Ints:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


def sequence_cost(lengths: Ints, *, attention_length: float = ATTENTION_LENGTH) -> Doubles:
    """Return relative work [B] for `lengths` [B]: linear layers and causal attention's square."""
    return lengths * (1.0 + lengths / attention_length)


def _fill(lengths: Ints, costs: Doubles, *, num_bins: int, max_tokens: float) -> list[Ints] | None:
    """Put items, dearest first, into the cheapest bin with room; return None without room for all.

    An item longer than `max_tokens` takes a whole bin. The bins hold ascending indices. Costs rise
    with lengths, so that the order of costs is also the one of lengths.
    """
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    tokens = [0] * num_bins
    cheapest = [(0.0, index) for index in range(num_bins)]
    # Bins without room for the item at hand, the emptiest first. A later item is no longer, so a bin
    # waits here once for each of its items: a look at all bins for every item would be quadratic.
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
    """Partition sequences of `lengths` [B] into equally many micro-batches for each of `num_ranks`.

    A micro-batch holds at most `max_tokens` tokens, or a single longer sequence. Ranks, and a rank's
    micro-batches, are balanced by `sequence_cost`. The dearest micro-batches come first: experts
    make ranks wait for each other within a micro-batch, so those that meet are alike. One
    micro-batch fewer would not hold all, filled in this way. The result [rank][micro-batch] holds
    ascending indices; some may be empty.
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
    """Return a lower bound of micro-batches: for all tokens, and one for each above half of the room."""
    return max(-(-int(np.minimum(lengths, max_tokens).sum()) // max_tokens), int((2 * lengths > max_tokens).sum()))


def _fill_ranks(
    ranks: Sequence[Ints], lengths: Ints, costs: Doubles, *, count: int, max_tokens: int
) -> tuple[tuple[Ints, ...], ...] | None:
    """Return `count` micro-batches for each rank, the dearest first; None when a rank's do not fit."""
    packed = []
    for rows in ranks:
        parts = _fill(lengths[rows], costs[rows], num_bins=count, max_tokens=max_tokens)
        if parts is None:
            return None
        packed.append(tuple(sorted((rows[part] for part in parts), key=lambda part: -costs[part].sum())))
    return tuple(packed)


def _step_rows(trajectories: Trajectories, *, optimizer_steps: int, seed: int) -> list[Ints]:
    """Return rows of each optimizer step: random whole trajectories, equally many up to one."""
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
) -> tuple[Shard, ...]:
    """Divide `batch` over `dp` data-parallel ranks, `optimizer_steps` steps and micro-batches.

    The budget counts tokens on each of the `cp` context-parallel ranks, padding included. Steps are
    random parts of the batch by `seed`, equal in whole trajectories up to one; ranks and
    micro-batches may cut a trajectory. Every sequence is in exactly one micro-batch of one rank, and
    all ranks have equally many micro-batches in a step.

    Raises ValueError for a trainable first token of a sequence: no position predicts it.
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
        packed = pack(lengths[rows], num_ranks=dp, max_tokens=max_tokens_per_micro_batch * cp)
        for rank, micro_batches in enumerate(packed):
            steps[rank].append(tuple(rows[part] for part in micro_batches))
    return tuple(_shard(batch, own, tuple(totals), trainable) for own in steps)


def _shard(batch: TrainBatch, steps: list[tuple[Ints, ...]], totals: tuple[StepTotals, ...], trainable: Ints) -> Shard:
    """Return a rank's sequences as a batch, with the steps renumbered to the rows of that batch."""
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
    """Return positions [N] of `held` with a trainable target under the whole batch's `loss_mask`."""
    positions = np.flatnonzero(held.target_index >= 0)
    return positions[loss_mask[held.target_index[positions]]]
