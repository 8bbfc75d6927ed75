"""Trajectories with an environment: turns, budgets, rewards, failures, and groups of them."""

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from chat_parts import THINKING_TEMPLATE, Policy, call, chat_tokenizer

from megatron_rl.config.settings import RolloutSettings
from megatron_rl.engines.sampling import Sampling
from megatron_rl.errors import TrajectoryError
from megatron_rl.observe.group_metrics import rollout_metrics
from megatron_rl.observe.metrics import metric_values
from megatron_rl.rollout.opened_rollout import opened_rollout
from megatron_rl.rollout.sample_checks import check_samples
from megatron_rl.types import Group, Prompt, Sample, StopReason

PROMPT = Prompt(id="p", token_ids=np.array([1]), text="Hi.", label="4")


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def play(
    name: str,
    texts: Sequence[str] | Callable[[str], str],
    *,
    num_samples: int = 1,
    must_reward: bool = True,
    context: int = 4096,
    label: str = "4",
    max_tokens: int = 200,
    end: str = "<|im_end|>",
    reason: StopReason = StopReason.STOP,
    sessions: list[str | None] | None = None,
    asked: list[list[int]] | None = None,
    **settings: object,
) -> tuple[Sample, ...]:
    """The samples of a rollout with the environment `name`, after the checks of a run; adds to `sessions` and `asked` who asked what."""
    tokenizer = chat_tokenizer(THINKING_TEMPLATE)
    chosen = RolloutSettings(environment=f"environments_under_test:{name}", **settings)  # type: ignore[arg-type]
    prompt = Prompt(id="p", token_ids=np.array([1]), text="Hi.", label=label)
    policy = Policy(tokenizer, texts, context=context)
    policy.end, policy.reason = end, reason
    policy.sessions = policy.sessions if sessions is None else sessions
    policy.asked = policy.asked if asked is None else asked

    async def work() -> Sequence[Sample]:
        async with opened_rollout(chosen, tokenizer=tokenizer, model_type="qwen3", must_reward=must_reward) as rollout:
            return await rollout(
                prompt=prompt, generator=policy, sampling=Sampling(max_tokens=max_tokens), num_samples=num_samples, tokenizer=tokenizer
            )

    samples = asyncio.run(asyncio.wait_for(work(), 60))
    return check_samples(samples, prompt=prompt, num_samples=num_samples, vocab_size=len(tokenizer), max_tokens=context)


def test_rewards_of_all_turns_are_summed() -> None:
    texts = [call("put", '{"key": "a", "value": "4"}'), call("get", '{"key": "a"}'), call("get", '{"key": "b"}'), "4"]
    (sample,) = play("Shop", texts, args={"bonus": 0.5})
    assert sample.reward is not None
    assert sample.reward.value == 1.75
    assert sample.reward.components == {"get": 0.25, "answer": 1.0, "bonus": 0.5}
    assert sample.metadata == {
        "num_turns": 4,
        "num_tool_calls": 3,
        "num_tool_errors": 1,
        "turn_rewards": [{}, {"get": 0.25}, {}, {"answer": 1.0, "bonus": 0.5}],
        "answer": "4",
    }
    assert sample.stop_reason is StopReason.STOP and not sample.truncated
    assert "error: no key b" in sample.response_text


def test_all_branches_have_the_trajectorys_reward() -> None:
    samples = play("Endless", ["<think>\nhm\n</think>\n\nA", "B", "C"], max_turns=3, num_samples=1)
    assert len(samples) == 2 and {sample.trajectory for sample in samples} == {0}
    assert [sample.reward.value for sample in samples if sample.reward] == [0.0, 0.0]
    assert [sample.truncated for sample in samples] == [False, True]


def test_rewards_of_a_name_are_summed_over_turns_and_tools() -> None:
    texts = [call("both", "{}"), call("both", "{}") * 2, call("both", '{"end": true}')]
    (sample,) = play("Wide", texts)
    assert sample.reward is not None and sample.reward.value == 2.0 and sample.reward.components == {"both": 2.0}
    assert sample.metadata["num_tool_calls"] == 4
    # Each result of the second turn is in the conversation.
    assert sample.response_text.count("ja, schön") == 3


