import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megatron_rl.errors import EngineError, UserError
from megatron_rl.system import files
from megatron_rl.system.files import (
    atomic_directory,
    commit_partial,
    disk_errors,
    partial_path,
    remove_directory,
    start_partial,
    write_atomic,
)


def test_write_atomic_makes_parents_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file.json"
    write_atomic(path, "größe")
    assert path.read_bytes() == "größe".encode()
    write_atomic(path, b"\x00\x01")
    assert path.read_bytes() == b"\x00\x01"
    assert os.listdir(path.parent) == ["file.json"]


def test_write_atomic_onto_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "name").mkdir()
    with pytest.raises(UserError, match="directory of this name is in the way"):
        write_atomic(tmp_path / "name", "x")
    assert os.listdir(tmp_path) == ["name"]


def test_write_below_a_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="a part of this path is a file"):
        write_atomic(tmp_path / "file" / "inner.json", "x")
    with pytest.raises(UserError, match="a part of this path is a file"), atomic_directory(tmp_path / "file"):
        pass


def test_file_beyond_the_size_limit_keeps_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, "old")
    script = (
        "import resource, sys; from pathlib import Path; from megatron_rl.system.files import write_atomic\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "write_atomic(Path(sys.argv[1]), b'x' * 100_000)"
    )
    result = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert "UserError: cannot write" in result.stderr and "raise the file size limit" in result.stderr
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_full_disk_becomes_a_user_error_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    full = Path("/dev/full")
    monkeypatch.setattr(files, "free_bytes", lambda path: 45 * 2**20)
    with pytest.raises(UserError, match=r"cannot write .*No space left.* \(45 MiB free\); free space on this disk"), disk_errors(full):
        full.write_text("x")


def test_a_library_error_on_a_full_disk_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="unexpected pos"), disk_errors(tmp_path):
        raise RuntimeError("unexpected pos 64")
    monkeypatch.setattr(files, "free_bytes", lambda path: 4096)
    with pytest.raises(UserError, match=r"the disk is full, .* \(unexpected pos 64\)"), disk_errors(tmp_path):
        raise RuntimeError("unexpected pos 64")


def test_errors_that_are_not_about_the_disk_pass_through(tmp_path: Path) -> None:
    with pytest.raises(ConnectionRefusedError), disk_errors(tmp_path):
        raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")


def test_atomic_directory_appears_only_at_the_end_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "checkpoint"
    for content in ("one", "two"):
        with atomic_directory(path) as directory:
            (directory / "sub").mkdir()
            (directory / "sub" / content).write_text(content)
            assert not (path / "sub" / content).exists()
        assert os.listdir(path / "sub") == [content]
    assert os.listdir(path.parent) == ["checkpoint"]


@pytest.mark.parametrize("error", [EngineError("boom"), KeyboardInterrupt()])
def test_atomic_directory_leaves_nothing_when_the_body_raises(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "checkpoint"
    with atomic_directory(path) as directory:
        (directory / "old").write_text("old")
    with pytest.raises(type(error)), atomic_directory(path) as directory:
        (directory / "new").write_text("new")
        raise error
    assert os.listdir(tmp_path) == ["checkpoint"] and os.listdir(path) == ["old"]


def test_processes_fill_one_directory_together(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    start_partial(path)
    (partial_path(path) / "stale").write_text("left by a killed attempt")
    assert os.listdir(start_partial(path)) == []
    for rank in range(2):
        (partial_path(path) / f"rank_{rank}").write_text(str(rank))
    commit_partial(path)
    assert sorted(os.listdir(path)) == ["rank_0", "rank_1"] and os.listdir(tmp_path) == ["checkpoint"]


def test_kill_while_replacing_a_directory_never_leaves_a_mixture(tmp_path: Path) -> None:
    """The child replaces a directory of 20 equal files over and over and is killed with SIGKILL at some moment."""
    script = (
        "import sys; from pathlib import Path; from megatron_rl.system.files import atomic_directory\n"
        "for turn in range(10**9):\n"
        "    with atomic_directory(Path(sys.argv[1])) as directory:\n"
        "        for name in range(20): (directory / str(name)).write_text(str(turn))\n"
        "    print(turn, flush=True)"
    )
    path = tmp_path / "checkpoint"
    for delay_s in (0.0, 0.003, 0.011):
        child = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(delay_s)
        child.send_signal(signal.SIGKILL)
        child.wait(timeout=30)
        child.stdout.close()
        complete = path if path.exists() else partial_path(path)
        contents = {name.read_text() for name in complete.iterdir()}
        assert len(contents) == 1 and len(list(complete.iterdir())) == 20


def test_torch_reports_a_full_disk_in_its_own_words(tmp_path: Path) -> None:
    words = "Traceback of another process\nRuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"
    expected = r"the disk is full, [\d,]+ MiB are free now \(RuntimeError: .enforce fail.*; free space on this disk"
    with pytest.raises(UserError, match=expected), disk_errors(tmp_path):
        raise RuntimeError(words)
    with pytest.raises(RuntimeError, match="another matter"), disk_errors(tmp_path):
        raise RuntimeError("another matter")


@pytest.mark.parametrize("durable", [True, False])
def test_files_and_directories_of_a_durable_tree_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool) -> None:
    synced: set[str] = set()
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.add(os.readlink(f"/proc/self/fd/{descriptor}")))
    with atomic_directory(tmp_path / "model", durable=durable) as partial:
        (partial / "deep").mkdir()
        files = [partial / "file", partial / "deep" / "file"]
        for file in files:
            file.write_text("content")
    assert (tmp_path / "model" / "deep" / "file").read_text() == "content"
    assert synced == ({str(path) for path in (*files, partial, partial / "deep", tmp_path)} if durable else set())


def test_why_a_file_that_torch_writes_is_refused_is_told(tmp_path: Path) -> None:
    class Refused:
        room = 1000

        def write(self, data: bytes) -> int:
            self.room -= len(data)
            if self.room < 0:
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
            return len(data)

        def flush(self) -> None:
            pass

    with pytest.raises(UserError, match=r"Disk quota exceeded .*; free space in your quota"), disk_errors(tmp_path):
        torch.save(torch.zeros(1000), Refused())


def test_a_copy_that_is_refused_names_what_it_would_write(tmp_path: Path) -> None:
    (tmp_path / "source").write_text("content")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write .*file/target: Not a directory"), disk_errors(tmp_path):
        os.rename(tmp_path / "source", tmp_path / "file" / "target")


def test_a_whole_directory_goes_and_a_link_to_one_alone(tmp_path: Path) -> None:
    for name in ("old", ".old.partial", "elsewhere"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    (tmp_path / "link").symlink_to("elsewhere")
    for name in ("old", "link"):
        remove_directory(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"] and (tmp_path / "elsewhere" / "file").exists()
