"""Training runs: the calls of the loop, with clock, console, metrics and checkpoints.

Runs differ in the source of batches. `SupervisedRun`, below, reads batches from a file;
`rollout_run.RolloutRun` gets batches from engines.
"""

import os
import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.exceptions import RayError

from megatron_rl.config.settings import Settings
from megatron_rl.data.batch import make_train_batch
from megatron_rl.data.source import PromptSource
from megatron_rl.errors import CheckpointError, DeadlineError, MegatronRLError, UserError, counted
from megatron_rl.files import disk_errors
from megatron_rl.observe.console import PhaseProgress, RunConsole
from megatron_rl.observe.memory import PeakMemory
from megatron_rl.observe.metrics import Max, Mean, Metric, merge_metrics, metric_values
from megatron_rl.observe.sinks import METRICS_FILE, Sinks
from megatron_rl.observe.summary import FINISHED, REPORT_FILE, Summary, asked_to_end, status_of, write_summary
from megatron_rl.observe.timing import PhaseTimer
from megatron_rl.runtime.colocation import SharedDevices, Turn
from megatron_rl.runtime.grace import finishing_first
from megatron_rl.runtime.run_checkpoint import (
    POLICY_LINK,
    SETTINGS_FILE,
    CheckpointWriter,
    RunState,
    checkpoint_paths,
    incomplete_checkpoints,
    naming_the_way_around,
    newest_checkpoint,
    oldest_step,
)
from megatron_rl.runtime.supervisor import run_command
from megatron_rl.runtime.trainers import TrainerGroup
from megatron_rl.types import TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecords:
    """Records of a run: console, sinks of metrics, peak of memory and clock."""

    console: RunConsole
    sinks: Sinks
    memory: PeakMemory
    timer: PhaseTimer


