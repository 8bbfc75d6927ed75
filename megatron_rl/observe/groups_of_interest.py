"""Which groups of a step to look at: the best, the worst, the median, the longest, and those that went wrong."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.types import Group, last_samples


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """A group of a step in numbers.

    `reward` is the mean of its scored trajectories, None without one; `longest` counts the tokens
    of the longest response; `truncated` and `failed` count trajectories, failed ones also without
    a score.
    """

    id: str
    reward: float | None
    longest: int
    truncated: int
    failed: int

    @classmethod
    def of(cls, group: Group) -> "GroupFacts":
        """Return the numbers of a group."""
        ends = last_samples(group.samples)
        rewards = [end.reward.value for end in ends if end.reward is not None and end.reward.value is not None]
        return cls(
            group.id,
            sum(rewards) / len(rewards) if rewards else None,
            max((len(sample.response_ids) for sample in group.samples), default=0),
            sum(end.truncated for end in ends),
            len(group.failures) + len(ends) - len(rewards),
        )


def labels(groups: Sequence[GroupFacts]) -> dict[str, list[str]]:
    """Return the ids of the groups of interest of one step, the most telling first, each with its labels."""
    found: dict[str, list[str]] = {}
    ranked = sorted((group for group in groups if group.reward is not None), key=lambda group: group.reward or 0.0)
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
    names = [*labels([GroupFacts.of(group) for group in groups]), *(group.id for group in groups)]
    return list(dict.fromkeys(names))[:limit]
