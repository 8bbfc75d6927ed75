"""ReMax compares each sample with the greedy response to its prompt, whose reward travels as a component of the sample's own."""

from dataclasses import replace

from megatron_rl.types import Group, Reward, RewardOutcome, Sample

GREEDY_BASELINE = "greedy_baseline"


def with_baseline(group: Group, baseline: Reward) -> Group:
    """The group with the reward of the greedy response as component `greedy_baseline` of every scored sample.

    A greedy response that was not scored leaves no baseline: the outcome and message of its reward become those of every sample.
    """
    return replace(group, samples=tuple(_with_baseline(sample, baseline) for sample in group.samples))


def _with_baseline(sample: Sample, baseline: Reward) -> Sample:
    if sample.reward is None or sample.reward.value is None:
        return sample
    if baseline.value is None:
        message = f"the greedy response that is the baseline was not scored: {baseline.message}"
        return replace(sample, reward=Reward(outcome=baseline.outcome, message=message))
    components = {**sample.reward.components, GREEDY_BASELINE: baseline.value}
    return replace(sample, reward=Reward(outcome=RewardOutcome.SCORED, value=sample.reward.value, components=components))
