"""Processes and files left by a killed process, and permission for removal.

Makers of temporary files make a scratch directory. The directory has the maker's process id and
start time, and the known places elsewhere. The next start on that machine removes the belongings of
a dead process, and nothing else: neither another user's files, nor files of another container with
the same temporary directory.
"""

import ctypes
import json
import os
import shutil
import signal
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PREFIX = "megatron-rl-"
SHORT = "/tmp"
"""Fallback for a temporary directory with too long a path for sockets."""
SHARED_MEMORY = Path("/dev/shm")
_OWNER, _ELSEWHERE = "owner.json", "elsewhere.json"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Let the kernel send the signal `number` to this process when the parent thread ends."""
    _prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Let the kernel make this process the parent of every orphan below."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


@dataclass(frozen=True, slots=True)
class Scratch:
    """The directory `path`, removed with the process that made the directory."""

    path: Path

    @classmethod
    def make(cls, *, max_length: int | None = None) -> "Scratch":
        """Make a directory that only this user can enter; its path has `max_length` characters at most."""
        path = Path(tempfile.mkdtemp(prefix=PREFIX))
        if max_length is not None and len(str(path)) > max_length:
            path.rmdir()
            path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=SHORT))
        (path / _OWNER).write_text(json.dumps(process_identity(os.getpid())))
        return cls(path)

    def note(self, places: Iterable[Path]) -> None:
        """Remember `places` elsewhere, instead of earlier ones: all are removed with this process, too."""
        (self.path / _ELSEWHERE).write_text(json.dumps([str(place) for place in places]))

    def remove_all(self) -> list[str]:
        """Remove the noted places and the directory; return the removed paths."""
        noted = self.path / _ELSEWHERE
        removed = [place for place in (json.loads(noted.read_text()) if noted.exists() else ()) if _remove(Path(place))]
        shutil.rmtree(self.path, ignore_errors=True)
        return [*removed, str(self.path)]


@contextmanager
def scratch_directory(*, max_length: int | None = None) -> Iterator[Scratch]:
    """Make a scratch directory for the time of the block."""
    scratch = Scratch.make(max_length=max_length)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch.path, ignore_errors=True)


def shared_memory_of(pids: Iterable[int]) -> list[Path]:
    """Return the files in /dev/shm mapped by these processes; an ended process has none."""
    found: set[Path] = set()
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue
        found |= {Path(line.split(maxsplit=5)[5]) for line in lines if f" {SHARED_MEMORY}/" in line}
    return sorted(path for path in found if path.exists())


def remove_leftovers() -> list[str]:
    """Remove leftovers of dead processes; return the paths."""
    removed: list[str] = []
    for path in sorted(path for place in {tempfile.gettempdir(), SHORT} for path in Path(place).glob(f"{PREFIX}*")):
        if _is_abandoned(path):
            removed += Scratch(path).remove_all()
    return removed


def process_identity(pid: int) -> dict[str, int | str]:
    """Return the identity of a process among all with its number, of any time and in any container."""
    return {"pid": pid, "started": _state_and_start(pid)[1], "namespace": os.readlink("/proc/self/ns/pid"), "boot": _boot_id()}


def lives_here(identity: Mapping[str, Any]) -> bool | None:
    """Return True where a process of this `process_identity` lives, None for one of another machine or container.

    Raises KeyError, TypeError or ValueError for anything else.
    """
    if identity["namespace"] != os.readlink("/proc/self/ns/pid") or identity["boot"] != _boot_id():
        return None
    return _lives(int(identity["pid"]), started=int(identity["started"]))


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _is_mine(path: Path, *, open_to_others: bool = False) -> bool:
    """Return True for a file of this user that, unless `open_to_others`, nobody else can have written."""
    found = path.lstat()
    return found.st_uid == os.geteuid() and not stat.S_ISLNK(found.st_mode) and (open_to_others or not found.st_mode & 0o022)


def _is_abandoned(path: Path) -> bool:
    try:
        if not _is_mine(path):
            return False
        return lives_here(json.loads((path / _OWNER).read_text())) is False
    except (OSError, ValueError, KeyError, TypeError):
        # Another process makes or removes the directory at this moment, or the content is not this program's.
        return False


def _state_and_start(pid: int) -> tuple[str, int]:
    """Return a process's state and start time in the kernel's ticks since boot, which no clock moves (proc(5))."""
    # The program's name, in parentheses, may hold anything.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])


def _lives(pid: int, *, started: int) -> bool:
    try:
        state, start = _state_and_start(pid)
    except FileNotFoundError:
        return False
    return start == started and state not in ("Z", "X")


def _remove(place: Path) -> bool:
    """Remove an existing file or directory of this user."""
    try:
        # Ray makes the directories of a session writable for everybody.
        if not _is_mine(place, open_to_others=True):
            return False
        if place.is_dir():
            shutil.rmtree(place, ignore_errors=True)
        else:
            place.unlink()
    except FileNotFoundError:
        return False
    return True
