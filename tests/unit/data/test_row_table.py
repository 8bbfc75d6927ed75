"""Rows that stay on the disk, rows that are left out, and labels that no reward function scores."""

import asyncio
import errno
import json
import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from megatron_rl.config.data_settings import DataFiles, DataSettings
from megatron_rl.config.load import load_settings
from megatron_rl.data import row_table
from megatron_rl.data.row_table import Rows, read_first_row, read_rows
from megatron_rl.data.source import RunPrompts
from megatron_rl.errors import UserError
from megatron_rl.rewards import gold
from megatron_rl.rewards.gold import Score, check_gold
from megatron_rl.rewards.math import score as math_score
from megatron_rl.rewards.runner import _killed
from megatron_rl.rewards.worker import late
from megatron_rl.types import Reward, RewardOutcome, Sample


def records(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{number} + é " + "x" * (number % 7), "label": str(number), "info": {"n": number}} for number in range(count)]


def read(path: Path, **settings: Any) -> Rows:
    return read_rows(DataFiles(path=path), settings=DataSettings(train=path, **settings))


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=900)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    else:
        path.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows), "utf-8")
    return path


@pytest.mark.parametrize("small_bytes", [0, 2**26])
@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_rows_come_in_any_order_as_in_a_list(tmp_path: Path, kind: str, small_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_table, "_SMALL_BYTES", small_bytes)
    expected = records(2500)
    path = write(tmp_path / f"rows.{kind}", expected)
    rows = read(path)
    assert len(rows) == 2500 and rows.is_labelled.all() and len(set(rows.keys.tolist())) == 2500
    for index in (*np.random.default_rng(0).permutation(2500)[:200], 0, 899, 900, 1023, 1024, 1799, 2499, -1):
        row, record = rows[int(index)], expected[index]
        assert (row.prompt, row.label, row.metadata) == (record["prompt"], record["label"], {"info": record["info"]})
        line = index % 2500 * (2 if kind == "jsonl" else 1) + 1
        assert row.origin == f"{path}:{line}"
    assert [row.label for row in rows[2:9:3]] == ["2", "5", "8"]
    assert [row.label for row in rows.take(np.array([7, 3]))] == ["7", "3"]
    both = Rows.joined([rows.take(slice(1, 3)), read(write(tmp_path / "other.jsonl", records(2)))])
    assert [row.label for row in both] == ["1", "2", "0", "1"] and "other" in both[-1].origin
    with pytest.raises(IndexError):
        rows[2500]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_large_file_needs_little_memory(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """20 MB of rows, in one row group of a parquet file."""
    monkeypatch.setattr(row_table, "_SMALL_BYTES", 0)
    texts = np.random.default_rng(0).bytes(10**7).hex()
    rows = [{"prompt": texts[2000 * number : 2000 * number + 2000], "label": "1"} for number in range(10**4)]
    path = tmp_path / f"rows.{kind}"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path) if kind == "parquet" else write(path, rows)
    del rows, texts
    checked, most, arrow = row_table.check_row, [], pyarrow.total_allocated_bytes()

    def noting(*arguments: Any, **keywords: Any) -> Any:
        most.append(pyarrow.total_allocated_bytes() - arrow)
        return checked(*arguments, **keywords)

    monkeypatch.setattr(row_table, "check_row", noting)
    tracemalloc.start()
    try:
        found = read(path)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found) == 10**4 and kept < 2**20 and peak < 2**23 and max(most) < 2**23
    assert pyarrow.total_allocated_bytes() - arrow < 2**20


def test_a_file_that_changes_beside_the_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "rows.jsonl", records(3))
    small = read(path)
    monkeypatch.setattr(row_table, "_SMALL_BYTES", 0)
    large = read(path)
    os.rename(path, tmp_path / "old.jsonl")
    for change in (lambda: None, lambda: shutil.copy(tmp_path / "old.jsonl", path), lambda: path.write_text("other")):
        change()
        with pytest.raises(UserError, match=r"rows\.jsonl was changed while the run reads it; restore it"):
            _ = large[2]
    assert small[2].label == "2"


