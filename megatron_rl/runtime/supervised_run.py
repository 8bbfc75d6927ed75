"""A run on rows with answers: the calls of the loop without engines."""

from typing import Any

from megatron_rl.config.settings import Settings
from megatron_rl.data.batch import make_train_batch
from megatron_rl.data.source import PromptSource
from megatron_rl.observe.console import PhaseProgress
from megatron_rl.observe.metrics import Metric
from megatron_rl.runtime.run import Run
from megatron_rl.runtime.run_records import RunRecords
from megatron_rl.runtime.trainers import TrainerGroup
from megatron_rl.types import TrainBatch


class SupervisedRun(Run):
    """A run on the rows of data.train with their answers, without engines."""

    def __init__(self, settings: Settings, *, source: PromptSource, ranks: TrainerGroup, records: RunRecords) -> None:
        super().__init__(settings, ranks=ranks, records=records)
        self._source = source
        # The number of steps before the latest batch, and the position then.
        self._before_batch: tuple[int, dict[str, Any]] = (-1, {})

    def _make_batch(self, step: int, *, progress: PhaseProgress) -> tuple[TrainBatch, dict[str, Metric]]:
        self._before_batch = (step, self._source.rows.state())
        return make_train_batch(self._source.next_supervised(self._settings.data.prompts_per_step)), {}

    def _position(self, *, step: int) -> dict[str, Any]:
        before, state = self._before_batch
        return state if before == step else self._source.rows.state()

    def _rewind(self, *, step: int, position: dict[str, Any] | None) -> tuple[str, ...]:
        if position is not None:
            self._source.rows.restore(position)
        return ()
