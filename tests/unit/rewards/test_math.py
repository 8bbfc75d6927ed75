import threading
from dataclasses import replace

import numpy as np
import pytest

from megatron_rl.rewards.math import score
from megatron_rl.types import Prompt, Sample, StopReason


def grade(response: str, label: str | None) -> tuple[float, str]:
    nothing = np.empty(0)
    arrays = {"response_ids": nothing, "loss_mask": nothing, "rollout_log_probs": nothing, "weight_versions": nothing}
    prompt = Prompt(id="p", token_ids=np.array([1]), text="", label=label)
    sample = Sample(group_id="p", index=0, prompt=prompt, response_text=response, stop_reason=StopReason.STOP, **arrays)
    reward, answer = (score(sample=sample)[key] for key in ("reward", "answer"))
    return float(reward), str(answer)


@pytest.mark.parametrize(
    ("response", "label", "expected", "answer"),
    [
        ("The answer is \\boxed{46}.", "46", 1.0, "46"),
        ("The answer is \\boxed{47}.", "46", 0.0, "47"),
        ("so 12 + 34 = 46", "46", 1.0, "46"),
        ("$\\frac{1}{2}$", "0.5", 1.0, "1/2"),
        ("\\boxed{0.75}", "\\frac{3}{4}", 1.0, "3/4"),
        ("no idea", "46", 0.0, ""),
        ("", "46", 0.0, ""),
        ("\\boxed{2x+2}", "$2(x+1)$", 1.0, "2*x + 2"),
    ],
)
def test_answers_are_compared_as_mathematics(response: str, label: str, expected: float, answer: str) -> None:
    """And the extracted answer is one that evaluations can vote on."""
    assert grade(response, label) == (expected, answer)


def test_it_works_outside_of_the_main_thread() -> None:
    values: list[tuple[float, str]] = []
    thread = threading.Thread(target=lambda: values.append(grade("\\boxed{46}", "46")))
    thread.start()
    thread.join()
    assert values == [(1.0, "46")]


@pytest.mark.parametrize("label", [None, "", " "])
def test_a_label_without_mathematics_is_an_error_not_a_zero(label: str | None) -> None:
    with pytest.raises(ValueError, match="label"):
        grade("\\boxed{46}", label)


@pytest.mark.parametrize(
    ("response", "label", "expected", "answer"),
    [
        ("\\boxed{1} then \\boxed{2}", "2", 1.0, "2"),
        ("\\boxed{2} then \\boxed{1}", "2", 0.0, "1"),
        ("\\boxed{1}, \\boxed{2} or \\boxed{3}", "2", 0.0, "3"),
        ("\\boxed{1} and \\boxed{2}", "\\{1, 2\\}", 1.0, "{1, 2}"),
        ("46 is it: \\boxed{}", "46", 0.0, ""),
        ("46 is it: \\boxed{46", "46", 0.0, ""),
        ("\\boxed{46}, and not 47", "46", 1.0, "46"),
    ],
)
def test_of_several_boxes_the_last_one_counts(response: str, label: str, expected: float, answer: str) -> None:
    """And an empty box is no answer, whatever stands before."""
    assert grade(response, label) == (expected, answer)


def test_a_response_that_was_cut_has_no_answer() -> None:
    prompt = Prompt(id="p", token_ids=np.array([1]), text="", label="46")
    for text in ("\\boxed{46}, but let us", "12 + 34 = 46 and"):
        cut = replace(Sample.written(prompt, text=text), stop_reason=StopReason.LENGTH)
        assert score(sample=cut) == {"reward": 0.0, "answer": ""}
