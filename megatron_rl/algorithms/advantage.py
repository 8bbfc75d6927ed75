"""Advantages per token from the rewards of a batch: the form of all estimators, and those by groups of equal ids.

`scores` come first, over the whole batch: a baseline needs groups of other ranks. Legend: B samples
of all ranks, a trajectory of several counts once. K reward components. S sequences of one rank laid
end to end, T their tokens. All maths is float64.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

from megatron_rl.algorithms.aggregation import identity
from megatron_rl.algorithms.choices import Choice, check_fields, doc
from megatron_rl.algorithms.lazy_torch import Tensor, torch
from megatron_rl.algorithms.returns import CONSTANT_TOLERANCE, token_rewards, whiten

AllReduceSum: TypeAlias = "Callable[[Tensor], Tensor]"
"""A tensor -> the sum of it over all ranks that hold different tokens; every rank calls it equally often."""

_STD_EPSILON = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """`index` [B] in [0, G), `sizes` [G]."""

    index: Tensor
    sizes: Tensor

    @classmethod
    def of(cls, group_ids: Tensor) -> Groups:
        """Return the groups of samples with equal ids [B]."""
        _, index, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
        return cls(index, sizes)

    def sum(self, values: Tensor) -> Tensor:
        """Return sums per group, [B] -> [G]."""
        return torch.zeros(len(self.sizes), dtype=torch.float64).index_add(0, self.index, values)

    def extreme(self, values: Tensor, how: str) -> Tensor:
        """Return the extreme of each group, [B] -> [G], by amin or amax."""
        return torch.zeros(len(self.sizes), dtype=torch.float64).scatter_reduce(0, self.index, values, how, include_self=False)

    def deviations(self, values: Tensor) -> Tensor:
        """Return `values` minus their group's mean [B]; exactly 0 where all of a group are equal."""
        lowest = self.extreme(values, "amin")[self.index]
        # Counted from the group's minimum: equal values become exact zeros, and large common offsets cost no precision.
        above = values - lowest
        return above - (self.sum(above) / self.sizes)[self.index]

    def std(self, values: Tensor) -> Tensor:
        """Return the unbiased standard deviation [G]; 1 for a single sample."""
        deviations = self.deviations(values)
        # In units of the group's largest deviation: squares overflow long before the numbers, which an infinite spread would hide.
        largest = self.extreme(deviations.abs(), "amax")
        unit = torch.where(largest > 0, largest, 1.0)
        squares = self.sum((deviations / unit[self.index]).square())
        return torch.where(self.sizes > 1, unit * (squares / (self.sizes - 1).clamp(min=1)).sqrt(), 1.0)

    def constant(self, values: Tensor) -> Tensor:
        """Return [B] True in groups of at least two samples whose values are all equal (max == min, no tolerance)."""
        equal = self.extreme(values, "amin") == self.extreme(values, "amax")
        return (equal & (self.sizes > 1))[self.index]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Samples:
    """The input of an estimator: `rewards` [B], or [B, K] of components, float64, with `group_ids` [B] of one prompt each.

    `lengths` [B] trainable tokens: weights of opo's baseline and of whitening. `baselines` [B]:
    greedy responses' rewards. Raises ValueError for wrong shapes and for rewards that are not
    finite.
    """

    rewards: Tensor
    group_ids: Tensor
    lengths: Tensor
    baselines: Tensor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "rewards", self.rewards.double())
        if self.group_ids.shape != self.lengths.shape or len(self.group_ids) != len(self.rewards) or self.rewards.ndim not in (1, 2):
            raise ValueError(
                f"Samples got rewards {tuple(self.rewards.shape)}, group_ids {tuple(self.group_ids.shape)} and lengths "
                f"{tuple(self.lengths.shape)}, needs [B] each, or rewards [B, K] of components"
            )
        if not bool(self.rewards.isfinite().all()):
            raise ValueError("Samples got a reward that is not finite, needs numbers; leave samples without a score out of the batch")

    @property
    def groups(self) -> Groups:
        """Return the groups of samples of one prompt."""
        return Groups.of(self.group_ids)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TokenPlaces:
    """The trained tokens of one rank's sequences: `loss_mask` [T], `cu_seqlens` [S + 1], with known values per token.

    `kl` [T] raw KL to the reference and its present coefficient, for a KL in the reward; `values`
    [T] and `bootstrap` [S] (the value after a truncated response, else 0) of a critic.
    `teacher_log_ratio` [T], log pi_old - log pi_teacher, times `distillation_coef` is taken from
    every advantage; a critic does not see the distillation.
    """

    loss_mask: Tensor
    cu_seqlens: Tensor
    kl: Tensor | None = None
    kl_coef: float = 0.0
    values: Tensor | None = None
    bootstrap: Tensor | None = None
    teacher_log_ratio: Tensor | None = None
    distillation_coef: float = 0.0

    def __post_init__(self) -> None:
        if self.kl_coef != 0.0 and self.kl is None:
            raise ValueError("TokenPlaces got kl_coef without kl, needs the raw KL of every token")
        if self.distillation_coef and self.teacher_log_ratio is None:
            raise ValueError("Objective.distillation_coef got no teacher_log_ratio, needs that of every token to the teacher")

    def spread(self, scores: Tensor) -> Tensor:
        """Return `scores` [S] at the trainable tokens of their sequences, [T]."""
        return scores.repeat_interleave(self.cu_seqlens.diff()).masked_fill(~self.loss_mask, 0.0)

    def rewards(self, scores: Tensor) -> Tensor:
        """Return token rewards [T]: the sequence's of `scores` [S] at its end, minus each token's KL."""
        return token_rewards(rewards=scores, loss_mask=self.loss_mask, cu_seqlens=self.cu_seqlens, kl=self.kl, kl_coef=self.kl_coef)


