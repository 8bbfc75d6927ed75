"""The user's view of a run: a live line per phase and a table row per step.

On a terminal the phase is a moving line. Elsewhere (a log file, CI) the first run of each phase is
announced, and a heartbeat names the activity, so that no minute is silent.
"""

import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TextIO

import rich.console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from megatron_rl.observe.metrics import is_beyond_healthy, metric_info

_ROWS_PER_HEADER = 20


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table: the first measured of `metrics`, in `width` characters.

    Columns of the highest `spare` are left out where a line is too short for all. Without metrics
    it has the time to the expected end of the run.
    """

    title: str
    metrics: tuple[str, ...]
    format: str
    width: int
    spare: int = 0


_TIME_LEFT = Column("left", (), "", 6)

RL_COLUMNS = (
    Column("reward", ("rollout/reward",), ".3f", 6),
    Column("entropy", ("train/entropy",), ".3f", 7),
    Column("KL ref", ("train/kl_reference",), ".4f", 7, spare=5),
    Column("|dlogp|", ("train/log_prob_diff",), ".1e", 7),
    Column("grad", ("train/grad_norm",), ".3f", 6, spare=3),
    Column("cut", ("rollout/truncated_fraction",), ".0%", 4),
    Column("fail", ("rollout/reward_failed_fraction",), ".0%", 4),
    Column("tok/s", ("rollout/tokens_per_second",), ",.0f", 6, spare=4),
    Column("roll s", ("time/rollout",), ".2f", 6, spare=2),
    Column("wait s", ("time/rollout_wait",), ".2f", 6),
    Column("train s", ("time/train",), ".2f", 7),
    Column("sync s", ("time/sync",), ".2f", 6, spare=1),
    _TIME_LEFT,
)

_EVALUATED_SETS = 2  # with a column of their own
_TITLE_WIDTH = 9


def rl_columns(sets: Sequence[str], *, keeps_reference: bool) -> tuple[Column, ...]:
    """Return the columns of a run with these sets of held-out prompts: each has its accuracy, or else its reward."""
    evaluated = [
        Column(
            name[:_TITLE_WIDTH], (f"eval/{name}/accuracy", f"eval/{name}/reward"), ".3f", max(6, len(name[:_TITLE_WIDTH])), spare=6 * number
        )
        for number, name in enumerate(sets[:_EVALUATED_SETS])
    ]
    columns = (RL_COLUMNS[0], *evaluated, *RL_COLUMNS[1:])
    return tuple(column for column in columns if keeps_reference or "train/kl_reference" not in column.metrics)


SUPERVISED_COLUMNS = (
    Column("loss", ("train/loss",), ".4f", 9),
    Column("entropy", ("train/entropy",), ".3f", 8),
    Column("grad", ("train/grad_norm",), ".3f", 8),
    Column("lr", ("train/lr",), ".1e", 8),
    Column("tokens", ("train/num_tokens",), ",.0f", 9),
    Column("train s", ("time/train",), ".2f", 8),
    _TIME_LEFT,
)


@dataclass(slots=True)
class PhaseProgress:
    """Progress of a phase; given by `RunConsole.phase`."""

    name: str
    total: int | None
    unit: str
    completed: int = 0
    note: str = ""
    started_s: float = field(default_factory=time.monotonic)

    def advance(self, count: int = 1) -> None:
        """Count `count` more finished units."""
        self.completed += count

    def say(self, note: str) -> None:
        """Show `note` behind the count, in place of the last note."""
        self.note = note

    def text(self) -> str:
        """Return the known parts of count, unit and note."""
        count = f"{self.completed}/{self.total}" if self.total is not None else str(self.completed) if self.completed else ""
        return " ".join(part for part in (count, self.unit if count else "", self.note) if part)

    def timed_text(self) -> str:
        """Return the same with the seconds so far."""
        return ", ".join(part for part in (self.text(), f"{time.monotonic() - self.started_s:.1f} s") if part)


class _Console(rich.console.Console):
    """Console that goes on without a reader, as behind `| head`."""

    def on_broken_pipe(self) -> None:
        """Print nothing from now on, and say so on the standard error."""
        self.quiet = True
        # Buffered text would fail again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())
        with suppress(OSError):
            print("megatron-rl: nobody reads the output any more; the run goes on, SIGINT or SIGTERM ends it", file=sys.stderr, flush=True)


class RunConsole:
    """The console of a run of `num_steps` steps. Methods may be called from any thread."""

    def __init__(
        self, num_steps: int, *, columns: tuple[Column, ...] = RL_COLUMNS, stream: TextIO | None = None, heartbeat_s: float = 20.0
    ) -> None:
        self._num_steps = num_steps
        self._console = _Console(file=stream or sys.stdout, highlight=False, markup=False, soft_wrap=True)
        self._step_width = len(f"{num_steps}/{num_steps}")
        self._columns = _fitting(columns, self._console.width - self._step_width)
        self._marked: set[str] = set()
        self._heartbeat_s = heartbeat_s
        self._lock = threading.RLock()
        self._started_s = self._printed_s = time.monotonic()
        self._num_rows = 0
        self._first_row: tuple[int, float] | None = None  # its step and time
        self._active: list[PhaseProgress] = []
        self._announced: set[str] = set()
        self._stop = threading.Event()
        self._live = self._console.is_terminal
        self._progress = Progress(
            SpinnerColumn("line"),  # in ASCII
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            refresh_per_second=4,
            disable=not self._live,
        )
        self._heartbeat = threading.Thread(target=self._beat, name="console", daemon=True)

    def __enter__(self) -> "RunConsole":
        self._progress.start()
        self._heartbeat.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._heartbeat.join()
        self._progress.stop()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        with self._lock:
            self._console.print(text)
            self._printed_s = time.monotonic()

    @property
    def phases(self) -> tuple[PhaseProgress, ...]:
        """Return the phases in progress; takes no lock, which a print to a stopped terminal may hold."""
        return tuple(self._active)

    def row(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the table row of a step, and a line for each metric newly beyond its range."""
        with self._lock:
            if self._num_rows % _ROWS_PER_HEADER == 0:
                self.say(self._line("step", [column.title for column in self._columns]))
            self._num_rows += 1
            left = self._time_left(step)
            cells = [_cell(column, metrics) if column.metrics else left for column in self._columns]
            self.say(self._line(f"{step}/{self._num_steps}", cells))
            beyond = [name for name, value in metrics.items() if name not in self._marked and is_beyond_healthy(name, value)]
            if beyond and not self._marked:
                self.say("note: ! is before numbers beyond their healthy range")
            self._marked.update(beyond)
            for name in beyond:
                self.say(f"note: {name} is {metrics[name]:.3g}, healthy: {metric_info(name).healthy}")

    @contextmanager
    def phase(
        self, name: str, *, total: int | None = None, unit: str = "", progress: PhaseProgress | None = None
    ) -> Iterator[PhaseProgress]:
        """Show the running phase `name`, with a count of `total` units where countable, or with `progress` so far."""
        progress, finished = progress or PhaseProgress(name, total=total, unit=unit), False
        with self._lock:
            announces = not self._live and name not in self._announced
            self._announced.add(name)
            self._active.append(progress)
            if announces:
                self.say(f"{self._clock()} {name} ...")
            task = self._progress.add_task(name, total=None)
        try:
            yield progress
            finished = True
        finally:
            with self._lock:
                self._active.remove(progress)
                self._progress.remove_task(task)
                # Without a refresh the next print would draw the line of the finished phase once more.
                self._progress.refresh()
                if announces and finished:
                    self.say(f"{self._clock()} {name}: {progress.timed_text()}")

    def _beat(self) -> None:
        """Refresh live lines, or print a heartbeat after `heartbeat_s` silent seconds."""
        while not self._stop.wait(min(0.25, self._heartbeat_s)):
            with self._lock:
                if self._live:
                    for task, progress in zip(self._progress.tasks, self._active, strict=True):
                        self._progress.update(task.id, description=f"{progress.name} {progress.text()}".rstrip())
                elif self._active and time.monotonic() - self._printed_s >= self._heartbeat_s:
                    doing = "; ".join(f"{progress.name} {progress.timed_text()}" for progress in self._active)
                    self.say(f"{self._clock()} still {doing}")

    def _time_left(self, step: int) -> str:
        """Return the time to the end at the pace of all steps since the first row; empty before the second row."""
        now_s = time.monotonic()
        first, began_s = self._first_row = self._first_row or (step, now_s)
        if step <= first:
            return ""
        return short_time((now_s - began_s) / (step - first) * (self._num_steps - step))

    def _clock(self) -> str:
        return f"[{time.monotonic() - self._started_s:7.1f} s]"

    def _line(self, first: str, cells: list[str]) -> str:
        padded = [f"{cell:>{column.width + 1}}" for column, cell in zip(self._columns, cells, strict=True)]
        return "".join([f"{first:>{self._step_width}}", *padded])


def _fitting(columns: Sequence[Column], width: int) -> tuple[Column, ...]:
    """Return the columns within `width` characters, a space before each included."""
    kept = list(columns)
    while sum(column.width + 1 for column in kept) > width and any(column.spare for column in kept):
        kept.remove(max(kept, key=lambda column: column.spare))
    return tuple(kept)


def _cell(column: Column, metrics: Mapping[str, float]) -> str:
    """Return the number, with a mark before one beyond its healthy range."""
    name = next((name for name in column.metrics if name in metrics), None)
    if name is None:
        return ""
    value = metrics[name]
    return ("!" if is_beyond_healthy(name, value) else "") + (format(value, column.format) if math.isfinite(value) else str(value))


def short_time(seconds: float) -> str:
    """Return a time in at most six characters, such as 45s, 12m05s, 3h25m and 2d04h."""
    whole = round(seconds)
    for unit, smaller, size in (("d", "h", 86400), ("h", "m", 3600), ("m", "s", 60)):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size * {'h': 24, 'm': 60, 's': 60}[smaller] // size:02}{smaller}"
    return f"{whole}s"
