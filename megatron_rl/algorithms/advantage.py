"""Advantages of whole responses from their rewards, without a critic. Samples are grouped by id, never by position.

Legend: B samples of the whole batch, over all ranks; a trajectory of several samples stands here once, for all of them. K reward
components. All maths is float64.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.algorithms.arguments import GDPOArguments, ScaledArguments, WhitenedArguments
from megatron_rl.algorithms.objective import AdvantageSettings
from megatron_rl.errors import UserError
from megatron_rl.plugins import KINDS, load

AllReduceSum = Callable[[Tensor], Tensor]
"""A tensor -> the sum of it over all ranks that hold different tokens; every rank calls it equally often."""


@dataclass(frozen=True, slots=True, eq=False)
class _Groups:
    """`index` [B] in [0, G), `sizes` [G]."""

    index: Tensor
    sizes: Tensor

    def sum(self, values: Tensor) -> Tensor:
        return torch.zeros(len(self.sizes), dtype=torch.float64).index_add(0, self.index, values)

    def extreme(self, values: Tensor, how: str) -> Tensor:
        return torch.zeros(len(self.sizes), dtype=torch.float64).scatter_reduce(0, self.index, values, how, include_self=False)

    def deviations(self, values: Tensor) -> Tensor:
        """`values` minus their group's mean [B]; exactly 0 where all of a group are equal."""
        lowest = self.extreme(values, "amin")[self.index]
        # Counted from the group's minimum: equal values become exact zeros, and large common offsets cost no precision.
        above = values - lowest
        return above - (self.sum(above) / self.sizes)[self.index]

    def std(self, values: Tensor) -> Tensor:
        """Unbiased standard deviation [G]; 1 for a single sample, which has none."""
        deviations = self.deviations(values)
        # In units of the group's largest deviation: squares overflow long before the numbers do, and an infinite spread would hide them.
        largest = self.extreme(deviations.abs(), "amax")
        unit = torch.where(largest > 0, largest, 1.0)
        squares = self.sum((deviations / unit[self.index]).square())
        return torch.where(self.sizes > 1, unit * (squares / (self.sizes - 1).clamp(min=1)).sqrt(), 1.0)

    def constant(self, values: Tensor) -> Tensor:
        """[B] True in groups of at least two samples whose values are all equal."""
        equal = self.extreme(values, "amin") == self.extreme(values, "amax")
        return (equal & (self.sizes > 1))[self.index]


def _group(group_ids: Tensor) -> _Groups:
    _, index, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
    return _Groups(index, sizes)


def zero_variance(*, rewards: Tensor, group_ids: Tensor) -> Tensor:
    """[B] bool: samples of groups of at least two whose raw rewards [B] are all equal (max == min, no tolerance).

    For training only: an evaluation group carries no advantage, whatever its rewards. Whether such a group teaches nothing depends on
    the estimator: see `token_advantage.without_signal`.
    """
    return _group(group_ids).constant(rewards.double())


def group_advantages(
    settings: AdvantageSettings,
    *,
    rewards: Tensor,
    group_ids: Tensor,
    lengths: Tensor,
    baselines: Tensor | None = None,
) -> Tensor:
    """One advantage per sample, [B] float64, for all its tokens; exactly 0 for equal rewards where the group is the baseline.

    `rewards` [B], or [B, K] for gdpo. `group_ids` [B] equal for samples of one prompt. `lengths` [B] trainable tokens: weights of
    opo's baseline and of whitening over tokens. `baselines` [B]: reward of the greedy response, for remax.

    grpo: (R - mean) / (std + eps) (arXiv 2402.03300). dr_grpo: R - mean (2503.20783). rloo: R - mean of the
    others (2402.14740). opo: R - length-weighted mean (2505.23585). pass@k: the best minus the second best over std, for the
    best alone. remax: R - greedy (2310.10505). gdpo: grpo per component, weighted, whitened over the batch (2601.05242).
    reinforce_plus_plus: R whitened over tokens; its baseline form subtracts the group mean first (2501.03262). A lone sample of a
    group, whose others were not scored, has nothing to be compared with: where the group is the baseline it gets 0, before whitening.

    Raises ValueError for ppo, for wrong shapes, for rewards that are not finite, and for remax without baselines; UserError
    for an estimator of your own (`package.module:function`) that cannot be loaded or returns something else.

    Example: `group_advantages(AdvantageSettings(), rewards=rewards, group_ids=group_ids, lengths=lengths)`
    """
    values = rewards.double()
    _check(settings, values, group_ids, lengths, baselines)
    if len(values) == 0:
        return torch.zeros(0, dtype=torch.float64)
    if settings.is_own:
        return _own_advantages(settings, values, group_ids, lengths)
    groups = _group(group_ids)
    if settings.estimator == "gdpo":
        return _gdpo(settings, values, groups)
    if settings.estimator == "remax":
        assert baselines is not None
        return values - baselines.double()
    if settings.estimator == "reinforce_plus_plus":
        return _whiten_samples(values, lengths) if settings.arguments(WhitenedArguments).whiten else values.clone()
    if settings.estimator == "reinforce_plus_plus_baseline":
        centred = groups.deviations(values)
        return _whiten_samples(centred, lengths) if settings.arguments(WhitenedArguments).whiten else centred
    nothing_to_compare = groups.constant(values) | (groups.sizes == 1)[groups.index]
    return torch.where(nothing_to_compare, 0.0, _baselined(settings, values, groups, lengths))


