"""Choose groups for a step. Refuse tokens of too old weights, and samples that are copies."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_rl.algorithms.advantage import Advantage, Gdpo, Samples
from megatron_rl.algorithms.objective import Objective
from megatron_rl.algorithms.plug_in import PlugInAdvantage
from megatron_rl.config.settings import FilterSettings
from megatron_rl.data.batch import GREEDY_BASELINE, compared_names
from megatron_rl.errors import UserError
from megatron_rl.plugins.kinds import KINDS
from megatron_rl.plugins.loader import load
from megatron_rl.types import Group, Sample, trajectories

NO_SIGNAL = "no signal (objective.zero_variance)"
NO_REWARD = "no sample has a reward"
FAILED = "the rollout failed for"
"""The beginning of the reason of a group that another one replaced."""

GroupFilter = Callable[[Group], str | None]  # a group -> None to train on it, or why not, as the buffer notes it


@dataclass(frozen=True, slots=True)
class Chosen:
    """A finished group of a step, and the `rejection` that the buffer notes, if any."""

    group: Group
    rejection: str | None
    kept: bool = False  # also without rewards, as a record of the generation
    failed: bool = False  # another group takes its place
    filtered: bool = False


class GroupChoice:
    """The rules for training on a group; failed trajectories have to leave enough to compare."""

    def __init__(self, objective: Objective, filter: FilterSettings | None, *, samples_per_prompt: int) -> None:
        advantage = objective.advantage
        plug_in = isinstance(advantage, PlugInAdvantage)
        self._advantage = advantage.loaded(load) if isinstance(advantage, PlugInAdvantage) else advantage
        self._drops = objective.zero_variance in ("drop", "resample")
        self._fewest = min(2 if advantage.compares_groups or plug_in else 1, samples_per_prompt)
        self._filter = load_filter(filter)

    def choose(self, group: Group) -> Chosen:
        """Return the group with the decision. Raises UserError for a failing filter."""
        num_left, num_failed = group.num_made, len(group.failures)
        if num_failed and num_left < self._fewest:
            of_all = f"{num_failed} of {num_left + num_failed} trajectories"
            return Chosen(group, f"{FAILED} {of_all}: {group.failures[0].headline}", failed=True)
        if not any(sample.reward is not None and sample.reward.value is not None for sample in group.samples):
            return Chosen(group, NO_REWARD, kept=not self._drops)
        if self._drops and not has_signal(group, self._advantage):
            return Chosen(group, NO_SIGNAL)
        reason = self._filter(group)
        return Chosen(group, reason, kept=reason is None, filtered=reason is not None)


def load_filter(settings: FilterSettings | None) -> GroupFilter:
    """Load the filter named in the settings; by default keep everything.

    The returned filter raises UserError where the user's function fails or breaks its contract.
    """
    if settings is None:
        return lambda group: None
    name = f"{KINDS['filter'].setting} {settings.function}"
    keep = load(settings.function, kind="filter", args=settings.args)

    def checked(group: Group) -> str | None:
        try:
            reason = keep(group=group)
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # a user's function can fail in any way
            raise UserError(f"{name} failed for the group of prompt {group.id}: {type(error).__name__}: {error}") from error
        if reason is None:
            return None
        if not isinstance(reason, str) or not reason.strip():
            raise UserError(
                f"{name} returned {reason!r} of type {type(reason).__name__} for the group of prompt {group.id}, needs None to keep it, or "
                "a text that says why not"
            )
        return f"{name}: {reason}"

    return checked


def check_versions(groups: Sequence[Group], *, step: int, oldest_version: int, cure: str) -> None:
    """Raise UserError, which ends with `cure`, for a token by weights outside of `oldest_version` to `step`."""
    for group in groups:
        for sample in group.samples:
            made = sample.weight_versions[sample.weight_versions >= 0]
            if len(made) and not oldest_version <= made.min() <= made.max() <= step:
                raise UserError(
                    f"step {step + 1}: sample {sample.index} of prompt {group.id} has tokens of weight versions {made.min()} to "
                    f"{made.max()}, needs {oldest_version} to {step} (rollout.max_staleness {step - oldest_version}); {cure}"
                )


def has_signal(group: Group, advantage: Advantage) -> bool:
    """Return True for scored trajectories with a signal, or that training will refuse."""
    rewarded = [(parts, parts[-1].reward) for parts in trajectories(group.samples)]
    scored = [(parts, reward) for parts, reward in rewarded if reward is not None and reward.value is not None]
    if not scored:
        return False
    rewards = np.array([reward.value for _, reward in scored], np.float64)
    baselines = None
    if isinstance(advantage, Gdpo):
        names = compared_names(sorted({name for _, reward in scored for name in reward.components}))
        rewards = np.array([[reward.components.get(name, np.nan) for name in names] for _, reward in scored])
        weights = advantage.reward_weights
        if not names or not np.isfinite(rewards).all() or (weights is not None and len(weights) != len(names)):
            return True
    if advantage.needs_greedy:
        baselines = torch.tensor([reward.components[GREEDY_BASELINE] for _, reward in scored], dtype=torch.float64)
    lengths = torch.tensor([sum(int(sample.loss_mask.sum()) for sample in parts) for parts, _ in scored])
    roles = [parts[-1].role for parts, _ in scored]
    group_ids = torch.tensor([roles.index(role) for role in roles])
    samples = Samples(rewards=torch.from_numpy(rewards), group_ids=group_ids, lengths=lengths, baselines=baselines)
    return not bool(advantage.without_signal(samples).all())


LIMIT = math.log(1e15)  # nats of evidence at which chance is ruled out: one wrong alarm in 10^15 groups at most


class IdenticalGroups:
    """Evidence over the groups of a run that samples of one prompt are copies of each other.

    Let y be the first of n trajectories of a group, and p(y) its probability by the rollout
    log-probs. Drawn independently, the others all equal y with probability q = p(y)^(n - 1), where
    p(y) is of the tokens that a sample does not share with another one by construction. With
    X = 1 for such a group and X = 0 for others, the factor (1 + X / q) / 2 has the expectation 1
    given y. So the product of the factors since any given group is a martingale. By Ville's
    inequality the product ever reaches 1 / a with probability a at most. The evidence is the
    logarithm of the product, begun anew whenever it falls below 0 (the sum of CUSUM), so that a long
    healthy start hides nothing. N beginnings make the probability of a wrong alarm N a at most.

    A converged policy is no alarm: q is close to 1. A seed shared by all samples is found in the
    first groups: 8 equal samples of 5 tokens with probability 1/2 each give 24 nats.
    """

    def __init__(self) -> None:
        self._evidence = 0.0
        self._num_identical = self._num_groups = 0

    def add(self, group: Group) -> None:
        """Take the evidence of each role of a group drawn at a temperature above 0; one trajectory gives none."""
        of_role: dict[str | None, list[Sequence[Sample]]] = {}
        for parts in trajectories(group.samples):
            of_role.setdefault(parts[-1].role, []).append(parts)
        for drawn in of_role.values():
            if len(drawn) > 1:
                self._add(drawn)

    def _add(self, all_parts: Sequence[Sequence[Sample]]) -> None:
        gain = -math.log(2)
        if len({tuple(sample.response_ids.tobytes() for sample in parts) for parts in all_parts}) == 1:
            self._num_identical += 1
            gain += float(np.logaddexp(0.0, sum(map(_surprise, all_parts[1:]))))
        self._num_groups += 1
        self._evidence += gain
        if self._evidence <= 0:
            self._evidence, self._num_identical, self._num_groups = 0.0, 0, 0

    def check(self, *, step: int, rollout: str) -> None:
        """Raise UserError where chance does not explain the copies among the groups up to `step`."""
        if self._evidence >= LIMIT:
            raise UserError(
                f"step {step + 1}: in {self._num_identical} of the last {self._num_groups} groups all samples are the same tokens, which "
                f"chance explains with a probability of 1e-{int(self._evidence / math.log(10))} by their own log-probs, so they were not "
                f"drawn independently; look for what gives them one seed in {rollout}, which has to ask the engine for every sample, in "
                "rollout.sglang and in the engines' logs"
            )


def _surprise(trajectory: Sequence[Sample]) -> float:
    """Return -log p of a trajectory's own engine-made tokens, in nats: not of a masked prefix that other samples share."""
    drawn = (part.rollout_log_probs[(part.weight_versions >= 0) & part.loss_mask] for part in trajectory)
    return max(0.0, -sum(float(log_probs.sum(dtype=np.float64)) for log_probs in drawn))
