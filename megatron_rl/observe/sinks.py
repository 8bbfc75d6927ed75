"""Sinks of a step's metrics: metrics.jsonl and TensorBoard always, Weights & Biases on request."""

import importlib
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.summary.writer.record_writer import RecordWriter

from megatron_rl.config.settings import ObserveSettings
from megatron_rl.errors import UserError
from megatron_rl.observe.visible_text import lines_of, visible
from megatron_rl.system.files import disk_errors, write_atomic
from megatron_rl.types import Doubles, Sample

METRICS_FILE = "metrics.jsonl"


class Sinks:
    """All sinks of a run with files in `directory`; `config` are the settings, to be shown.

    A resumed run goes on in the same files, without rows of steps after `first_step`. The first
    metrics logged of that step are added to those in `row` (the checkpoint's) and in the file.
    Raises UserError for a missing package, a full disk or another program's metrics.jsonl.
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
        self._first_step, self.lines = first_step, JsonLines(directory / METRICS_FILE, first_step=first_step)
        self._row = {**(row or {}), **self.lines.row}
        curves = TensorBoard(directory / "tensorboard", first_step=first_step)
        if config:
            curves.write_text("settings", json.dumps(config, indent=2), step=first_step)
        self._sinks: list[JsonLines | TensorBoard | WeightsAndBiases] = [self.lines, curves]
        if settings.wandb_project is not None:
            self._sinks.append(WeightsAndBiases(directory, project=settings.wandb_project, config=config or {}))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of `step`; several calls for one step add up."""
        if step == self._first_step:
            metrics, self._row = {**self._row, **metrics}, {}
        for sink in self._sinks:
            sink.log(step, metrics)

    def show(self, step: int, samples: Sequence[Sample], spread: Mapping[str, Doubles]) -> None:
        """Give samples of `step` and numbers [B] by metric to TensorBoard and Weights & Biases."""
        # A tag of TensorBoard has one kind of value.
        finite = {f"{name}_histogram": numbers[np.isfinite(numbers)] for name, numbers in spread.items()}
        for sink in self._sinks:
            if not isinstance(sink, JsonLines):
                sink.show(step, samples, {name: numbers for name, numbers in finite.items() if len(numbers)})

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> "Sinks":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class JsonLines:
    """One JSON object per call: `step`, `time` (seconds since 1970) and the metrics.

    Null stands for NaN and infinities. Earlier lines are kept up to `first_step`; the next call for
    that step replaces its line, which `row` holds.
    """

    def __init__(self, path: Path, *, first_step: int) -> None:
        self._path = path
        known = _read_records(path) if path.exists() else {}
        self._earlier = {step: record for step, record in known.items() if step < first_step}
        self._replaces = first_step if first_step in known else None
        self.row = _numbers(known.get(first_step, {}))
        kept = [record for step, record in known.items() if step <= first_step]
        # Without the torn last line of a kill or a full disk.
        write_atomic(path, b"".join(map(_line, kept)))
        self._file = FileIO(path, "ab")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line with a single write, so that a kill leaves no half a line."""
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
                    # A short write is the last write before a full disk.
                    left = left[self._file.write(left) :]
            except OSError:
                # A line behind a torn line would be lost, too.
                with suppress(OSError):
                    self._file.truncate(start)
                raise

    def sync(self) -> None:
        """Sync the logged lines to the disk itself."""
        with disk_errors(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """TensorBoard events; a resumed run hides earlier ones from `first_step` on.

    Writes are immediate: the thread of TensorBoard's own writer fails with a traceback on a full
    disk.
    """

    def __init__(self, directory: Path, *, first_step: int) -> None:
        with disk_errors(directory):
            resumed = directory.exists()
            directory.mkdir(parents=True, exist_ok=True)
            # TensorBoard reads in the order of names, also where the clock was set back.
            last = max((path.name for path in directory.glob("events*")), default="")
            self._path = directory / max(f"events.out.tfevents.{time.time_ns()}", f"{last}.1" * bool(last))
            self._file = self._path.open("ab")
        self._records = RecordWriter(self._file)
        self._write(Event(file_version="brain.Event:2"))
        if resumed:
            self._write(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write every metric as a scalar."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(Event(step=step, summary=Summary(value=values)))

    def show(self, step: int, samples: Sequence[Sample], spread: Mapping[str, Doubles]) -> None:
        """Write samples as texts, and numbers [B] by metric as histograms."""
        texts = ["\n".join(lines_of(sample, step=step)) for sample in samples]
        if texts:
            self.write_text("samples", "\n\n".join(texts), step=step)
        self._write(Event(step=step, summary=Summary(value=[_histogram(name, numbers) for name, numbers in spread.items()])))

    def write_text(self, name: str, text: str, *, step: int) -> None:
        """Write a text as it is: TensorBoard reads Markdown, in which an indented block is code."""
        block = "".join(f"    {line}\n" for line in text.splitlines())
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(dtype="DT_STRING", string_val=[block.encode("utf-8", "replace")], tensor_shape=shape)
        self._write(Event(step=step, summary=Summary(value=[Summary.Value(tag=name, metadata=metadata, tensor=tensor)])))

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        with disk_errors(self._path):
            self._records.write(event.SerializeToString())
            self._records.flush()

    def close(self) -> None:
        """Close the event file."""
        with disk_errors(self._path):
            self._records.close()


class WeightsAndBiases:
    """A Weights & Biases run named after the directory, which keeps the id for a resume."""

    def __init__(self, directory: Path, *, project: str, config: Mapping[str, Any]) -> None:
        self._wandb = _import_wandb()
        identity = directory / "wandb_run_id"
        run_id = identity.read_text().strip() if identity.exists() else None
        # Group and tags are read from the environment there.
        name = os.environ.get("WANDB_NAME") or directory.name
        self._run = self._wandb.init(project=project, name=name, dir=str(directory), id=run_id, resume="allow", config=dict(config))
        with disk_errors(identity):
            identity.write_text(f"{self._run.id}\n")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def show(self, step: int, samples: Sequence[Sample], spread: Mapping[str, Doubles]) -> None:
        """Send samples as a table, and numbers [B] by metric as histograms."""
        columns = ["step", "group", "prompt", "label", "answer", "reward", "tokens", "ended by"]
        rows = [
            [
                *(step, one.group_id, visible(one.prompt.text), visible(one.prompt.label or ""), visible(one.response_text)),
                *(None if one.reward is None else one.reward.value, len(one.response_ids), one.stop_reason.value),
            ]
            for one in samples
        ]
        tables = {"samples": self._wandb.Table(columns=columns, data=rows)} if rows else {}
        histograms = {name: self._wandb.Histogram(numbers) for name, numbers in spread.items()}
        self._run.log({**tables, **histograms}, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def _histogram(name: str, numbers: Doubles) -> Summary.Value:
    """Return the histogram of numbers [B]."""
    counts, edges = np.histogram(numbers, bins=30)
    moments = {"min": numbers.min(), "max": numbers.max(), "num": len(numbers), "sum": numbers.sum(), "sum_squares": numbers @ numbers}
    return Summary.Value(tag=name, histo=HistogramProto(**moments, bucket_limit=edges[1:], bucket=counts))


def check_installed(settings: ObserveSettings) -> None:
    """Import the packages of the requested sinks. Raises UserError for a missing package."""
    if settings.wandb_project is not None:
        _import_wandb()


def _import_wandb() -> Any:
    try:
        return importlib.import_module("wandb")
    except ImportError as error:
        raise UserError("observe.wandb_project is set but wandb is not installed; pip install wandb, or unset it") from error


def read_metrics(path: Path) -> dict[int, dict[str, float]]:
    """Return the metrics of every step in a metrics.jsonl, by step in rising order; NaN for null.

    Several lines of a step add up; a later line wins, also over all lines of later steps. Raises
    UserError for a broken line.
    """
    return {step: _numbers(record) for step, record in _read_records(path).items()}


def read_times(path: Path) -> dict[int, float]:
    """Return when the newest line of every step was written, in seconds since 1970. Raises UserError for a broken line."""
    return {step: float(record["time"]) for step, record in _read_records(path).items() if "time" in record}


def _read_records(path: Path) -> dict[int, dict[str, Any]]:
    """Return the object of every step, with `step` and `time`; the rest as `read_metrics`."""
    steps: dict[int, dict[str, Any]] = {}
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            record = dict(json.loads(line))
            step = int(record["step"])
            _numbers(record)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise UserError(f"{path}:{number}: not a line of metrics ({error}); remove that line") from error
        while steps and next(reversed(steps)) > step:
            steps.popitem()
        steps.setdefault(step, {}).update(record)
    return steps


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    return {name: math.nan if value is None else float(value) for name, value in record.items() if name not in ("step", "time")}


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, allow_nan=False).encode() + b"\n"
