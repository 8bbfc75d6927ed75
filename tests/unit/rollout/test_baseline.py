from dataclasses import replace

import numpy as np
import pytest

from megatron_rl.data.batch import GREEDY_BASELINE
from megatron_rl.rollout.groups import with_baseline
from megatron_rl.types import Group, Prompt, Reward, RewardOutcome, Sample, StopReason

PROMPT = Prompt(id="p", token_ids=np.array([1]), text="a")
TIMEOUT = Reward(RewardOutcome.TIMEOUT, message="no reward after 30 s")


def group_of(*rewards: Reward) -> Group:
    samples = [
        Sample(
            group_id="p",
            index=index,
            prompt=PROMPT,
            response_ids=np.array([2]),
            loss_mask=np.array([True]),
            rollout_log_probs=np.array([-1.0]),
            weight_versions=np.array([0]),
            stop_reason=StopReason.STOP,
            reward=reward,
        )
        for index, reward in enumerate(rewards)
    ]
    return Group(id="p", prompt=PROMPT, samples=tuple(samples))


def test_the_baseline_travels_with_every_scored_sample() -> None:
    group = group_of(Reward(RewardOutcome.SCORED, 1.0, components={"format": 0.5}), TIMEOUT)
    rewards = [sample.reward for sample in with_baseline(group, {None: Reward(RewardOutcome.SCORED, 0.25)}).samples]
    assert rewards[0] == Reward(RewardOutcome.SCORED, 1.0, components={"format": 0.5, GREEDY_BASELINE: 0.25})
    assert rewards[1] == TIMEOUT
    assert group.samples[0].reward == Reward(RewardOutcome.SCORED, 1.0, components={"format": 0.5})


@pytest.mark.parametrize("failed", [TIMEOUT, Reward(RewardOutcome.ERROR, message="boom")])
def test_samples_without_a_baseline_are_not_scored(failed: Reward) -> None:
    (sample,) = with_baseline(group_of(Reward(RewardOutcome.SCORED, 1.0)), {None: failed}).samples
    assert sample.reward is not None
    assert sample.reward.outcome is failed.outcome
    assert failed.message in sample.reward.message


def test_each_role_has_the_baseline_of_its_own_greedy_response() -> None:
    group = group_of(*(Reward(RewardOutcome.SCORED, value) for value in (1.0, 0.5, 0.0)))
    roles = ("proposer", "verifier", "judge")
    group = replace(group, samples=tuple(replace(sample, role=role) for sample, role in zip(group.samples, roles, strict=True)))
    greedy = {role: Reward(RewardOutcome.SCORED, value) for role, value in (("proposer", 0.25), ("verifier", 0.75))}
    rewards = [sample.reward for sample in with_baseline(group, greedy).samples]
    assert [reward.components.get(GREEDY_BASELINE) for reward in rewards if reward] == [0.25, 0.75, None]
    assert rewards[2] is not None and rewards[2].outcome is RewardOutcome.ERROR and "'judge'" in rewards[2].message
