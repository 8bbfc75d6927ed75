"""`megatron-rl check-plugin --data FILE`: what reads fields of a row is tried on one that has them."""

from pathlib import Path

import pytest

from megatron_rl.cli import main

PLUGINS = """
from megatron_rl import Environment, Reply

def good(*, sample):
    return len(sample.response_text)

def of_a_row(*, sample):
    return sample.prompt.metadata["weight"] * len(sample.response_text)

class Keyed(Environment):
    def reset(self, *, prompt):
        self.weight = prompt.metadata["weight"]

    def step(self, *, message):
        return Reply(done=True, reward=self.weight)

class Bare(Environment):
    pass
"""


@pytest.mark.parametrize("name", ["of_a_row", "Keyed"])
def test_a_plugin_is_tried_on_a_row_with_its_fields(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plugins_by_row.py").write_text(PLUGINS)
    (rows := tmp_path / "rows.jsonl").write_text('{"prompt": "2+2=", "label": "4", "weight": 0.5}\n')
    monkeypatch.syspath_prepend(tmp_path)
    words = ["check-plugin", f"plugins_by_row:{name}"]
    assert main(words) == 2 and "give --data FILE, whose first row has the fields" in capsys.readouterr().out
    assert main([*words, "--data", str(rows)]) == 0 and "BROKEN" not in capsys.readouterr().out
    assert main([*words, "--data", str(tmp_path / "none.jsonl")]) == 2 and "none.jsonl does not exist" in capsys.readouterr().err
    assert main(["check-plugin", "plugins_by_row:good", "--kind", "filter", "--data", str(rows)]) == 2
    assert "--data is" in (said := capsys.readouterr().err) and "the kind filter gets no prompt; leave it out" in said


def test_an_end_without_a_reward_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plugins_by_row.py").write_text(PLUGINS)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["check-plugin", "plugins_by_row:Bare"]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("note") and "reward.function" in line]
