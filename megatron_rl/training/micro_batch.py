"""A packed micro-batch as tensors on this rank's device.

Legend: T tokens of this rank, N tokens with a prediction in use, S sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_rl.algorithms.log_prob import CandidateColumns
from megatron_rl.data.packing import MicroBatchTokens, micro_batch_tokens, pack, sequence_multiple, trainable_targets
from megatron_rl.models.experts.routed_tokens import RoutedTokens
from megatron_rl.models.packed_sequences import PackedSequences, packed_sequences
from megatron_rl.system.device import in_host_memory, to_device
from megatron_rl.system.frozen_arrays import Candidates
from megatron_rl.training.topology import Place, Topology
from megatron_rl.types import Ints, TrainBatch


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """The model's input, and the positions of the predictions in use.

    `rows` [S] of the batch. `input_ids` and `position_ids` [1, T]; `token_index` [T] in the batch's
    arrays, -1 for padding; `positions` [N] among the T, ascending; `targets` [N] the predicted
    tokens, at `target_index` [N] in the batch's arrays, with their `candidates` where recorded;
    `sequence_index` [N] in [0, S);
    `sequence_tokens` [S] trainable over all context-parallel ranks.
    """

    rows: Ints
    input_ids: Tensor
    position_ids: Tensor
    token_index: Ints
    packed: PackedSequences
    positions: Tensor
    targets: Tensor
    target_index: Ints
    sequence_index: Tensor
    sequence_tokens: Tensor
    routed: RoutedTokens
    candidates: CandidateColumns | None

    def pick(self, values: NDArray[np.generic]) -> Tensor:
        """Pick this micro-batch's targets [N] from a token-aligned array of the whole batch."""
        return to_device(torch.from_numpy(values[self.target_index]), self.input_ids.device)


def make_micro_batch(
    batch: TrainBatch, rows: Ints, *, topology: Topology, place: Place, device: torch.device, all_tokens: bool = False
) -> MicroBatch:
    """Lay out the sequences `rows` [S] of `batch` for this rank, with predictions of trainable tokens or of `all_tokens`."""
    held = micro_batch_tokens(batch, rows, cp_size=topology.cp, cp_rank=place.cp_rank, pad_to=topology.pad_to)
    positions = np.flatnonzero(held.target_index >= 0) if all_tokens else trainable_targets(held, batch.loss_mask)
    target_index = held.target_index[positions]
    real = held.token_index >= 0
    tokens = np.zeros(len(held.token_index), np.int64)
    tokens[real] = batch.tokens[held.token_index[real]]

    move = partial(to_device, device=device)
    return MicroBatch(
        rows=rows,
        input_ids=move(tokens)[None],
        position_ids=move(held.position_ids)[None],
        token_index=held.token_index,
        packed=packed_sequences(
            held.cu_seqlens_padded, lengths=np.diff(held.cu_seqlens), device=device, cp_size=topology.cp, cp_rank=place.cp_rank
        ),
        positions=move(positions),
        targets=move(batch.tokens[target_index]),
        target_index=target_index,
        sequence_index=move(held.sequence_index[positions]),
        sequence_tokens=move(batch.trainable_tokens[rows]),
        routed=_routed_tokens(batch, rows, held, device=device),
        candidates=None if batch.candidates is None else _columns(batch.candidates.take(target_index), device),
    )


def _columns(candidates: Candidates, device: torch.device) -> CandidateColumns:
    ids, counts, move = candidates.ids.copy(), candidates.counts.copy(), partial(to_device, device=device)
    rows = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    return CandidateColumns(move(ids), move(rows), move(counts), [0, *np.cumsum(counts).tolist()])


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """Builder of micro-batches of at most `max_tokens` tokens per context-parallel rank."""

    topology: Topology
    place: Place
    device: torch.device
    max_tokens: int

    def of_parts(self, batch: TrainBatch, parts: Sequence[Ints], *, all_tokens: bool = False) -> list[MicroBatch]:
        """Return a micro-batch of each of `parts`, rows of `batch`; empty ones fill an interleaved pipeline's stages."""
        missing = -len(parts) % self.topology.pp if self.topology.vpp > 1 else 0
        parts = [*parts, *[np.empty(0, np.int64)] * missing]
        return [
            make_micro_batch(batch, rows, topology=self.topology, place=self.place, device=self.device, all_tokens=all_tokens)
            for rows in parts
        ]

    def of_all_tokens(self, batch: TrainBatch, *, divided: bool) -> list[MicroBatch]:
        """Return micro-batches of all of `batch`, or, `divided`, of this rank's share."""
        unit = sequence_multiple(self.topology.cp)
        lengths = -(-batch.lengths // unit) * unit
        num_ranks = self.topology.dp if divided else 1
        parts = pack(lengths, num_ranks=num_ranks, max_tokens=self.max_tokens * self.topology.cp)
        return self.of_parts(batch, parts[self.place.dp_rank if divided else 0], all_tokens=True)


def _routed_tokens(batch: TrainBatch, rows: Ints, held: MicroBatchTokens, *, device: torch.device) -> RoutedTokens:
    """Return the held tokens' recorded experts, for routers. A micro-batch without rows holds one sequence of padding."""
    real = held.token_index >= 0
    lengths = batch.lengths[rows] if len(rows) else np.ones(1, np.int64)
    counted = batch.trainable_tokens[rows] > 0 if len(rows) else np.zeros(1, np.bool_)
    experts = recorded = None
    if batch.routed_experts is not None:
        index = np.maximum(held.token_index, 0)
        experts = in_host_memory(batch.routed_experts[index].swapaxes(0, 1), device)
        recorded = to_device(batch.routed[index] & real, device)
    return RoutedTokens(
        sequence_index=to_device(np.where(real, held.sequence_index, -1), device),
        sequence_lengths=to_device(lengths, device),
        counted=to_device(counted, device),
        experts=experts,
        recorded=recorded,
    )
