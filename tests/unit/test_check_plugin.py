"""`megatron-rl check-plugin --data FILE`: what reads fields of a row is tried on one that has them."""

from pathlib import Path

import pytest

from megatron_rl.cli import main

PLUGINS = '''
import time

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

class Loose:
    tools = ()

class Late(Environment):
    def __init__(self, *, part: str):
        self.part = part

    def reset(self, *, prompt):
        time.sleep(20 * (self.part == "reset"))

    def wait(self) -> str:
        """Wait."""
        time.sleep(20 * (self.part == "the tool wait"))
        return "4"

    tools = (wait,)

    def step(self, *, message):
        time.sleep(20 * (self.part == "step"))
        return Reply(done=True, reward=0)
'''


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


def test_a_model_that_is_not_there_is_no_fault_of_the_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plugins_by_row.py").write_text(PLUGINS)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["check-plugin", "plugins_by_row:Bare", "--model", str(tmp_path / "none")]) == 2
    said = capsys.readouterr()
    assert "none, which is not a directory" in said.err and not said.out


@pytest.mark.parametrize("part", ["reset", "step", "the tool wait"])
def test_the_part_without_an_answer_is_named(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plugins_by_row.py").write_text(PLUGINS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("megatron_rl.runtime.plugin_contracts.PLUGIN_PROBE_S", 3.0)
    assert main(["check-plugin", "plugins_by_row:Late", "--args", f"part={part}"]) == 2
    assert f"has not ended {part} after 3 s" in capsys.readouterr().out


def test_an_end_without_a_reward_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plugins_by_row.py").write_text(PLUGINS)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["check-plugin", "plugins_by_row:Bare"]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("note") and "reward.function" in line]


def test_a_class_of_no_kind_is_told_the_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plugins_by_row.py").write_text(PLUGINS)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["check-plugin", "plugins_by_row:Loose"]) == 2
    assert "write `class Name(Environment)`, or give --kind" in capsys.readouterr().err
