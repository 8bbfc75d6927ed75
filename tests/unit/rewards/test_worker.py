"""What a worker answers for a call that fails."""

from pathlib import Path

import pytest

from megatron_rl.rewards.worker import call_all
from megatron_rl.types import Prompt, RewardOutcome, Sample

MODULE = """
def score(*, sample):
    raise ValueError("\\n\\n  the label is no number\\nFor help see https://example.invalid/errors")
"""


def test_an_error_is_named_by_its_first_line_that_is_not_blank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rewards_of_many_lines.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    sample = Sample.written(Prompt(id="p", token_ids=[1], text="1"), text="")
    [reward], _ = call_all("rewards_of_many_lines:score", "{}", samples=[sample])
    assert reward.outcome is RewardOutcome.ERROR
    assert reward.message.splitlines()[0] == "ValueError: the label is no number"
