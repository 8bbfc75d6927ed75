"""Values and traps of the rewards of the text alone; each formula against a loop."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_rl.rewards.text import choice, exact, overlong, regex, tags
from megatron_rl.types import Prompt, Sample, StopReason


def sample_of(text: str, label: str | None = "46", *, cut: bool = False, tokens: int = 0, **metadata: Any) -> Sample:
    prompt = Prompt(id="p", token_ids=np.array([1]), text="", label=label, metadata=metadata)
    made = Sample.written(prompt, [0] * tokens, text=text)
    return replace(made, stop_reason=StopReason.LENGTH) if cut else made


@pytest.mark.parametrize(
    ("text", "options", "reward", "answer"),
    [
        (" 46\n", {}, 1.0, "46"),
        ("46.", {}, 0.0, "46."),
        ("<answer>45</answer> <answer> 46 </answer>", {"extract": "<answer>(.*?)</answer>"}, 1.0, "46"),
        ("<answer>46</answer> <answer>45</answer>", {"extract": "<answer>(.*?)</answer>"}, 0.0, "45"),
        ("46", {"extract": "<answer>(.*?)</answer>"}, 0.0, ""),
        ("so\n#### 46", {"extract": "#### ([^\n]*)"}, 1.0, "46"),
    ],
)
def test_an_answer_equals_the_label_or_not(text: str, options: dict[str, Any], reward: float, answer: str) -> None:
    assert exact(sample=sample_of(text), **options) == {"reward": reward, "answer": answer}


def test_case_and_spaces_may_be_ignored() -> None:
    assert exact(sample=sample_of("new  YORK\n", "New York"), ignore_case=True)["reward"] == 1.0
    assert exact(sample=sample_of("new  YORK\n", "New York"))["reward"] == 0.0


@pytest.mark.parametrize(
    ("text", "label", "answer"),
    [
        ("B", "B", "B"), ("(B).", "(b)", "B"), ("**B**", "B", "B"), ("The answer is (B).", "B", "B"), ("Answer: C", "C", "C"),
        ("A is wrong. The answer is B", "B", "B"), ("\\boxed{\\text{D}}", "D", "D"), ("answer is A. No, the answer is C.", "C", "C"),
        ("The answer is Better", "B", ""), ("I think B, or C", "B", ""), ("the answer is a matter of taste", "A", ""), ("", "A", ""),
    ],
)  # fmt: skip
def test_the_last_stated_letter_is_the_choice(text: str, label: str, answer: str) -> None:
    assert choice(sample=sample_of(text, label)) == {"reward": float(answer == label.strip("()").upper()), "answer": answer}


@pytest.mark.parametrize("label", ["46", "AB", "", None])
def test_a_label_that_is_no_letter_is_an_error(label: str | None) -> None:
    with pytest.raises(ValueError, match="label"):
        choice(sample=sample_of("A", label))


def test_a_pattern_is_searched_for() -> None:
    assert [regex(sample=sample_of(text), pattern=r"^\d+$") for text in ("46", "a 46")] == [1.0, 0.0]
    assert [regex(sample=sample_of(text, r"\b46\b")) for text in ("so 46!", "146")] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>a</think>\n<answer>b</answer>", 1.0),
        ("<think>a</think><think>b</think><answer>c</answer>", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("x <think>a</think><answer>b</answer>", 0.0),
        ("<think>a</think> so <answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer> x", 0.0),
        ("<think>a<answer>b</answer></think>", 0.0),
        ("", 0.0),
    ],
)
def test_each_tag_stands_once_and_in_order(text: str, value: float) -> None:
    assert tags(sample=sample_of(text)) == value


def test_nothing_is_the_answer_of_a_cut_response() -> None:
    cut = [sample_of(text, label, cut=True) for text, label in (("46", "46"), ("The answer is B", "B"))]
    assert [exact(sample=cut[0]), choice(sample=cut[1])] == [{"reward": 0.0, "answer": ""}] * 2
    assert regex(sample=cut[0], pattern="46") == 0.0


def test_the_overlong_penalty_follows_dapo() -> None:
    """Equation 13 with L_max 20 and L_cache 5; context of a rollout does not count."""
    for length in range(30):
        expected = 0.0 if length <= 15 else (20 - 5 - length) / 5 if length <= 20 else -1.0
        sample = sample_of("", tokens=length)
        assert overlong(sample=sample, max_tokens=20, buffer_tokens=5) == expected
    context = replace(sample, loss_mask=np.arange(length) < 17)
    assert overlong(sample=context, max_tokens=20, buffer_tokens=5) == pytest.approx(-0.4)
    # A prefix that another sample is trained on is as long.
    assert overlong(sample=replace(context, weight_versions=np.zeros(length, np.int64)), max_tokens=20, buffer_tokens=5) == -1.0
    with pytest.raises(ValueError, match=re.escape("buffer_tokens 0 and max_tokens 20")):
        overlong(sample=sample, max_tokens=20, buffer_tokens=0)
