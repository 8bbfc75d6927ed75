"""A training run whose batches engines make: they get the weights of every step, agree with the trainer on them, and are evaluated."""

import math
import time
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

from megatron_rl.config.settings import Settings
from megatron_rl.deadlines import ENGINE_CONTROL_S
from megatron_rl.errors import counted
from megatron_rl.observe.console import PhaseProgress
from megatron_rl.observe.metrics import Mean, Metric, metric_values
from megatron_rl.observe.summary import asked_to_end
from megatron_rl.rollout.manager import MAX_RESAMPLING_ROUNDS, RolloutManager
from megatron_rl.runtime.colocation import SharedDevices, Turn
from megatron_rl.runtime.grace import finishing_first
from megatron_rl.runtime.trainers import TrainerGroup
from megatron_rl.runtime.training_run import RunRecords, TrainingRun
from megatron_rl.runtime.watchdog import Watchdog
from megatron_rl.types import TrainBatch
from megatron_rl.weights.parity import PARITY_THRESHOLDS, PROBE_SEQUENCES, check_probe, score_probe
from megatron_rl.weights.sync import WeightSync

Result = TypeVar("Result")


def generation_deadline_s(settings: Settings, num_samples: int) -> float:
    """Seconds within which `num_samples` responses and their rewards are there if every single request and call keeps its own deadline.

    One wave more than the samples fill, because groups end unevenly and a baseline may be generated first.
    """
    rollout, reward = settings.rollout, settings.reward
    waves = 1 + math.ceil(num_samples / (rollout.num_engines * rollout.max_concurrent_requests))
    return waves * rollout.request_timeout_s + math.ceil(num_samples / reward.num_workers) * reward.timeout_s


class RolloutRun(TrainingRun):
    """A run on the engines of `manager`, which `sync` gives the trainer's weights in `dtype`."""

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
        return self._watchdog.wait(work, name=name, owner="the engines", timeout_s=timeout_s, meanwhile=self._put_written_save_in_its_place)

    def begin(self, *, step: int) -> None:
        """Before the first step, engines get the trainer's weights, must agree with the trainer about them, and are evaluated.

        A resumed run evaluates the steps that the run which was not interrupted does.
        """
        self.publish(version=step)
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
        """Optimizer steps on one batch, and how much of that time engines were busy meanwhile."""
        self._turn(Turn.TRAINING)
        start_s, busy_before_s = time.perf_counter(), self._manager.busy_s
        super().train(batch, step=step)
        overlap_s, train_s = self._manager.busy_s - busy_before_s, time.perf_counter() - start_s
        self._metrics.append({"rollout/overlap_fraction": Mean(min(overlap_s, train_s), train_s)})

    def publish(self, *, version: int) -> None:
        """Sync the engines' weights."""
        self._turn(Turn.SYNC)
        # The sync keeps its own deadline, and names who misses it.
        timeout_s = self._settings.weights.sync_timeout_s + ENGINE_CONTROL_S
        with finishing_first(), self._phase("sync"):
            self._metrics.append(self._wait(self._sync.run(version=version), name=f"weight sync to version {version}", timeout_s=timeout_s))

    def _check_parity(self) -> None:
        manager, settings = self._manager, self._settings
        self._turn(Turn.GENERATION)
        with self._phase("parity probe"):
            prompts, vocab_size = manager.prompts.for_parity(PROBE_SEQUENCES), len(manager.prompts.tokenizer)
            scoring = score_probe(prompts, manager.pool, vocab_size=vocab_size, seed=settings.run.seed)
            scored = self._wait(scoring, name="parity probe of the engines")
        self._turn(Turn.SYNC)
        with self._phase("parity probe"):
            threshold = settings.weights.parity_threshold or PARITY_THRESHOLDS[self._dtype]
            log_probs = partial(self._trainers.log_probs, temperature=1.0)
            metrics = check_probe(scored, log_probs, threshold=threshold, replays=settings.training.routing_replay)
        values = metric_values(metrics)
        free = values.get("weights/parity_mean_without_replay")
        note = "" if free is None else f", {free:.1e} without routing replay"
        self._console.say(f"parity of engine and trainer: mean |Δ log-prob| {values['weights/parity_mean']:.1e} nats{note}")
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
        # An engine that has died fails no wait for the ranks, which are well.
        self._watchdog.forget()
        if asked_to_end(error) and self._devices is not None:
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
