import threading

import numpy as np
import pytest

from megatron_rl.rewards.math import score
from megatron_rl.types import Prompt, Sample, StopReason


def grade(response: str, label: str | None) -> float:
    nothing = np.empty(0)
    arrays = {"response_ids": nothing, "loss_mask": nothing, "rollout_log_probs": nothing, "weight_versions": nothing}
    prompt = Prompt(id="p", token_ids=np.array([1]), text="", label=label)
    return score(sample=Sample(group_id="p", index=0, prompt=prompt, response_text=response, stop_reason=StopReason.STOP, **arrays))


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        ("The answer is \\boxed{46}.", "46", 1.0),
        ("The answer is \\boxed{47}.", "46", 0.0),
        ("so 12 + 34 = 46", "46", 1.0),
        ("$\\frac{1}{2}$", "0.5", 1.0),
        ("\\boxed{0.75}", "\\frac{3}{4}", 1.0),
        ("no idea", "46", 0.0),
        ("", "46", 0.0),
        ("\\boxed{2x+2}", "$2(x+1)$", 1.0),
    ],
)
def test_answers_are_compared_as_mathematics(response: str, label: str, expected: float) -> None:
    assert grade(response, label) == expected


def test_it_works_outside_of_the_main_thread() -> None:
    values: list[float] = []
    thread = threading.Thread(target=lambda: values.append(grade("\\boxed{46}", "46")))
    thread.start()
    thread.join()
    assert values == [1.0]


@pytest.mark.parametrize("label", [None, "", " "])
def test_a_label_without_mathematics_is_an_error_not_a_zero(label: str | None) -> None:
    with pytest.raises(ValueError, match="label"):
        grade("\\boxed{46}", label)
