"""The two kinds of Ray actor, thin: each forwards to one object of the training or rollout room.

`hold` and `watch` run beside the other calls in a concurrency group of their own and return only when something is wrong.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import ray
import torch.distributed as dist

from megatron_rl.config.settings import Settings
from megatron_rl.errors import UserError
from megatron_rl.observe.metrics import Metric
from megatron_rl.rollout.engine import Engine, EngineAddress
from megatron_rl.training.offload import Part
from megatron_rl.training.trainer import Trainer
from megatron_rl.types import Floats, Shard, TrainBatch
from megatron_rl.weights.broadcast import BroadcastGroup, join_as_sender, send_buckets
from megatron_rl.weights.bucket import WeightSpec, make_manifest

HEALTH_INTERVAL_S = 0.5


def enter_directory(directory: Path) -> None:
    """Work where the driver does, so that relative paths mean the same on every node. Raises UserError where it does not exist."""
    if not directory.is_dir():
        raise UserError(
            f"{ray.util.get_node_ip_address()} has no directory {directory}, from which this run was started and to which its relative "
            f"paths belong; start it from a directory that all nodes share"
        )
    os.chdir(directory)


def free_port(address: str) -> int:
    """A TCP port of `address` that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


@ray.remote(concurrency_groups={"watch": 1})
class TrainerWorker:
    """One Megatron rank."""

    def __init__(self) -> None:
        self._rank: int
        self._trainer: Trainer
        self._group: dist.ProcessGroup | None = None

    @ray.method(concurrency_group="watch")
    def hold(self) -> None:
        """Never return: the caller learns of this actor's death."""
        threading.Event().wait()

    def take_place(self, directory: Path) -> tuple[int, ...]:
        """Work in `directory` from now on; return the GPUs that Ray gave this process, by the numbers of its node."""
        enter_directory(directory)
        return tuple(int(gpu) for gpu in ray.get_gpu_ids())

    def address(self) -> tuple[str, int]:
        """An address of this node and a free port on it, for a rendezvous that this rank will serve."""
        address = ray.util.get_node_ip_address()
        return address, free_port(address)

    def start(self, settings: Settings, *, rank: int, init_method: str) -> int:
        """Build the model and the optimizer as this rank; return its data-parallel rank."""
        self._rank = rank
        self._trainer = Trainer.of(settings, rank=self._rank, init_method=init_method)
        return self._trainer.dp_rank

    def train(self, shard: Shard) -> list[dict[str, Metric]]:
        """One rollout batch; this rank's share of the metrics, one dict per optimizer step."""
        return self._trainer.train_shard(shard)

    def log_probs(self, batch: TrainBatch, *, temperature: float) -> Floats:
        """Log-probs [T] of the batch's tokens under the current weights."""
        return self._trainer.own_log_probs(batch, temperature=temperature)

    def put_away(self, parts: frozenset[Part]) -> None:
        """Move these parts of this rank's models to host memory."""
        self._trainer.put_away(parts)

    def take_back(self, parts: frozenset[Part]) -> None:
        """Move these parts of this rank's models back to the device."""
        self._trainer.take_back(parts)

    def save(self, directory: Path) -> None:
        """Write this rank's part of a checkpoint that `load` continues from."""
        self._trainer.save(directory)

    def load(self, directory: Path) -> None:
        """Continue from a checkpoint."""
        self._trainer.load(directory)

    def save_hf(self, directory: Path) -> None:
        """Write the policy as a Hugging Face directory (rank 0 writes, all gather)."""
        self._trainer.save_hf(directory)

    def manifest(self) -> tuple[WeightSpec, ...]:
        """What `send_weights` sends, in order."""
        return make_manifest(self._trainer.weights())

    def join_engines(self, group: BroadcastGroup, *, timeout_s: float) -> None:
        """Open the process group to the engines; only rank 0 is in it."""
        if self._rank == 0:
            self._group = join_as_sender(group, timeout_s=timeout_s)

    def send_weights(self, buckets: Sequence[Sequence[WeightSpec]]) -> None:
        """Send the current weights to the engines."""
        send_buckets(self._trainer.weights(), buckets, group=self._group)


@ray.remote(concurrency_groups={"watch": 1})
class EngineWorker:
    """One SGLang server, a child process of this actor, on the GPUs that Ray gave it or, beside ranks, on `shared_gpus`."""

    def __init__(self, make_engine: Callable[..., Engine], *, directory: Path, shared_gpus: tuple[int, ...] = ()) -> None:
        enter_directory(directory)
        gpus = shared_gpus or tuple(int(gpu) for gpu in ray.get_gpu_ids())
        self._engine = make_engine(host=ray.util.get_node_ip_address(), gpu_ids=gpus)
        self._stopping = False

    @ray.method(concurrency_group="watch")
    def watch(self) -> None:
        """Return when the engine was stopped on purpose; raise with the tail of its log when it died."""
        while not self._stopping:
            self._engine.check()
            time.sleep(HEALTH_INTERVAL_S)

    def start(self) -> EngineAddress:
        """Start the server and wait until it serves."""
        return self._engine.start()

    def stop(self) -> None:
        """Stop the server and reap it."""
        self._stopping = True
        self._engine.stop()
