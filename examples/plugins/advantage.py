"""The reward above the median of its group, in place of the mean: one outlier does not move the baseline."""

import torch
from torch import Tensor


def advantage(*, rewards: Tensor, group_ids: Tensor, lengths: Tensor, scale: float = 1.0) -> Tensor:
    """One advantage per sample, [B] float64."""
    advantages = torch.zeros_like(rewards)
    for group in group_ids.unique():
        members = group_ids == group
        advantages[members] = scale * (rewards[members] - rewards[members].quantile(0.5))
    return advantages