def test_trajectories_of_one_call_are_numbered() -> None:
    sessions: list[str | None] = []
    samples = play("Shop", ["4", "5"], num_samples=2, sessions=sessions)
    assert [(sample.index, sample.trajectory) for sample in samples] == [(0, None), (1, None)]
    assert [sample.reward.value for sample in samples if sample.reward] == [1.0, 0.0]
    assert len(set(sessions)) == len(sessions) == 2


def test_branches_of_several_trajectories_are_numbered() -> None:
    thoughts = ["<think>\nhm\n</think>\n\nA", "B"] * 2
    samples = play("Endless", thoughts, max_turns=2, num_samples=2)
    assert [(sample.index, sample.trajectory) for sample in samples] == [(0, 0), (1, 0), (2, 1), (3, 1)]


def test_a_conversation_of_other_markers_has_the_difference_as_metadata() -> None:
    (right,) = play("Shop", ["4"])
    (sample,) = play("Shop", ["4"], end="<|endoftext|>")
    assert "structure_difference" not in right.metadata
    assert "is <|endoftext|>, the chat template has <|im_end|>" in sample.metadata["structure_difference"]


def test_an_aborted_answer_ends_a_trajectory_as_aborted() -> None:
    (sample,) = play("Endless", ["Well"], reason=StopReason.ABORT)
    assert sample.stop_reason is StopReason.ABORT and sample.metadata["num_turns"] == 1


def test_odd_texts_reach_the_policy_token_by_token() -> None:
    (sample,) = play("Wide", [call("both", "{}"), call("both", '{"end": true}')])
    assert "ja, schön: \0 \u2028 \U0001f600\n</tool_response>" in sample.response_text


def test_a_text_of_a_megabyte_fills_the_context() -> None:
    (sample,) = play("Broken", ["4"], label="large")
    assert sample.truncated and sample.metadata["num_turns"] == 1 and len(sample.response_ids) < 10


def test_thirty_tools_are_offered_and_called() -> None:
    (sample,) = play("Thirty", [call("tool_29", "{}"), "4"], must_reward=False, context=8192)
    assert sample.prompt.text.count('{"type": "function"') == 30 and "\n29\n" in sample.response_text


@pytest.mark.parametrize("setting", [{"max_turns": 0}, {"max_turns": None}, {"step_timeout_s": 0}, {"step_timeout_s": None}])
def test_budgets_without_a_value_are_refused(setting: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=rf"{next(iter(setting))}\n *Input should be"):
        RolloutSettings(environment="a:B", **setting)  # type: ignore[arg-type]


def test_a_budget_of_one_turn_answers_its_tools() -> None:
    (sample,) = play("Shop", [call("put", '{"key": "a", "value": "4"}')], max_turns=1)
    assert sample.truncated and sample.metadata["num_tool_calls"] == 1
    with pytest.raises(TrajectoryError, match=r"more than 0\.001 s to reset"):
        play("AsyncSlow", ["4"], step_timeout_s=0.001)


@pytest.mark.parametrize("limit", [{"max_turns": 2}, {"max_tokens": 3}, {"context": 700}])
def test_a_trajectory_without_an_end_is_truncated(limit: dict[str, int]) -> None:
    (sample,) = play("Endless", lambda _: "Well" * 5, **limit)  # type: ignore[arg-type]
    assert sample.truncated and sample.reward is not None and sample.reward.value == 0.0
    assert sample.loss_mask[-1]


def test_without_a_reward_of_its_own_the_function_decides() -> None:
    (sample,) = play("Silent", ["4"], must_reward=False)
    assert sample.reward is None
    with pytest.raises(TrajectoryError, match=r"ended without a reward, and reward\.function is null") as raised:
        play("Silent", ["4"])
    assert raised.value.cause == "contract"


ADDED = [*(call("add", f'{{"number": {number}}}') for number in (1, 2, 13, 4)), "end"]


