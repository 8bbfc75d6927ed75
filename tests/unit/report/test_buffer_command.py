"""`megatron-rl buffer` and its reader, beside a run that has the file open, after a kill, and on files that are none."""

import dataclasses
import json
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

from megatron_rl.cli import main
from megatron_rl.config.settings import Settings
from megatron_rl.data.buffer import Buffer
from megatron_rl.data.recorded import Recorded
from megatron_rl.errors import UserError
from megatron_rl.types import Failure, Group, Prompt, Reward, RewardOutcome, Sample, StopReason

ODD = "\x1b[31mred\x9b2J\u202egnp\x00 \x7f\r\nline"


def make_group(number: int, *, version: int = 0) -> Group:
    """A group of a scored sample and one whose reward failed."""
    prompt = Prompt(id=f"0-{number}", token_ids=np.array([1, 2]), text=f"{number} + 1", label=str(number), metadata={"k": number})
    samples = []
    for index in range(2):
        reward = Reward(RewardOutcome.SCORED, 0.5, components={"format": 1.0}) if not index else Reward(RewardOutcome.ERROR, message="a\nb")
        sample = Sample(
            group_id=prompt.id, index=index, prompt=prompt, response_ids=np.array([3, 4, 5]), loss_mask=np.array([True, False, True]),
            rollout_log_probs=np.array([-1.0, np.nan, -2.0]), weight_versions=np.array([version, -1, version]),
            stop_reason=StopReason.LENGTH if index else StopReason.STOP, response_text=ODD, reward=reward,
        )  # fmt: skip
        samples.append(sample)
    other = dataclasses.replace(samples[1], prompt=dataclasses.replace(prompt, text="own", token_ids=np.array([9])))
    return Group(prompt.id, prompt, (samples[0], other), (Failure("timeout", "late"),) * (number == 0))


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """A run directory whose buffer is open: 20 groups of step 1, one left out, three of step 2, one done, one pending."""
    (tmp_path / "run").mkdir()
    with Buffer(tmp_path / "run" / "buffer.sqlite") as buffer:
        groups = [make_group(number, version=number >= 20) for number in range(25)]
        buffer.add_prompts(group.prompt for group in groups)
        buffer.take_pending(24)
        for group in groups[:24]:
            buffer.put_done(group)
        buffer.consume({f"0-{number}": "too easy" if number == 3 else None for number in range(20)}, step=1)
        buffer.consume({f"0-{number}": None for number in range(20, 23)}, step=2)
        yield tmp_path / "run"


Said = Callable[..., str]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """What `megatron-rl buffer ...` prints; its status has to be 0."""

    def call(*words: object) -> str:
        assert main(["buffer", *map(str, words)]) == 0
        return capsys.readouterr().out

    return call


def test_steps_and_counts_beside_the_run(run: Path, said: Said) -> None:
    names, first, second, states = said("ls", run).splitlines()
    assert names.split()[:6] == ["step", "groups", "trained", "samples", "scored", "reward"]
    assert first.split() == ["1", "20", "19", "40", "20", "0.5", "3", "0.5", "0", "0", "0"]
    assert second.split() == ["2", "3", "3", "6", "3", "0.5", "3", "0.5", "1", "1", "0"]
    assert states == "23 consumed, 1 done, 1 pending"
    found = json.loads(said("stats", run, "--json"))
    assert found["groups left out, by reason"] == {"too easy": 1}
    assert found["samples by outcome of the reward"] == {"error": 24, "scored": 24}
    assert found["failed trajectories by cause"] == {"timeout": 1} and found["samples by age in steps"] == {"0": 46}
    assert found["reward"]["50 %"] == found["reward"]["mean"] == 0.5 and found["response tokens"]["100 %"] == 3
    assert "groups by state: consumed 23, done 1, pending 1" in said("stats", run)


