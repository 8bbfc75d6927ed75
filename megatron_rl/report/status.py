"""`megatron-rl status`: the state of runs from their directories alone, on this node or another one."""

import itertools
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from megatron_rl.config.derived import one_reward
from megatron_rl.config.load import load_settings
from megatron_rl.config.settings import RunSettings
from megatron_rl.data.buffer import BUFFER_FILE
from megatron_rl.errors import UserError, sized
from megatron_rl.observe.advice import advise
from megatron_rl.observe.live_state import STATUS_FILE, STATUS_S, LiveState, read_state
from megatron_rl.observe.sinks import METRICS_FILE, read_metrics, read_times
from megatron_rl.observe.summary import FINISHED, SETTINGS_FILE, SUMMARY_FILE, read_summary, summary_time
from megatron_rl.system.files import free_bytes
from megatron_rl.system.leftovers import lives_here

SILENT_S = 15 * STATUS_S
"""Age of a state from which on its writer is looked at; disks that nodes share show a new one seconds later."""
LOOK_S = 5 * STATUS_S
"""Time to see whether another node goes on, whose clock may be another."""
RECENT, TAIL_LINES = 20, 5

Life: TypeAlias = Literal["running", "late", "silent", "dead", "finished", "failed", "interrupted"]
EXIT_STATUS: dict[Life, int] = {"running": 0, "finished": 0, "interrupted": 75, "late": 3, "silent": 3, "dead": 1, "failed": 1}
"""For scripts; of several runs the largest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """Facts of a run seen from outside; seconds, tokens a second, bytes.

    `why` is the summary's status or the silence of the run, `state` the last one that it wrote,
    `log` the last lines of the process that failed.
    """

    directory: str
    life: Life
    why: str
    step: int
    num_steps: int | None
    age_s: float | None
    state: LiveState | None
    left_s: float | None
    tokens_per_second: float | None
    usual_tokens_per_second: float | None
    metrics: dict[str, float]
    restarts: int
    disk_to_come: int | None
    disk_free: int
    advice: tuple[str, ...]
    log: tuple[str, ...]

    def lines(self) -> list[str]:
        """Return the report for a terminal, the first line for all that matters."""
        of = "" if self.num_steps is None else f"/{self.num_steps}"
        left = ""
        if self.left_s is not None:
            end = time.strftime("%a %H:%M", time.localtime(time.time() + self.left_s))
            left = f", ends in {_time(self.left_s)} ({end})"
        lines = [f"{self.directory}: {self.life}, {self.step}{of} steps{left}{f'; {self.why}' if self.why else ''}"]
        if self.state is not None and self.life in ("running", "late", "silent", "dead"):
            lines += [f"  in {' '.join(filter(None, (one.name, one.progress)))} for {one.seconds:.0f} s" for one in self.state.phases]
            lines += [f"  {one}" for one in self.state.waits]
            for number, one in enumerate(self.state.engines):
                known = "" if one.kv_use is None else f", queue {one.queue}, KV use {one.kv_use:.2f}"
                lines.append(f"  engine {number} {one.url}: {one.requests} of {one.limit} requests{known}, {one.answers} answers")
        lines += [f"  {name:<10}{value}" for name, value in self._facts().items()]
        lines += [f"  note      {note}" for note in (() if self.state is None else self.state.notes)]
        lines += [f"  ! {sentence}" for sentence in self.advice]
        return lines + [f"  | {line}" for line in self.log]

    def _facts(self) -> dict[str, str]:
        facts: dict[str, str] = {}
        if self.tokens_per_second is not None and self.usual_tokens_per_second is not None:
            facts["speed"] = f"{self.tokens_per_second:,.0f} tokens/s, usually {self.usual_tokens_per_second:,.0f}"
        names = {"rollout/reward": "reward", "rollout/staleness": "staleness", "weights/version": "weights' version"}
        if found := [f"{words} {self.metrics[name]:.4g}" for name, words in names.items() if name in self.metrics]:
            facts["last row"] = ", ".join([*found, f"engine restarts {self.restarts}"])
        if peak := self.metrics.get("memory/peak_bytes"):
            facts["memory"] = f"{sized(peak)} at most"
        if self.disk_to_come is not None:
            facts["disk"] = f"{sized(self.disk_to_come)} to come, {sized(self.disk_free)} free"
        return facts


def report_status(directory: Path) -> RunReport:
    """Return what the files in the `directory` of a run say. Raises UserError where there is no run."""
    state, summary = read_state(directory), read_summary(directory) if directory.is_dir() else None
    rows, times = _rows(directory)
    if state is None and summary is None and not rows:
        missing = f"{directory} has neither {STATUS_FILE} nor {SUMMARY_FILE}, so no run was started there"
        raise UserError(f"{missing}; give the run.directory of a run")
    life, why = _life(directory, state)
    step, num_steps = max(rows, default=0), None if state is None else state.num_steps
    goes_on, gaps, speeds = life in ("running", "late"), _gaps(times), _speeds(rows)
    left_s = statistics.median(gaps) * (num_steps - step) if goes_on and gaps and num_steps is not None else None
    settings = None
    with suppress(UserError):
        settings = load_settings(directory / SETTINGS_FILE, on_gpus=False)
    return RunReport(
        directory=str(directory),
        life=life,
        why=why,
        step=step,
        num_steps=num_steps,
        age_s=None if state is None else time.time() - state.time,
        state=state,
        left_s=left_s,
        tokens_per_second=speeds[-1] if speeds else None,
        usual_tokens_per_second=statistics.median(speeds) if speeds else None,
        metrics=rows[step] if rows else {},
        restarts=round(sum(row.get("engine/restarts", 0.0) for row in rows.values())),
        disk_to_come=_disk_to_come(directory, settings.run, step=step, num_steps=num_steps) if goes_on and settings is not None else None,
        disk_free=free_bytes(directory),
        advice=advise(
            rows,
            waits=() if state is None or not goes_on else state.waits,
            one_reward="teaches nothing" if settings is None else one_reward(settings.objective),
        ),
        log=_last_lines(directory, why) if life in ("failed", "dead") else (),
    )


def _rows(directory: Path) -> tuple[dict[int, dict[str, float]], dict[int, float]]:
    """Return the rows of a run and their times, none where there is no file yet."""
    path = directory / METRICS_FILE
    return (read_metrics(path), read_times(path)) if path.is_file() else ({}, {})


def _life(directory: Path, state: LiveState | None) -> tuple[Life, str]:
    """Return whether the run goes on, and why not."""
    summary = read_summary(directory)
    # A resumed run keeps the summary of its earlier life until it has started.
    if summary is not None and (state is None or summary_time(directory) != state.earlier):
        life: Life = "finished" if summary.status == FINISHED else "interrupted" if summary.status.startswith("interrupted") else "failed"
        return life, "" if life == "finished" else summary.status
    if state is None:
        return "dead", f"it has no {STATUS_FILE} and no {SUMMARY_FILE}"
    lives, age_s = lives_here(state.identity), time.time() - state.time
    where = f"process {state.identity['pid']} on {state.host}"
    if lives is False:
        old = f"its last state is {_time(age_s)} old"
        return "dead", f"{where} is gone without a summary; {old}, and --resume goes on from the last checkpoint"
    if abs(age_s) > SILENT_S and not _changes(directory, state):
        silent = f"has written no state for {_time(max(age_s, LOOK_S))}"
        if lives:
            return "silent", f"{where} lives, but {silent}: it is stopped, or its disk hangs"
        return "dead", f"{where} {silent}"
    return ("late" if any(wait.late for wait in state.waits) else "running"), ""


def _changes(directory: Path, state: LiveState) -> bool:
    """Return True where a new state comes within LOOK_S seconds."""
    until_s = time.monotonic() + LOOK_S
    while time.monotonic() < until_s:
        newer = read_state(directory)
        if newer is not None and newer.time != state.time:
            return True
        time.sleep(STATUS_S / 4)
    return False


def _gaps(times: Mapping[int, float]) -> list[float]:
    """Return the seconds of the newest steps; those of a step before which the run stood still count as any other."""
    steps = sorted(times)[-RECENT - 1 :]
    return [times[step] - times[before] for before, step in itertools.pairwise(steps) if before + 1 == step and times[step] > times[before]]


def _speeds(rows: Mapping[int, Mapping[str, float]]) -> list[float]:
    """Return the tokens a second of the newest steps: of the rollout, else of training."""
    for name in ("rollout/tokens_per_second", "train/tokens_per_second"):
        if found := [row[name] for row in rows.values() if name in row]:
            return found[-RECENT:]
    return []


def _disk_to_come(directory: Path, run: RunSettings, *, step: int, num_steps: int | None) -> int | None:
    """Return the bytes that checkpoints, exports and the buffer of a run still take, None before the first checkpoint."""
    # checkpoints.run_checkpoints knows more of them, but imports megatron-core: seconds.
    saved = sorted((path.parent for path in directory.glob("checkpoints/step-*/run.json")), key=lambda path: path.stat().st_mtime_ns)
    if not saved or not step or num_steps is None:
        return None
    each, exported = (sum(path.stat().st_size for path in place.rglob("*") if path.is_file()) for place in (saved[-1], saved[-1] / "hf"))
    later = [due for due in range(step + 1, num_steps + 1) if due == num_steps or (run.save_interval and due % run.save_interval == 0)]
    kept = sum(1 for due in later if run.keep_interval and due % run.keep_interval == 0)
    # One more than those that are kept, while it is written.
    passing = min(len(later), max(0, run.keep_checkpoints + 1 - len(saved)))
    buffer = directory / BUFFER_FILE
    growth = buffer.stat().st_size / step * (num_steps - step) if buffer.is_file() else 0
    exports = num_steps // run.export_interval - step // run.export_interval if run.export_interval else 0
    return round(each * max(kept, passing) + exported * exports + growth)


def _last_lines(directory: Path, why: str) -> tuple[str, ...]:
    """Return the last lines of the log that `why` names, as of "engine 1", or of the newest one."""
    logs = [path for path in directory.glob("logs/*.log") if path.stat().st_size]
    if not logs:
        return ()
    named = re.search(r"engine (\d+)", why)
    newest = max(logs, key=lambda path: (named is not None and path.stem == f"engine-{named[1]}", path.stat().st_mtime))
    with newest.open("rb") as file:
        file.seek(max(0, newest.stat().st_size - 2**14))
        text = file.read().decode(errors="replace")
    return (f"{newest}:", *text.splitlines()[-TAIL_LINES:])


def _time(seconds: float) -> str:
    """Return a time such as "45 s", "12 min" and "3 h 20 min"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