def test_many_small_files_are_a_large_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        write(tmp_path / f"{number}.jsonl", records(50))
    size = (tmp_path / "0.jsonl").stat().st_size
    for limit, kept in ((4 * size, True), (4 * size - 1, False)):
        monkeypatch.setattr(row_table, "_SMALL_BYTES", limit)
        assert [bool(file._kept) for file in read(tmp_path / "*.jsonl")._files] == [kept] * 4


def test_a_full_disk_is_no_fault_of_the_parquet_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pyarrow.ipc, "new_file", full)
    with pytest.raises(UserError, match=r"cannot write .*megatron-rl-.*\.arrow: No space left on device .*free"):
        read(write(tmp_path / "rows.parquet", records(2)))


GOOD = {"prompt": "1+1", "label": "2"}
BAD = ['{"prompt": ', json.dumps({"label": "3"}), json.dumps({"prompt": "漢"}), json.dumps({"prompt": [{"role": "user", "content": "1"}]})]
Prompts = Callable[..., RunPrompts]


@pytest.fixture
def prompts(tiny_model: Callable[..., Path], tmp_path: Path) -> Prompts:
    """The prompts of a file of these lines, with words of settings."""
    model = tiny_model()

    def make(lines: list[str], *words: str) -> RunPrompts:
        (tmp_path / "rows.jsonl").write_text("\n".join(lines), "utf-8")
        settings = load_settings(None, [f"run.directory={tmp_path}", f"model.path={model}", f"data.train={tmp_path}/rows.jsonl", *words])
        return RunPrompts.read(settings.model.path, settings.data, sets=settings.eval.sets, seed=0)

    return make


def test_bad_rows_are_left_out_within_a_limit(prompts: Prompts, tmp_path: Path) -> None:
    lines = [json.dumps(GOOD), *BAD, json.dumps(GOOD | {"prompt": "3"})]
    with pytest.raises(UserError, match=r"rows\.jsonl:2: not a JSON object"):
        prompts(lines)
    with pytest.raises(UserError, match=r"4 rows cannot be used, data\.max_bad_rows is 3; .*the first: .*:2: .*; the last: .*:5: "):
        prompts(lines, "data.max_bad_rows=3")
    found = prompts(lines, "data.max_bad_rows=4", "data.shuffle=false")
    assert [prompt.text for prompt in found.source.next_prompts(3)] == ["1+1", "3", "1+1"]
    assert len(found.source.lengths) == len(found.source.known) == 2
    assert any("4 rows of" in note and "left out, the first: " in note for note in found.notes)
    found.list_bad_rows(tmp_path / "logs" / "bad_rows.txt")
    listed = (tmp_path / "logs" / "bad_rows.txt").read_text().splitlines()
    assert [line.partition(": ")[0].rpartition(":")[2] for line in listed] == ["2", "3", "4", "5"]
    (tmp_path / "held.jsonl").write_text(BAD[0])
    with pytest.raises(UserError, match=r"held\.jsonl:1: not a JSON object"):
        prompts([json.dumps(GOOD)], f"eval.sets.own={tmp_path}/held.jsonl", "data.max_bad_rows=9")


def test_the_first_row_is_the_first_that_is_kept(tmp_path: Path) -> None:
    (tmp_path / "0.jsonl").write_text("\n".join(BAD[:2]))
    (tmp_path / "1.jsonl").write_text(json.dumps(GOOD))

    def first(limit: int, name: str = "*") -> str | list[dict[str, Any]]:
        files = DataFiles(path=tmp_path / f"{name}.jsonl")
        return read_first_row(files, settings=DataSettings(train=files.path, max_bad_rows=limit)).prompt

    assert first(2) == "1+1"
    for limit, words in ((0, r"0\.jsonl:1: not a JSON"), (1, r"2 rows cannot be used, data\.max_bad_rows is 1")):
        with pytest.raises(UserError, match=words):
            first(limit)
    with pytest.raises(UserError, match=r"no rows that can be used, needs at least one; .*0\.jsonl:1: not a JSON object"):
        first(2, "0")


