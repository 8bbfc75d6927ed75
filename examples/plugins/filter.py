"""Leave out groups that are solved too seldom or too often to teach much."""

from megatron_rl.types import Group, last_samples


def keep(*, group: Group, lowest: float = 0.1, highest: float = 0.9) -> str | None:
    """None keeps the group; a reason is noted in the buffer."""
    rewards = [last.reward.value for last in last_samples(group.samples) if last.reward is not None and last.reward.value is not None]
    mean = sum(rewards) / len(rewards)
    return None if lowest <= mean <= highest else f"mean reward {mean:g} is outside of [{lowest:g}, {highest:g}]"
