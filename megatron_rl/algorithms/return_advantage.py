"""Estimators by returns from token to token, and the loss of the critic that one of them needs.

Legend: B samples of the batch; T tokens of S sequences of one rank, or of a micro-batch's part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from megatron_rl.algorithms.advantage import Advantage, Samples, TokenPlaces, plain_rewards, whiten_field
from megatron_rl.algorithms.aggregation import Aggregation, Metrics, Sequences, token_weights
from megatron_rl.algorithms.choices import doc
from megatron_rl.algorithms.lazy_torch import Tensor, torch
from megatron_rl.algorithms.returns import discounted_returns, gae


@dataclass(frozen=True, slots=True, kw_only=True)
class _Whitened(Advantage):
    """An estimator with whitening over the batch's tokens at the end."""

    takes_kl: ClassVar[bool] = True

    whiten: bool = whiten_field()

    @property
    def whitens_tokens(self) -> bool:
        return self.whiten


@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforcePlusPlusBaseline(_Whitened):
    """R - the group's mean, minus the KL of each token, whitened over tokens (REINFORCE++, arXiv 2501.03262)."""

    kind: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"

    def scores(self, samples: Samples) -> Tensor:
        """Return the distances [B] from the group's mean."""
        values = plain_rewards(samples, self.kind)
        return samples.groups.deviations(values) if len(values) else values.clone()

    def _by_token(self, scores: Tensor, places: TokenPlaces) -> tuple[Tensor, Tensor | None]:
        return places.spread(scores) + places.rewards(torch.zeros_like(scores)), None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Discounted(_Whitened):
    """An estimator by discounted returns, without groups: one of equal rewards teaches as much as any other."""

    compares_groups: ClassVar[bool] = False
    drops_groups: ClassVar[bool] = False

    gamma: float = doc("Discount per trainable token.", 1.0, ge=0, le=1)

    def scores(self, samples: Samples) -> Tensor:
        return plain_rewards(samples, self.kind).clone()

    def without_signal(self, samples: Samples) -> Tensor:
        return samples.groups.constant(samples.rewards)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforcePlusPlus(_Discounted):
    """Discounted returns, whitened over tokens (REINFORCE++, arXiv 2501.03262)."""

    kind: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"

    def _by_token(self, scores: Tensor, places: TokenPlaces) -> tuple[Tensor, Tensor | None]:
        rewards, mask = places.rewards(scores), places.loss_mask
        return discounted_returns(rewards=rewards, loss_mask=mask, cu_seqlens=places.cu_seqlens, gamma=self.gamma), None

    def ends_with_sequence(self, *, has_kl: bool) -> str | None:
        """Name values that end with each sequence: returns differ from token to token."""
        return "the returns of reinforce_plus_plus with gamma below 1 or a KL in the rewards" if has_kl or self.gamma < 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class GaeAdvantage(_Discounted):
    """PPO's generalised advantage estimation by a jointly trained critic (arXiv 1506.02438)."""

    has_critic: ClassVar[bool] = True
    reads: ClassVar[str] = "a critic's returns"

    kind: Literal["gae"] = "gae"
    lam: float = doc("GAE lambda.", 1.0, ge=0, le=1)
    bootstrap_truncated: bool = doc("Give a truncated response the value of its last state instead of zero.", False)
    value_clip: float | None = doc("Largest move of a value prediction within one batch; no clip when not set.", 0.2, gt=0)

    def of_samples(self, samples: Samples) -> Tensor:
        """Raise ValueError: without values [T] of tokens there are no advantages."""
        raise ValueError("Objective.advantage gae has no advantage without a critic, needs token values")

    def _by_token(self, scores: Tensor, places: TokenPlaces) -> tuple[Tensor, Tensor | None]:
        """Return advantages and returns. Raises ValueError without a critic's values."""
        if places.values is None:
            raise ValueError("Objective.advantage gae got no values, needs those of a critic")
        return gae(
            rewards=places.rewards(scores),
            values=places.values,
            loss_mask=places.loss_mask,
            cu_seqlens=places.cu_seqlens,
            gamma=self.gamma,
            lam=self.lam,
            bootstrap=places.bootstrap if self.bootstrap_truncated else None,
        )

    def ends_with_sequence(self, *, has_kl: bool) -> str | None:
        """Return what ends with each sequence."""
        return "the returns and values of gae"


ReturnAdvantages = ReinforcePlusPlusBaseline | ReinforcePlusPlus | GaeAdvantage


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
