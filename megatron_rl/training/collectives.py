"""All collectives of an optimizer step that are not megatron-core's own: here it can be read off that every rank takes part.

Each function says over which ranks it is collective: all of those ranks call it, equally often and in the same order, also ranks whose
share has no tokens. No caller may therefore make a call depend on anything that differs between these ranks.
"""

from typing import Any, TypeVar

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor, distributed

from megatron_rl.training.topology import Place
from megatron_rl.types import Floats

Report = TypeVar("Report")


def sum_over_ranks(values: Tensor) -> Tensor:
    """`values`, of any shape and on the device of the collectives, summed in place and returned. Collective over all ranks."""
    distributed.all_reduce(values)
    return values


def sum_over_data_parallel(values: Tensor) -> Tensor:
    """The sum of `values`, of any shape and device, over the data-parallel ranks, which hold different sequences. Collective over them."""
    return _sum_over(values.to(collective_device()), parallel_state.get_data_parallel_group()).to(values.device)


def shares_of_data_parallel(share: Floats) -> Floats:
    """Numbers [T] of all data-parallel ranks from the `share` [T] of each, which is 0 at the tokens of others. Collective over them."""
    return np.asarray(sum_over_data_parallel(torch.from_numpy(share)).numpy())


def sum_over_context_parallel(values: Tensor, place: Place) -> Tensor:
    """`values`, of any shape, summed in place over the context-parallel ranks, which share each sequence. Collective over them."""
    return _sum_over(values, place.cp_group)


def from_last_stage(values: Tensor, place: Place) -> Tensor:
    """`values`, of any shape, replaced by those of the last pipeline stage. Collective over the pipeline's ranks."""
    if place.pp_group.size() > 1:
        distributed.broadcast(values, group_src=place.pp_group.size() - 1, group=place.pp_group)
    return values


def gather_on_last_stage(values: Tensor) -> Tensor:
    """`values` [n] of all data- and context-parallel ranks, one after the other; n differs between them.

    Collective over these ranks of one pipeline stage: the last one calls it alone.
    """
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    sizes = [torch.zeros(1, dtype=torch.int64, device=values.device) for _ in range(group.size())]
    distributed.all_gather(sizes, torch.tensor([len(values)], device=values.device), group=group)
    longest = max(int(size) for size in sizes)
    padded = torch.nn.functional.pad(values, (0, longest - len(values)))
    parts = [torch.empty_like(padded) for _ in sizes]
    distributed.all_gather(parts, padded, group=group)
    return torch.cat([part[: int(size)] for part, size in zip(parts, sizes, strict=True)])


def reports_of_ranks(report: Report) -> list[Report]:
    """The reports of all ranks, plain values that can be pickled, in the order of the ranks. Collective over all ranks."""
    gathered = [report] * distributed.get_world_size()
    distributed.all_gather_object(gathered, report)
    return gathered


def equal_on_ranks(number: int) -> bool:
    """Whether all ranks give the same `number` of fewer than 63 bits. Collective over all ranks."""
    extremes = torch.tensor([number, -number], device=collective_device())
    distributed.all_reduce(extremes, op=distributed.ReduceOp.MAX)
    highest, lowest = extremes.tolist()
    return bool(highest == -lowest)


def true_on_ranks(condition: bool) -> bool:
    """Whether `condition` holds on every rank. Collective over all ranks."""
    smallest = torch.tensor([int(condition)], device=collective_device())
    distributed.all_reduce(smallest, op=distributed.ReduceOp.MIN)
    return bool(smallest)


class SequenceSum:
    """Partial sums [S] of sequences on each rank of `group` to whole sums [S] on all of them; differentiable."""

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._group = group

    def __call__(self, partial_sums: Tensor) -> Tensor:
        """The sums over the group. Collective over it, also in the backward pass."""
        if self._group.size() == 1:
            return partial_sums
        total: Tensor = _AllReduce.apply(partial_sums, self._group)
        return total


class _AllReduce(torch.autograd.Function):
    """Sum over a group; the gradient is summed as well, because every rank's share of the loss depends on the sum."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: distributed.ProcessGroup) -> Tensor:
        ctx.group = group
        return _sum_over(values.clone(), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum_over(grad.clone(), ctx.group), None


def collective_device() -> torch.device:
    """The device on which this process's collectives take tensors."""
    return torch.device("cuda" if distributed.get_backend() == "nccl" else "cpu")


def _sum_over(values: Tensor, group: distributed.ProcessGroup) -> Tensor:
    """Summed in place and returned. A group of one rank sends nothing."""
    if group.size() > 1:
        distributed.all_reduce(values, group=group)
    return values