def test_percentiles_are_those_of_a_sort(tmp_path: Path) -> None:
    values = np.random.default_rng(0).permutation(101) / 4
    with Buffer(tmp_path / "buffer.sqlite") as buffer:
        group = make_group(0)
        samples = tuple(
            dataclasses.replace(group.samples[0], index=index, reward=Reward(RewardOutcome.SCORED, value))
            for index, value in enumerate(values)
        )
        buffer.add_prompts([group.prompt])
        buffer.take_pending(1)
        buffer.put_done(dataclasses.replace(group, samples=samples))
    with Recorded(tmp_path) as recorded:
        found = recorded.statistics()["reward"]
    expected = {f"{percent} %": float(np.percentile(values, percent, method="lower")) for percent in (0, 10, 50, 90, 99, 100)}
    assert found == {**expected, "mean": values.mean()}


def test_shown_text_moves_no_terminal(run: Path, said: Said) -> None:
    text = said("show", run, "--step", "1", "--limit", "3")
    assert all(letter.isprintable() or letter == "\n" for letter in text)
    assert "\\x1b[31mred\\x9b2J\\u202egnp\\x00 \\x7f\\r\nline" in text
    assert text.count("── sample") == 3 and text.count("── group 0-0, step 1, label '0'") == 2, (
        "a prompt of its own stands before the sample"
    )
    assert "reward 0.5, format 1, 3 tokens, ended by stop, versions 0 to 0" in text and "no reward (error): a, 3 tokens" in text
    assert "left out: too easy" in said("show", run, "--group", "0-3")
    lines = said("export", run)
    assert lines.isascii() and all(letter.isprintable() or letter == "\n" for letter in lines)
    assert len(lines.splitlines()) == 48 and json.loads(lines.splitlines()[0])["text"] == ODD


def test_exported_files_hold_every_sample(run: Path, said: Said, tmp_path: Path) -> None:
    lines, table = tmp_path / "all.jsonl", tmp_path / "all.parquet"
    assert said("export", run, "--tokens", "--out", lines) == f"{lines}: 48 samples\n"
    said("export", run, "--tokens", "--out", table)
    rows = [json.loads(line) for line in lines.read_text("utf-8").split("\n")[:-1]]
    columns = pyarrow.parquet.read_table(table).to_pylist()
    assert columns == [{**row, "components": json.dumps(row["components"]), "metadata": json.dumps(row["metadata"])} for row in rows]
    assert rows[0] == {
        "group": "0-0", "index": 0, "step": 1, "state": "consumed", "trained": True, "rejection": None, "trajectory": None, "role": None,
        "prompt": "0 + 1", "label": "0", "text": ODD, "outcome": "scored", "reward": 0.5, "components": {"format": 1.0}, "message": "",
        "stop": "stop", "num_tokens": 3, "num_trainable_tokens": 2, "min_version": 0, "max_version": 0, "metadata": {},
        "prompt_ids": [1, 2], "response_ids": [3, 4, 5], "loss_mask": [1, 0, 1], "rollout_log_probs": [-1.0, None, -2.0],
        "weight_versions": [0, -1, 0],
    }  # fmt: skip
    assert (rows[1]["prompt"], rows[1]["prompt_ids"]) == ("own", [9])
    assert [row["step"] for row in rows] == [1] * 40 + [2] * 6 + [None] * 2
    said("export", run, "--step", 2, "--out", tmp_path / "two.sqlite")
    with Recorded(tmp_path / "two.sqlite") as copy, Recorded(run) as whole:
        assert len(list(whole.samples(step=1))) == 40
        assert list(copy.samples(tokens=True)) == list(whole.samples(step=2, tokens=True))
    assert not list(tmp_path.glob("*.partial")) + list(tmp_path.glob(".*.partial"))


def test_pruned_samples_have_no_tokens(tmp_path: Path, said: Said) -> None:
    with Buffer(tmp_path / "buffer.sqlite") as buffer:
        groups = [make_group(number) for number in range(2)]
        buffer.add_prompts(group.prompt for group in groups)
        buffer.take_pending(2)
        for group in groups:
            buffer.put_done(group)
        buffer.consume({"0-0": None, "0-1": None}, step=1)
        buffer.prune(1, keep=1)
    rows = [json.loads(line) for line in said("export", tmp_path, "--tokens").splitlines()]
    arrays = ("prompt_ids", "response_ids", "loss_mask", "rollout_log_probs", "weight_versions")
    assert [[row[name] is None for name in arrays] for row in rows] == [[False] * 5] * 2 + [[False, *[True] * 4], [True] * 5]
    assert said("ls", tmp_path).splitlines()[1].split()[-1] == "1"


