"""Where the metrics of a step go: metrics.jsonl always, TensorBoard and Weights & Biases when asked for."""

import importlib
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from megatron_rl.config.settings import ObserveSettings
from megatron_rl.errors import UserError
from megatron_rl.files import disk_errors

METRICS_FILE = "metrics.jsonl"


class Sink(Protocol):
    """One destination of metrics."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the metrics of a step."""

    def close(self) -> None:
        """Bring everything to its destination."""


class Sinks:
    """All sinks of a run that writes into `directory`. A resumed run goes on in the same files.

    `first_step` is the step that comes first; `config` are the run's settings, for those sinks that show them.
    Raises UserError when a sink's package is not installed or the disk is full.
    """

    def __init__(self, directory: Path, settings: ObserveSettings, *, first_step: int = 0, config: Mapping[str, Any] | None = None) -> None:
        self._sinks: list[Sink] = [JsonLines(directory / METRICS_FILE)]
        if settings.tensorboard:
            self._sinks.append(TensorBoard(directory / "tensorboard", first_step=first_step))
        if settings.wandb_project is not None:
            self._sinks.append(WeightsAndBiases(directory, project=settings.wandb_project, config=config or {}))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of `step`; several calls for one step add up."""
        for sink in self._sinks:
            sink.log(step, metrics)

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> "Sinks":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class JsonLines:
    """One JSON object per call: `step`, `time` (seconds since 1970) and the metrics; null stands for NaN and infinities."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b", buffering=0)
            self._drop_torn_line()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line with a single write, so that a kill cannot leave half of it in the middle of the file."""
        numbers = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        line = json.dumps({"step": step, "time": round(time.time(), 3), **numbers}, allow_nan=False)
        with disk_errors(self._path):
            self._file.write(line.encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _drop_torn_line(self) -> None:
        """Cut off what a full disk or a crash left behind the last complete line."""
        self._file.seek(0)
        content = self._file.read()
        self._file.truncate(content.rfind(b"\n") + 1)


class TensorBoard:
    """TensorBoard events; those from `first_step` on that an earlier life of the run wrote are hidden."""

    def __init__(self, directory: Path, *, first_step: int) -> None:
        module = _import_tensorboard()
        self._writer = module.SummaryWriter(str(directory), purge_step=first_step or None)

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

    A run that was killed and resumed writes some steps twice: a line of step s takes the place of everything that earlier lives of
    the run wrote about later steps, and of the metrics of its own step that it names again. Raises UserError for a broken line.
    """
    steps: dict[int, dict[str, float]] = {}
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            record = dict(json.loads(line))
            step = int(record.pop("step"))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}:{number}: not a line of metrics ({error}); remove that line") from error
        record.pop("time", None)
        while steps and next(reversed(steps)) > step:
            steps.popitem()
        steps.setdefault(step, {}).update({name: math.nan if value is None else float(value) for name, value in record.items()})
    return steps