def test_a_replayable_environment_is_asked_all_again(tmp_path: Path) -> None:
    """No answer of the policy is made again, and the tokens are those of an environment that did not end."""
    asked: list[str | None] = []
    (tmp_path / "whole").touch()
    (one,) = play("Mortal", ADDED, label=str(tmp_path / "whole"))
    (other,) = play("Mortal", ADDED, label=str(tmp_path / "x"), sessions=asked)
    assert len(asked) == 5 and (tmp_path / "x").exists()
    assert np.array_equal(one.response_ids, other.response_ids) and np.array_equal(one.loss_mask, other.loss_mask)
    assert np.array_equal(one.rollout_log_probs, other.rollout_log_probs) and one.reward == other.reward
    assert one.reward is not None and one.reward.value == 20.0
    assert other.metadata == {**one.metadata, "num_replays": 1}
    values = [metric_values(rollout_metrics([Group(id="p", prompt=PROMPT, samples=(each, each))], version=3)) for each in (one, other)]
    assert values[1].pop("rollout/replays") == 2 and values[0] == values[1]


@pytest.mark.parametrize(
    ("name", "args", "cause", "words"),
    [
        ("Mortal", {"forgets": True}, "replay", "it answered message 1 with .*1 again.*set replayable = False"),
        ("Mortal", {"always": True}, "environment", "its process ended before it answered"),
        ("Lost", {}, "environment", "its process ended before it answered"),
    ],
)
def test_a_trajectory_that_cannot_be_replayed_fails(tmp_path: Path, name: str, args: dict[str, bool], cause: str, words: str) -> None:
    asked: list[str | None] = []
    with pytest.raises(TrajectoryError, match=words) as raised:
        play(name, ADDED, label=str(tmp_path / "x"), args=args, sessions=asked)
    assert raised.value.cause == cause and len(asked) == 3


def test_no_prefix_breaks_in_64_trajectories_with_tools() -> None:
    """Each request begins with all tokens of the one before and its answer; what follows depends on all of them."""
    asked: list[list[int]] = []

    def said(text: str) -> str:
        draw = random.Random(text)
        calls = [call("put", json.dumps({"key": "a", "value": "4" * draw.randrange(1, 9)})), call("get", '{"key": "a"}'), call("no", "{}")]
        return "ja, sch\u00f6n" if draw.random() < 0.2 else " ".join(draw.choices(calls, k=draw.randrange(1, 3)))

    samples = play("Shop", said, num_samples=64, max_turns=6, asked=asked)
    assert len(samples) == 64 and sum(sample.metadata["num_tool_calls"] for sample in samples) > 64
    ends = [sum(sample.metadata["num_turns"] for sample in samples[:number]) for number in range(65)]
    assert ends[-1] == len(asked) > 128
    for sample, first, end in zip(samples, ends[:-1], ends[1:], strict=True):
        tokens = [*sample.prompt.token_ids.tolist(), *sample.response_ids.tolist()]
        assert all(tokens[: len(one)] == one for one in asked[first:end])
        made = [np.flatnonzero(np.diff(sample.loss_mask.astype(int), prepend=0) == 1) + len(sample.prompt.token_ids)]
        assert [len(one) for one in asked[first:end]] == made[0].tolist()


def test_failures_have_a_cause() -> None:
    with pytest.raises(TrajectoryError, match=r"more than 2 s to answer a message \(rollout\.step_timeout_s\)") as raised:
        play("Broken", ["4"], label="hang", step_timeout_s=2.0)
    assert raised.value.cause == "timeout"
    with pytest.raises(TrajectoryError, match="KeyError: 'missing'") as raised:
        play("Broken", ["4"], label="raise")
    assert raised.value.cause == "environment" and "environments_under_test.py" in raised.value.trace
    with pytest.raises(TrajectoryError, match="no room for an answer in 20 tokens") as raised:
        play("Shop", ["4"], context=20)
    assert raised.value.cause == "context"
    with pytest.raises(TrajectoryError, match="reset returned no message") as raised:
        play("Unwilling", ["4"], label="none")
    assert raised.value.cause == "contract"