Publish: TypeAlias = Callable[[Sequence[RunReport]], None]


def print_status(directories: Sequence[Path], *, watch: bool, as_json: bool, publish: Publish | None = None) -> int:
    """Print the reports of the runs in `directories`, again every few seconds to `watch`; return the exit status.

    With `publish`, which gets them each time, nothing is printed and nothing ends.
    """
    while True:
        reports = [report_status(directory) for directory in directories]
        if publish is not None:
            publish(reports)
            time.sleep(STATUS_S)
            continue
        if as_json:
            text = "\n".join(json.dumps({**asdict(one), "exit_status": EXIT_STATUS[one.life]}) for one in reports)
        else:
            text = "\n".join(line for one in reports for line in one.lines())
        # From the corner of the screen, where there is one.
        print(f"\033[H\033[J{text}" if watch and sys.stdout.isatty() else text, flush=True)
        if not watch or all(one.life in ("finished", "failed", "interrupted", "dead") for one in reports):
            return max(EXIT_STATUS[one.life] for one in reports)
        time.sleep(STATUS_S)


def runs_below(directory: Path) -> list[Path]:
    """Return `directory` where it is a run's, else the runs one or two levels below, newest first."""
    if (directory / STATUS_FILE).exists() or (directory / SUMMARY_FILE).exists() or (directory / METRICS_FILE).exists():
        return [directory]
    found = {path.parent for pattern in (f"*/{STATUS_FILE}", f"*/*/{STATUS_FILE}") for path in directory.glob(pattern)}
    return sorted(found, key=lambda path: -(path / STATUS_FILE).stat().st_mtime) or [directory]
