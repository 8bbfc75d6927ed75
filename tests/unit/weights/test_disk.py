"""What the directory of a sync leaves behind: nothing."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.weights.disk import DiskTransport
from megatron_rl.weights.transport import Surroundings


def make_transport(directory: Path) -> DiskTransport:
    parts: dict[str, Any] = {"free_address": lambda: ("", 0), "backend": "gloo", "num_engines": 1, "ranks_per_engine": 1, "timeout_s": 1.0}
    return DiskTransport(Surroundings(manifest=(), directory=directory, **parts))


def test_a_version_goes_whole_or_half_written_and_others_stay(tmp_path: Path) -> None:
    for name in ("version-000001", ".version-000001.partial", "version-000002"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"x" * 72)
    transport = make_transport(tmp_path)
    assert transport.finish(version=1) == 72
    assert [path.name for path in tmp_path.iterdir()] == ["version-000002"]
    assert transport.finish(version=3) == 0, "of a sync that wrote nothing there is nothing to remove"


def test_what_cannot_be_removed_yet_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NFS a file that an engine has open gets another name, and its directory stays."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    (tmp_path / "version-000001").mkdir()
    (tmp_path / "version-000001" / "model.safetensors").write_bytes(b"x" * 72)
    monkeypatch.setattr(os, "rmdir", refuse)
    assert make_transport(tmp_path).finish(version=1) == 72
