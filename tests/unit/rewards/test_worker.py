"""What a worker answers for a call that fails."""

from pathlib import Path

import pytest

from megatron_rl.rewards.worker import call_all, read_result
from megatron_rl.types import Prompt, RewardOutcome, Sample

MODULE = """
def score(*, sample):
    raise ValueError("\\n\\n  the label is no number\\nFor help see https://example.invalid/errors")
"""


def test_an_error_is_named_by_its_first_line_that_is_not_blank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rewards_of_many_lines.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    sample = Sample.written(Prompt(id="p", token_ids=[1], text="1"), text="")
    [reward], _ = call_all("rewards_of_many_lines:score", "{}", samples=[sample], form="sample", call_timeout_s=1.0)
    assert reward.outcome is RewardOutcome.ERROR
    assert reward.message.splitlines()[0] == "ValueError: the label is no number"


@pytest.mark.parametrize(
    ("result", "reward", "components", "answer"),
    [
        (0.5, 0.5, {}, None),
        ({"reward": 1, "format": 0.5}, 1.0, {"format": 0.5}, None),
        ({"reward": 0.0, "answer": "1/2"}, 0.0, {}, "1/2"),
        ({"reward": 0.0, "answer": None}, 0.0, {}, ""),
    ],
)
def test_an_extracted_answer_is_no_component(result: object, reward: float, components: dict[str, float], answer: str | None) -> None:
    assert read_result(result, name="f") == (reward, components, answer)


def test_an_answer_of_another_type_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"f returned for 'answer' 3\.5 of type float, needs a text, or None for no answer"):
        read_result({"reward": 1.0, "answer": 3.5}, name="f")