class TrainingRun(ABC):
    """The methods called by `train_loop`. `devices` are shared by ranks and engines, if at all."""

    def __init__(self, settings: Settings, *, trainers: TrainerGroup, records: RunRecords, devices: SharedDevices | None = None) -> None:
        self._settings, self._trainers, self._devices = settings, trainers, devices
        self._console, self._sinks, self._memory, self._timer = records.console, records.sinks, records.memory, records.timer
        run = settings.run
        self._directory_identity = _identity(run.directory)
        self._checkpoints = CheckpointWriter(run.directory, trainers=trainers, keep=run.keep_checkpoints, keep_interval=run.keep_interval)
        self._metrics: list[dict[str, Metric]] = []
        self._first_evaluation: dict[str, float] = {}
        self._last_evaluation: dict[str, float] = {}
        self._trained_steps = self._logged_steps = self._saved_steps = 0
        # Called during waits for samples; fails when the ranks have died.
        self._ranks_are_idle = False

    # Differences between runs

    @abstractmethod
    def begin(self, *, step: int) -> None:
        """Prepare the first step, the one after `step` steps."""

    @abstractmethod
    def _make_batch(self, step: int, *, progress: PhaseProgress) -> tuple[TrainBatch, dict[str, Metric]]:
        """Return the sequences of this step, and metrics of the rollout."""

    @abstractmethod
    def publish(self, *, version: int) -> None:
        """Give the trainer's weights to the engines, if any."""

    @abstractmethod
    def evaluate(self) -> None:
        """Evaluate the present weights."""

    @abstractmethod
    def _position(self, *, step: int) -> dict[str, Any]:
        """Return the data cursor after `step` steps as JSON values, already on disk.

        The next step may have a batch already.
        """

    @abstractmethod
    def _rewind(self, *, step: int, position: dict[str, Any] | None) -> tuple[str, ...]:
        """Continue where the checkpoint after `step` steps stood; None: at the start of the data, before any checkpoint.

        Returns what the user has to know, in sentences.
        """

    @abstractmethod
    def _forget(self, *, before_step: int) -> None:
        """Free what only a checkpoint older than `before_step` could come back to."""

    @abstractmethod
    def _stop_batches(self, error: BaseException) -> None:
        """Stop making batches because `error` ends the run; the final save must not wait."""

    @property
    def directory(self) -> Path:
        """Output directory of the run."""
        return self._settings.run.directory

    @property
    def num_steps(self) -> int:
        """Rollout batches in all."""
        return self._settings.run.num_steps

    @contextmanager
    def _phase(self, name: str, *, clock: str | None = None, total: int | None = None, unit: str = "") -> Iterator[PhaseProgress]:
        """Show the phase `name` and measure the time, under `clock` where given."""
        with self._timer.measure(clock or name), self._console.phase(name, total=total, unit=unit) as progress:
            yield progress

    def _turn(self, turn: Turn) -> None:
        """Bring the needed memory onto the devices, where ranks and engines share devices."""
        if self._devices is not None and self._devices.changes(turn):
            with finishing_first(), self._phase("swap"):
                self._devices.take(turn)

    def resume(self, *, weights_only: bool = False) -> int:
        """Load the newest checkpoint and return the number of steps done, 0 when there is none; see `Trainer.load` for `weights_only`.

        Raises CheckpointError where the run cannot go on from there.
        """
        for path in incomplete_checkpoints(self.directory):
            self._console.say(f"{path} is not complete and is passed over; it can be deleted")
        found = newest_checkpoint(self.directory)
        if found is None:
            self._say_all(self._rewind(step=0, position=None))
            return 0
        path, state = found
        self._turn(Turn.TRAINING)
        with self._phase("load"):
            try:
                with naming_the_way_around(self.directory):
                    changes = self._trainers.load(path / "megatron", weights_only=weights_only)
                notes = self._rewind(step=state.step, position=state.source)
            except UserError as error:
                raise CheckpointError(str(error)) from error
        # A kill may have come between the checkpoint and the link.
        _link(self.directory / POLICY_LINK, path / "hf")
        self._first_evaluation = state.first_evaluation
        self._trained_steps = self._logged_steps = self._saved_steps = state.step
        self._console.say(f"resumed from {path} after {counted(state.step, 'step')}" + (", with a new optimizer" if weights_only else ""))
        self._say_all((*changes, *notes))
        return state.step

    def _say_all(self, sentences: Iterable[str]) -> None:
        for sentence in sentences:
            self._console.say(sentence)

    def next_batch(self, step: int) -> TrainBatch:
        """Return the sequences of this step. Raises UserError when the run directory is gone."""
        self._check_directory()
        self._turn(Turn.GENERATION)
        with self._phase("rollout", clock="rollout_wait", total=self._settings.data.prompts_per_step, unit="groups") as progress:
            batch, metrics = self._make_batch(step, progress=progress)
        self._metrics.append(metrics)
        return batch

    def train(self, batch: TrainBatch, *, step: int) -> None:
        """Optimizer steps on one batch."""
        self._finish_written_save()
        self._turn(Turn.TRAINING)
        with finishing_first():
            with self._phase("train"):
                self._metrics += self._trainers.train(batch, step=step)
            self._trained_steps = step + 1

    def evaluates_after(self, step: int) -> bool:
        """Return True for every eval_interval-th step and the last."""
        return self._due(self._settings.run.eval_interval, step) or (step + 1 == self.num_steps and self._settings.run.eval_interval > 0)

    def saves_after(self, step: int) -> bool:
        """Return True where a checkpoint or an export is due."""
        return self._checkpoints_after(step) or self._exports_after(step)

    def _checkpoints_after(self, step: int) -> bool:
        """Return True for every save_interval-th step and the last."""
        return self._due(self._settings.run.save_interval, step) or step + 1 == self.num_steps

    def _exports_after(self, step: int) -> bool:
        """Return True for every export_interval-th step."""
        return self._due(self._settings.run.export_interval, step)

    @staticmethod
    def _due(interval: int, step: int) -> bool:
        return interval > 0 and (step + 1) % interval == 0

    def save(self, *, step: int) -> None:
        """Begin the save that is due after `step` steps. Raises as `next_batch`.

        The save is a checkpoint for `--resume` with the policy as a Hugging Face directory, or only
        the policy directory. Writing continues while the run goes on. The save is in place at the
        latest when the next save begins or the run ends. Raises UserError when the previous save
        could not be written.
        """
        if self._checkpoints_after(step - 1):
            self._begin_checkpoint(step)
            return
        with self._saving():
            self._checkpoints.begin_export(step)

    def _begin_checkpoint(self, step: int) -> None:
        with self._saving():
            self._sinks.sync()
            metrics = metric_values(self._measured())
            state = RunState(step=step, source=self._position(step=step), first_evaluation=self._first_evaluation, metrics=metrics)
            self._checkpoints.begin(state, exports=self._exports_after(step - 1))
            self._saved_steps = step

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """In the body something may be saved."""
        self._check_directory()
        self._finish_save()
        self._turn(Turn.TRAINING)
        with finishing_first(), self._phase("save"):
            yield

    def _finish_written_save(self) -> None:
        """Call `_finish_save` when no waiting is needed."""
        if self._checkpoints.is_writing and self._checkpoints.is_written():
            self._finish_save()

    def _finish_save(self) -> None:
        """Wait until the pending checkpoint, if any, is in place."""
        if self._checkpoints.is_writing:
            with self._phase("save"):
                self._put_save_in_its_place()

    def _put_written_save_in_its_place(self) -> None:
        """Put a written save in place as soon as no waiting is needed, within another phase.

        Until then a killed run goes back to the previous checkpoint.
        """
        if self._checkpoints.is_writing and self._checkpoints.is_written():
            self._put_save_in_its_place()

    def _put_save_in_its_place(self) -> None:
        self._check_directory()
        with finishing_first():
            path = self._checkpoints.finish()
            if path is not None:
                # Before the deletion of the checkpoint that the link points to.
                _link(self.directory / POLICY_LINK, path / "hf")
                self._say_all(self._checkpoints.prune())
                self._forget(before_step=oldest_step(self.directory))

    def _has_its_directory(self) -> bool:
        """Return False where the run directory was deleted, moved or replaced by another one."""
        return (self.directory / SETTINGS_FILE).exists() and _identity(self.directory) == self._directory_identity

    def _check_directory(self) -> None:
        """Raise UserError when the run's output would no longer be kept."""
        if not self._has_its_directory():
            happened = "replaced by another directory" if self.directory.exists() else "deleted or moved"
            raise UserError(
                f"run.directory {self.directory} was {happened} while the run was going, so that nothing it makes would be kept; "
                f"start it again in a directory that stays"
            )

    def _measured(self) -> dict[str, Metric]:
        """Return all measurements since the last log, without clearing them; later measurements are
        added.
        """
        self._metrics.append({"memory/peak_bytes": Max(self._memory.peak_bytes)})
        metrics = merge_metrics([*self._metrics, self._timer.take()])
        self._metrics = [metrics]
        tokens, seconds = metrics.get("train/num_tokens"), metrics.get("time/train")
        if tokens is None or seconds is None:
            return metrics
        return {**metrics, "train/tokens_per_second": Mean(tokens.value, seconds.value)}

    def log(self, *, step: int) -> None:
        """Write and show all measurements since the last call, under the first `step` steps."""
        self._finish_written_save()
        values = metric_values(self._measured())
        self._metrics, self._logged_steps = [], step
        self._sinks.log(step, values)
        self._console.row(step, values)

    def finish(self) -> None:
        """Wait for the last checkpoint; write curves, page and finally the summary; print their
        paths.
        """
        self._finish_save()
        # Half as many steps again.
        go_on = f"{self._resume_command} run.num_steps={self.num_steps + max(1, self.num_steps // 2)}"
        self._write_outcome(FINISHED, go_on=go_on)
        found = {"policy": POLICY_LINK, "report": REPORT_FILE, "metrics": METRICS_FILE}
        paths = {name: self.directory / file for name, file in found.items() if (self.directory / file).exists()}
        self._say_all((f"finished after {counted(self._trained_steps, 'step')}", *(f"{name:<8} {path}" for name, path in paths.items())))
        self._console.say(f"{'go on':<8} {go_on}")

    def break_off(self, error: BaseException) -> None:
        """Keep the results of a run that `error` ends early.

        Results are the row of a step that was trained on, the curves, the page and the summary.
        Also a checkpoint, where `error` leaves the ranks well, and the save in progress. Failures
        here are reported and do not hide `error`. Nothing is written where the run directory is
        gone. Raises UserError when the disk is full.
        """
        if not self._has_its_directory():
            return
        # A second signal does not wait for what follows.
        self._write_summary(status_of(error), go_on=self._resume_command)
        try:
            self._stop_batches(error)
            if isinstance(error, DeadlineError) and self._checkpoints.is_writing:
                # Work that missed one deadline would also miss the equally long one of the
                # checkpoint.
                self._trainers.check_answers()
            if self._saves_at_the_end(error) and self._trained_steps > self._saved_steps:
                self._begin_checkpoint(self._trained_steps)
            self._finish_save()
        except (MegatronRLError, RayError, OSError, RuntimeError, ValueError) as second:
            self._console.say(f"the checkpoint of step {max(self._trained_steps, self._saved_steps)} is lost: {second}")
        if self._trained_steps > self._logged_steps:
            self.log(step=self._trained_steps)
        self._write_outcome(status_of(error), go_on=self._resume_command)

    def _saves_at_the_end(self, error: BaseException) -> bool:
        """Return True where `error` leaves the ranks well: SIGTERM, or samples that cannot be made."""
        return asked_to_end(error) or (self._ranks_are_idle and isinstance(error, UserError | DeadlineError))

    @property
    def _resume_command(self) -> str:
        return shlex.join([sys.executable, "-m", "megatron_rl", "train", str(self.directory / SETTINGS_FILE), "--resume"])

    def _write_outcome(self, status: str, *, go_on: str) -> None:
        self._write_summary(status, go_on=go_on)
        if not (self.directory / METRICS_FILE).exists():
            return
        with self._console.phase("report"):
            try:
                run_command("report", self.directory)
            except UserError as error:
                self._console.say(f"there is no report: {error}")

    def _write_summary(self, status: str, *, go_on: str) -> None:
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
            reward_before=first.get("eval/reward_greedy"),
            reward_after=last.get("eval/reward_greedy"),
            seconds={name: round(value, 2) for name, value in self._timer.totals().items()},
            peak_memory_bytes=self._memory.peak_bytes,
            checkpoint=str((saved[-1] / "hf").resolve()) if saved else None,
            go_on=go_on,
        )
        write_summary(self.directory, summary)


