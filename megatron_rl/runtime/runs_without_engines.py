"""Runs without engines: the calls of the loop on rows with answers, and on the batches that another run recorded."""

from dataclasses import replace
from typing import Any

import numpy as np

from megatron_rl.config.derived import leaves_tokens_out
from megatron_rl.config.settings import RunSettings, Settings
from megatron_rl.data.batch import make_train_batch
from megatron_rl.data.recorded import Recorded
from megatron_rl.data.source import PromptSource
from megatron_rl.errors import UserError
from megatron_rl.observe.console import PhaseProgress
from megatron_rl.observe.group_metrics import rollout_metrics
from megatron_rl.observe.metrics import Metric
from megatron_rl.rollout.group_choice import FAILED, check_versions
from megatron_rl.rollout.sample_checks import without_stale_tokens
from megatron_rl.runtime.resumption import RECORDED_BEFORE
from megatron_rl.runtime.run import Run
from megatron_rl.runtime.run_records import RunRecords
from megatron_rl.runtime.trainers import TrainerGroup
from megatron_rl.types import TrainBatch


class SupervisedRun(Run):
    """A run on the rows of data.train with their answers, without engines."""

    def __init__(self, run: RunSettings, *, groups_per_step: int, source: PromptSource, ranks: TrainerGroup, records: RunRecords) -> None:
        super().__init__(run, groups_per_step=groups_per_step, ranks=ranks, records=records)
        self._source = source
        # The number of steps before the latest batch, and the position then.
        self._before_batch: tuple[int, dict[str, Any]] = (-1, {})

    def _make_batch(self, step: int, *, progress: PhaseProgress) -> tuple[TrainBatch, dict[str, Metric]]:
        self._before_batch = (step, self._source.rows.state())
        return make_train_batch(self._source.next_supervised(self._groups_per_step)), {}

    def _position(self, *, step: int) -> dict[str, Any]:
        before, state = self._before_batch
        return state if before == step else self._source.rows.state()

    def _rewind(self, *, step: int, position: dict[str, Any] | None) -> tuple[str, ...]:
        if position is not None:
            self._source.rows.restore(position)
        return ()


class ReplayRun(Run):
    """A run that trains on the steps of `recorded`, and ends with the last one.

    A new run begins with the first recorded step. One that resumes from the checkpoint of step s,
    also a copy of the recorded run's, goes on with recorded step s + 1.
    """

    def __init__(self, settings: Settings, *, recorded: Recorded, before: int, ranks: TrainerGroup, records: RunRecords) -> None:
        """`before` recorded steps precede this run's first."""
        self._recorded, self._before = recorded, before
        last = recorded.recorded_steps()[-1] - before
        own = settings.run.model_copy(update={"num_steps": min(settings.run.num_steps, last)})
        super().__init__(own, groups_per_step=settings.data.prompts_per_step, ranks=ranks, records=records)
        self._rollout, self._resamples = settings.rollout, settings.objective.zero_variance == "resample"
        self._needs_records = leaves_tokens_out(settings.rollout.sampling) or settings.training.routing_replay

    def _make_batch(self, step: int, *, progress: PhaseProgress) -> tuple[TrainBatch, dict[str, Metric]]:
        number, rollout = step + 1 + self._before, self._rollout
        oldest = number - 1 - rollout.max_staleness
        # What was trained so far is saved where the record has a fault.
        self._ranks_are_idle = True
        groups, rejections = self._recorded.batch_groups(number, records=self._needs_records)
        if rollout.order.partial:
            groups = [without_stale_tokens(group, oldest_version=oldest) for group in groups]
        else:
            cure = f"they are from {self._recorded.path}; set rollout.max_staleness and rollout.order to what they were"
            check_versions(groups, step=number - 1, oldest_version=oldest, cure=cure)
        chosen = list(zip(groups, rejections, strict=True))
        made = [group for group, rejection in chosen if not (rejection or "").startswith(FAILED)]
        kept = [group for group, rejection in chosen if rejection is None]
        counted, needed = kept if self._resamples else made, self._groups_per_step
        if len(counted) != needed:
            raise UserError(
                f"{self._recorded.path} has {len(counted)} of data.prompts_per_step {needed} groups of step {number}: its run ended or "
                f"still is in that step, or had another data.prompts_per_step; end before by run.num_steps={step}, or set what it was"
            )
        self._ranks_are_idle = False
        batch = make_train_batch(kept or made, version=number - 1)
        if not kept:
            batch = replace(batch, loss_mask=np.zeros(len(batch.tokens), np.bool_))
        return batch, rollout_metrics(made, version=number - 1)

    def _position(self, *, step: int) -> dict[str, Any]:
        return {RECORDED_BEFORE: self._before}

    def _rewind(self, *, step: int, position: dict[str, Any] | None) -> tuple[str, ...]:
        return ()
