"""Checks of what a run stands on: its directory, the disk and the network interface."""

import os
import shutil
from pathlib import Path

import pytest

from megatron_rl.config.settings import RuntimeSettings
from megatron_rl.errors import UserError
from megatron_rl.runtime.preflight import check_disk, check_interface
from megatron_rl.runtime.resumption import check_run_directory


def test_run_directory(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    assert check_run_directory(directory, resume=False) == []
    assert "nothing to resume" in check_run_directory(directory, resume=True)[0]
    directory.mkdir()
    assert check_run_directory(directory, resume=False) == []
    for name in ("settings.yaml", "buffer.sqlite-wal", "status.json", ".status.json.7.partial"):
        (directory / name).write_text("left by a start that failed")
    assert check_run_directory(directory, resume=False) == []
    (directory / "metrics.jsonl").write_text("")
    assert check_run_directory(directory, resume=True) == []
    with pytest.raises(UserError, match=r"holds a run already.*--resume"):
        check_run_directory(directory, resume=False)
    with pytest.raises(UserError, match=r"settings\.yaml is a file"):
        check_run_directory(directory / "settings.yaml" / "below", resume=False)
    for target in ("nothing", "link"):
        link = directory / "link"
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        with pytest.raises(UserError, match="link is a link to nothing; choose another directory"):
            check_run_directory(link, resume=False)


def test_read_only_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UserError, match="not writable"):
        check_run_directory(tmp_path / "run", resume=False)


def test_a_file_system_without_room_for_files_is_not_called_full() -> None:
    with pytest.raises(UserError, match=r"run\.directory is /proc/run, but /proc is not writable"):
        check_disk(Path("/proc/run"), checkpoint_bytes=1, keep=2)


def test_a_small_disk_has_the_space_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2**30, 2**30, 45 * 2**20))  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"has 45 MiB free, a checkpoint of this model takes about 1\.5 GiB"):
        check_disk(tmp_path, checkpoint_bytes=3 * 2**29, keep=2)


def test_disk(tmp_path: Path) -> None:
    assert check_disk(tmp_path / "run", checkpoint_bytes=1, keep=2) == []
    with pytest.raises(UserError, match="a checkpoint of this model takes about"):
        check_disk(tmp_path / "run", checkpoint_bytes=2**60, keep=2)
    assert "run.keep_checkpoints 1000000000" in check_disk(tmp_path, checkpoint_bytes=2**20, keep=10**9)[0]


def test_the_interface_is_one_of_this_machine() -> None:
    check_interface(RuntimeSettings(ray_address="10.0.0.1:6379", network_interface="lo"))
    with pytest.raises(UserError, match=r"network_interface is nowhere0, but the interfaces here are .*lo.*; name one that every node has"):
        check_interface(RuntimeSettings(ray_address="10.0.0.1:6379", network_interface="nowhere0"))
