"""The outcome of a run in summary.json, also of a failed or interrupted run."""

import json
import signal
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_rl.errors import UserError
from megatron_rl.system.files import read_record, write_atomic

SETTINGS_FILE, SUMMARY_FILE = "settings.yaml", "summary.json"
REPORT_FILE = "report.html"
"""Written by `megatron-rl report`."""
FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The outcome of a run, in the form of summary.json.

    `status` is finished, "failed: REASON" or "interrupted: SIGNAL"; `steps` counts trained rollout
    batches. `evaluation_before` and `evaluation_after` are the first and the last estimates of each
    set, by SET/NAME, such as aime/accuracy. `seconds` are per phase. `checkpoint` is the Hugging
    Face directory of the newest saved policy; `go_on` is the command to continue the run.
    """

    status: str
    steps: int
    seed: int
    evaluation_before: dict[str, float]
    evaluation_after: dict[str, float]
    seconds: dict[str, float]
    peak_memory_bytes: int
    checkpoint: str | None
    go_on: str


def asked_to_end(error: BaseException) -> bool:
    """Return True where a signal of a scheduler, a user or a closing terminal ends the run."""
    return isinstance(error, SystemExit) and error.code in (128 + signal.SIGTERM, 128 + signal.SIGINT, 128 + signal.SIGHUP)


def signal_of(error: BaseException) -> signal.Signals:
    """Return the signal behind an `error` with `asked_to_end` True."""
    assert isinstance(error, SystemExit) and isinstance(error.code, int), "asked_to_end was asked first"
    return signal.Signals(error.code - 128)


def status_of(error: BaseException) -> str:
    """Return the status of a run ended by `error`."""
    if asked_to_end(error):
        return f"interrupted: {signal_of(error).name}"
    return f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def write_summary(directory: Path, summary: Summary) -> None:
    """Write the summary of the run in `directory`. Raises UserError when the disk is full."""
    write_atomic(directory / SUMMARY_FILE, json.dumps(asdict(summary), indent=2) + "\n")


def summary_time(directory: Path) -> int | None:
    """Return the time of the summary of the run in `directory`, in nanoseconds, None without one."""
    path = directory / SUMMARY_FILE
    return path.stat().st_mtime_ns if path.exists() else None


def read_summary(directory: Path) -> Summary | None:
    """Return the summary of a run; None while it goes on or after a kill. Raises UserError."""
    path = directory / SUMMARY_FILE
    if not path.exists():
        return None
    try:
        return read_record(path, Summary)
    except ValueError as error:
        raise UserError(f"{path} is not the summary of a run ({error}); remove it, or name another directory") from error
