"""The calls of the loop: a run with engines, and what every run has.

`Run` trains, saves, logs, resumes and ends. `RolloutRun` gets its batches from engines and gives
weights to them; the `runs_without_engines` read batches from files.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from ray.exceptions import RayError

from megatron_rl.algorithms.rounding_limits import Expected
from megatron_rl.checkpoints.run_checkpoints import CheckpointWriter, RunState, load_newest, oldest_step
from megatron_rl.config.derived import DEADLINE, sync_deadline_s
from megatron_rl.config.settings import RunSettings, Settings
from megatron_rl.errors import DeadlineError, EngineError, MegatronRLError, ParityError, UserError, counted
from megatron_rl.evaluation.best_steps import reason_to_stop
from megatron_rl.observe.console import PhaseProgress
from megatron_rl.observe.metrics import Mean, Metric, metric_values
from megatron_rl.observe.summary import asked_to_end, status_of
from megatron_rl.rollout.manager import MAX_RESAMPLING_ROUNDS, RolloutManager
from megatron_rl.runtime.agreement import Agreement
from megatron_rl.runtime.colocation import Phase, SharedDevices
from megatron_rl.runtime.grace import finishing_first
from megatron_rl.runtime.run_evaluations import GENERATION_SETTINGS, RunEvaluations, generation_deadline_s
from megatron_rl.runtime.run_records import RunRecords
from megatron_rl.runtime.trainers import TrainerGroup
from megatron_rl.runtime.watchdog import Watchdog
from megatron_rl.system.deadlines import CLOSE_S, ENGINE_CONTROL_S
from megatron_rl.types import TrainBatch
from megatron_rl.weights.sync import WeightSync

Result = TypeVar("Result")
Work = Coroutine[Any, Any, Result] | Future[Result]


class Run(ABC):
    """The methods called by `train_loop`, and the first and the last calls around the loop."""

    def __init__(
        self, run: RunSettings, *, groups_per_step: int, ranks: TrainerGroup, records: RunRecords, devices: SharedDevices | None = None
    ) -> None:
        """`devices` are those shared by ranks and engines, None for devices of their own."""
        self._groups_per_step, self._ranks, self._devices, self._records = groups_per_step, ranks, devices, records
        records.spans.append(ranks.spans)
        self.num_steps, self._directory, self._keep_checkpoints = run.num_steps, run.directory, run.keep_checkpoints
        """Steps of the whole run with a batch each, and the directory of its output."""
        self._checkpoints = CheckpointWriter(run, ranks=ranks)
        self.trained_steps = self._saved_steps = 0
        self._ranks_are_idle = False  # True during waits for samples, or for what engines do on devices of their own
        self.engines_have_weights = False  # True where they have served this run, before its ranks were started again

    def begin(self, *, step: int) -> None:
        """Prepare the first step, the one after `step` steps."""
        return

    @abstractmethod
    def _make_batch(self, step: int, *, progress: PhaseProgress) -> tuple[TrainBatch, dict[str, Metric]]:
        """Return the sequences of this step, and metrics of the rollout."""

    def publish(self, *, version: int) -> None:
        """Give the trainer's weights to the engines, if any."""
        return

    def evaluate(self, *, step: int, goes_on: bool = False) -> None:
        """Evaluate the weights after `step` steps, where engines answer held-out prompts."""
        return

    @abstractmethod
    def _position(self, *, step: int) -> dict[str, Any]:
        """Return the data cursor after `step` steps as JSON; later batches may be made already."""

    @abstractmethod
    def _rewind(self, *, step: int, position: dict[str, Any] | None) -> tuple[str, ...]:
        """Continue at `position` after `step` steps, or at the first row; return notes to show."""

    def _forget(self, *, before_step: int) -> None:
        """Begin to free data that only a resume from a checkpoint older than `before_step` needs."""
        return

    def give_up(self) -> None:
        """Cancel work beside the ranks, whose life ends."""
        return

    def _stop_batches(self, error: BaseException) -> None:
        """Stop making batches because `error` ends the run; the final save must not wait."""
        return

    def next_batch(self, step: int) -> TrainBatch:
        """Return the sequences of this step. Raises UserError when the run directory is gone."""
        self._checkpoints.check_directory()
        self._take_devices(Phase.GENERATION)
        with self._records.phase("rollout", clock="rollout_wait", total=self._groups_per_step, unit="groups") as progress:
            batch, metrics = self._make_batch(step, progress=progress)
        self._records.add(metrics)
        return batch

    def train(self, batch: TrainBatch, *, step: int, expected: Expected | None = None, rows: Collection[int] = ()) -> None:
        """Train on one batch, recording tokens of its sequences `rows`. Raises ParityError for log-probs other than `expected`."""
        self._finish_save(waits=False)
        self._take_devices(Phase.TRAINING)
        with finishing_first():
            with self._records.phase("train"):
                self._records.add(*self._ranks.train(batch, step=step, expected=expected, rows=rows))
            self.trained_steps = step + 1

    def saves_after(self, step: int) -> bool:
        """Return True where a checkpoint or an export is due."""
        return self._checkpoints.checkpoint_is_due(step + 1) or self._checkpoints.export_is_due(step + 1)

    def save(self, *, step: int, at_the_end: bool = False) -> None:
        """Begin the save due after `step` steps, a checkpoint `at_the_end`; it is in place when the next one begins, or before.

        Raises UserError as `next_batch`, and when the previous save could not be written.
        """
        self._checkpoints.check_directory()
        self._finish_save()
        self._take_devices(Phase.TRAINING)
        with finishing_first(), self._records.phase("save"):
            if not (at_the_end or self._checkpoints.checkpoint_is_due(step)):
                self._checkpoints.begin_export(step)
                return
            metrics, position = self._records.so_far(durable=True), self._position(step=step)
            first, best = self._records.first_evaluation, self._records.best
            self._checkpoints.begin(RunState(step=step, source=position, first_evaluation=first, metrics=metrics, best=best))
            self._saved_steps = step

    def _finish_save(self, *, waits: bool = True) -> None:
        """Put the save in place, without `waits` only a written one; a kill before loses it."""
        if not (self._checkpoints.is_writing if waits else self._checkpoints.is_written()):
            return
        self._checkpoints.check_directory()
        with finishing_first(), self._records.phase("save"):
            self._records.say(*self._checkpoints.finish())
            self._forget(before_step=oldest_step(self._directory, among=self._keep_checkpoints))

    def log(self, *, step: int) -> None:
        """Write and show all measurements since the last call, under the first `step` steps."""
        self._finish_save(waits=False)
        self._records.log(step=step)

    def _take_devices(self, phase: Phase) -> None:
        """Bring the needed memory onto the devices, where ranks and engines share devices."""
        if self._devices is not None and self._devices.changes(phase):
            with finishing_first(), self._records.phase("swap"):
                self._devices.take(phase)

    def resume(self, *, weights_only: bool = False) -> int:
        """Load the newest checkpoint; return the number of steps done, 0 without a checkpoint.

        `weights_only` as in `Trainer.load`. Raises CheckpointError for one that cannot be loaded.
        """
        how: dict[str, Any] = {"ranks": self._ranks, "rewind": self._rewind, "phase": self._records.phase, "say": self._records.say}
        state = load_newest(self._directory, weights_only=weights_only, before=partial(self._take_devices, Phase.TRAINING), **how)
        if state is None:
            return 0
        self._records.first_evaluation, self._records.best = state.first_evaluation, state.best
        self._records.logged_steps = self.trained_steps = self._saved_steps = state.step
        return state.step

    def finish(self) -> None:
        """Wait for the last checkpoint; write and print the outcome."""
        if self.trained_steps > self._saved_steps:
            self.save(step=self.trained_steps, at_the_end=True)
        self._finish_save()
        self._records.finish(steps=self.trained_steps)

    def break_off(self, error: BaseException) -> None:
        """Keep the results of a run that `error` ends early.

        Results are the row of a trained step, the curves, the page, the summary and the save in
        progress; also a checkpoint, where `error` leaves the ranks well. Failures here are reported
        and do not hide `error`. Raises UserError when the disk is full.
        """
        if not self._checkpoints.has_directory():
            return
        # A second signal does not wait for what follows.
        self._records.write_summary(status_of(error), steps=self.trained_steps)
        try:
            self._stop_batches(error)
            keeps = self._checkpoints.is_writing or self.trained_steps > self._saved_steps
            if keeps and isinstance(error, DeadlineError | EngineError | RayError):
                # Work that missed one deadline would also miss the equally long one of the checkpoint.
                self._ranks.check_answers()
            if self._saves_at_the_end(error) and self.trained_steps > self._saved_steps:
                self.save(step=self.trained_steps, at_the_end=True)
            self._finish_save()
        except (MegatronRLError, RayError, OSError, RuntimeError, ValueError) as second:
            self._records.say(f"the checkpoint of step {max(self.trained_steps, self._saved_steps)} is lost: {second}")
        if self.trained_steps > self._records.logged_steps:
            self.log(step=self.trained_steps)
        self._records.write_outcome(status_of(error), steps=self.trained_steps)

    @contextmanager
    def told_of_failure(self) -> Iterator[None]:
        """Write the outcome of a run that ends in the body, while its ranks are brought back."""
        try:
            yield
        except BaseException as error:
            with suppress(MegatronRLError, OSError):
                self._records.write_outcome(status_of(error), steps=self._saved_steps)
            raise

    def _saves_at_the_end(self, error: BaseException) -> bool:
        """Return True where `error` leaves the ranks well: SIGTERM, or a failure of the rollout or of a sync.

        An engine's death on shared devices leaves memory of theirs in no known state.
        """
        of_rollout = (UserError, DeadlineError) if self._devices is not None else (UserError, DeadlineError, EngineError, RayError)
        return asked_to_end(error) or (self._ranks_are_idle and isinstance(error, of_rollout))


