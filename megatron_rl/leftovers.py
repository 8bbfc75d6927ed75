"""What a process that was killed leaves in the temporary directory and in /dev/shm, and who may remove it.

Whoever makes temporary files makes a scratch directory, in which its own process id and start time stand and, as far as they are known,
the places elsewhere that belong to it. The next start on that machine removes what belongs to a process that is gone, and nothing else:
neither what another user has made, nor what another container with the same temporary directory has.
"""

import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PREFIX = "megatron-rl-"
SHARED_MEMORY = Path("/dev/shm")
_OWNER, _ELSEWHERE = "owner.json", "elsewhere.json"


@dataclass(frozen=True, slots=True)
class Scratch:
    """The directory `path`, which goes with the process that made it."""

    path: Path

    @classmethod
    def make(cls) -> "Scratch":
        """A new directory, which belongs to this process."""
        path = Path(tempfile.mkdtemp(prefix=PREFIX))
        (path / _OWNER).write_text(json.dumps(_identity(os.getpid())))
        return cls(path)

    def note(self, places: Iterable[Path]) -> None:
        """Remember these files and directories elsewhere, in place of those noted before: they go with this process, too."""
        (self.path / _ELSEWHERE).write_text(json.dumps([str(place) for place in places]))

    def remove(self) -> None:
        """Remove the directory alone."""
        shutil.rmtree(self.path, ignore_errors=True)


@contextmanager
def scratch_directory() -> Iterator[Scratch]:
    """A scratch directory for the time of the block."""
    scratch = Scratch.make()
    try:
        yield scratch
    finally:
        scratch.remove()


def shared_memory_of(pids: Iterable[int]) -> list[Path]:
    """The files in /dev/shm that these processes have mapped; a process that has ended has none."""
    found: set[Path] = set()
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue
        found |= {Path(line.split(maxsplit=5)[5]) for line in lines if f" {SHARED_MEMORY}/" in line}
    return sorted(path for path in found if path.exists())


def remove_leftovers() -> list[str]:
    """Remove what processes that are gone have left behind; each is named by its path."""
    removed = []
    for path in sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")):
        if not _is_abandoned(path):
            continue
        for place in _noted(path):
            if _remove(place):
                removed.append(str(place))
        shutil.rmtree(path, ignore_errors=True)
        removed.append(str(path))
    return removed


def _identity(pid: int) -> dict[str, object]:
    """What tells this process from every other one, of other times and other containers, that has its number."""
    return {"pid": pid, "started": _state_and_start(pid)[1], "namespace": os.readlink("/proc/self/ns/pid"), "boot": _boot_id()}


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _is_mine(path: Path, *, open_to_others: bool = False) -> bool:
    """Whether this is a file or directory of this user, and nobody else can have written what stands there unless `open_to_others`."""
    found = path.lstat()
    return found.st_uid == os.geteuid() and not stat.S_ISLNK(found.st_mode) and (open_to_others or not found.st_mode & 0o022)


def _is_abandoned(path: Path) -> bool:
    try:
        if not _is_mine(path):
            return False
        owner = json.loads((path / _OWNER).read_text())
        here = owner["namespace"] == os.readlink("/proc/self/ns/pid") and owner["boot"] == _boot_id()
        return here and not _lives(int(owner["pid"]), started=int(owner["started"]))
    except (OSError, ValueError, KeyError, TypeError):
        # Being made or removed at this moment, or not what this program writes.
        return False


def _state_and_start(pid: int) -> tuple[str, int]:
    """State of a process and when it started, in the kernel's ticks since boot, which no correction of the clock moves (proc(5))."""
    # The name of the program, in parentheses, may hold anything.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])


def _lives(pid: int, *, started: int) -> bool:
    try:
        state, start = _state_and_start(pid)
    except FileNotFoundError:
        return False
    return start == started and state not in ("Z", "X")


def _noted(path: Path) -> list[Path]:
    file = path / _ELSEWHERE
    return [Path(place) for place in json.loads(file.read_text())] if file.exists() else []


def _remove(place: Path) -> bool:
    """Remove a file or directory if it is there and this user's."""
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
