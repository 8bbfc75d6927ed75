"""What a start waits for, while it does, and how long each part of it took."""

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from megatron_rl.observe.console import RunConsole
from megatron_rl.observe.timing import PhaseTimer


class StartReport:
    """Shows every part as a phase of its own and measures it as `start_PART`. Parts may overlap; `str` gives the seconds of all."""

    def __init__(self, console: RunConsole, timer: PhaseTimer) -> None:
        self._console, self._timer = console, timer
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """The body waits for `name`."""
        start_s = time.perf_counter()
        with self._console.phase(f"start: {name}"):
            yield
        self._ended(name, time.perf_counter() - start_s)

    def follow(self, name: str, futures: "Sequence[Future[Any]]") -> None:
        """Somebody waits for all of `futures`, which make up `name`; returns at once."""
        phase = self.part(name)
        phase.__enter__()
        waiting = set(futures)

        def finished(future: "Future[Any]") -> None:
            with self._lock:
                waiting.discard(future)
                last = not waiting
            if last:
                phase.__exit__(None, None, None)

        for future in futures:
            future.add_done_callback(finished)

    def note(self, text: str) -> None:
        """Say what is worth knowing before the run goes on."""
        self._console.say(f"note: {text}")

    def _ended(self, name: str, seconds: float) -> None:
        self._timer.add(f"start_{name.lower().replace(' ', '_')}", seconds)
        self._seconds[name] = seconds

    def __str__(self) -> str:
        return f"started: {', '.join(f'{name} {seconds:.1f} s' for name, seconds in self._seconds.items())}"
