"""The reply of a judge: one verdict, in the last line, or none at all."""

import pytest

from megatron_rl.rewards.servers import CORRECT, verdict_in


@pytest.mark.parametrize(
    ("text", "value"),
    [("Verdict: correct", 1.0), ("It differs.\n\n**Verdict:** Incorrect.\n", 0.0), ("Verdict: 4", 0.75)],
)
def test_the_last_line_is_the_verdict(text: str, value: float) -> None:
    assert verdict_in(text, {**CORRECT, "4": 0.75}, is_cut=False) == value


@pytest.mark.parametrize(
    ("text", "is_cut", "got"),
    [
        ("", False, "0 verdicts"),
        ("It is correct", False, "0 verdicts"),
        ("Verdict: maybe", False, "1 verdicts"),
        ("Verdict: correct or incorrect", False, "1 verdicts"),
        ("Verdict: incorrect\nVerdict: correct", False, "2 verdicts"),
        ("Verdict: correct\nBut I doubt it", False, "1 verdicts"),
        ("Verdict: correct", True, "cut"),
    ],
)
def test_anything_else_is_no_reward(text: str, is_cut: bool, got: str) -> None:
    with pytest.raises(ValueError, match=rf"{got}.*needs one verdict in the last line: Verdict: correct \| incorrect"):
        verdict_in(text, CORRECT, is_cut=is_cut)
