"""Files that are written beside their place: by one process, whole, and only those that an earlier attempt has not left."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl.convert import resumable
from megatron_rl.convert.resumable import FileJob, locked_partial, write_files
from megatron_rl.errors import UserError
from megatron_rl.models.checkpoint_manifest import HashedFile, entry_of


def jobs(ran: list[str], *names: str, work: Callable[[str], None] = lambda name: None) -> list[FileJob]:
    """Each writes its name; `ran` notes who did."""

    def job(name: str) -> FileJob:
        def write(file: HashedFile) -> str:
            ran.append(name)
            work(name)
            file.write(name.encode())
            return f"content of {name}"

        return FileJob(name, len(name), write)

    return [job(name) for name in names]


def write_all(partial: Path, wanted: list[FileJob]) -> dict[str, dict[str, object]]:
    return write_files(partial, wanted, report=lambda num_bytes: None, keep=lambda num_bytes: None)


def test_a_target_has_its_files_alone(tmp_path: Path) -> None:
    with locked_partial(tmp_path / "target", {}) as partial:
        records = write_all(partial, jobs([], "one", "below/two"))
        assert not (tmp_path / "target").exists()
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {"target/one", "target/below/two"}
    assert sorted(path.name for path in (tmp_path / "target").iterdir()) == ["below", "one"]
    assert records == {
        name: {"file": entry_of(tmp_path / "target" / name), "content": f"content of {name}"} for name in ("one", "below/two")
    }


def test_a_target_has_one_writer(tmp_path: Path) -> None:
    with locked_partial(tmp_path / "target", {}) as partial:
        (partial / "file").write_text("of the first")
        with pytest.raises(UserError, match="another process is writing"), locked_partial(tmp_path / "target", {"other": True}):
            pytest.fail("two processes would write into one directory")
    assert (tmp_path / "target/file").read_text() == "of the first"


@pytest.mark.parametrize("damage", ["gone", "shorter", "none"])
def test_a_file_that_is_not_as_its_record_says_is_written_again(tmp_path: Path, damage: str) -> None:
    ran: list[str] = []
    with pytest.raises(KeyboardInterrupt), locked_partial(tmp_path / "target", {}) as partial:
        write_all(partial, jobs(ran, "one", "two"))
        raise KeyboardInterrupt
    ran.clear()
    if damage == "gone":
        (partial / "one").unlink()
    elif damage == "shorter":
        (partial / "one").write_text("o")
    with locked_partial(tmp_path / "target", {}) as partial:
        records = write_all(partial, jobs(ran, "one", "two"))
    assert ran == ([] if damage == "none" else ["one"])
    assert (tmp_path / "target/one").read_text() == "one" and records["one"]["content"] == "content of one"


def test_room_is_needed_for_what_is_left_and_for_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = resumable.shutil.disk_usage(tmp_path)
    free = 3
    monkeypatch.setattr(resumable.shutil, "disk_usage", lambda place: usage._replace(free=free))
    ran: list[str] = []
    with locked_partial(tmp_path / "target", {}) as partial:
        write_all(partial, jobs(ran, "one"))
        write_all(partial, jobs(ran, "one", "two"))
        free = 4
        with pytest.raises(UserError, match="the target needs"):
            write_all(partial, jobs(ran, "one", "two", "three"))
    assert ran == ["one", "two"]


def test_a_record_is_of_a_file_that_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power failure that took the file and left its record would let the next attempt keep a file of zeros."""
    done: list[str] = []
    sync, record = os.fsync, resumable.write_atomic

    def synced(descriptor: int) -> None:
        done.append(os.readlink(f"/proc/self/fd/{descriptor}").rpartition("/")[2])
        sync(descriptor)

    def recorded(path: Path, content: str) -> None:
        done.append(f"record of {json.loads(content).get('content', 'the attempt')}")
        record(path, content)

    with locked_partial(tmp_path / "target", {}) as partial:
        monkeypatch.setattr(resumable.os, "fsync", synced)
        monkeypatch.setattr(resumable, "write_atomic", recorded)
        write_all(partial, jobs([], "one"))
        assert done[:2] == ["one.unfinished", "record of content of one"]


def test_behind_a_failure_no_further_file_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def fails_at_first(name: str) -> None:
        if name == "0":
            raise UserError("a damaged source")
        time.sleep(0.01)

    monkeypatch.setattr(resumable, "NUM_THREADS", 1)
    with pytest.raises(UserError, match="a damaged source"), locked_partial(tmp_path / "target", {}) as partial:
        write_all(partial, jobs(ran, *map(str, range(300)), work=fails_at_first))
    assert len(ran) < 300
