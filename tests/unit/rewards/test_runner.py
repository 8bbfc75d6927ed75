import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.config.settings import RewardSettings
from megatron_rl.errors import UserError
from megatron_rl.rewards.runner import RewardRunner, check_error_rate
from megatron_rl.types import Prompt, Reward, RewardOutcome, Sample, StopReason

MODULE = "rewards_under_test"


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in this folder, where a user's module is found without being on the Python path."""
    monkeypatch.chdir(Path(__file__).parent)
    yield


def make_sample(response: str, *, label: str | None = "4", metadata: dict[str, int] | None = None) -> Sample:
    prompt = Prompt(id="p", token_ids=np.array([1]), text="2+2=", label=label, metadata={"a": 1, "b": 2})
    empty = np.empty(0)
    return Sample(
        group_id="p",
        index=0,
        prompt=prompt,
        response_ids=empty,
        loss_mask=empty,
        rollout_log_probs=empty,
        weight_versions=empty,
        stop_reason=StopReason.STOP,
        response_text=response,
        metadata=metadata or {},
    )


def make_runner(name: str, **options: float) -> RewardRunner:
    return RewardRunner(RewardSettings(function=f"{MODULE}:{name}", **options))


def score_all(runner: RewardRunner, samples: list[Sample]) -> list[Reward]:
    async def work() -> list[Reward]:
        return await asyncio.gather(*map(runner.score, samples))

    return asyncio.run(work())


@pytest.mark.parametrize("name", ["exact", "exact_later"])
def test_a_right_and_a_wrong_answer_are_scored(name: str) -> None:
    with make_runner(name) as runner:
        assert runner.probe(make_sample("").prompt, response="4").value == 1.0
        assert [reward.value for reward in score_all(runner, [make_sample("4"), make_sample("5")])] == [1.0, 0.0]


def test_parts_of_a_reward_are_recorded_beside_it() -> None:
    with make_runner("parts") as runner:
        (reward,) = score_all(runner, [make_sample("abc")])
    assert reward.value == 0.5
    assert reward.components == {"format": 1.0, "length": 3.0}


def test_metadata_of_the_prompt_and_of_the_rollout_reach_the_function() -> None:
    with make_runner("echo_metadata") as runner:
        values = [reward.value for reward in score_all(runner, [make_sample(""), make_sample("", metadata={"b": 7})])]
    assert values == [12.0, 17.0]


def test_errors_and_timeouts_are_outcomes_of_their_own_and_the_others_are_scored() -> None:
    responses = ["fine", "raise", "hang", "exit", "nan", "none", "text", "fine"]
    with make_runner("by_response", timeout_s=0.5) as runner:
        rewards = score_all(runner, [make_sample(response) for response in responses])
    outcomes = [reward.outcome for reward in rewards]
    error, scored = RewardOutcome.ERROR, RewardOutcome.SCORED
    assert outcomes == [scored, error, RewardOutcome.TIMEOUT, error, error, error, error, scored]
    messages = [reward.message for reward in rewards]
    assert "no such answer" in messages[1] and "by_response" in messages[1]
    assert "0.5 s" in messages[2]
    assert "exit status 3" in messages[3]
    assert "finite" in messages[4]
    assert "None of type NoneType, needs a number" in messages[5]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("no_such_module:score", "cannot be imported.*No module named 'no_such_module'"),
        (f"{MODULE}:no_such_function", "has no no_such_function; it has: exact, "),
        (f"{MODULE}:NOT_A_FUNCTION", "is a int, needs a function"),
        (f"{MODULE}.exact", "needs the form package.module:function"),
        (f"{MODULE}:wrong_names", r"signature \(prompt, answer\) but is called as \(prompt=.., response=.., label=.., metadata=..\)"),
        (f"{MODULE}:parts_without_total", "needs the key 'reward'"),
        ("megatron_rl.rewards.math:score", "holds no mathematical expression"),
    ],
)
def test_a_function_that_cannot_work_is_found_by_the_probe(function: str, message: str) -> None:
    with RewardRunner(RewardSettings(function=function)) as runner, pytest.raises(UserError, match=message):
        runner.probe(make_sample("", label="").prompt)


@pytest.mark.parametrize("response", ["raise", "nan", "none", "exit", "hang"])
def test_a_failing_probe_is_an_error(response: str) -> None:
    with make_runner("by_response", timeout_s=0.5) as runner, pytest.raises(UserError, match="gave no reward for a probe"):
        runner.probe(make_sample("").prompt, response=response)


def test_workers_import_nothing_heavy() -> None:
    with make_runner("heavy_modules") as runner:
        assert score_all(runner, [make_sample("")])[0].value == 0.0


def test_a_thousand_rewards_come_in_order() -> None:
    with make_runner("exact") as runner:
        rewards = score_all(runner, [make_sample(response) for response in ("4", "5", "5", "4") * 256])
    assert [reward.value for reward in rewards] == [1.0, 0.0, 0.0, 1.0] * 256


def test_the_error_rate_counts_errors_and_timeouts_and_shows_the_first() -> None:
    scored = Reward(outcome=RewardOutcome.SCORED, value=0.0)
    error = Reward(outcome=RewardOutcome.ERROR, message="Traceback: first")
    timeout = Reward(outcome=RewardOutcome.TIMEOUT, message="second")
    check_error_rate([scored] * 18 + [error, timeout], max_error_rate=0.1)
    check_error_rate([], max_error_rate=0.0)
    with pytest.raises(UserError, match=r"1 errors and 1 timeouts in 19 reward calls = 10.5%(.|\n)*Traceback: first"):
        check_error_rate([scored] * 17 + [error, timeout], max_error_rate=0.1)
