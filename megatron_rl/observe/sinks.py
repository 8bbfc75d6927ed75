"""Where the metrics of a step go: metrics.jsonl always, TensorBoard and Weights & Biases when asked for."""

import importlib
import json
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from megatron_rl.config.settings import ObserveSettings
from megatron_rl.errors import UserError
from megatron_rl.files import disk_errors, write_atomic

METRICS_FILE = "metrics.jsonl"


class Sink(Protocol):
    """One destination of metrics."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the metrics of a step."""

    def close(self) -> None:
        """Bring everything to its destination."""


class Sinks:
    """All sinks of a run that writes into `directory`. A resumed run goes on in the same files, after the row of `first_step`.

    What an earlier life of the run wrote about later steps is dropped; the first metrics logged of `first_step` are added to those that
    are there of it, in `row` (what its checkpoint knows) or in the file. `config` are the run's settings, for those sinks that show
    them. Raises UserError when a sink's package is not installed, the disk is full or metrics.jsonl is not what a run writes.
    """

    def __init__(
        self,
        directory: Path,
        settings: ObserveSettings,
        *,
        first_step: int = 0,
        row: Mapping[str, float] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        lines = JsonLines(directory / METRICS_FILE, first_step=first_step)
        self._first_step = first_step
        self._row = {**(row or {}), **lines.row}
        self._lines = lines
        self._sinks: list[Sink] = [lines]
        if settings.tensorboard:
            self._sinks.append(TensorBoard(directory / "tensorboard", first_step=first_step))
        if settings.wandb_project is not None:
            self._sinks.append(WeightsAndBiases(directory, project=settings.wandb_project, config=config or {}))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of `step`; several calls for one step add up."""
        if step == self._first_step:
            metrics, self._row = {**self._row, **metrics}, {}
        for sink in self._sinks:
            sink.log(step, metrics)

    def sync(self) -> None:
        """Let metrics.jsonl survive a power failure: a run that goes on from a checkpoint does not measure the steps before it again."""
        self._lines.sync()

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> "Sinks":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class JsonLines:
    """One JSON object per call: `step`, `time` (seconds since 1970) and the metrics; null stands for NaN and infinities.

    Lines of an earlier life of the run are kept up to `first_step`, whose own line the next call for that step replaces; `row` holds it.
    """

    def __init__(self, path: Path, *, first_step: int) -> None:
        self._path = path
        known = _read_records(path) if path.exists() else {}
        self._earlier = {step: record for step, record in known.items() if step < first_step}
        self._replaces = first_step if first_step in known else None
        self.row = _numbers(known.get(first_step, {}))
        kept = [record for step, record in known.items() if step <= first_step]
        # Also without a torn last line, which a kill or a full disk leaves.
        write_atomic(path, b"".join(map(_line, kept)))
        self._file = FileIO(path, "ab")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line with a single write, so that a kill cannot leave half of it in the middle of the file."""
        numbers = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        line = _line({"step": step, "time": round(time.time(), 3), **numbers})
        if step == self._replaces:
            self._file.close()
            write_atomic(self._path, b"".join([*map(_line, self._earlier.values()), line]))
            self._replaces = None
            self._file = FileIO(self._path, "ab")
            return
        with disk_errors(self._path):
            start, left = self._file.seek(0, os.SEEK_END), memoryview(line)
            try:
                while left:
                    # The last write before a disk is full is a short one.
                    left = left[self._file.write(left) :]
            except OSError:
                # Behind a torn line the next one would be lost, too.
                with suppress(OSError):
                    self._file.truncate(start)
                raise

    def sync(self) -> None:
        """Bring what was logged to the disk itself."""
        with disk_errors(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """TensorBoard events; those from `first_step` on that an earlier life of the run wrote are hidden."""

    def __init__(self, directory: Path, *, first_step: int) -> None:
        module = _import_tensorboard()
        self._writer = module.SummaryWriter(str(directory), purge_step=first_step if directory.exists() else None)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write every metric as a scalar."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WeightsAndBiases:
    """A Weights & Biases run named after the directory, whose id is kept there so that a resumed run continues it."""

    def __init__(self, directory: Path, *, project: str, config: Mapping[str, Any]) -> None:
        wandb = _import_wandb()
        identity = directory / "wandb_run_id"
        run_id = identity.read_text().strip() if identity.exists() else None
        self._run = wandb.init(project=project, name=directory.name, dir=str(directory), id=run_id, resume="allow", config=dict(config))
        with disk_errors(identity):
            identity.write_text(f"{self._run.id}\n")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def check_installed(settings: ObserveSettings) -> None:
    """Import what the sinks that were asked for are made of. Raises UserError when a package is not installed."""
    if settings.tensorboard:
        _import_tensorboard()
    if settings.wandb_project is not None:
        _import_wandb()


def _import_tensorboard() -> Any:
    try:
        return importlib.import_module("torch.utils.tensorboard")
    except ImportError as error:
        raise UserError("observe.tensorboard is on but tensorboard is not installed; pip install tensorboard, or turn it off") from error


def _import_wandb() -> Any:
    try:
        return importlib.import_module("wandb")
    except ImportError as error:
        raise UserError("observe.wandb_project is set but wandb is not installed; pip install wandb, or unset it") from error


def read_metrics(path: Path) -> dict[int, dict[str, float]]:
    """The metrics of every step in a metrics.jsonl, by step in rising order; NaN stands for null.

    Several lines of a step add up, a later one wins. A line of step s takes the place of everything that earlier lives of the run wrote
    about later steps. Raises UserError for a broken line.
    """
    return {step: _numbers(record) for step, record in _read_records(path).items()}


def _read_records(path: Path) -> dict[int, dict[str, Any]]:
    """The object of every step, with `step` and `time`; the rest as `read_metrics`."""
    steps: dict[int, dict[str, Any]] = {}
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            record = dict(json.loads(line))
            step = int(record["step"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}:{number}: not a line of metrics ({error}); remove that line") from error
        while steps and next(reversed(steps)) > step:
            steps.popitem()
        steps.setdefault(step, {}).update(record)
    return steps


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    return {name: math.nan if value is None else float(value) for name, value in record.items() if name not in ("step", "time")}


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, allow_nan=False).encode() + b"\n"
