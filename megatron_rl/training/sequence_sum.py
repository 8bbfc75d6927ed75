"""Sums over the context-parallel ranks that hold one sequence between them."""

from typing import Any

import torch
from torch import Tensor, distributed


class _AllReduce(torch.autograd.Function):
    """Sum over a group; the gradient is summed as well, because every rank's share of the loss depends on the sum."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: distributed.ProcessGroup) -> Tensor:
        ctx.group = group
        total = values.clone()
        distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone()
        distributed.all_reduce(total, group=ctx.group)
        return total, None


class SequenceSum:
    """Per-sequence partial sums [S] of each rank of `group` to whole sums [S] on all; differentiable."""

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._group = group

    def __call__(self, partial_sums: Tensor) -> Tensor:
        """The sums over the group. Collective, also in the backward pass."""
        if self._group.size() == 1:
            return partial_sums
        total: Tensor = _AllReduce.apply(partial_sums, self._group)
        return total