class RolloutRun(Run):
    """A run on the engines of `manager`; `sync` gives engines the trainer's weights in `dtype`.

    An asynchronous run, whose engines have devices of their own, is evaluated while the next step
    trains, and the evaluation ends before the weights change: its answers are of one version.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        manager: RolloutManager,
        sync: WeightSync,
        dtype: str,
        watchdog: Watchdog,
        devices: SharedDevices | None,
        ranks: TrainerGroup,
        records: RunRecords,
    ) -> None:
        super().__init__(settings.run, groups_per_step=settings.data.prompts_per_step, ranks=ranks, records=records, devices=devices)
        self._settings, self._manager, self._sync, self._watchdog = settings, manager, sync, watchdog
        self._evaluations = RunEvaluations(settings, manager, watchdog=watchdog, wait=self._wait_for_samples, records=records)
        parts: dict[str, Any] = {"manager": manager, "wait": self._wait, "records": records}
        self._agreement = Agreement(settings, dtype=dtype, log_probs=ranks.log_probs, take=self._take_devices, **parts)
        self._checkpoints.may_be_best = lambda step: settings.eval.keeps(steps=step, num_steps=self.num_steps)
        self._version: int | None = None  # of the trainer's weights, where engines serve them, too
        records.follow("rollout", lambda: manager.busy_s)
        records.spans.append(manager.pool.spans)

    def _wait(self, work: Work[Result], *, name: str, timeout_s: float = ENGINE_CONTROL_S, see: str = "") -> Result:
        how: dict[str, Any] = {"owner": "the engines", "timeout_s": timeout_s, "see": see, "meanwhile": self._update_newcomers}
        idle, self._ranks_are_idle = self._ranks_are_idle, self._devices is None
        result = self._watchdog.wait(work, name=name, **how)
        self._ranks_are_idle = idle
        return result

    def _update_newcomers(self) -> None:
        """Give engines that were started again the weights that the others serve."""
        if self._version is not None and self._manager.pool.has_newcomers:
            self._sync_weights(self._version)  # its bytes are none of the step's: a run without the death has none

    def _wait_for_samples(self, work: Work[Result], *, name: str, timeout_s: float, see: str = GENERATION_SETTINGS) -> Result:
        """Wait for samples, or their storage, while the ranks are idle; finish a written save meanwhile."""
        self._ranks_are_idle = True

        def meanwhile() -> None:
            self._finish_save(waits=False)
            if self._version is None and self._manager.pool.waits_for_weights:
                # Engines get no other weights before the evaluation of those that they lost has ended.
                self._evaluations.give_up()
            self._update_newcomers()

        result = self._watchdog.wait(work, name=name, owner="the engines", timeout_s=timeout_s, see=see, meanwhile=meanwhile)
        self._ranks_are_idle = False
        return result

    def begin(self, *, step: int) -> None:
        """Give engines the trainer's weights before the first step, compare both, and evaluate.

        A resumed run evaluates at the same steps as one without an interruption.
        """
        self._take_devices(Phase.SYNC)
        if self.engines_have_weights:
            # Those that a sync brings may be equal ones, and log-probs tell others.
            self.publish(version=step)
        else:
            self._agreement.check_weights(partial(self.publish, version=step), resumed=step > 0)
        probe = self._agreement.sample()
        try:
            self._agreement.check_log_probs(probe, version=step)
        except ParityError as error:
            raise self._explained(error, version=step) from error
        self.evaluate(step=step, goes_on=True)
        self.log(step=step)

    def _make_batch(self, step: int, *, progress: PhaseProgress) -> tuple[TrainBatch, dict[str, Metric]]:
        settings = self._settings
        rounds = MAX_RESAMPLING_ROUNDS if settings.objective.zero_variance == "resample" else 1
        of_round_s = generation_deadline_s(settings.model, settings.rollout, settings.reward, num_samples=settings.sequences_per_step)
        making = self._manager.next_batch(step, progress=progress)
        batch, metrics = self._wait_for_samples(making, name=f"rollout of step {step + 1}", timeout_s=rounds * of_round_s)
        if renewed := round(metric_values(metrics)["rollout/renewed_groups"]):
            now = settings.rollout.max_staleness
            self._records.say(f"step {step + 1}: {counted(renewed, 'group')} made anew, because rollout.max_staleness is {now} now")
        return batch, metrics

    @finishing_first()  # a step is saved with its tokens' values
    def train(self, batch: TrainBatch, *, step: int, expected: Expected | None = None, rows: Collection[int] = ()) -> None:
        """Train on one batch; keep tokens' values, measure the share of time with busy engines. Raises ParityError with its cause."""
        self._take_devices(Phase.TRAINING)
        self._version, start_s, busy_before_s = None, time.perf_counter(), self._manager.busy_s
        try:
            limits = expected or self._agreement.of_samples(step)
            super().train(batch, step=step, expected=limits, rows=rows or list(self._manager.looked_at))
        except ParityError as error:
            self._wait(self._manager.distrust(step=step), name="marking the samples")
            raise self._explained(error, version=step, batch=batch) from error
        overlap_s, train_s = self._manager.busy_s - busy_before_s, time.perf_counter() - start_s
        self._records.add({"rollout/overlap_fraction": Mean(min(overlap_s, train_s), train_s)})
        self._wait_for_samples(self._manager.keep(self._ranks.recorded), name="keeping token values", timeout_s=ENGINE_CONTROL_S, see="")
        if (prints := self._settings.observe.print_samples) and not (step + 1) % prints:
            self._records.show(step + 1, list(self._manager.looked_at.values()), self._manager.spread)

    def save(self, *, step: int, at_the_end: bool = False) -> None:
        """Save as `Run.save`, with the results of all evaluations begun, which are in no later run."""
        if not at_the_end:
            self._finish_evaluation(step=step)
        super().save(step=step, at_the_end=at_the_end)

    def publish(self, *, version: int) -> None:
        """Sync the engines' weights, when no evaluation of the present ones is in progress."""
        self._finish_evaluation(step=version)
        self._records.add(self._sync_weights(version))

    def _sync_weights(self, version: int, *, proves: bool = True) -> dict[str, Metric]:
        """Sync, and compare log-probs of fixed tokens. Raises ParityError with a likely cause."""
        self._version = None
        self._take_devices(Phase.SYNC)
        if proves:
            self._agreement.expect(version=version)
        # On shared devices no engine returns, and none can score before it has all its memory.
        prove = self._agreement.prove if proves and self._devices is None else None
        # The sync keeps a separate deadline, and names the late process.
        timeout_s = sync_deadline_s(self._settings.model) + ENGINE_CONTROL_S
        try:
            with finishing_first(), self._records.phase("sync"):
                syncing = self._sync.run(version=version, prove=prove)
                found = self._wait(syncing, name=f"weight sync to version {version}", timeout_s=timeout_s, see=DEADLINE)
            if proves and prove is None and self._agreement.expected is not None:
                self._take_devices(Phase.GENERATION)
                proving = self._agreement.prove(self._manager.pool.membership.members)
                self._wait(proving, name="scores of fixed tokens", timeout_s=timeout_s, see=DEADLINE)
        except ParityError as error:
            raise self._explained(error, version=version) from error
        self._version = version if proves else None
        return found

    def _explained(self, error: ParityError, *, version: int, batch: TrainBatch | None = None) -> ParityError:
        """Return `error` with its likeliest cause; `batch` are the samples that disagree."""
        self._take_devices(Phase.SYNC)
        again, samples = partial(self._sync_weights, version, proves=False), None if batch is None else (batch, version)
        if batch is not None and self._devices is not None:
            again()  # engines that share GPUs lose their weights while the trainer trains
        return ParityError(f"{error}; {self._agreement.likely_cause(again, samples=samples)}")

    def evaluate(self, *, step: int, goes_on: bool = False) -> None:
        """Evaluate the weights after `step` steps on due sets, and on all if these end the run; `goes_on` where a killed run was."""
        begun: tuple[str, ...] = ()
        while names := tuple(name for name in self._settings.eval.due(steps=step, num_steps=self.num_steps) if name not in begun):
            self._take_devices(Phase.GENERATION)
            self._evaluations.begin(names, step=step, goes_on=goes_on)
            begun += names
            if not self._settings.rollout.max_staleness or self._devices is not None or step == self.num_steps:
                self._finish_evaluation(step=step, late=False)

    def _finish_evaluation(self, *, step: int, late: bool = True) -> None:
        """Wait for the evaluation in progress; keep the best checkpoints, and end after `step` steps by `stop_after`."""
        self._evaluations.finish(late=late)
        self._checkpoints.keep(self._records.best)
        if step < self.num_steps and (reason := reason_to_stop(self._records.best, sets=self._settings.eval.sets)):
            self._records.say(f"the run ends after {counted(step, 'step')}: {reason}")
            self.num_steps = step

    def give_up(self) -> None:
        """Cancel an evaluation in progress."""
        self._evaluations.give_up()

    def _stop_batches(self, error: BaseException) -> None:
        self._watchdog.forget()  # a dead engine fails no wait for the ranks, and the ranks are well
        if self._saves_at_the_end(error) and self._devices is not None:
            # Engines have to be idle before their memory goes to the ranks.
            self._wait(self._manager.abandon(), name="stopping the rollout")

    def _position(self, *, step: int) -> dict[str, Any]:
        return self._wait(self._manager.position(step=step), name="flushing the buffer")

    def _rewind(self, *, step: int, position: dict[str, Any] | None) -> tuple[str, ...]:
        self._evaluations.forget(after_step=step)
        return self._wait(self._manager.rewind(step=step, position=position), name="rewinding the buffer")

    def _forget(self, *, before_step: int) -> None:
        pruning = self._watchdog.begin(self._manager.forget(before_step=before_step))
        if self.trained_steps == self.num_steps:
            with suppress(DeadlineError):  # another run prunes the rest
                self._wait(pruning, name="pruning the buffer", timeout_s=CLOSE_S)