def write_lines(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


TRIED: list[str | None] = []


async def scored(sample: Sample) -> Reward:
    TRIED.append(sample.prompt.label)
    try:
        found = math_score(sample=sample)
    except ValueError as error:
        return Reward(RewardOutcome.ERROR, message=f"ValueError: {error}\ntrace")
    return Reward(RewardOutcome.SCORED, float(found["reward"]))


def try_labels(found: RunPrompts, *words: str, score: Score = scored) -> None:
    settings = load_settings(None, ["run.directory=r", "model.path=m", "data.train=t", *words])
    asyncio.run(check_gold(found, settings.reward, score=score, sets=settings.eval.sets))


def test_labels_that_math_cannot_score_are_bad_rows(prompts: Prompts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = [json.dumps({"prompt": str(number), "label": label}) for number, label in enumerate(("12", "\\frac{1}{2}", "$3$", "(1, 2)"))]
    bad = [*good, json.dumps({"prompt": "9", "label": " "}), json.dumps({"prompt": "8"})]
    TRIED.clear()
    monkeypatch.setattr("megatron_rl.rewards.gold._AT_ONCE", 3)
    try_labels(prompts([*good, *good]))
    assert len(TRIED) == 4, "equal labels once"
    with pytest.raises(UserError, match=r"rows\.jsonl:5: the label ' ' cannot be scored \(ValueError: .*reward\.check_labels=false"):
        try_labels(prompts(bad))
    try_labels(prompts(bad), "reward.check_labels=false")
    try_labels(prompts(bad), "reward.function=my:own")
    found = prompts(bad, "data.max_bad_rows=1", "data.shuffle=false")
    try_labels(found)
    assert [prompt.label for prompt in found.source.next_prompts(6)] == ["12", "\\frac{1}{2}", "$3$", "(1, 2)", None, "12"]
    assert len(found.source.lengths) == len(found.source.known) == 5 and len(found.source.bad.reasons) == 1
    held = f"eval.sets.own={write_lines(tmp_path / 'held.jsonl', {'prompt': '1', 'label': ' '})}"
    with pytest.raises(
        UserError, match=r"eval\.sets\.own: .*held\.jsonl:1: the label ' ' .*; correct it, or set reward\.check_labels=false$"
    ):
        try_labels(prompts(good, held, "data.max_bad_rows=9"), held)
    # An answer that is read, but has no reward, is none either.
    monkeypatch.setattr(gold, "right_response", lambda *_: "\\boxed{7}")
    with pytest.raises(UserError, match=r"rows\.jsonl:1: the label '12' .* has the reward 0\.0"):
        try_labels(prompts(good))


class Slow:
    """A reward function whose first `num_lost` calls for the label 2 have no answer, with the calls for it."""

    def __init__(self, num_lost: int, lost: Reward) -> None:
        self.num_calls, self.num_lost, self.lost = 0, num_lost, lost

    async def __call__(self, sample: Sample) -> Reward:
        if sample.prompt.label == "2":
            self.num_calls += 1
            if self.num_calls <= self.num_lost:
                return self.lost
        return await scored(sample)


LOST = [
    Reward(RewardOutcome.TIMEOUT, message=late(5)),
    Reward(RewardOutcome.ERROR, message="the worker process ended during the call (exit status -9)"),
    _killed(3),
]


@pytest.mark.parametrize("lost", LOST, ids=["late", "died", "killed"])
def test_a_label_without_an_answer_is_no_bad_row(prompts: Prompts, lost: Reward) -> None:
    lines = [json.dumps({"prompt": label, "label": label}) for label in "123"]
    slow = Slow(1, lost)
    found = prompts(lines, "data.max_bad_rows=3")
    try_labels(found, score=slow)
    assert slow.num_calls == 2 and not found.source.bad.reasons
    with pytest.raises(UserError, match=r":2: the label '2' has no reward in two calls.* raise reward\.timeout_s"):
        try_labels(prompts(lines, "data.max_bad_rows=3"), score=Slow(2, lost))
