"""Training runs with batches from engines: weight sync at every step, parity check, evaluation."""

import math
import time
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from megatron_rl.config.derived import request_deadline_s, start_deadline_s, sync_deadline_s
from megatron_rl.config.settings import Settings
from megatron_rl.deadlines import ENGINE_CONTROL_S
from megatron_rl.device import quiet_megatron_imports
from megatron_rl.engines.sampling import make_sampling
from megatron_rl.errors import EngineRefusal, counted
from megatron_rl.observe.console import PhaseProgress
from megatron_rl.observe.metrics import Mean, Metric, metric_values
from megatron_rl.rollout.groups import ATTEMPTS, CANCEL_S
from megatron_rl.rollout.manager import MAX_RESAMPLING_ROUNDS, RolloutManager
from megatron_rl.runtime.colocation import SharedDevices, Turn
from megatron_rl.runtime.grace import finishing_first
from megatron_rl.runtime.trainers import TrainerGroup
from megatron_rl.runtime.training_run import RunRecords, TrainingRun
from megatron_rl.runtime.watchdog import Watchdog
from megatron_rl.types import TrainBatch
from megatron_rl.weights.parity import PROBE_PROMPTS, Limits, check_probe, check_read, check_replaced, sample_probe, weight_checksums
from megatron_rl.weights.sync import WeightSync

with quiet_megatron_imports():
    from megatron_rl.checkpoints.stored_weights import engines_read
    from megatron_rl.models.read_spec import read_model_spec

Result = TypeVar("Result")


def generation_deadline_s(settings: Settings, num_samples: int) -> float:
    """Return the deadline in seconds for `num_samples` trajectories with rewards.

    Every call is assumed to keep its own deadline. One wave more than the samples fill is allowed,
    because groups end unevenly and a baseline may be generated first.
    """
    rollout, reward = settings.rollout, settings.reward
    waves = 1 + math.ceil(num_samples / (rollout.num_engines * rollout.max_concurrent_requests))
    wave_s = max(
        request_deadline_s(settings.model, rollout.sampling),
        ATTEMPTS * (rollout.timeout_s + CANCEL_S),
    )
    return waves * wave_s + math.ceil(num_samples / reward.num_workers) * reward.timeout_s


