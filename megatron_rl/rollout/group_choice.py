"""The choice of the finished groups that a step trains on: groups that failed or teach nothing and tokens of other weights
are refused, and so is a run whose samples of one prompt are copies of each other.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_rl.algorithms.advantage import Advantage, Samples
from megatron_rl.algorithms.group_advantage import Gdpo
from megatron_rl.config.settings import FilterSettings
from megatron_rl.data.baseline import GREEDY_BASELINE
from megatron_rl.errors import UserError
from megatron_rl.plugins.kinds import KINDS
from megatron_rl.plugins.loader import load
from megatron_rl.types import Group, Sample, trajectories

NO_SIGNAL = "no signal (objective.zero_variance)"
NO_REWARD = "no sample has a reward"
FAILED = "the rollout failed"
"""Why a group was not trained on, in the buffer's words; FAILED begins a longer sentence."""

GroupFilter = Callable[[Group], str | None]
"""A group -> None to train on it, or why not, as the buffer notes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupChoice:
    """The rules for training on a group or rejecting a group.

    `drops` leaves out groups without a signal for the estimator of `advantage`. A group with failed
    trajectories needs `fewest`.
    """

    drops: bool
    advantage: Advantage
    filter: GroupFilter
    fewest: int

    def rejections(self, groups: Iterable[Group]) -> dict[str, str | None]:
        """Return by id the reason why a step does not train on a group, as the buffer notes it, or
        None.
        """
        return {group.id: self._rejection(group) for group in groups}

    def _rejection(self, group: Group) -> str | None:
        num_left, num_failed = len(trajectories(group.samples)), len(group.failures)
        if num_failed and num_left < self.fewest:
            return f"{FAILED} for {num_failed} of {num_left + num_failed} trajectories: {group.failures[0].headline}"
        if not any(sample.reward is not None and sample.reward.value is not None for sample in group.samples):
            return NO_REWARD
        if self.drops and not has_signal(group, self.advantage):
            return NO_SIGNAL
        return self.filter(group)

    def keeps(self, rejection: str | None) -> bool:
        """Return True for a group of the batch. One without rewards is, where nothing is dropped, as a record of the generation."""
        return rejection is None or (rejection == NO_REWARD and not self.drops)


def has_failed(rejection: str | None) -> bool:
    """Return True where too many trajectories of a group failed and another group is needed
    instead.
    """
    return rejection is not None and rejection.startswith(FAILED)


def load_filter(settings: FilterSettings | None) -> GroupFilter:
    """Load the filter named in the settings, with checked answers; by default keep everything.

    Raises:
        UserError: the filter cannot be imported or does not take the arguments of the contract or
            of
            the settings. The filter itself raises UserError where the user's function fails or
                returns
            anything except None or a reason.
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


def check_versions(groups: Sequence[Group], *, step: int, oldest_version: int, rollout: str) -> None:
    """Check that weights from `oldest_version` to `step` made every token trained on after `step`
    steps.

    Raises:
        UserError: one token is outside. Admission keeps engine tokens young enough, so an old token
            was
            kept by `rollout` from an earlier call.
    """
    for group in groups:
        for sample in group.samples:
            made = sample.weight_versions[sample.weight_versions >= 0]
            if len(made) and not oldest_version <= made.min() <= made.max() <= step:
                raise UserError(
                    f"step {step + 1}: sample {sample.index} of prompt {group.id} has tokens of weight versions {made.min()} to "
                    f"{made.max()}, needs {oldest_version} to {step} (rollout.max_staleness {step - oldest_version}), as engines serve; "
                    f"{rollout} has to ask the engine anew for each prompt, keep no Generation and take weight_versions as they are"
                )


def has_signal(group: Group, advantage: Advantage) -> bool:
    """Return True when the scored trajectories teach anything under this estimator.

    True as well where training will refuse the trajectories.
    """
    rewarded = [(attempt, attempt[-1].reward) for attempt in trajectories(group.samples)]
    scored = [(attempt, reward) for attempt, reward in rewarded if reward is not None and reward.value is not None]
    if not scored:
        return False
    rewards = np.array([reward.value for _, reward in scored], np.float64)
    baselines = None
    if isinstance(advantage, Gdpo):
        names = sorted({name for _, reward in scored for name in reward.components})
        rewards = np.array([[reward.components.get(name, np.nan) for name in names] for _, reward in scored])
        weights = advantage.reward_weights
        if not names or not np.isfinite(rewards).all() or (weights is not None and len(weights) != len(names)):
            return True
    if advantage.needs_greedy:
        baselines = torch.tensor([reward.components[GREEDY_BASELINE] for _, reward in scored], dtype=torch.float64)
    lengths = torch.tensor([sum(int(sample.loss_mask.sum()) for sample in attempt) for attempt, _ in scored])
    one_group = torch.zeros(len(scored), dtype=torch.int64)
    samples = Samples(rewards=torch.from_numpy(rewards), group_ids=one_group, lengths=lengths, baselines=baselines)
    return not bool(advantage.without_signal(samples).all())


LIMIT = math.log(1e15)
"""Nats of evidence at which chance is ruled out: one wrong alarm in 10^15 groups at most."""


class IdenticalGroups:
    """Evidence over the groups of a run that samples of one prompt are copies. Legend: n
    trajectories.

    Let y be the first trajectory of a group and p(y) its probability, as given by the rollout
    log-probs. Drawn independently, the other n - 1 all equal y with probability q = p(y)^(n - 1),
    whatever the lengths and the entropy. With X = 1 for such a group and X = 0 for others, the
    factor (1 + X / q) / 2 has the expectation 1 given y. So the product of the factors of the
    groups since any given one is a martingale. By Ville's inequality the product ever reaches 1 / a
    with probability a at most. The evidence is the logarithm of the product, begun anew whenever it
    falls below 0 (the sum of CUSUM), so that a long healthy start hides nothing. Beginning at each
    of N groups makes the probability of a wrong alarm N a at most.

    A converged policy is no alarm: there q is close to 1, and an identical group is no evidence. A
    seed shared by all samples is found in the first groups: 8 equal samples of 5 tokens with
    probability 1/2 each give 24 nats.
    """

    def __init__(self) -> None:
        self._evidence = 0.0
        self._num_identical = self._num_groups = 0

    def add(self, group: Group) -> None:
        """Take the evidence of a group whose samples were drawn at a temperature above 0. One trajectory says nothing."""
        attempts = trajectories(group.samples)
        if len(attempts) < 2:
            return
        gain = -math.log(2)
        if len({tuple(sample.response_ids.tobytes() for sample in attempt) for attempt in attempts}) == 1:
            self._num_identical += 1
            gain += float(np.logaddexp(0.0, (len(attempts) - 1) * _surprise(attempts[0])))
        self._num_groups += 1
        self._evidence += gain
        if self._evidence <= 0:
            self._evidence, self._num_identical, self._num_groups = 0.0, 0, 0

    def problem(self) -> str | None:
        """Return the observation, as the start of a sentence, when chance does not explain the
        copies.
        """
        if self._evidence < LIMIT:
            return None
        return (
            f"in {self._num_identical} of the last {self._num_groups} groups all samples are the same tokens, which chance explains with "
            f"a probability of 1e-{int(self._evidence / math.log(10))} by their own log-probs, so they were not drawn independently"
        )


def _surprise(attempt: Sequence[Sample]) -> float:
    """Return -log p of a trajectory's engine-made tokens, in nats.

    Other tokens of the responses only make chance less likely.
    """
    return max(0.0, -sum(float(part.rollout_log_probs[part.weight_versions >= 0].sum(dtype=np.float64)) for part in attempt))
