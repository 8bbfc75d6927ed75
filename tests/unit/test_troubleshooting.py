"""examples/troubleshooting: its commands, its faults, and what it says that a run with each of them says."""

import json
import re
import runpy
import shlex
from pathlib import Path

import pytest
from written_run import group, write_run

from examples.troubleshooting.broken import boxed, write_rows
from megatron_rl.cli import main
from megatron_rl.config.load import load_settings
from megatron_rl.evaluation.graded_answers import Answer, AnswerFile
from megatron_rl.observe.advice import advise
from megatron_rl.observe.summary import Summary, write_summary
from megatron_rl.report import curves
from megatron_rl.report import page as page_module
from megatron_rl.report.curves import Panel
from megatron_rl.types import Prompt, Sample

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "examples" / "troubleshooting" / "README.md").read_text()
LOOKING, MAKING = (
    [shlex.split(line) for line in block.replace("\\\n", " ").splitlines() if line]
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
)
RUNS = json.loads((ROOT / "tests" / "data" / "rows" / "runs.json").read_text())
FAULTS = {"template": "wrong_template", "label": "no_label", "reward": "blind_reward", "rate": "high_rate"}
"""Runs of the page by their directories, and their recorded rows."""


def write_one(name: str, *, reward: float) -> None:
    """A finished run of two steps with an evaluation at step 20."""
    directory = write_run(Path("runs") / name, [[group(f"0-{step}", ["41", "42"], [0.0, reward])] for step in range(2)])
    rest = {"evaluation_before": {}, "evaluation_after": {}, "seconds": {}, "peak_memory_bytes": 0, "checkpoint": None, "go_on": ""}
    write_summary(directory, Summary(status="finished", steps=2, seed=1, **rest))  # type: ignore[arg-type]
    file = AnswerFile(directory / "evaluation" / "step-000020" / "greedy.jsonl", facts={}, num_samples=1, goes_on=False)
    asked = {"prompt_id": "greedy-0", "index": 0, "prompt": "6*7=", "label": "42", "text": "42" if reward else "41"}
    answer = Answer(**asked, cause=None, reward=reward, correct=reward == 1.0)  # type: ignore[arg-type]
    file.finish([[answer]], {"estimates": {name: {"value": reward} for name in ("accuracy", "reward")}})


def test_every_command_that_looks_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(page_module, "_charts", lambda: None)
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "rewards.py").write_text("def score(*, sample):\n    return float(sample.response_text == sample.prompt.label)\n")
    for name, reward in (("first", 0.0), ("second", 1.0)):
        write_one(name, reward=reward)
    said = {}
    for program, *words in LOOKING:
        assert program == "megatron-rl" and main(words) == 0, words
        said[words[0]] = capsys.readouterr().out
    assert list(said) == ["status", "samples", "score", "report", "compare"]
    assert re.search(r"my.rewards:score +│ 1 +│ 0 +│ 0 +│ 0 ", said["score"]), "one answer is scored, and the mean is 0"
    assert "runs/first: finished" in said["status"] and "label  42" in said["samples"]
    assert said["report"] == "runs/first/report.html\n" and "greedy accuracy 0.0000 → 1.0000" in said["compare"]


def test_the_runs_of_the_page_have_their_faults_alone(tmp_path: Path) -> None:
    made, *trained = (words for words in MAKING if words[0] == "megatron-rl")
    assert [words[2:3] for words in (made, *trained[:-1])] == [["examples/arithmetic/sft.yaml"], *[["examples/arithmetic/grpo.yaml"]] * 6]
    task = load_settings(ROOT / made[2]).data.train
    assert isinstance(task, Path)
    files = {task.with_name(f"{name}.jsonl") for name in ("train", "no_equals", "no_label")}
    directories = []
    for _, _, path, *overrides in trained[:-1]:
        settings = load_settings(ROOT / path, overrides)
        directories.append(settings.run.directory.name)
        assert settings.data.train in files
    assert directories == [*FAULTS, "collapse", "stale"] and trained[-1] == ["megatron-rl", "status", "runs/broken"]
    scripts = [words[1:] for words in MAKING if words[0] == "python"]
    assert [words[1:] for words in scripts] == [["runs/arithmetic/task"]] * 2 + [["runs/broken", "curves.png"]]
    assert all((ROOT / words[0]).exists() for words in scripts)


def test_the_picture_has_a_panel_for_each_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*FAULTS.values(), "stale"):
        (tmp_path / name).mkdir()
        rows = [json.dumps({"step": int(step), **row}) for step, row in RUNS[name].items()]
        (tmp_path / name / "metrics.jsonl").write_text("".join(f"{row}\n" for row in rows))
    drawn: list[Panel] = []
    monkeypatch.setattr(curves, "_draw_panel", lambda axis, panel, steps: drawn.append(panel))
    main_of = runpy.run_path(str(ROOT / "examples" / "troubleshooting" / "draw_curves.py"))["main"]
    main_of(tmp_path, tmp_path / "curves.png")
    assert [panel.title for panel in drawn] == sorted((*FAULTS.values(), "stale")) and (tmp_path / "curves.png").stat().st_size
    assert drawn[-1].curves["reward"] == "wrong_template/rollout/reward" and '<img src="curves.png"' in PAGE


def test_a_page_has_the_sentence_of_each_fault() -> None:
    text = " ".join(PAGE.replace("\n> ", " ").split())
    for name in (*FAULTS.values(), "collapse", "stale"):
        (sentence,) = advise({int(step): row for step, row in RUNS[name].items()})
        assert sentence in text
    first, last = (f"{RUNS['solved'][step]['rollout/reward']:.2f}" for step in ("1", "15"))
    assert f"from {first} to {last} in 15 steps" in text and f"± {0.5 / 8**0.5:.2f}" in text


def test_rows_and_reward_are_broken_as_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "57+68=", "label": "125"}\n')
    monkeypatch.setattr("sys.argv", ["broken.py", str(tmp_path)])
    runpy.run_path(str(ROOT / "examples" / "troubleshooting" / "broken.py"), run_name="__main__")
    assert json.loads((tmp_path / "no_equals.jsonl").read_text()) == {"prompt": "57+68", "label": "125"}
    assert json.loads((tmp_path / "no_label.jsonl").read_text()) == {"prompt": "57+68=", "answer": "125"}
    (tmp_path / "train.jsonl").write_text("")
    write_rows(tmp_path)
    assert (tmp_path / "no_label.jsonl").read_text() == ""
    prompt = Prompt("0", [1], "57+68=", label="125")  # type: ignore[arg-type]
    assert [boxed(sample=Sample.written(prompt, [1], text=text)) for text in ("125", "\\boxed{125}", "\\boxed{12}")] == [0.0, 1.0, 0.0]
