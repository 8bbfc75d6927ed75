"""Sums of rewards and the choice by a field of the row, called as a worker calls them; labels that do not score themselves."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_rl.config.settings import RewardSettings
from megatron_rl.errors import UserError
from megatron_rl.rewards.gold import right_response, unscored_labels
from megatron_rl.rewards.worker import call_all, form_of
from megatron_rl.types import Prompt, Reward, RewardOutcome, Sample

THINKS = "<think>so</think><answer>46</answer>"
PARTS = {"right": {"function": "exact", "args": {"extract": "<answer>(.*)</answer>"}, "weight": 2.0}, "tags": 0.5}


def call(function: str, args: dict[str, Any], text: str, label: str | None = "46", **metadata: Any) -> Reward:
    prompt = Prompt(id="p", token_ids=np.array([1]), text="", label=label, metadata=metadata)
    [reward], _ = call_all(function, json.dumps(args), samples=[Sample.written(prompt, text=text)], form="sample", call_timeout_s=9.0)
    return reward


def test_a_mixture_is_the_weighted_sum_of_its_parts() -> None:
    right, wrong = (call("mixture", {"parts": PARTS}, text) for text in (THINKS, "46"))
    assert (right.value, right.components, right.answer) == (2.5, {"right": 1.0, "tags": 1.0}, "46")
    assert (wrong.value, wrong.components, wrong.answer) == (0.0, {"right": 0.0, "tags": 0.0}, "")


def test_a_part_that_fails_leaves_no_reward() -> None:
    failed = call("mixture", {"parts": {"tags": 1.0, "choice": 1.0}}, "46")
    assert failed.outcome is RewardOutcome.ERROR and "label is '46'" in failed.message


def test_a_part_that_raises_at_once_fails_one_call_of_an_async_mixture() -> None:
    judge = {"function": "judge", "args": {"url": "http://127.0.0.1:9/v1", "model": "m", "attempts": 1}}
    args = {"key": "source", "functions": {"judged": judge, "letters": "choice"}}
    samples = [
        Sample.written(Prompt(id=source, token_ids=np.array([1]), text="", label="B", metadata={"source": source}), text="answer is B")
        for source in ("letters", "other", "letters")
    ]
    rewards, _ = call_all("by_row", json.dumps(args), samples=samples, form="async", call_timeout_s=9.0)
    assert [reward.value for reward in rewards] == [1.0, None, 1.0]
    assert rewards[1].outcome is RewardOutcome.ERROR and "needs one of judged, letters" in rewards[1].message


def test_components_of_parts_keep_the_name_of_the_part() -> None:
    inner = {"function": "mixture", "args": {"parts": PARTS}}
    assert call("mixture", {"parts": {"all": inner}}, THINKS).components == {"all": 2.5, "all/right": 1.0, "all/tags": 1.0}


@pytest.mark.parametrize("key", ["data_source", "extra.source"])
def test_a_row_chooses_its_reward(key: str) -> None:
    args = {"key": key, "functions": {"letters": "choice", "words": {"function": "exact", "args": {"ignore_case": True}}}}

    def row(source: str) -> dict[str, Any]:
        return {"data_source": source, "extra": {"source": source}}

    assert call("by_row", args, "answer is B", "B", **row("letters")).value == 1.0
    assert call("by_row", args, "paris", "Paris", **row("words")).value == 1.0
    other = call("by_row", args, "paris", "Paris", **row("code"))
    assert other.outcome is RewardOutcome.ERROR and f"the row's {key} is 'code', needs one of letters, words" in other.message


def test_a_reward_is_async_where_a_part_is() -> None:
    judge = {"function": "judge", "args": {"url": "http://127.0.0.1:9/v1", "model": "m"}}
    forms = {name: form_of("mixture", json.dumps({"parts": parts})) for name, parts in {"text": PARTS, "judge": {"judge": judge}}.items()}
    assert forms == {"text": "sample", "judge": "async"}
    assert form_of("by_row", json.dumps({"key": "k", "functions": {"a": "math", "b": judge}})) == "async"
    wrong = form_of("mixture", json.dumps({"parts": {"judge": 1.0}}))
    assert isinstance(wrong, UserError) and "reward.args.url is missing" in str(wrong)


def test_a_name_that_is_no_built_in_reward_is_refused() -> None:
    wrong = form_of("maths", "{}")
    assert isinstance(wrong, UserError) and "'maths', needs the form package.module:function, or one of the names math, code" in str(wrong)


def test_labels_that_do_not_score_themselves_are_found() -> None:
    rows = [
        ("math", "\\frac{1}{2}"),
        ("math", ""),
        ("math", "$(1, 2)$"),
        ("letters", "B"),
        ("letters", "46"),
        ("words", "x"),
        ("other", "x"),
    ]
    prompts = [Prompt(id="p", token_ids=np.array([1]), text="", label=label, metadata={"of": of}) for of, label in rows]
    words = {"function": "exact", "args": {"extract": "<(.*)>"}}
    args = {"key": "of", "functions": {"math": "math", "letters": {"function": "choice"}, "words": words}}
    responses = [right_response(prompt, "by_row", args) for prompt in prompts[:-1]]
    assert responses == ["\\boxed{\\frac{1}{2}}", "\\boxed{}", "$(1, 2)$", "B", "46", None]
    values = [
        call("by_row", args, text or "", prompt.label, of=of).value for (of, _), prompt, text in zip(rows, prompts, responses, strict=False)
    ]
    assert values[:5] == [1.0, None, 1.0, 1.0, None]
    with pytest.raises(ValueError, match="the row's of is 'other'"):
        right_response(prompts[-1], "by_row", args)
    assert [right_response(prompts[0], name, {}) for name in ("code", "my:score", "regex", None)] == [None] * 4


def test_labels_of_a_mixture_are_those_of_its_part() -> None:
    prompt = Prompt(id="p", token_ids=np.array([1]), text="", label="46", metadata={})
    parts = {
        "accuracy": {"function": "math"},
        "tags": 0.2,
        "overlong": {"function": "overlong", "args": {"max_tokens": 9, "buffer_tokens": 2}},
    }
    text = right_response(prompt, "mixture", {"parts": parts})
    assert text == "\\boxed{46}" and call("mixture", {"parts": parts}, text).components["accuracy"] == 1.0
    for other in ({"function": "judge"}, {"function": "my:score"}):
        assert right_response(prompt, "mixture", {"parts": {**parts, "other": other}}) is None
    assert right_response(prompt, "mixture", {"parts": {"tags": 1.0}}) is None

    async def score(sample: Sample) -> Reward:
        return call("mixture", {"parts": {**parts, "regex": -2.0}}, sample.response_text, sample.prompt.label)

    reward = RewardSettings(function="mixture", args={"parts": {**parts, "regex": -2.0}})
    one, other = asyncio.run(unscored_labels([prompt, replace(prompt, label=" ")], reward, score=score))
    assert one is None and other is not None and "the label ' ' cannot be scored" in other