def whiten_field() -> Any:
    """Return the field of estimators that end with whitening."""
    return doc("Whiten advantages over the whole batch.", True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantage(Choice):
    """The form of every estimator: arguments as fields, maths, and needs as flags.

    `compares_groups`: the baseline is the rest of the group, so one sample has none.
    `drops_groups`: a group of equal rewards teaches nothing. `needs_greedy`, `needs_components`,
    `has_critic`: the estimator reads more than rewards, in words `reads`. `takes_kl`: the rewards
    can include a KL.
    """

    compares_groups: ClassVar[bool] = True
    drops_groups: ClassVar[bool] = True
    needs_greedy: ClassVar[bool] = False
    needs_components: ClassVar[bool] = False
    has_critic: ClassVar[bool] = False
    takes_kl: ClassVar[bool] = False
    reads: ClassVar[str] = ""

    kind: str

    def scores(self, samples: Samples) -> Tensor:
        """Return a number per sample [B] float64 for `of_tokens`; exactly 0 for equal rewards compared with each other."""
        raise NotImplementedError

    def of_samples(self, samples: Samples) -> Tensor:
        """Return one advantage per sample, [B] float64, for all its tokens, whitened by their number where `of_tokens` whitens."""
        scores = self.scores(samples)
        return whiten_samples(scores, samples.lengths) if self.whitens_tokens else scores

    def without_signal(self, samples: Samples) -> Tensor:
        """Return [B] True in groups whose rewards teach nothing: every advantage is 0 before whitening."""
        scores, groups = self.scores(samples), samples.groups
        return (groups.sum((scores != 0).double()) == 0)[groups.index]

    def _by_token(self, scores: Tensor, places: TokenPlaces) -> tuple[Tensor, Tensor | None]:
        """Return advantages [T] before whitening, and a critic's returns [T] or None, from the `scores` [S] of one rank."""
        return places.spread(scores), None

    def of_tokens(self, scores: Tensor, places: TokenPlaces, *, all_reduce_sum: AllReduceSum = identity) -> tuple[Tensor, Tensor | None]:
        """Return advantages [T], whitened over all ranks where set, and a critic's returns [T] or None; 0 where masked."""
        advantages, returns = self._by_token(scores, places)
        if places.distillation_coef and places.teacher_log_ratio is not None:
            advantages = advantages - places.distillation_coef * places.teacher_log_ratio.double().masked_fill(~places.loss_mask, 0.0)
        if self.whitens_tokens:
            advantages = whiten(advantages, mask=places.loss_mask, all_reduce_sum=all_reduce_sum)
        return advantages, returns

    @property
    def whitens_tokens(self) -> bool:
        """Return True when `of_tokens` ends with whitening."""
        return False

    def ends_with_sequence(self, *, has_kl: bool) -> str | None:
        """Name values that end with each sequence, not with the trajectory, else None."""
        return None


def group_advantages(
    estimator: Advantage, *, rewards: Tensor, group_ids: Tensor, lengths: Tensor, baselines: Tensor | None = None
) -> Tensor:
    """Return one advantage per sample, [B] float64, for all tokens of the sample, from the arguments of `Samples`.

    Equal rewards, and a lone sample, give exactly 0 where the group is the baseline. Raises
    ValueError for wrong or missing input and for an estimator with a critic; UserError for a wrong
    result of an estimator of your own.
    """
    return estimator.of_samples(Samples(rewards=rewards, group_ids=group_ids, lengths=lengths, baselines=baselines))


def whiten_samples(values: Tensor, weights: Tensor) -> Tensor:
    """Return `values` [B] with mean 0 and unbiased variance 1, each counted `weights` [B] times; 0 if equal to rounding."""
    counts = weights.long()
    repeated = values.repeat_interleave(counts)
    whitened = torch.zeros_like(values)
    whitened[counts > 0] = whiten(repeated, mask=torch.ones_like(repeated, dtype=torch.bool))[(counts.cumsum(0) - counts)[counts > 0]]
    return whitened


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compared(Advantage):
    """An estimator whose numbers are 0 for equal rewards and lone samples."""

    def _compared(self, values: Tensor, groups: Groups, samples: Samples) -> Tensor:
        """Return the advantages [B] of `values` [B] where there is something to compare."""
        raise NotImplementedError

    def scores(self, samples: Samples) -> Tensor:
        """Return the advantages [B]. Raises ValueError for components instead of a single reward."""
        values, groups = plain_rewards(samples, self.kind), samples.groups
        if len(values) == 0:
            return values.clone()
        alone = groups.constant(values) | (groups.sizes == 1)[groups.index]
        return torch.where(alone, 0.0, self._compared(values, groups, samples))


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

    def _divisor(self, values: Tensor, groups: Groups) -> Tensor:
        """Return the divisor [B] of each sample's advantage."""
        if self.scale == "none":
            return torch.ones_like(values)
        spread_of = groups if self.scale == "std" else Groups.of(torch.zeros_like(values))
        return spread_of.std(values)[spread_of.index] + self.std_epsilon


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdvantage(_Scaled):
    """(R - mean) / (std + eps) (GRPO, arXiv 2402.03300); R - mean without a scale (Dr.GRPO, arXiv 2503.20783)."""

    kind: Literal["group"] = "group"

    def _compared(self, values: Tensor, groups: Groups, samples: Samples) -> Tensor:
        return groups.deviations(values) / self._divisor(values, groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveOneOut(_Compared):
    """R - mean of the others (RLOO, arXiv 2402.14740)."""

    kind: Literal["rloo"] = "rloo"

    def _compared(self, values: Tensor, groups: Groups, samples: Samples) -> Tensor:
        size = groups.sizes[groups.index]
        return torch.where(size > 1, groups.deviations(values) * size / (size - 1).clamp(min=1), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthWeighted(_Compared):
    """R - length-weighted mean (OPO, arXiv 2505.23585)."""

    kind: Literal["opo"] = "opo"

    def _compared(self, values: Tensor, groups: Groups, samples: Samples) -> Tensor:
        deviations, weights = groups.deviations(values), samples.lengths.double()
        total = groups.sum(weights)
        baseline = groups.sum(weights * deviations) / torch.where(total > 0, total, 1.0)
        return deviations - baseline[groups.index]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassAtK(_Scaled):
    """(best - second best) / (std + eps) for the first best sample of each group of at least two, 0 for all others."""

    kind: Literal["pass@k"] = "pass@k"

    def _compared(self, values: Tensor, groups: Groups, samples: Samples) -> Tensor:
        best = groups.extreme(values, "amax")[groups.index]
        position = torch.arange(len(values), dtype=torch.float64)
        first = groups.extreme(torch.where(values == best, position, float("inf")), "amin")[groups.index]
        winner = position == first
        second = groups.extreme(torch.where(winner, float("-inf"), values), "amax")[groups.index]
        margin = torch.where(second.isfinite(), best - second, 0.0)
        return torch.where(winner, margin / self._divisor(values, groups), 0.0)


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
