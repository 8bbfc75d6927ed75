"""Durations of the phases of a step."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron_rl.observe.metrics import Metric, Sum
from megatron_rl.observe.spans import Spans


class PhaseTimer:
    """Seconds per named phase, for one step and for the whole run; phases may nest or overlap."""

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._step: dict[str, float] = {}
        self._run: dict[str, float] = {}
        self.spans = Spans()
        """Every phase measured, in order."""

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the seconds of the body to the phase `name`, also when the body raises."""
        start = self._clock()
        try:
            yield
        finally:
            seconds = self._clock() - start
            self.add(name, seconds)
            self.spans.add("driver", name, seconds=seconds)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds measured elsewhere to the phase `name`."""
        self._step[name] = self._step.get(name, 0.0) + seconds

    def take(self) -> dict[str, Metric]:
        """Return the seconds per phase since the last call, as metrics `time/NAME`."""
        taken, self._step = self._step, {}
        for name, seconds in taken.items():
            self._run[name] = self._run.get(name, 0.0) + seconds
        return {f"time/{name}": Sum(seconds) for name, seconds in taken.items()}

    def totals(self) -> dict[str, float]:
        """Return the seconds per phase of the whole run so far."""
        names = self._run.keys() | self._step.keys()
        return {name: self._run.get(name, 0.0) + self._step.get(name, 0.0) for name in sorted(names)}
