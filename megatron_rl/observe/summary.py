"""How a run ended and what it came to: summary.json, also of a run that failed or was interrupted."""

import json
import signal
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_rl.errors import UserError
from megatron_rl.files import write_atomic

SUMMARY_FILE = "summary.json"
FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The outcome of a run, as summary.json holds it.

    `status` is finished, "failed: REASON" or "interrupted: SIGNAL"; `steps` are the rollout batches trained on. Accuracies are of
    held-out prompts, None without data.eval; `seconds` per phase. `checkpoint` is the Hugging Face directory of the newest saved policy,
    None when there is none; `go_on` is the command that continues the run.
    """

    status: str
    steps: int
    seed: int
    accuracy_before: float | None
    accuracy_after: float | None
    accuracy_sampled_before: float | None
    accuracy_sampled_after: float | None
    seconds: dict[str, float]
    peak_memory_bytes: int
    checkpoint: str | None
    go_on: str


def asked_to_end(error: BaseException) -> bool:
    """Whether SIGTERM ends the run, as a scheduler sends it before it takes the machine away."""
    return isinstance(error, SystemExit) and error.code == 128 + signal.SIGTERM


def status_of(error: BaseException) -> str:
    """The status of a run that `error` ends."""
    if isinstance(error, KeyboardInterrupt):
        return f"interrupted: {signal.SIGINT.name}"
    if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code > 128:
        return f"interrupted: {signal.Signals(error.code - 128).name}"
    return f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def write_summary(directory: Path, summary: Summary) -> None:
    """Write the summary of the run in `directory`. Raises UserError when the disk is full."""
    write_atomic(directory / SUMMARY_FILE, json.dumps(asdict(summary), indent=2) + "\n")


def read_summary(directory: Path) -> Summary | None:
    """The summary of the run in `directory`; None while it goes on, or when it was killed. Raises UserError for a file of another kind."""
    path = directory / SUMMARY_FILE
    if not path.exists():
        return None
    try:
        return Summary(**json.loads(path.read_text()))
    except (json.JSONDecodeError, TypeError) as error:
        raise UserError(f"{path} is not the summary of a run ({error}); remove it, or name another directory") from error


def facts_of(summary: Summary) -> dict[str, str]:
    """The summary as rows of a table; what was not measured is left out."""
    facts = {
        "status": summary.status,
        "steps": str(summary.steps),
        "seed": str(summary.seed),
        "peak memory": f"{summary.peak_memory_bytes / 2**30:.2f} GiB",
        "seconds": ", ".join(f"{name} {seconds:.0f}" for name, seconds in summary.seconds.items()),
    }
    if summary.checkpoint is not None:
        facts["checkpoint"] = summary.checkpoint
    if summary.accuracy_before is not None and summary.accuracy_after is not None:
        facts["held-out accuracy, greedy"] = f"{summary.accuracy_before:.3f} → {summary.accuracy_after:.3f}"
    if summary.accuracy_sampled_before is not None and summary.accuracy_sampled_after is not None:
        facts["held-out accuracy, sampled"] = f"{summary.accuracy_sampled_before:.3f} → {summary.accuracy_sampled_after:.3f}"
    return facts
