"""Which groups teach something, by the estimator that reads their rewards."""

from typing import Any

import numpy as np
import pytest

from megatron_rl.algorithms.objective import AdvantageSettings
from megatron_rl.runtime.rollouts import has_signal
from megatron_rl.types import Group, Prompt, Reward, RewardOutcome, Sample, StopReason


def group_of(*rewards: Reward) -> Group:
    prompt = Prompt(id="p", token_ids=np.array([1, 2]), text="ab")
    samples = tuple(
        Sample(
            group_id="p",
            index=index,
            prompt=prompt,
            response_ids=np.zeros(2 + index, np.int64),
            loss_mask=np.ones(2 + index, np.bool_),
            rollout_log_probs=np.zeros(2 + index, np.float32),
            weight_versions=np.zeros(2 + index, np.int64),
            stop_reason=StopReason.STOP,
            reward=reward,
        )
        for index, reward in enumerate(rewards)
    )
    return Group("p", prompt, samples)


def scored(value: float, **components: float) -> Reward:
    return Reward(RewardOutcome.SCORED, value, components=components)


FAILED = Reward(RewardOutcome.ERROR, message="boom")


@pytest.mark.parametrize(
    ("advantage", "rewards", "expected"),
    [
        ({"estimator": "grpo"}, [scored(1), scored(1)], False),
        ({"estimator": "grpo"}, [scored(1), scored(0)], True),
        ({"estimator": "grpo"}, [scored(1), FAILED], False),
        ({"estimator": "grpo"}, [FAILED, FAILED], False),
        ({"estimator": "pass@k"}, [scored(1), scored(1), scored(0)], False),
        ({"estimator": "remax"}, [scored(1, greedy_baseline=0.5)], True),
        ({"estimator": "remax"}, [scored(1, greedy_baseline=0.5), scored(1, greedy_baseline=0.5)], True),
        ({"estimator": "remax"}, [scored(1, greedy_baseline=1.0), scored(1, greedy_baseline=1.0)], False),
        ({"estimator": "gdpo"}, [scored(1, a=1, b=0), scored(1, a=1, b=1)], True),
        ({"estimator": "gdpo"}, [scored(1, a=1), scored(0, a=1)], False),
        ({"estimator": "gdpo", "args": {"reward_weights": [1.0, 0.0]}}, [scored(1, a=1, b=0), scored(1, a=1, b=1)], False),
        ({"estimator": "gdpo"}, [scored(1), scored(1)], True),
        ({"estimator": "gdpo"}, [scored(1, a=1), scored(1, b=1)], True),
        ({"estimator": "gdpo", "args": {"reward_weights": [1.0, 0.0]}}, [scored(1, a=1), scored(1, a=1)], True),
    ],
)
def test_what_a_group_teaches_depends_on_the_estimator(advantage: dict[str, Any], rewards: list[Reward], expected: bool) -> None:
    assert has_signal(group_of(*rewards), AdvantageSettings(**advantage)) is expected