class RolloutRun(TrainingRun):
    """A run on the engines of `manager`; `sync` gives engines the trainer's weights in `dtype`."""

    def __init__(
        self,
        settings: Settings,
        *,
        manager: RolloutManager,
        sync: WeightSync,
        dtype: str,
        watchdog: Watchdog,
        devices: SharedDevices | None,
        trainers: TrainerGroup,
        records: RunRecords,
    ) -> None:
        super().__init__(settings, trainers=trainers, records=records, devices=devices)
        self._manager, self._sync, self._dtype, self._watchdog = manager, sync, dtype, watchdog
        self._busy_logged_s = 0.0

    def _wait(self, work: Coroutine[Any, Any, Result], *, name: str, timeout_s: float = ENGINE_CONTROL_S) -> Result:
        return self._watchdog.wait(work, name=name, owner="the engines", timeout_s=timeout_s)

    def _wait_for_samples(self, work: Coroutine[Any, Any, Result], *, name: str, timeout_s: float) -> Result:
        """Wait for what may take far longer than a save, while the ranks have nothing else to do."""
        self._ranks_are_idle = True
        meanwhile = self._put_written_save_in_its_place
        result = self._watchdog.wait(work, name=name, owner="the engines", timeout_s=timeout_s, meanwhile=meanwhile)
        self._ranks_are_idle = False
        return result

    def begin(self, *, step: int) -> None:
        """Give engines the trainer's weights before the first step, compare both, and evaluate.

        A resumed run evaluates at the same steps as one without an interruption.
        """
        self._first_sync(step)
        self._check_parity()
        if step == 0 or self.evaluates_after(step - 1):
            self.evaluate()
        self.log(step=step)

    def _make_batch(self, step: int, *, progress: PhaseProgress) -> tuple[TrainBatch, dict[str, Metric]]:
        data = self._settings.data
        rounds = MAX_RESAMPLING_ROUNDS if self._settings.objective.zero_variance == "resample" else 1
        timeout_s = rounds * generation_deadline_s(self._settings, data.prompts_per_step * data.samples_per_prompt)
        making = self._manager.next_batch(step, progress=progress)
        batch, metrics = self._wait_for_samples(making, name=f"rollout of step {step + 1}", timeout_s=timeout_s)
        renewed = metric_values(metrics)["rollout/renewed_groups"]
        if renewed:
            limit = self._settings.rollout.max_staleness
            self._console.say(
                f"step {step + 1}: {counted(round(renewed), 'group')} made anew, because rollout.max_staleness is {limit} now"
            )
        return batch, metrics

    def train(self, batch: TrainBatch, *, step: int) -> None:
        """Train on one batch; measure the share of time with busy engines."""
        self._turn(Turn.TRAINING)
        start_s, busy_before_s = time.perf_counter(), self._manager.busy_s
        super().train(batch, step=step)
        overlap_s, train_s = self._manager.busy_s - busy_before_s, time.perf_counter() - start_s
        self._metrics.append({"rollout/overlap_fraction": Mean(min(overlap_s, train_s), train_s)})

    def publish(self, *, version: int) -> None:
        """Sync the engines' weights."""
        self._turn(Turn.SYNC)
        # The sync keeps a separate deadline, and names the late process.
        timeout_s = sync_deadline_s(self._settings.model) + ENGINE_CONTROL_S
        with finishing_first(), self._phase("sync"):
            self._metrics.append(self._wait(self._sync.run(version=version), name=f"weight sync to version {version}", timeout_s=timeout_s))

    def _first_sync(self, step: int) -> None:
        """Sync, and compare the engines' weights before and after bit by bit.

        Raises ParityError.
        """
        settings, pool = self._settings, self._manager.pool
        self._turn(Turn.SYNC)
        # One engine reads the checkpoint, a read allowed in the time of a start.
        timeout_s = start_deadline_s(settings.model)
        checksums = partial(self._wait, name="checksums of the engines' weights", timeout_s=timeout_s)
        before = checksums(weight_checksums(pool))
        self.publish(version=step)
        with self._phase("weight check"):
            after = checksums(weight_checksums(pool))
            check_replaced(before, after)
            path, said = settings.model.path, f"all {len(next(iter(after.values())))} weights of each engine came by the first sync"
            try:
                if step:
                    said += "; they are not compared with a file, because the run is resumed"
                elif not engines_read(path):
                    said += f"; they are not compared with a file, because engines cannot read {path}"
                else:
                    reading = check_read(path, pool, after, timeout_s=timeout_s)
                    self._wait(reading, name=f"an engine's reading of {path}", timeout_s=timeout_s)
                    said += f", bit for bit as an engine reads {path}"
            except EngineRefusal as error:
                said += f"; they are not compared with a file, because an engine cannot read {path} while it runs ({error})"
                self.publish(version=step)
        self._console.say(said)

    def _check_parity(self) -> None:
        manager, settings = self._manager, self._settings
        replays = settings.training.routing_replay
        self._turn(Turn.GENERATION)
        with self._phase("parity probe"):
            sampling = make_sampling(settings.rollout.sampling, eos_token_ids=[manager.prompts.tokenizer.eos_token_id])
            prompts = manager.prompts.for_parity(PROBE_PROMPTS)
            asking = sample_probe(prompts, manager.pool, sampling=replace(sampling, seed=settings.run.seed))
            # The engines' first forward passes compile kernels, as their start does.
            timeout_s = start_deadline_s(settings.model)
            probe = self._wait(asking, name="parity probe of the engines", timeout_s=timeout_s)
        self._turn(Turn.SYNC)
        with self._phase("parity probe"):
            mixture = read_model_spec(settings.model.path).moe is not None
            limits = Limits.of(
                dtype=self._dtype,
                mixture=mixture,
                replays=replays,
                temperature=probe.temperature,
                median=settings.weights.parity_threshold,
            )
            metrics = check_probe(probe, self._trainers.log_probs, limits=limits, replays=replays)
        values = metric_values(metrics)
        free = values.get("weights/parity_mean_without_replay")
        note = "" if free is None else f", mean {free:.1e} without routing replay"
        self._console.say(
            f"parity of engine and trainer on sampled tokens: |Δ log-prob| median {values['weights/parity_median']:.1e}, mean"
            f" {values['weights/parity_mean']:.1e} nats{note}"
        )
        self._metrics.append(metrics)

    def evaluate(self) -> None:
        """Evaluate the present weights, where there are held-out prompts."""
        num_prompts = len(self._manager.prompts.held_out)
        if not num_prompts or not self._settings.run.eval_interval:
            return
        self._turn(Turn.GENERATION)
        with self._phase("eval", total=2 * num_prompts, unit="prompts") as progress:
            timeout_s = 2 * generation_deadline_s(self._settings, num_prompts)
            metrics = self._wait_for_samples(self._manager.evaluate(progress=progress), name="evaluation", timeout_s=timeout_s)
        self._last_evaluation = metric_values(metrics)
        self._first_evaluation = self._first_evaluation or self._last_evaluation
        self._metrics.append(metrics)

    def _stop_batches(self, error: BaseException) -> None:
        # A dead engine fails no wait for the ranks, and the ranks are well.
        self._watchdog.forget()
        if self._saves_at_the_end(error) and self._devices is not None:
            # Engines have to be idle before their memory goes to the ranks.
            self._wait(self._manager.abandon(), name="stopping the rollout")

    def _position(self, *, step: int) -> dict[str, Any]:
        return self._wait(self._manager.position(step=step), name="flushing the buffer")

    def _rewind(self, *, step: int, position: dict[str, Any] | None) -> tuple[str, ...]:
        return self._wait(self._manager.rewind(step=step, position=position), name="rewinding the buffer")

    def _forget(self, *, before_step: int) -> None:
        self._wait(self._manager.forget(before_step=before_step), name="pruning the buffer")

    def _measured(self) -> dict[str, Metric]:
        busy_s = self._manager.busy_s
        self._timer.add("rollout", busy_s - self._busy_logged_s)
        self._busy_logged_s = busy_s
        return super()._measured()