def _own_advantages(settings: AdvantageSettings, values: Tensor, group_ids: Tensor, lengths: Tensor) -> Tensor:
    """What the user's estimator returns, [B] float64. Raises UserError where that is something else, or it cannot be loaded."""
    name = f"{KINDS['advantage'].setting} {settings.estimator}"
    made = load(settings.estimator, kind="advantage", args=settings.args)(rewards=values, group_ids=group_ids, lengths=lengths)
    if not isinstance(made, Tensor) or made.shape != values.shape or made.dtype != torch.float64:
        got = f"{made.dtype} {tuple(made.shape)}" if isinstance(made, Tensor) else f"type {type(made).__name__}"
        raise UserError(f"{name} returned {got}, needs a float64 tensor {tuple(values.shape)}, an advantage for each sample")
    if not bool(made.isfinite().all()):
        raise UserError(
            f"{name} returned {made[~made.isfinite()][0].item()} for the reward {values[~made.isfinite()][0].item()}, needs finite"
        )
    return made


def _check(settings: AdvantageSettings, values: Tensor, group_ids: Tensor, lengths: Tensor, baselines: Tensor | None) -> None:
    if settings.estimator == "ppo":
        raise ValueError("AdvantageSettings.estimator ppo has no advantage without a critic, needs gae with token values")
    if values.ndim != (2 if settings.estimator == "gdpo" else 1) or group_ids.shape != lengths.shape or len(group_ids) != len(values):
        raise ValueError(
            f"group_advantages got rewards {tuple(values.shape)}, group_ids {tuple(group_ids.shape)} and lengths {tuple(lengths.shape)} "
            f"for {settings.estimator}, needs [B] each, and rewards [B, K] for gdpo"
        )
    if settings.estimator == "remax" and (baselines is None or baselines.shape != values.shape):
        raise ValueError("AdvantageSettings.estimator remax got no baselines [B], needs the reward of each prompt's greedy response")
    if not bool(values.isfinite().all()):
        raise ValueError("group_advantages got a reward that is not finite, needs numbers; leave samples without a score out of the batch")


def _baselined(settings: AdvantageSettings, values: Tensor, groups: _Groups, lengths: Tensor) -> Tensor:
    deviations = groups.deviations(values)
    if settings.estimator == "dr_grpo":
        return deviations
    if settings.estimator == "grpo":
        return deviations / _scale(settings, values, groups)
    size = groups.sizes[groups.index]
    if settings.estimator == "rloo":
        return torch.where(size > 1, deviations * size / (size - 1).clamp(min=1), 0.0)
    if settings.estimator == "opo":
        weights = lengths.double()
        total = groups.sum(weights)
        baseline = groups.sum(weights * deviations) / torch.where(total > 0, total, 1.0)
        return deviations - baseline[groups.index]
    return _pass_at_k(settings, values, groups)


def _scale(settings: AdvantageSettings, values: Tensor, groups: _Groups) -> Tensor:
    """What each sample's advantage is divided by, [B]."""
    args = settings.arguments(ScaledArguments)
    if args.scale == "none":
        return torch.ones_like(values)
    spread_of = groups if args.scale == "group" else _group(torch.zeros_like(values))
    return spread_of.std(values)[spread_of.index] + args.std_epsilon


def _pass_at_k(settings: AdvantageSettings, values: Tensor, groups: _Groups) -> Tensor:
    """(best - second best) / (std + eps) for the first best sample of each group of at least two, 0 for all others; `scale` as in grpo."""
    best = groups.extreme(values, "amax")[groups.index]
    position = torch.arange(len(values), dtype=torch.float64)
    first = groups.extreme(torch.where(values == best, position, float("inf")), "amin")[groups.index]
    winner = position == first
    second = groups.extreme(torch.where(winner, float("-inf"), values), "amax")[groups.index]
    margin = torch.where(second.isfinite(), best - second, 0.0)
    return torch.where(winner, margin / _scale(settings, values, groups), 0.0)


def _gdpo(settings: AdvantageSettings, values: Tensor, groups: _Groups) -> Tensor:
    args = settings.arguments(GDPOArguments)
    weights = args.reward_weights if args.reward_weights is not None else (1.0,) * values.shape[1]
    if len(weights) != values.shape[1]:
        raise ValueError(f"GDPOArguments.reward_weights has {len(weights)} numbers, needs one for each of {values.shape[1]} components")
    total = torch.zeros(len(values), dtype=torch.float64)
    for column, weight in zip(values.unbind(1), weights, strict=True):
        normalised = groups.deviations(column) / (groups.std(column)[groups.index] + args.std_epsilon)
        total = total + weight * torch.where(groups.constant(column), 0.0, normalised)
    return _whiten_samples(total, torch.ones(len(values))) if args.whiten else total


def _whiten_samples(values: Tensor, weights: Tensor) -> Tensor:
    """`values` [B] with mean 0 and unbiased variance 1 where each counts `weights` [B] times."""
    count = weights.double()
    used = count > 0
    if not bool(used.any()) or bool((values[used] == values[used][0]).all()):
        return torch.zeros_like(values)
    total = count.sum()
    above = values - values[used][0]
    centred = above - (count * above).sum() / total
    unit = centred[used].abs().amax()
    variance = (count * (centred / unit).square()).sum() / (total - 1).clamp(min=1)
    return torch.where(used, centred / unit / variance.sqrt(), 0.0)
