"""The Ray actor of a Megatron rank, thin: it forwards to one object of the training room."""

import socket
import threading
from pathlib import Path

import ray

from megatron_rl.config.settings import Settings
from megatron_rl.observe.metrics import Metric
from megatron_rl.runtime.engine_worker import enter_directory
from megatron_rl.training.offload import Part
from megatron_rl.training.trainer import Trainer
from megatron_rl.types import Floats, Shard, TrainBatch
from megatron_rl.weights.interface import SenderPlan, WeightSender


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
        self._sender: WeightSender

    @ray.method(concurrency_group="watch")
    def hold(self) -> None:
        """Never return, beside the other calls: the caller learns of this actor's death."""
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

    def open_sender(self, plan: SenderPlan) -> None:
        """Open this rank's end of the transport to the engines."""
        self._sender = plan.open(self._trainer, rank=self._rank)

    def close_sender(self) -> None:
        """Close this rank's end of the transport."""
        self._sender.close()

    def send(self, *, version: int) -> None:
        """Send the current weights to the engines."""
        self._sender.send(version=version)
