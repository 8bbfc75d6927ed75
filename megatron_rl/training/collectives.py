"""All collectives of an optimizer step outside megatron-core, in one place to check participation.

All ranks named by a docstring call the function, equally often and in the same order, also with a
share without tokens. No caller may therefore make a call depend on data that differ between the
ranks.
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
    """Sum `values`, of any shape on the collectives' device, in place over all ranks, and return them."""
    distributed.all_reduce(values)
    return values


def sum_over_data_parallel(values: Tensor) -> Tensor:
    """Return the sum of `values`, of any shape and device, over the data-parallel ranks, which split the sequences."""
    return _sum_over(values.to(collective_device()), parallel_state.get_data_parallel_group()).to(values.device)


def shares_of_data_parallel(share: Floats) -> Floats:
    """Return numbers [T] of all data-parallel ranks from the `share` [T] of each, 0 at the tokens of other ranks."""
    return np.asarray(sum_over_data_parallel(torch.from_numpy(share)).numpy())


def sum_over_context_parallel(values: Tensor, place: Place) -> Tensor:
    """Sum `values`, of any shape, in place over the context-parallel ranks, which share each sequence, and return them."""
    return _sum_over(values, place.cp_group)


def from_last_stage(values: Tensor, place: Place) -> Tensor:
    """Replace `values`, of any shape, by those of the last stage, and return them. Collective over the pipeline's ranks."""
    if place.pp_group.size() > 1:
        distributed.broadcast(values, group_src=place.pp_group.size() - 1, group=place.pp_group)
    return values


def gather_on_last_stage(values: Tensor) -> Tensor:
    """Return `values` [n] of all dp and cp ranks, n may differ, in rank order. Collective over the last stage alone."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    sizes = [torch.zeros(1, dtype=torch.int64, device=values.device) for _ in range(group.size())]
    distributed.all_gather(sizes, torch.tensor([len(values)], device=values.device), group=group)
    longest = max(int(size) for size in sizes)
    padded = torch.nn.functional.pad(values, (0, longest - len(values)))
    parts = [torch.empty_like(padded) for _ in sizes]
    distributed.all_gather(parts, padded, group=group)
    return torch.cat([part[: int(size)] for part, size in zip(parts, sizes, strict=True)])


def reports_of_ranks(report: Report) -> list[Report]:
    """Return the reports of all ranks, plain values that can be pickled, in rank order. Collective over all ranks."""
    gathered = [report] * distributed.get_world_size()
    distributed.all_gather_object(gathered, report)
    return gathered


def sum_sequences(partial_sums: Tensor, group: distributed.ProcessGroup) -> Tensor:
    """Return the sums over `group` of partial sums [S]; differentiable. Collective, also in the backward pass."""
    return partial_sums if group.size() == 1 else _AllReduce.apply(partial_sums, group)


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
    """Return the device of tensors in this process's collectives."""
    return torch.device("cuda" if distributed.get_backend() == "nccl" else "cpu")


def _sum_over(values: Tensor, group: distributed.ProcessGroup) -> Tensor:
    """Summed in place and returned. A group of one rank sends nothing."""
    if group.size() > 1:
        distributed.all_reduce(values, group=group)
    return values
