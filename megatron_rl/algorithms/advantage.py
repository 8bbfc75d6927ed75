"""Advantages per token from the rewards of a batch: the form of estimators, groups, and your own.

`scores` comes first, over the whole batch, because a baseline needs groups held by other ranks.
`of_tokens` follows, over the sequences of one rank. Samples are grouped by id, never by position.

Legend: B samples of the whole batch, over all ranks; a trajectory of several samples counts once. K
reward components. S sequences of one rank laid end to end, T their tokens. All maths is float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from megatron_rl.algorithms.aggregation import identity
from megatron_rl.algorithms.choices import Choice, Load, doc, own_arguments, required
from megatron_rl.algorithms.returns import CONSTANT_TOLERANCE, whiten
from megatron_rl.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from megatron_rl.algorithms.lazy_torch import torch

AllReduceSum: TypeAlias = "Callable[[Tensor], Tensor]"
"""A tensor -> the sum of it over all ranks that hold different tokens; every rank calls it equally often."""


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
    """The input of an estimator: `rewards` [B], or [B, K] of components, as float64, and `groups`.

    A group has the samples of one prompt. `group_ids` [B]. `lengths` [B] trainable tokens: weights
    of opo's baseline and of whitening over tokens. `baselines` [B]: reward of the greedy response
    to the sample's prompt. Raises ValueError for wrong shapes and for rewards that are not finite.
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
    """The trained tokens of one rank's sequences, with known values per token.

    `loss_mask` [T], `cu_seqlens` [S + 1]. `kl` [T] raw KL to the reference and its present
    coefficient, for a KL in the reward; `values` [T] and `bootstrap` [S] (the value after a
    truncated response, else 0) of a critic. `teacher_log_ratio` [T], log pi_old - log pi_teacher,
    times `distillation_coef` is taken from every advantage; a critic does not see the distillation.
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
        """Return the number of each sample [B] float64 as input of `of_tokens`.

        Equal rewards compared with each other give exactly 0.
        """
        raise NotImplementedError

    def of_samples(self, samples: Samples) -> Tensor:
        """Return one advantage per sample, [B] float64, for all tokens of the sample."""
        return self.scores(samples)

    def without_signal(self, samples: Samples) -> Tensor:
        """Return [B] bool: samples of groups whose rewards teach nothing, because every advantage in the group is 0 before whitening."""
        scores, groups = self.scores(samples), samples.groups
        return (groups.sum((scores != 0).double()) == 0)[groups.index]

    def by_token(self, scores: Tensor, places: TokenPlaces) -> tuple[Tensor, Tensor | None]:
        """Return (advantages [T] before whitening, returns [T] for a critic or None) from the `scores` [S] of one rank's sequences."""
        return places.spread(scores), None

    def of_tokens(self, scores: Tensor, places: TokenPlaces, *, all_reduce_sum: AllReduceSum = identity) -> tuple[Tensor, Tensor | None]:
        """Return (advantages [T], returns [T] for a critic or None), 0 at masked positions, from the `scores` [S] of one rank.

        Whitened over all ranks where the settings say so: `all_reduce_sum` adds over data-parallel ranks.
        """
        advantages, returns = self.by_token(scores, places)
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
    """Return one advantage per sample, [B] float64, for all tokens of the sample.

    Equal rewards give exactly 0 where the group is the baseline. Arguments are those of `Samples`.
    Raises ValueError for wrong shapes, rewards that are not finite, an estimator with a critic, and
    missing input of an estimator; UserError for a wrong result of an estimator of your own.

    Example: `group_advantages(GroupAdvantage(), rewards=rewards, group_ids=group_ids,
    lengths=lengths)`
    """
    return estimator.of_samples(Samples(rewards=rewards, group_ids=group_ids, lengths=lengths, baselines=baselines))


def whiten_samples(values: Tensor, weights: Tensor) -> Tensor:
    """Return `values` [B] with mean 0 and unbiased variance 1, each counted `weights` [B] times.

    Values that differ only by rounding give 0.
    """
    count = weights.double()
    used = count > 0
    if not bool(used.any()) or bool((values[used] == values[used][0]).all()):
        return torch.zeros_like(values)
    total = count.sum()
    above = values - values[used][0]
    mean_above = (count * above).sum() / total
    centred = above - mean_above
    unit = centred[used].abs().amax()
    variance = (count * (centred / unit).square()).sum() / (total - 1).clamp(min=1)
    if bool(unit * variance.sqrt() <= CONSTANT_TOLERANCE * (values[used][0] + mean_above).abs()):
        return torch.zeros_like(values)
    return torch.where(used, centred / unit / variance.sqrt(), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlugInAdvantage(Advantage):
    """Your own estimator, a function (rewards=.., group_ids=.., lengths=..) -> advantages [B]."""

    compares_groups: ClassVar[bool] = False

    kind: Literal["plug_in"] = "plug_in"
    path: str = required("Your own estimator, package.module:function.")
    args: Mapping[str, Any] = own_arguments("Arguments of your own estimator, by their names.")

    def scores(self, samples: Samples) -> Tensor:
        """Raise ValueError, because the function is not loaded."""
        raise ValueError(f"Objective.advantage {self.path} is not loaded; take advantage.loaded(plugins.load)")

    def loaded(self, load: Load) -> LoadedAdvantage:
        """Return the estimator with its function. Raises UserError when the path cannot be imported or does not take `args`."""
        return LoadedAdvantage(path=self.path, args=self.args, function=load(self.path, kind="advantage", args=self.args))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedAdvantage(PlugInAdvantage):
    """Your own estimator with its function."""

    function: Callable[..., Any]

    def scores(self, samples: Samples) -> Tensor:
        """Return the function's advantages, [B] float64. Raises UserError for any other result."""
        name, values = f"objective.advantage {self.path}", samples.rewards
        if len(values) == 0:
            return torch.zeros(0, dtype=torch.float64)
        made = self.function(rewards=values, group_ids=samples.group_ids, lengths=samples.lengths)
        if not isinstance(made, torch.Tensor) or made.shape != values.shape or made.dtype != torch.float64:
            got = f"{made.dtype} {tuple(made.shape)}" if isinstance(made, torch.Tensor) else f"type {type(made).__name__}"
            raise UserError(f"{name} returned {got}, needs a float64 tensor {tuple(values.shape)}, an advantage for each sample")
        if not bool(made.isfinite().all()):
            raise UserError(
                f"{name} returned {made[~made.isfinite()][0].item()} for the reward {values[~made.isfinite()][0].item()}, needs finite"
            )
        return made
