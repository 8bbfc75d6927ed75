"""`megatron-rl score`: outcomes, slow calls and differences of rewards of a file, by the real workers."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.cli import main

MODULE = """
def longest(*, samples):
    most = max(len(sample.response_text) for sample in samples)
    return [float(len(sample.response_text) == most) for sample in samples]

def fussy(*, sample):
    if "?" in sample.response_text:
        raise KeyError("no such thing")
    return {"reward": 1.0, "tokens": len(sample.response_ids), "cut": sample.truncated}
"""
ROWS: list[dict[str, Any]] = [
    {"prompt": "1+1=", "label": "2", "response": "\\boxed{2}", "old": 1.0},
    {"prompt": "1+2=", "label": "3", "text": "\\boxed{3.0}", "old": 0.0, "num_tokens": 7},
    {"prompt": [{"role": "user", "content": "1+3="}], "label": "4", "response": "?", "old": None},
    {"prompt": "1+4=", "label": "5", "response": "\\boxed{5}", "stop_reason": "length", "old": 1.0},
    {"prompt": "1+4=", "label": "5", "response": "5 or 55", "old": 0.0},
]


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "rewards_of_a_file.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_outcomes_and_differences_come_as_table_and_json(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewards = ["--reward", "math", "--reward", "{function: exact, args: {extract: 'boxed.(.*).'}}", "--reward", "rewards_of_a_file:fussy"]
    assert main(["score", str(rows), *rewards, "--column", "old", "--out", "out.json"]) == 0
    found = json.loads(Path("out.json").read_text())
    assert found["rows"] == {
        "math": [1.0, 1.0, 0.0, 0.0, 0.0],
        "exact": [1.0, 0.0, 0.0, 0.0, 0.0],
        "rewards_of_a_file:fussy": [1.0, 1.0, None, 1.0, 1.0],
        "column old": [1.0, 0.0, None, 1.0, 0.0],
    }
    assert [score["outcomes"] for score in found["scores"]] == [{"scored": 5}, {"scored": 5}, {"scored": 4, "error": 1}, {"scored": 4}]
    assert [score["mean"] for score in found["scores"]] == [0.4, 0.2, 1.0, 0.5]
    assert [score["failures"] for score in found["scores"]] == [{}, {}, {"KeyError: 'no such thing'": 1}, {}]
    assert len(found["scores"][0]["slowest"]) == 5 and found["scores"][0]["calls_per_second"] > 0
    differences = {tuple(each["of"]): each for each in found["differences"]}
    of_math = differences["math", "column old"]
    assert (of_math["both_scored"], of_math["first_higher"], of_math["second_higher"]) == (4, 1, 1)
    assert of_math["rows"] == [[f"{rows}:2", 1.0, 0.0], [f"{rows}:4", 0.0, 1.0]]
    assert differences["math", "exact"]["first_higher"] == 1 and differences["math", "exact"]["second_higher"] == 0
    out = capsys.readouterr().out
    assert "math above column old in 1 and below in 1 of 4 rows that both scored" in out
    assert f"{rows}:2: 1 and 0, label '3', ends '\\\\boxed{{3.0}}'" in out and "1 of KeyError: 'no such thing'" in out


def test_one_function_with_other_arguments_has_its_own_column(rows: Path) -> None:
    rewards = ["--reward", "exact", "--reward", "{function: exact, args: {extract: 'boxed.(.*).'}}"]
    assert main(["score", str(rows), *rewards, "--out", "out.json"]) == 0
    found = json.loads(Path("out.json").read_text())
    assert found["rows"] == {"exact (1)": [0.0] * 5, "exact (2)": [1.0, 0.0, 0.0, 0.0, 0.0]}
    assert found["differences"][0]["of"] == ["exact (1)", "exact (2)"]


def test_groups_are_rows_of_one_prompt(rows: Path) -> None:
    assert main(["score", str(rows), "--reward", "rewards_of_a_file:longest", "--out", "out.json"]) == 0
    assert json.loads(Path("out.json").read_text())["rows"] == {"rewards_of_a_file:longest": [1.0, 1.0, 1.0, 1.0, 0.0]}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--reward", "maths"], "'maths', needs the form package.module:function, or one of the names math, code"),
        (["--reward", "{function: math, arg: 1}"], "arg: Extra inputs are not permitted"),
        (["--reward", "math", "--column", "older"], "rows.jsonl:1: the column 'older' is None, needs a number, or null"),
        (["--reward", "math", "--label-key", "a.b"], "no row has the field 'a.b'"),
    ],
)
def test_what_cannot_be_scored_is_said(rows: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", str(rows), *words]) != 0
    assert message in capsys.readouterr().err


def test_a_row_without_a_response_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
    assert main(["score", str(tmp_path / "rows.jsonl"), "--reward", "math"]) != 0
    assert "rows.jsonl:1: no field 'response' or 'text' or 'completion' with a text" in capsys.readouterr().err