def test_a_reader_leaves_the_file_as_it_was(run: Path, tmp_path: Path) -> None:
    with Recorded(run) as recorded, pytest.raises(UserError, match="readonly"):
        recorded.read("DELETE FROM groups")
    # After a kill the log is there, and its rows are read.
    dead = tmp_path / "dead"
    dead.mkdir()
    for name in ("buffer.sqlite", "buffer.sqlite-wal"):
        (dead / name).write_bytes((run / name).read_bytes())
    before = {path.name: path.read_bytes() for path in dead.iterdir()}
    with Recorded(dead) as recorded:
        assert len(list(recorded.samples())) == 48
    assert {name: (dead / name).read_bytes() for name in before} == before


def test_a_page_is_all_that_is_read_at_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Recorded(run) as recorded:
        samples, sizes, read = recorded.samples(), [], recorded.read
        monkeypatch.setattr(recorded, "read", lambda *query: (found := read(*query), sizes.append(len(found)))[0])
        assert len(list(samples)) == 48
    assert max(sizes) == 16 and sizes.count(16) == 1


def test_samples_are_generated_into_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The settings of training do not matter, and what is unfinished is beside the file until it is whole."""
    asked: list[tuple[Settings, int]] = []

    def generate(settings: Settings, *, count: int) -> Path:
        asked.append((settings, count))
        settings.run.directory.mkdir()
        with Buffer(settings.run.directory / "buffer.sqlite") as buffer:
            buffer.add_prompts([(group := make_group(1)).prompt])
            buffer.take_pending(1)
            buffer.put_done(group)
        return settings.run.directory / "buffer.sqlite"

    monkeypatch.setattr("megatron_rl.cli._session", lambda runtime: SimpleNamespace(generate=generate))
    (tmp_path / "run.yaml").write_text(
        "run: {directory: x, seed: 3}\nmodel: {path: m}\ndata: {train: t.jsonl}\nrollout: {max_staleness: 2}\n"
    )
    words = ["rollout", str(tmp_path / "run.yaml"), "training.topology.num_ranks=5", "eval.sets.a=b.jsonl", "--out"]
    assert main([*words, str(tmp_path / "out.jsonl"), "--count", "7"]) == 0
    assert [json.loads(line)["index"] for line in (tmp_path / "out.jsonl").read_text().splitlines()] == [0, 1]
    assert main([*words, str(tmp_path / "out.sqlite")]) == 0
    (first, count), (_, default) = asked
    assert (count, default, first.run.seed, first.rollout.max_staleness, first.eval.sets) == (7, 64, 3, 0, {})
    assert first.run.directory == tmp_path / "out.jsonl.partial" and not first.run.directory.exists()
    capsys.readouterr()
    assert main([*words, str(tmp_path / "out.jsonl")]) == 2 and "exists, needs a new file" in capsys.readouterr().err
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        (["show", "{run}", "--step", "9"], "no sample of step 9"),
        (["export", "{run}", "--group", "x", "--out", "new.jsonl"], "no sample of group x"),
        (["export", "{run}", "--out", "new.csv"], "ends in .jsonl, .parquet or .sqlite"),
        (["export", "{run}", "--out", "{run}/buffer.sqlite"], "exists, needs a new file"),
        (["export", "{run}", "--group", "0-1", "--out", "new.sqlite"], "--group"),
        (["ls", "{run}/none"], "does not exist"),
        (["ls", "{run}/other.sqlite"], "the database of another program"),
    ],
)
def test_what_cannot_be_read_is_said(
    run: Path, words: list[str], needed: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run)
    with sqlite3.connect(run / "other.sqlite") as other:
        other.execute("CREATE TABLE other (x)")
    assert main(["buffer", *(word.format(run=run) for word in words)]) == 2
    assert needed in capsys.readouterr().err and not [name for name in os.listdir(run) if name.startswith(("new", ".new"))]
