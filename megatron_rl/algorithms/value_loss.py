"""The loss of a critic: values of states against returns. Legend: T tokens of this rank's part of a micro-batch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.algorithms.aggregation import Aggregation, Metrics, Sequences, token_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss:
    """1/2 max((v - R)^2, (clip(v, old v +- value_clip) - R)^2) (PPO; clipped as in arXiv 2005.12729), aggregated."""

    aggregation: Aggregation = "sequence_mean_token_mean"
    max_response_length: int | None = None
    value_clip: float | None = 0.2

    def share(
        self, sequences: Sequences, *, values: Tensor, old_values: Tensor, returns: Tensor, num_tokens: int, num_trajectories: int
    ) -> tuple[Tensor, Metrics]:
        """Return this rank's share of loss and metrics, as `compute_loss`; `old_values` and `returns` [T] are constants."""
        values, old_values, returns = sequences.masked(values), sequences.masked(old_values).detach(), sequences.masked(returns).detach()
        weights = token_weights(
            sequences, aggregation=self.aggregation, num_tokens=num_tokens, num_trajectories=num_trajectories,
            max_response_length=self.max_response_length, dtype=values.dtype,
        )  # fmt: skip
        metrics = {"value_mean": sequences.mean_pair(values), "return_mean": sequences.mean_pair(returns)}
        losses = (values - returns).square()
        if self.value_clip is not None:
            # Clamped between bounds, not by the difference, because differences round: values inside the bounds have to stay bit-equal.
            clipped = (values.clamp(old_values - self.value_clip, old_values + self.value_clip) - returns).square()
            metrics["value_clip_fraction"] = sequences.mean_pair(clipped > losses)
            losses = torch.maximum(losses, clipped)
        loss = (sequences.masked(0.5 * losses) * weights).sum()
        if num_tokens == 0:
            metrics["empty_step"] = (torch.ones_like(loss.detach()), torch.ones_like(loss.detach()))
        return loss, metrics
