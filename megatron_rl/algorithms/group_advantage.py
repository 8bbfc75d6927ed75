"""Estimators by comparison of one prompt's samples with each other, or with the greedy response.

A lone scored sample of a group has no comparison and gets 0. Legend: B samples, G groups.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from megatron_rl.algorithms.advantage import Advantage, Groups, Samples, whiten_field, whiten_samples
from megatron_rl.algorithms.choices import check_fields, doc
from megatron_rl.algorithms.returns import CONSTANT_TOLERANCE

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from megatron_rl.algorithms.lazy_torch import torch

_STD_EPSILON = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compared(Advantage):
    """An estimator whose numbers are 0 for equal rewards and lone samples."""

    def compared(self, values: Tensor, groups: Groups, samples: Samples) -> Tensor:
        """Return the advantages [B] of `values` [B] where there is something to compare."""
        raise NotImplementedError

    def scores(self, samples: Samples) -> Tensor:
        """Return the advantages [B].

        Raises ValueError for components instead of a single reward.
        """
        values, groups = plain_rewards(samples, self.kind), samples.groups
        if len(values) == 0:
            return values.clone()
        alone = groups.constant(values) | (groups.sizes == 1)[groups.index]
        return torch.where(alone, 0.0, self.compared(values, groups, samples))


def plain_rewards(samples: Samples, kind: str) -> Tensor:
    """Return the rewards [B]. Raises ValueError for components."""
    if samples.rewards.ndim != 1:
        raise ValueError(f"Objective.advantage {kind} got rewards {tuple(samples.rewards.shape)}, needs [B]; gdpo takes components [B, K]")
    return samples.rewards


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scaled(_Compared):
    """An estimator with division by a standard deviation."""

    scale: Literal["std", "batch_std", "none"] = doc("Divisor of advantages: the group's standard deviation, the batch's, or none.", "std")
    std_epsilon: float = doc("Added to a standard deviation that divides.", _STD_EPSILON, ge=0)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.scale == "none" and self.std_epsilon != _STD_EPSILON:
            raise ValueError(
                f"{type(self).__name__}.std_epsilon is {self.std_epsilon} with scale 'none', which divides by nothing; remove it"
            )

    def divisor(self, values: Tensor, groups: Groups) -> Tensor:
        """Return what each sample's advantage is divided by, [B]."""
        if self.scale == "none":
            return torch.ones_like(values)
        spread_of = groups if self.scale == "std" else Groups.of(torch.zeros_like(values))
        return spread_of.std(values)[spread_of.index] + self.std_epsilon


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdvantage(_Scaled):
    """(R - mean) / (std + eps) (GRPO, arXiv 2402.03300); R - mean without a scale (Dr.GRPO, arXiv 2503.20783)."""

    kind: Literal["group"] = "group"

    def compared(self, values: Tensor, groups: Groups, samples: Samples) -> Tensor:
        """Return the scaled distance [B] from the group's mean."""
        return groups.deviations(values) / self.divisor(values, groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveOneOut(_Compared):
    """R - mean of the others (RLOO, arXiv 2402.14740)."""

    kind: Literal["rloo"] = "rloo"

    def compared(self, values: Tensor, groups: Groups, samples: Samples) -> Tensor:
        """Return the distance [B] from the mean of the others."""
        size = groups.sizes[groups.index]
        return torch.where(size > 1, groups.deviations(values) * size / (size - 1).clamp(min=1), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthWeighted(_Compared):
    """R - length-weighted mean (OPO, arXiv 2505.23585)."""

    kind: Literal["opo"] = "opo"

    def compared(self, values: Tensor, groups: Groups, samples: Samples) -> Tensor:
        """Return the distance [B] from the mean of all trainable tokens' rewards."""
        deviations, weights = groups.deviations(values), samples.lengths.double()
        total = groups.sum(weights)
        baseline = groups.sum(weights * deviations) / torch.where(total > 0, total, 1.0)
        return deviations - baseline[groups.index]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassAtK(_Scaled):
    """(best - second best) / (std + eps) for the first best sample of each group of at least two, 0 for all others."""

    kind: Literal["pass@k"] = "pass@k"

    def compared(self, values: Tensor, groups: Groups, samples: Samples) -> Tensor:
        """Return the scaled margin [B] of the best."""
        best = groups.extreme(values, "amax")[groups.index]
        position = torch.arange(len(values), dtype=torch.float64)
        first = groups.extreme(torch.where(values == best, position, float("inf")), "amin")[groups.index]
        winner = position == first
        second = groups.extreme(torch.where(winner, float("-inf"), values), "amax")[groups.index]
        margin = torch.where(second.isfinite(), best - second, 0.0)
        return torch.where(winner, margin / self.divisor(values, groups), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyBaseline(Advantage):
    """R - the greedy response's reward (ReMax, arXiv 2310.10505)."""

    compares_groups: ClassVar[bool] = False
    needs_greedy: ClassVar[bool] = True
    reads: ClassVar[str] = "the rewards of greedy responses"

    kind: Literal["remax"] = "remax"

    def scores(self, samples: Samples) -> Tensor:
        """Return the advantages [B]. Raises ValueError without baselines."""
        values = plain_rewards(samples, self.kind)
        if samples.baselines is None or samples.baselines.shape != values.shape:
            raise ValueError("Objective.advantage remax got no baselines [B], needs the reward of each prompt's greedy response")
        return values - samples.baselines.double()


@dataclass(frozen=True, slots=True, kw_only=True)
class Gdpo(Advantage):
    """GRPO's advantage of each reward component, weighted, summed, whitened over the batch's samples (arXiv 2601.05242)."""

    needs_components: ClassVar[bool] = True
    reads: ClassVar[str] = "components of the rewards"

    kind: Literal["gdpo"] = "gdpo"
    whiten: bool = whiten_field()
    std_epsilon: float = doc("Added to a standard deviation that divides.", _STD_EPSILON, ge=0)
    reward_weights: tuple[float, ...] | None = doc("Weights of the reward components; all 1 when not set.", None)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.reward_weights is not None and not any(self.reward_weights):
            raise ValueError(f"Gdpo.reward_weights is {list(self.reward_weights)}, needs one other than 0")

    def scores(self, samples: Samples) -> Tensor:
        """Return the advantages [B]. Raises ValueError for rewards without components, and for weights of other components."""
        values, groups = samples.rewards, samples.groups
        if values.ndim != 2:
            raise ValueError(f"Objective.advantage gdpo got rewards {tuple(values.shape)}, needs components [B, K]")
        if len(values) == 0:
            return torch.zeros(0, dtype=torch.float64)
        weights = self.reward_weights if self.reward_weights is not None else (1.0,) * values.shape[1]
        if len(weights) != values.shape[1]:
            raise ValueError(f"Gdpo.reward_weights has {len(weights)} numbers, needs one for each of {values.shape[1]} components")
        total, exact, size = torch.zeros(3, len(values), dtype=torch.float64).unbind(0)
        for column, weight in zip(values.unbind(1), weights, strict=True):
            deviations, std = groups.deviations(column), groups.std(column)[groups.index]
            total = total + weight * torch.where(groups.constant(column), 0.0, deviations / (std + self.std_epsilon))
            term = weight * torch.where(groups.constant(column), 0.0, deviations / std)
            exact, size = exact + term, size + term.abs()
        # Cancelled components leave only rounding and the epsilons, and whitening would blow both up.
        opposite = groups.extreme(exact.abs(), "amax") <= CONSTANT_TOLERANCE * groups.extreme(size, "amax")
        total = torch.where(opposite[groups.index], 0.0, total)
        return whiten_samples(total, torch.ones(len(values))) if self.whiten else total

    def without_signal(self, samples: Samples) -> Tensor:
        """Return [B] bool: samples of groups with 0 before whitening."""
        return Advantage.without_signal(dataclasses.replace(self, whiten=False), samples)


GroupAdvantages = GroupAdvantage | LeaveOneOut | LengthWeighted | PassAtK | GreedyBaseline | Gdpo
