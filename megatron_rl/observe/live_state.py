"""The present state of a run in status.json, written every few seconds while the run goes on."""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_rl.observe.summary import summary_time
from megatron_rl.system.files import read_record
from megatron_rl.system.leftovers import process_identity

STATUS_FILE = "status.json"
STATUS_S = 2.0
"""Seconds from one state to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseState:
    """A phase in progress, with its count such as "12/64 groups"."""

    name: str
    progress: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitState:
    """A wait of the driver for `owners`; `usual_s` is the median of equal ones before, `late` beyond what is usual."""

    name: str
    owners: tuple[str, ...]
    seconds: float
    usual_s: float | None
    deadline_s: float
    late: bool

    def __str__(self) -> str:
        usual = "" if self.usual_s is None else f", usually {self.usual_s:.1f} s"
        return f"{self.name} has taken {self.seconds:.0f} s{usual}; waiting for {', '.join(self.owners)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """Requests of an engine in flight, their limit, its answers so far; queue and KV use of the last look."""

    url: str
    requests: int
    limit: int
    answers: int
    queue: int | None = None
    kv_use: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveState:
    """The state at `time` (seconds since 1970) of the run of the process `identity` on `host`.

    `notes` are the last sentences of the run about what is wrong. `earlier` is the time of the
    summary that an earlier life has left, in nanoseconds.
    """

    host: str
    identity: dict[str, int | str]
    time: float
    num_steps: int
    phases: tuple[PhaseState, ...]
    waits: tuple[WaitState, ...]
    engines: tuple[EngineState, ...]
    notes: tuple[str, ...]
    earlier: int | None = None


class StatusFile:
    """Writes the state of a run from a thread of its own, which no wait, plug-in or terminal blocks; use in a `with`.

    The sources are called in that thread. A state that cannot be written is left out: the file then
    shows its age.
    """

    def __init__(
        self,
        directory: Path,
        *,
        num_steps: int,
        phases: Callable[[], tuple[PhaseState, ...]],
        waits: Callable[[], tuple[WaitState, ...]],
        engines: Callable[[], tuple[EngineState, ...]],
        notes: Callable[[], Sequence[str]],
    ) -> None:
        self._path = directory / STATUS_FILE
        self._sources: dict[str, Callable[[], Any]] = {"phases": phases, "waits": waits, "engines": engines}
        self._notes = notes
        identity = process_identity(os.getpid())
        earlier = summary_time(directory)
        self._facts: dict[str, Any] = {"host": socket.gethostname(), "identity": identity, "earlier": earlier, "num_steps": num_steps}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write_often, name="status", daemon=True)

    def __enter__(self) -> "StatusFile":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self.write()

    def write(self) -> None:
        """Write the state now, where the directory of the run exists."""
        present = {name: source() for name, source in self._sources.items()}
        state = LiveState(time=time.time(), notes=tuple(self._notes()), **self._facts, **present)
        partial = self._path.with_name(f".{STATUS_FILE}.{os.getpid()}.partial")
        # No sync: the state before a power failure is of no use, and a shared disk is slow.
        with suppress(OSError):
            partial.write_text(json.dumps(asdict(state)) + "\n")
            os.replace(partial, self._path)

    def _write_often(self) -> None:
        while not self._stop.wait(STATUS_S):
            self.write()


def read_state(directory: Path) -> LiveState | None:
    """Return the last state of a run; None where there is none that can be read."""
    try:
        return read_record(directory / STATUS_FILE, LiveState)
    except (OSError, ValueError):
        return None
