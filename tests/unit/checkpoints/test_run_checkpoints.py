import errno
import json
import os
import shutil
import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.checkpoints import run_checkpoints
from megatron_rl.checkpoints.run_checkpoints import (
    CheckpointWriter,
    RunState,
    checkpoint_paths,
    incomplete_checkpoints,
    load_newest,
    newest_checkpoint,
    oldest_step,
)
from megatron_rl.config.settings import RunSettings
from megatron_rl.errors import UserError
from megatron_rl.system import files


class Ranks:
    """Write what the ranks would write, or fail on the way."""

    def __init__(self, *, fails: str = "") -> None:
        self._fails = fails

    def call(self, method: str, *args: Any, **keywords: Any) -> list[Any]:
        return [getattr(self, method)(*args, **keywords)]

    def begin_save(self, directory: Path | None = None, *, hf: Path) -> None:
        if directory is not None:
            directory.mkdir()
            (directory / "manifest.json").write_text("{}")
        if self._fails == "at once":
            raise UserError("cannot write: the disk is full")
        hf.mkdir()
        (hf / "model.safetensors").write_text(str(hf))

    def finish_save(self) -> None:
        if self._fails == "later":
            raise UserError("cannot write: the disk is full")


def make_writer(directory: Path, *, fails: str = "", **settings: int) -> CheckpointWriter:
    return CheckpointWriter(RunSettings(directory=directory, **{"num_steps": 2**30, **settings}), ranks=Ranks(fails=fails))


def state(step: int) -> RunState:
    return RunState(step=step, source={"epoch": 0, "cursor": 8 * step}, first_evaluation={"eval/greedy/accuracy": 0.25})


def save(directory: Path, step: int, *, fails: str = "", **settings: int) -> Path:
    writer, path = make_writer(directory, fails=fails, **settings), directory / "checkpoints" / f"step-{step:06d}"
    try:
        writer.begin(state(step))
        assert writer.is_writing and not path.exists()
        assert writer.finish() == [] and (directory / "huggingface").resolve() == path / "hf"
        return path
    finally:
        assert not writer.is_writing


def names(directory: Path) -> list[str]:
    return [path.name for path in checkpoint_paths(directory)]


def test_devices_are_taken_before_a_checkpoint_is_loaded(tmp_path: Path) -> None:
    calls: list[Any] = []
    ranks = SimpleNamespace(load=lambda path, *, weights_only: calls.append((path.parent.name, weights_only)) or ["changed"])

    def rewind(**to: Any) -> list[str]:
        calls.append(to["step"])
        return ["rewound"]

    def load() -> RunState | None:
        parts: dict[str, Any] = {"ranks": ranks, "rewind": rewind, "before": lambda: calls.append("before")}
        parts |= {"phase": lambda name: nullcontext(calls.append(name)), "say": lambda *words: calls.extend(words)}
        return load_newest(tmp_path, weights_only=True, **parts)

    assert load() is None and calls == [0, "rewound"]
    path = save(tmp_path, 3)
    calls.clear()
    (tmp_path / "huggingface").unlink()
    assert load() == state(3) and os.readlink(tmp_path / "huggingface") == "checkpoints/step-000003/hf"
    assert calls[:4] == ["before", "load", ("step-000003", True), 3]
    assert calls[4:] == [f"resumed from {path} after 3 steps, with a new optimizer", "changed", "rewound"]


def test_the_newest_are_kept_and_the_newest_is_found(tmp_path: Path) -> None:
    for step in (2, 4, 1_000_002):
        save(tmp_path, step)
    assert names(tmp_path) == ["step-000004", "step-1000002"]
    path, found = newest_checkpoint(tmp_path) or (None, None)
    assert path == tmp_path / "checkpoints" / "step-1000002"
    assert found == state(1_000_002)
    assert oldest_step(tmp_path, among=2) == 4


def test_every_so_many_steps_are_kept_for_good(tmp_path: Path) -> None:
    for step in range(1, 9):
        save(tmp_path, step, keep_checkpoints=1, keep_interval=3)
    assert names(tmp_path) == ["step-000003", "step-000006", "step-000008"]
    assert oldest_step(tmp_path, among=1) == 8, "else the buffer would grow from step 3 on"


@pytest.mark.parametrize("links", [True, False])
def test_the_policy_of_a_deleted_checkpoint_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    def refuse(source: str, target: str) -> None:
        raise PermissionError("not on this file system")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    for step in (2, 4, 6):
        path = save(tmp_path, step, keep_checkpoints=1, export_interval=2 * (step > 2))
    assert names(tmp_path) == ["step-000006"]
    assert sorted(found.name for found in (tmp_path / "exports").iterdir()) == ["step-000004", "step-000006"]
    saved, exported = path / "hf" / "model.safetensors", tmp_path / "exports" / "step-000006" / "model.safetensors"
    assert saved.read_text() == exported.read_text() and saved.samefile(exported) == links
    # A run comes to this step once more.
    shutil.rmtree(path)
    save(tmp_path, 6, export_interval=2)
    assert (path / "hf" / "model.safetensors").samefile(exported) == links


