"""Records of a run: lines on the console, metrics of a step, and the outcome in the run directory."""

import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen

from megatron_rl.checkpoints.run_checkpoints import POLICY_LINK, Best, checkpoint_paths
from megatron_rl.config.derived import OneReward
from megatron_rl.config.settings import RunSettings
from megatron_rl.errors import UserError, counted
from megatron_rl.evaluation.evaluator import SetResult
from megatron_rl.observe.advice import advise
from megatron_rl.observe.console import PhaseProgress, RunConsole
from megatron_rl.observe.memory import PeakMemory
from megatron_rl.observe.metrics import Max, Mean, Metric, merge_metrics, metric_values
from megatron_rl.observe.sinks import METRICS_FILE, Sinks, read_metrics
from megatron_rl.observe.spans import Spans, write_spans
from megatron_rl.observe.summary import FINISHED, REPORT_FILE, SETTINGS_FILE, Summary, write_summary
from megatron_rl.observe.timing import PhaseTimer
from megatron_rl.observe.visible_text import lines_of
from megatron_rl.runtime.supervisor import begin_command, run_command
from megatron_rl.types import Doubles, Sample

_MOST_ADVICE = 3
"""Sentences at the end of a run; `megatron-rl status` has all of them."""


class RunRecords:
    """Collects the metrics of a step until `log`; evaluations, phases and memory of the whole run."""

    def __init__(
        self,
        run: RunSettings,
        *,
        console: RunConsole,
        sinks: Sinks,
        memory: PeakMemory,
        timer: PhaseTimer,
        replay: Path | None = None,
        report_interval: int = 0,
        one_reward: OneReward = "teaches nothing",
    ) -> None:
        """`report_interval` are steps between reports while the run goes on, 0: none."""
        self._report_interval, self._one_reward = report_interval, one_reward
        self._report: Popen[bytes] | None = None
        self._run, self._console, self._sinks, self._memory, self._timer = run, console, sinks, memory, timer
        self._resume_words = ["--resume"] if replay is None else ["--resume", "--replay", str(replay)]
        self._metrics: list[dict[str, Metric]] = []
        self.spans: list[Spans] = [timer.spans]
        """Sources of the spans that each `log` writes."""
        self._clocks: dict[str, tuple[Callable[[], float], float]] = {}
        self.logged_steps = 0
        self.first_evaluation: dict[str, float] = {}
        self.best: dict[str, Best] = {}
        self._last_evaluation: dict[str, float] = {}

    @contextmanager
    def phase(
        self, name: str, *, clock: str | None = None, total: int | None = None, unit: str = "", progress: PhaseProgress | None = None
    ) -> Iterator[PhaseProgress]:
        """Show the phase `name`, or one with `progress` already, and measure the time, under `clock` where given."""
        with self._timer.measure(clock or name), self._console.phase(name, total=total, unit=unit, progress=progress) as shown:
            yield shown

    def say(self, *sentences: str) -> None:
        """Print sentences."""
        for sentence in sentences:
            self._console.say(sentence)

    def show(self, step: int, samples: Sequence[Sample], spread: Mapping[str, Doubles]) -> None:
        """Print one of the kept `samples` of a step; give all to the sinks, with numbers [B] by metric."""
        if samples:
            self.say(*lines_of(samples[(step - 1) % len(samples)], step=step))
        self._sinks.show(step, samples, spread)

    def add(self, *metrics: dict[str, Metric]) -> None:
        """Add metrics to the step's."""
        self._metrics += metrics

    def follow(self, name: str, clock: Callable[[], float]) -> None:
        """Measure the phase `name` beside the others, by the seconds that pass on `clock`."""
        self._clocks[name] = clock, 0.0

    def add_evaluation(self, results: Iterable[SetResult], *, step: int, late: bool) -> None:
        """Add an evaluation to the row of `step`, which is written where `late`; the summary has each set's first and last."""
        for result in results:
            values = metric_values(result.metrics)
            self.first_evaluation, self._last_evaluation = {**values, **self.first_evaluation}, {**self._last_evaluation, **values}
            if late or result.failures:
                self.say(f"evaluation after step {step}: {result}")
            if late:
                self._sinks.log(step, values)
            else:
                self.add(result.metrics)

    def so_far(self, *, durable: bool = False) -> dict[str, float]:
        """Return all measurements since the last log; with `durable`, earlier rows are on the disk."""
        if durable:
            # A resumed run does not measure earlier steps again.
            self._sinks.lines.sync()
        for name, (clock, before_s) in self._clocks.items():
            self._clocks[name] = clock, clock()
            self._timer.add(name, self._clocks[name][1] - before_s)
        self._metrics.append({"memory/peak_bytes": Max(self._memory.peak_bytes)})
        metrics = merge_metrics([*self._metrics, self._timer.take()])
        self._metrics = [metrics]
        tokens, seconds = metrics.get("train/num_tokens"), metrics.get("time/train")
        if tokens is not None and seconds is not None:
            metrics = {**metrics, "train/tokens_per_second": Mean(tokens.value, seconds.value)}
        return metric_values(metrics)

    def log(self, *, step: int) -> None:
        """Write and show all measurements since the last call, under the first `step` steps."""
        values = self.so_far()
        self._metrics, self.logged_steps = [], step
        self._sinks.log(step, values)
        write_spans(self._run.directory, (span for source in self.spans for span in source.take()))
        self._console.row(step, values)
        goes_on = 0 < step < self._run.num_steps
        if goes_on and self._report_interval and not step % self._report_interval and not self._reports():
            self._report = begin_command("report", self._run.directory)

    def _reports(self) -> bool:
        """Return True while a report is being written."""
        return self._report is not None and self._report.poll() is None

    def end_report(self) -> None:
        """End the report that is being written: an earlier page must not replace a later one."""
        if self._report is not None:
            self._report.kill()
            self._report.wait()

    def finish(self, *, steps: int) -> None:
        """Write curves, page and finally the summary of a finished run; print their paths."""
        # Half as many steps again.
        go_on = f"{self._resume_command} run.num_steps={self._run.num_steps + max(1, self._run.num_steps // 2)}"
        self.write_outcome(FINISHED, steps=steps, go_on=go_on)
        found = {"policy": POLICY_LINK, "report": REPORT_FILE, "metrics": METRICS_FILE}
        paths = {name: self._run.directory / file for name, file in found.items()}
        lines = [f"{name:<8} {path}" for name, path in paths.items() if path.exists()]
        self.say(f"finished after {counted(steps, 'step')}", *lines, f"{'go on':<8} {go_on}")

    def write_outcome(self, status: str, *, steps: int, go_on: str = "") -> None:
        """Write the summary, and the report in a process of its own; print the most urgent advice, if any."""
        self.write_summary(status, steps=steps, go_on=go_on)
        rows, advice = self._run.directory / METRICS_FILE, tuple[str, ...]()
        if not rows.exists():
            return
        with self._console.phase("report"):
            self.end_report()
            try:
                advice = advise(read_metrics(rows), one_reward=self._one_reward)
                run_command("report", self._run.directory)
            except UserError as error:
                self.say(f"there is no report: {error}")
        self.say(*(f"! {sentence}" for sentence in advice[:_MOST_ADVICE]))

    def write_summary(self, status: str, *, steps: int, go_on: str = "") -> None:
        """Write the outcome after `steps` trained steps, with the command that continues the run."""
        saved = checkpoint_paths(self._run.directory)
        summary = Summary(
            status=status,
            steps=steps,
            seed=self._run.seed,
            evaluation_before={name.removeprefix("eval/"): value for name, value in self.first_evaluation.items()},
            evaluation_after={name.removeprefix("eval/"): value for name, value in self._last_evaluation.items()},
            seconds={name: round(value, 2) for name, value in self._timer.totals().items()},
            peak_memory_bytes=self._memory.peak_bytes,
            checkpoint=str((saved[-1] / "hf").resolve()) if saved else None,
            go_on=go_on or self._resume_command,
        )
        write_summary(self._run.directory, summary)

    @property
    def _resume_command(self) -> str:
        return shlex.join([sys.executable, "-m", "megatron_rl", "train", str(self._run.directory / SETTINGS_FILE), *self._resume_words])
