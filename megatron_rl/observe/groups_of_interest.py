"""Groups of a step to look at: the best, the worst, the median, the longest, and those that went wrong."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from megatron_rl.types import Group, Sample


class Answer(NamedTuple):
    """One sample, by its index in the group, in numbers; `trajectory` None: one by itself."""

    step: int
    group: str
    trajectory: int | None
    sample: int
    reward: float | None
    stop: str
    num_tokens: int


class GroupFacts(NamedTuple):
    """A group of a step in numbers, which but for `longest` count trajectories.

    `rewards` are those of scored ones, `failed` counts those without, `longest` the tokens of the
    longest sample.
    """

    id: str
    rewards: tuple[float, ...]
    longest: int
    truncated: int
    failed: int

    @property
    def mean(self) -> float | None:
        """Return the mean reward, None without any."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else None


def ends(answers: Iterable[Answer]) -> list[Answer]:
    """Return the last sample of each trajectory, with the trajectory's reward."""
    found: dict[Any, Answer] = {}
    for answer in answers:
        alone = answer.trajectory is None
        found[answer.group, alone, answer.sample if alone else answer.trajectory] = answer
    return list(found.values())


def facts(answers: Iterable[Answer], num_failures: Mapping[str, int]) -> list[GroupFacts]:
    """Return groups in numbers, from their `answers` by rising index and their trajectories without one, `num_failures`."""
    groups: dict[str, list[Answer]] = {name: [] for name, count in num_failures.items() if count}
    for answer in answers:
        groups.setdefault(answer.group, []).append(answer)
    made = []
    for name, samples in groups.items():
        last = ends(samples)
        rewards = tuple(end.reward for end in last if end.reward is not None)
        longest, truncated = max((answer.num_tokens for answer in samples), default=0), sum(end.stop == "length" for end in last)
        made.append(GroupFacts(name, rewards, longest, truncated, num_failures.get(name, 0) + len(last) - len(rewards)))
    return made


def labels(groups: Sequence[GroupFacts]) -> dict[str, list[str]]:
    """Return the ids of the groups of interest of one step, the most telling first, each with its labels."""
    found: dict[str, list[str]] = {}
    ranked = sorted((group for group in groups if group.rewards), key=lambda group: group.mean or 0.0)
    chosen = [("worst", ranked[0]), ("best", ranked[-1]), ("median", ranked[len(ranked) // 2])] if ranked else []
    for name in ("truncated", "failed", "longest"):
        most = max(groups, key=lambda group: getattr(group, name), default=None)
        if most is not None and getattr(most, name):
            chosen.append((name, most))
    for label, group in chosen:
        found.setdefault(group.id, []).append(label)
    return found


def to_keep(groups: Sequence[Group], limit: int) -> list[str]:
    """Return the ids of up to `limit` groups: those of interest, then the first others."""
    answers = [
        Answer(0, group.id, one.trajectory, one.index, _value(one), one.stop_reason.value, len(one.response_ids))
        for group in groups
        for one in sorted(group.samples, key=lambda sample: sample.index)
    ]
    found = labels(facts(answers, {group.id: len(group.failures) for group in groups}))
    return list(dict.fromkeys([*found, *(group.id for group in groups)]))[:limit]


def _value(sample: Sample) -> float | None:
    return None if sample.reward is None else sample.reward.value
