"""The contract of a reward function. Check your own: `pytest tests/contract/test_reward.py --reward package.module:function`."""

import asyncio
import math

import numpy as np
import pytest

from megatron_rl.config.settings import RewardSettings
from megatron_rl.rewards.runner import RewardRunner
from megatron_rl.types import Prompt, Reward, RewardOutcome, Sample, StopReason

RESPONSES = ("4", "5", "", "no idea", "\\boxed{4}", "\N{GRINNING FACE}", "x" * 10_000)


@pytest.fixture
def path(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--reward", default="megatron_rl.rewards.math:score"))


@pytest.fixture
def prompt(request: pytest.FixtureRequest) -> Prompt:
    label = str(request.config.getoption("--reward-label", default="4"))
    return Prompt(id="contract", token_ids=np.array([1]), text="2+2=", label=label)


def make_sample(prompt: Prompt, response: str) -> Sample:
    empty = np.empty(0)
    arrays = {"response_ids": empty, "loss_mask": empty, "rollout_log_probs": empty, "weight_versions": empty}
    return Sample(group_id=prompt.id, index=0, prompt=prompt, stop_reason=StopReason.STOP, response_text=response, **arrays)


def score_all(runner: RewardRunner, prompt: Prompt) -> list[Reward]:
    async def work() -> list[Reward]:
        return await asyncio.gather(*(runner.score(make_sample(prompt, response)) for response in RESPONSES))

    return asyncio.run(work())


def test_any_response_gets_a_finite_reward_and_the_same_one_again(path: str, prompt: Prompt) -> None:
    with RewardRunner(RewardSettings(function=path)) as runner:
        runner.probe(prompt)
        first, second = score_all(runner, prompt), score_all(runner, prompt)
    for response, reward in zip(RESPONSES, first, strict=True):
        assert reward.outcome is RewardOutcome.SCORED, f"response {response[:40]!r}: {reward.message}"
        assert reward.value is not None and math.isfinite(reward.value)
    assert [reward.value for reward in first] == [reward.value for reward in second]