def test_an_export_is_there_before_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on behind the checkpoint does not come back to that step."""

    def killed(path: Path) -> None:
        assert (tmp_path / "exports" / "step-000002" / "model.safetensors").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(run_checkpoints, "commit_partial", killed)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2, export_interval=2)


@pytest.mark.parametrize("fails", ["", "at once", "later"])
def test_an_export_alone_is_no_checkpoint_and_supersedes_none(tmp_path: Path, fails: str) -> None:
    save(tmp_path, 2, keep_checkpoints=1)
    writer = make_writer(tmp_path, fails=fails, keep_checkpoints=1)
    with pytest.raises(UserError, match="disk is full") if fails else nullcontext():
        writer.begin_export(5)
        assert writer.is_writing
        assert writer.finish() == []
    assert not writer.is_writing
    assert names(tmp_path) == ["step-000002"]
    assert fails == "later" or [path.name for path in (tmp_path / "exports").iterdir()] == ([] if fails else ["step-000005"])


@pytest.mark.parametrize("fails", ["at once", "later"])
def test_a_failed_save_keeps_the_old_checkpoint_whole(tmp_path: Path, fails: str) -> None:
    save(tmp_path, 2, keep_checkpoints=1)
    with pytest.raises(UserError, match="disk is full"):
        save(tmp_path, 4, keep_checkpoints=1, fails=fails)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000002"]


def test_a_half_written_checkpoint_is_named_and_ignored(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    save(tmp_path, 2)
    for step, part in ((4, "run.json"), (6, "megatron/manifest.json")):
        (save(tmp_path, step, keep_checkpoints=9) / part).unlink()
    (folder / ".step-000008.partial").mkdir()
    (folder / "notes").mkdir()
    path, _ = newest_checkpoint(tmp_path) or (None, None)
    assert path == folder / "step-000002"
    assert [path.name for path in incomplete_checkpoints(tmp_path)] == [".step-000008.partial", "step-000004", "step-000006"]
    save(tmp_path, 7, keep_checkpoints=2)
    assert names(tmp_path) == ["step-000002", "step-000007"]


def test_of_two_checkpoints_of_one_step_the_newer_wins(tmp_path: Path) -> None:
    first = save(tmp_path, 2)
    copy = first.with_name("step-0000002")
    shutil.copytree(first, copy)
    for newer, older in ((copy, first), (first, copy)):
        os.utime(older, (1, 1))
        os.utime(newer, (2, 2))
        assert (newest_checkpoint(tmp_path) or [None])[0] == newer


def test_a_run_without_checkpoint_starts_anew(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    assert oldest_step(tmp_path, among=2) == 0


STATE = {"step": 2, "source": {}, "first_evaluation": {}}


@pytest.mark.parametrize("text", ["{", json.dumps({"step": 3}), json.dumps(STATE | {"step": "2"}), "[" * 10**5])
def test_a_broken_state_is_named(tmp_path: Path, text: str) -> None:
    (save(tmp_path, 2) / "run.json").write_text(text)
    with pytest.raises(UserError, match=r"run\.json is not the state of a run"):
        newest_checkpoint(tmp_path)


def test_the_old_goes_only_when_the_new_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 2, keep_checkpoints=1)
    order: list[str] = []
    sync, remove = files.sync, shutil.rmtree
    monkeypatch.setattr(files, "sync", lambda path: (order.append(f"sync {path.name}"), sync(path)))
    monkeypatch.setattr(shutil, "rmtree", lambda path, **options: (order.append(f"remove {path.name}"), remove(path, **options)))
    save(tmp_path, 4, keep_checkpoints=1)
    assert order[-2:] == ["sync checkpoints", "remove .step-000002.partial"]


def test_a_half_done_deletion_leaves_no_half_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 2)
    monkeypatch.setattr(shutil, "rmtree", lambda path: (path / "hf" / "model.safetensors").unlink() or os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 4, keep_checkpoints=1)
    assert names(tmp_path) == ["step-000004"]
    assert [path.name for path in incomplete_checkpoints(tmp_path)] == [".step-000002.partial"]


def test_a_checkpoint_that_cannot_be_deleted_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    for step in (2, 3):
        save(tmp_path, step)
    # Moved to another disk by hand.
    shutil.move(tmp_path / "checkpoints" / "step-000002", elsewhere)
    (tmp_path / "checkpoints" / "step-000002").symlink_to(elsewhere)
    writer = make_writer(tmp_path, keep_checkpoints=1)
    writer.begin(state(4))

    def busy(path: Path) -> None:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", busy)
        (said,) = writer.finish()
    assert "step-000003 is superseded, but could not all be deleted: " in said and "not empty" in said
    assert names(tmp_path) == ["step-000004"] and (elsewhere / "run.json").is_file()


@pytest.mark.parametrize("begin", ["begin", "begin_export"])
def test_a_place_where_nothing_can_be_written_is_one_sentence(tmp_path: Path, begin: str) -> None:
    for folder in ("checkpoints", "exports"):
        (tmp_path / folder).symlink_to(tmp_path / "gone")
    writer = make_writer(tmp_path, keep_checkpoints=1)
    with pytest.raises(UserError, match=r"cannot write .*(checkpoints|exports): File exists"):
        getattr(writer, begin)(state(2) if begin == "begin" else 2)
    assert not writer.is_writing
