"""All Megatron ranks as one object, seen from the driver."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megatron_rl.config.settings import Settings
from megatron_rl.data.packing import make_shards
from megatron_rl.observe.metrics import Metric, merge_metrics
from megatron_rl.runtime.watchdog import Watchdog
from megatron_rl.runtime.workers import TrainerWorker
from megatron_rl.types import Floats, TrainBatch
from megatron_rl.weights.broadcast import BroadcastGroup
from megatron_rl.weights.bucket import WeightSpec

START_TIMEOUT_S = 600.0


class TrainerGroup:
    """Starts one actor per rank and calls them together; the first failure ends the call."""

    def __init__(self, settings: Settings, *, places: PlacementGroup, device_kind: str, watchdog: Watchdog) -> None:
        self._settings = settings
        self._watchdog = watchdog
        num_gpus = 1 if device_kind == "cuda" else 0
        self.workers = [
            TrainerWorker.options(  # type: ignore[attr-defined]
                num_cpus=1,
                num_gpus=num_gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(places, placement_group_bundle_index=rank),
            ).remote(rank)
            for rank in range(settings.training.topology.num_ranks)
        ]
        for rank, worker in enumerate(self.workers):
            watchdog.watch(f"Megatron rank {rank}", worker.hold.remote().future())

    def begin_start(self) -> list[ray.ObjectRef]:
        """Ask every rank to build its model; wait for the result with `finish_start`."""
        address, port = self.free_address()
        return [worker.start.remote(self._settings, init_method=f"tcp://{address}:{port}") for worker in self.workers]

    def finish_start(self, refs: list[ray.ObjectRef]) -> None:
        """Wait until every rank has built its model."""
        self._dp_ranks = self._watchdog.wait_refs(refs, name="starting the Megatron ranks", timeout_s=START_TIMEOUT_S)

    @property
    def dp(self) -> int:
        """Data-parallel size."""
        return max(self._dp_ranks) + 1

    def _call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        refs = [getattr(worker, method).remote(*args, **kwargs) for worker in self.workers]
        return self._watchdog.wait_refs(refs, name=method, timeout_s=self._settings.training.step_timeout_s)

    def train(self, batch: TrainBatch, *, step: int) -> list[dict[str, Metric]]:
        """Train on one rollout batch; the merged metrics of each optimizer step."""
        training = self._settings.training
        shards = make_shards(
            batch,
            dp=self.dp,
            optimizer_steps=training.optimizer_steps_per_batch,
            max_tokens_per_micro_batch=training.max_tokens_per_micro_batch * training.topology.cp,
            seed=self._settings.run.seed + step,
            cp=training.topology.cp,
        )
        stored = [ray.put(shard) for shard in shards]
        refs = [worker.train.remote(stored[dp_rank]) for worker, dp_rank in zip(self.workers, self._dp_ranks, strict=True)]
        results = self._watchdog.wait_refs(refs, name=f"training step {step}", timeout_s=training.step_timeout_s)
        return [merge_metrics(shares) for shares in zip(*results, strict=True)]

    def log_probs(self, batch: TrainBatch, *, temperature: float) -> Floats:
        """Log-probs [T] of the batch's tokens under the current weights."""
        return self._call("log_probs", batch, temperature=temperature)[0]

    def save(self, directory: Path) -> None:
        """Write a checkpoint that `load` continues from."""
        self._call("save", directory)

    def load(self, directory: Path) -> None:
        """Continue from a checkpoint."""
        self._call("load", directory)

    def save_hf(self, directory: Path) -> None:
        """Write the policy as a Hugging Face directory."""
        self._call("save_hf", directory)

    def manifest(self) -> tuple[WeightSpec, ...]:
        """The tensors that `begin_send` sends, in order."""
        manifest: tuple[WeightSpec, ...] = self._call("manifest")[0]
        return manifest

    def free_address(self) -> tuple[str, int]:
        """An address of rank 0's node and a free port on it."""
        return self._watchdog.wait_refs([self.workers[0].address.remote()], name="finding a free port", timeout_s=START_TIMEOUT_S)[0]

    def begin_join(self, group: BroadcastGroup, *, timeout_s: float) -> list[ray.ObjectRef]:
        """Let rank 0 open the process group to the engines."""
        return [self.workers[0].join_engines.remote(group, timeout_s=timeout_s)]

    def begin_send(self, buckets: Sequence[Sequence[WeightSpec]]) -> list[ray.ObjectRef]:
        """Let every rank gather and rank 0 send the current weights."""
        stored = ray.put(buckets)
        return [worker.send_weights.remote(stored) for worker in self.workers]