class SupervisedRun(TrainingRun):
    """A run on the rows of data.train with their answers, without engines."""

    def __init__(self, settings: Settings, *, source: PromptSource, trainers: TrainerGroup, records: RunRecords) -> None:
        super().__init__(settings, trainers=trainers, records=records)
        self._source = source
        # The position before the rows of the latest batch, and the number of steps at that
        # position.
        self._before_batch: tuple[int, dict[str, Any]] = (-1, {})

    def begin(self, *, step: int) -> None:
        """Nothing has to be done before the first step."""

    def _stop_batches(self, error: BaseException) -> None:
        pass

    def _make_batch(self, step: int, *, progress: PhaseProgress) -> tuple[TrainBatch, dict[str, Metric]]:
        self._before_batch = (step, self._source.state())
        return make_train_batch(self._source.next_supervised(self._settings.data.prompts_per_step)), {}

    def publish(self, *, version: int) -> None:
        """Nothing serves the weights."""

    def evaluate(self) -> None:
        """Nothing answers held-out prompts."""

    def _position(self, *, step: int) -> dict[str, Any]:
        before, state = self._before_batch
        return state if before == step else self._source.state()

    def _rewind(self, *, step: int, position: dict[str, Any] | None) -> tuple[str, ...]:
        if position is not None:
            self._source.restore(position)
        return ()

    def _forget(self, *, before_step: int) -> None:
        """Nothing is kept."""


def _identity(directory: Path) -> tuple[int, int]:
    """Return device and inode; both stay the same when the directory is renamed."""
    found = directory.stat()
    return found.st_dev, found.st_ino


def _link(link: Path, target: Path) -> None:
    """Point `link` at `target`, below the same directory; replace an older link in one step."""
    partial = link.with_name(f".{link.name}.partial")
    with disk_errors(link):
        partial.unlink(missing_ok=True)
        partial.symlink_to(target.relative_to(link.parent), target_is_directory=True)
        os.replace(partial, link)
