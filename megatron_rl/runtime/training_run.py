"""A training run: what the loop calls by name, with its clock, its console and its metrics."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_rl.config.settings import Settings
from megatron_rl.errors import UserError
from megatron_rl.observe.console import PhaseProgress, RunConsole
from megatron_rl.observe.memory import PeakMemory
from megatron_rl.observe.metrics import Max, Mean, Metric, merge_metrics, metric_values
from megatron_rl.observe.report import has_curves, write_report
from megatron_rl.observe.sinks import Sinks
from megatron_rl.observe.summary import FINISHED, Summary, facts_of, status_of, write_summary
from megatron_rl.observe.timing import PhaseTimer
from megatron_rl.runtime.checkpoint import RunState, checkpoint_paths, newest_checkpoint, oldest_step, save_checkpoint
from megatron_rl.runtime.samples import SampleSource
from megatron_rl.runtime.trainers import TrainerGroup
from megatron_rl.runtime.turns import Turn, Turns
from megatron_rl.types import TrainBatch

SETTINGS_FILE = "settings.yaml"
POLICY_LINK = "huggingface"


class TrainingRun:
    """The methods that `train_loop` calls."""

    def __init__(
        self,
        settings: Settings,
        *,
        samples: SampleSource,
        trainers: TrainerGroup,
        turns: Turns,
        console: RunConsole,
        sinks: Sinks,
        memory: PeakMemory,
        timer: PhaseTimer,
    ) -> None:
        self._settings, self._samples, self._trainers, self._turns = settings, samples, trainers, turns
        self._console, self._sinks, self._memory, self._timer = console, sinks, memory, timer
        self._metrics: list[dict[str, Metric]] = []
        self._first_evaluation: dict[str, float] = {}
        self._last_evaluation: dict[str, float] = {}
        self._busy_logged_s = 0.0
        self._trained_steps = self._logged_steps = 0

    @property
    def directory(self) -> Path:
        """Where the run writes."""
        return self._settings.run.directory

    @property
    def num_steps(self) -> int:
        """Rollout batches in all."""
        return self._settings.run.num_steps

    @contextmanager
    def _phase(self, name: str, *, clock: str | None = None, total: int | None = None, unit: str = "") -> Iterator[PhaseProgress]:
        """Show the phase `name` and measure it, as `clock` where that differs."""
        with self._timer.measure(clock or name), self._console.phase(name, total=total, unit=unit) as progress:
            yield progress

    def _turn(self, turn: Turn) -> None:
        """Have what is needed on the devices, where ranks and engines share them."""
        if self._turns.changes(turn):
            with self._phase("swap"):
                self._turns.take(turn)

    def resume(self) -> int:
        """Load the newest checkpoint and return the number of steps done, 0 when there is none."""
        found = newest_checkpoint(self.directory)
        if found is None:
            self._samples.rewind(step=0, state=None)
            return 0
        path, state = found
        self._turn(Turn.TRAINING)
        with self._phase("load"):
            self._trainers.load(path / "megatron")
            self._samples.rewind(step=state.step, state=state.source)
        self._first_evaluation = state.first_evaluation
        self._trained_steps = self._logged_steps = state.step
        self._console.say(f"resumed from {path} after {state.step} steps")
        return state.step

    def next_batch(self, step: int) -> TrainBatch:
        """The sequences of this step. Raises UserError when the run directory is gone."""
        self._check_directory()
        self._turn(Turn.GENERATION)
        with self._phase("rollout", clock="rollout_wait", total=self._settings.data.prompts_per_step, unit="groups") as progress:
            batch, metrics = self._samples.next_batch(step, progress=progress)
        self._metrics.append(metrics)
        return batch

    def train(self, batch: TrainBatch, *, step: int) -> None:
        """Optimizer steps on one batch."""
        self._turn(Turn.TRAINING)
        start_s, busy_before_s = time.perf_counter(), self._samples.busy_s
        with self._phase("train"):
            results = self._trainers.train(batch, step=step)
        self._metrics += results
        self._trained_steps = step + 1
        if self._samples.generates:
            overlap_s, train_s = self._samples.busy_s - busy_before_s, time.perf_counter() - start_s
            self._metrics.append({"rollout/overlap_fraction": Mean(min(overlap_s, train_s), train_s)})

    def begin(self, *, step: int) -> None:
        """Before the first step, engines get the trainer's weights, must agree with the trainer about them, and are evaluated."""
        if self._samples.generates:
            self.publish(version=step)
            self._check_parity()
            self.evaluate(step=step)
            self.log(step=step)

    def publish(self, *, version: int) -> None:
        """Sync the engines' weights."""
        if not self._samples.generates:
            return
        self._turn(Turn.SYNC)
        with self._phase("sync"):
            self._metrics.append(self._samples.publish(version=version))

    def _check_parity(self) -> None:
        self._turn(Turn.GENERATION)
        with self._phase("parity probe"):
            scored = self._samples.score_probe()
        self._turn(Turn.SYNC)
        with self._phase("parity probe"):
            metrics = self._samples.check_parity(scored)
        values = metric_values(metrics)
        free = values.get("weights/parity_mean_without_replay")
        note = "" if free is None else f", {free:.1e} without routing replay"
        self._console.say(f"parity of engine and trainer: mean |Δ log-prob| {values['weights/parity_mean']:.1e} nats{note}")
        self._metrics.append(metrics)

    def evaluates_after(self, step: int) -> bool:
        """True for every eval_interval-th step and the last."""
        return self._due(self._settings.run.eval_interval, step) or (step + 1 == self.num_steps and self._settings.run.eval_interval > 0)

    def saves_after(self, step: int) -> bool:
        """True for every save_interval-th step and the last."""
        return self._due(self._settings.run.save_interval, step) or step + 1 == self.num_steps

    @staticmethod
    def _due(interval: int, step: int) -> bool:
        return interval > 0 and (step + 1) % interval == 0

    def evaluate(self, *, step: int) -> None:
        """Evaluate the weights that `step` steps have made."""
        if not self._samples.num_eval_prompts or not self._settings.run.eval_interval:
            return
        self._turn(Turn.GENERATION)
        with self._phase("eval", total=2 * self._samples.num_eval_prompts, unit="prompts") as progress:
            metrics = self._samples.evaluate(progress=progress)
        self._last_evaluation = metric_values(metrics)
        self._first_evaluation = self._first_evaluation or self._last_evaluation
        self._metrics.append(metrics)

    def save(self, *, step: int) -> None:
        """Write a checkpoint that `--resume` continues from, with the policy as a Hugging Face directory. Raises as `next_batch`."""
        self._check_directory()
        self._turn(Turn.TRAINING)
        with self._phase("save"):
            state = RunState(
                step=step, source=self._samples.state(), first_evaluation=self._first_evaluation, metrics=metric_values(self._measured())
            )
            path = save_checkpoint(self.directory, state=state, trainers=self._trainers, keep=self._settings.run.keep_checkpoints)
            self._samples.forget(before_step=oldest_step(self.directory))
            _link(self.directory / POLICY_LINK, path / "hf")

    def _check_directory(self) -> None:
        """Raise UserError when nothing that this run makes would be kept any more."""
        if not (self.directory / SETTINGS_FILE).exists():
            raise UserError(
                f"run.directory {self.directory} was deleted or moved while the run was going, so that nothing it makes would be kept; "
                f"start it again in a directory that stays"
            )

    def _measured(self) -> dict[str, Metric]:
        """Everything measured since the last log. It stays, and what is measured from now on adds to it."""
        self._metrics.append({"memory/peak_bytes": Max(self._memory.peak_bytes)})
        if self._samples.generates:
            busy_s = self._samples.busy_s
            self._timer.add("rollout", busy_s - self._busy_logged_s)
            self._busy_logged_s = busy_s
        metrics = merge_metrics([*self._metrics, self._timer.take()])
        self._metrics = [metrics]
        tokens, seconds = metrics.get("train/num_tokens"), metrics.get("time/train")
        if tokens is None or seconds is None:
            return metrics
        return {**metrics, "train/tokens_per_second": Mean(tokens.value, seconds.value)}

    def log(self, *, step: int) -> None:
        """Write and show everything measured since the last call, as that of the first `step` steps."""
        values = metric_values(self._measured())
        self._metrics, self._logged_steps = [], step
        self._sinks.log(step, values)
        self._console.row(step, values)

    def finish(self) -> None:
        """Write the curves, the page and last of all the summary."""
        # Half as many steps again.
        more = f" run.num_steps={self.num_steps + max(1, self.num_steps // 2)}"
        self._write_outcome(FINISHED, go_on=self._resume_command + more)

    def break_off(self, error: BaseException) -> None:
        """Keep what a run that `error` ends early has: the row of a step that was trained on, the curves, the page, the summary.

        Nothing is written where the run directory is gone. Raises UserError when the disk is full.
        """
        if not (self.directory / SETTINGS_FILE).exists():
            return
        if self._trained_steps > self._logged_steps:
            self.log(step=self._trained_steps)
        self._write_outcome(status_of(error), go_on=self._resume_command)

    @property
    def _resume_command(self) -> str:
        return f"{sys.executable} -m megatron_rl train {self.directory / SETTINGS_FILE} --resume"

    def _write_outcome(self, status: str, *, go_on: str) -> None:
        saved = checkpoint_paths(self.directory)
        first, last = self._first_evaluation, self._last_evaluation
        summary = Summary(
            status=status,
            steps=self._trained_steps,
            seed=self._settings.run.seed,
            accuracy_before=first.get("eval/accuracy_greedy"),
            accuracy_after=last.get("eval/accuracy_greedy"),
            accuracy_sampled_before=first.get("eval/accuracy_sampled"),
            accuracy_sampled_after=last.get("eval/accuracy_sampled"),
            seconds={name: round(value, 2) for name, value in self._timer.totals().items()},
            peak_memory_bytes=self._memory.peak_bytes,
            checkpoint=str((saved[-1] / "hf").resolve()) if saved else None,
            go_on=go_on,
        )
        with self._console.phase("report"):
            if has_curves(self.directory):
                write_report(self.directory, facts=facts_of(summary), commands=[go_on])
        write_summary(self.directory, summary)


def _link(link: Path, target: Path) -> None:
    """Point `link` at `target`, which lies below the same directory, replacing an older link in one step."""
    partial = link.with_name(f".{link.name}.partial")
    partial.unlink(missing_ok=True)
    partial.symlink_to(target.relative_to(link.parent), target_is_directory=True)
    os.replace(partial, link)
