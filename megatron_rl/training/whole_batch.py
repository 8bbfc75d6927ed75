"""A batch held whole by every rank: the check for equality, the shares, and the merged metrics."""

import dataclasses
import hashlib

import numpy as np

from megatron_rl.algorithms.objective import Objective
from megatron_rl.config.settings import TrainingSettings
from megatron_rl.data.packing import Trajectories, make_shards
from megatron_rl.errors import UserError
from megatron_rl.observe.metrics import Metric, merge_metrics, metric_values
from megatron_rl.system.frozen_arrays import Candidates
from megatron_rl.training.advantages import compared_samples
from megatron_rl.training.collectives import reports_of_ranks
from megatron_rl.training.topology import Topology
from megatron_rl.types import Shard, TrainBatch


def check_same_everywhere(batch: TrainBatch) -> None:
    """Raise UserError, on every rank, when two ranks have different batches. Collective over all ranks."""
    digest = hashlib.blake2b(digest_size=16)
    for item in dataclasses.fields(batch):
        value = getattr(batch, item.name)
        digest.update(item.name.encode())
        value = value.packed() if isinstance(value, Candidates) else value
        digest.update(np.ascontiguousarray(value).data if isinstance(value, np.ndarray) else repr(value).encode())
    if len(set(reports_of_ranks(digest.hexdigest()))) > 1:
        raise UserError(
            "the ranks were given different batches, but each rank takes its share of the whole batch itself; pass the same batch, in "
            "the same order, on every rank"
        )


def with_signal(objective: Objective, batch: TrainBatch) -> TrainBatch:
    """Return the batch without the groups that `objective.zero_variance` drops; new prompts are drawn by the caller.

    A batch that `check_batch` refuses is returned as it is.
    """
    refused = batch.advantages is not None or not np.isfinite(batch.rewards).all()
    if objective.zero_variance not in ("drop", "resample") or refused or not batch.num_sequences:
        return batch
    trajectories = Trajectories.of(batch.trajectory_ids)
    (shard,) = make_shards(batch, dp=1, optimizer_steps=1, max_tokens_per_micro_batch=1, seed=0)
    nothing = objective.advantage.without_signal(compared_samples(objective, shard, trajectories)).numpy()
    return batch.select(np.flatnonzero(~nothing[trajectories.index])) if nothing.any() else batch


def divide(batch: TrainBatch, training: TrainingSettings, *, seed: int, optimizer_steps: int | None = None) -> tuple[Shard, ...]:
    """Divide the batch into a shard for each data-parallel rank; `seed` decides the sequences of each optimizer step."""
    topology = Topology.of(training.topology)
    return make_shards(
        batch,
        dp=topology.dp,
        optimizer_steps=optimizer_steps or training.optimizer_steps_per_batch,
        max_tokens_per_micro_batch=training.max_tokens_per_micro_batch,
        seed=seed,
        cp=topology.cp,
    )


def merge_over_ranks(shares: list[dict[str, Metric]]) -> list[dict[str, float]]:
    """Return the metrics of each optimizer step from all ranks' shares, equal on every rank. Collective over all ranks."""
    return [metric_values(merge_metrics(step)) for step in zip(*reports_of_ranks(shares), strict=True)]
