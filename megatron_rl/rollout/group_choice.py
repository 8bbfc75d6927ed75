"""Which finished groups a step trains on, and what it refuses: groups that teach nothing, tokens of other weights."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from megatron_rl.algorithms.arguments import GDPOArguments
from megatron_rl.algorithms.objective import AdvantageSettings
from megatron_rl.algorithms.token_advantage import without_signal
from megatron_rl.config.settings import FilterSettings, Settings
from megatron_rl.data.baseline import GREEDY_BASELINE
from megatron_rl.errors import UserError
from megatron_rl.plugins import KINDS, load
from megatron_rl.types import Group, trajectories

NO_SIGNAL = "no signal (objective.zero_variance)"
NO_REWARD = "no sample has a reward"
"""Why a group was not trained on, in the buffer's words."""

GroupFilter = Callable[[Group], str | None]
"""A group -> None to train on it, or why not, as the buffer notes it."""


class GroupChoice:
    """The rules of the settings by which a group is trained on or rejected."""

    def __init__(self, settings: Settings) -> None:
        self._drops = settings.objective.zero_variance in ("drop", "resample")
        self._advantage = settings.objective.advantage
        self._filter = load_filter(settings.rollout.filter)

    def rejection(self, group: Group) -> str | None:
        """Why a step does not train on a group, as the buffer notes it; None when it does."""
        if not any(sample.reward is not None and sample.reward.value is not None for sample in group.samples):
            return NO_REWARD
        if self._drops and not has_signal(group, self._advantage):
            return NO_SIGNAL
        return self._filter(group)

    def keeps(self, rejection: str | None) -> bool:
        """Whether a group with this rejection is in the batch: one without rewards is, where nothing is dropped, as what was generated."""
        return rejection is None or (rejection == NO_REWARD and not self._drops)


def load_filter(settings: FilterSettings | None) -> GroupFilter:
    """The filter that the settings name, its answers checked; one that keeps everything when they name none.

    Raises:
        UserError: it cannot be imported or does not take the arguments of the contract or of the settings. The filter itself raises
            UserError where the user's function fails or returns something else than None or a reason.
    """
    if settings is None:
        return lambda group: None
    name = f"{KINDS['filter'].setting} {settings.function}"
    keep = load(settings.function, kind="filter", args=settings.args)

    def checked(group: Group) -> str | None:
        try:
            reason = keep(group=group)
        except Exception as error:  # a user's function can fail in any way
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
    """Check that every token of what is trained on after `step` steps was made by weights from `oldest_version` to `step`.

    Raises:
        UserError: one was not. Admission sees to it that no token from an engine is too old, so `rollout` has kept it from an earlier call.
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


def has_signal(group: Group, advantage: AdvantageSettings) -> bool:
    """Whether the scored trajectories teach anything under this estimator, see `without_signal`; True where training will refuse them."""
    rewarded = [(attempt, attempt[-1].reward) for attempt in trajectories(group.samples)]
    scored = [(attempt, reward) for attempt, reward in rewarded if reward is not None and reward.value is not None]
    if not scored:
        return False
    rewards = np.array([reward.value for _, reward in scored], np.float64)
    baselines = None
    if advantage.estimator == "gdpo":
        names = sorted({name for _, reward in scored for name in reward.components})
        rewards = np.array([[reward.components.get(name, np.nan) for name in names] for _, reward in scored])
        weights = advantage.arguments(GDPOArguments).reward_weights
        if not names or not np.isfinite(rewards).all() or (weights is not None and len(weights) != len(names)):
            return True
    if advantage.estimator == "remax":
        baselines = torch.tensor([reward.components[GREEDY_BASELINE] for _, reward in scored], dtype=torch.float64)
    lengths = torch.tensor([sum(int(sample.loss_mask.sum()) for sample in attempt) for attempt, _ in scored])
    one_group = torch.zeros(len(scored), dtype=torch.int64)
    found = without_signal(advantage, rewards=torch.from_numpy(rewards), group_ids=one_group, lengths=lengths, baselines=baselines)
    return not bool(found.all())
