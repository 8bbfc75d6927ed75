"""All Megatron ranks as one object, seen from the driver, and the Ray actor that each of them is."""

import threading
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from typing import Any

import ray

from megatron_rl.config.settings import Settings
from megatron_rl.deadlines import RANK_ANSWER_S, RANKS_START_S
from megatron_rl.observe.metrics import Metric, merge_metrics
from megatron_rl.rollout.engine import free_port
from megatron_rl.runtime.cluster import Reservation, enter_directory, gpu_order, own_gpus
from megatron_rl.runtime.garbage import spare_what_is_loaded
from megatron_rl.runtime.watchdog import Watchdog
from megatron_rl.training import sharded_checkpoint
from megatron_rl.training.offload import Part
from megatron_rl.training.trainer import Trainer
from megatron_rl.training.whole_batch import divide
from megatron_rl.types import Floats, Shard, TrainBatch
from megatron_rl.weights.interface import SenderPlan, WeightSender

OWNER = "Megatron rank"
"""What a rank is called in messages, before its number."""


@ray.remote(concurrency_groups={"watch": 1})
class TrainerWorker:
    """The process of one Megatron rank, thin: it forwards to one object of the training room."""

    def __init__(self) -> None:
        # Which rank it is follows from the GPUs that Ray gives to it and its neighbours, which are only known once they all run.
        self._rank: int
        self._checked: Path | None = None
        self._trainer: Trainer
        self._sender: WeightSender

    @ray.method(concurrency_group="watch")
    def hold(self) -> None:
        """Never return, beside the other calls: the caller learns of this actor's death."""
        threading.Event().wait()

    def take_place(self, directory: Path) -> tuple[str, ...]:
        """Work in `directory` from now on; return the GPUs that Ray gave this process, by their names on its node."""
        enter_directory(directory)
        return own_gpus()

    def address(self) -> tuple[str, int]:
        """An address of this node and a free port on it, for a rendezvous that this rank will serve."""
        address = ray.util.get_node_ip_address()
        return address, free_port(address)

    def check(self, checkpoint: Path, *, share: int, num_shares: int) -> None:
        """Compare this share of the files of a checkpoint with its manifest."""
        sharded_checkpoint.check_files(checkpoint, share=share, num_shares=num_shares)
        self._checked = checkpoint

    def start(self, settings: Settings, *, rank: int, init_method: str) -> int:
        """Build the model and the optimizer as this rank; return its data-parallel rank."""
        self._rank = rank
        self._trainer = Trainer.of(settings, rank=self._rank, init_method=init_method)
        spare_what_is_loaded()
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

    def begin_save(self, directory: Path) -> None:
        """Begin this rank's part of a checkpoint that `load` continues from."""
        self._trainer.begin_save(directory)

    def begin_save_hf(self, directory: Path) -> None:
        """Begin a Hugging Face directory of the policy (rank 0 writes, all gather)."""
        self._trainer.begin_save_hf(directory)

    def saves_are_written(self) -> bool:
        """Whether `finish_saves` would not wait for this rank."""
        return self._trainer.saves_are_written

    def finish_saves(self) -> None:
        """Wait for what has begun."""
        self._trainer.finish_saves()

    def load(self, directory: Path, *, weights_only: bool) -> tuple[str, ...]:
        """Continue from a checkpoint; what has changed since it was made."""
        return self._trainer.load(directory, weights_only=weights_only, checked=directory == self._checked)

    def open_sender(self, plan: SenderPlan) -> None:
        """Open this rank's end of the transport to the engines."""
        self._sender = plan.open(self._trainer, rank=self._rank)

    def close_sender(self) -> None:
        """Close this rank's end of the transport."""
        self._sender.close()

    def send(self, *, version: int) -> None:
        """Send the current weights to the engines."""
        self._sender.send(version=version)


class TrainerGroup:
    """Starts one actor per rank and calls them together; the first failure ends the call."""

    def __init__(self, settings: Settings, *, reservation: Reservation, watchdog: Watchdog) -> None:
        self._settings = settings
        self._watchdog = watchdog
        # Of every rank, once all have started.
        self._dp_ranks: list[int] = []
        self._nodes = [
            [TrainerWorker.options(**reservation.rank_options(node)).remote() for _ in share.ranks]  # type: ignore[attr-defined]
            for node, share in enumerate(reservation.placement.nodes)
        ]

    @cached_property
    def _seated(self) -> list[tuple[Any, tuple[str, ...]]]:
        """The actor of every rank and the GPUs that Ray gave it: on each node in the order of the GPUs, which Ray deals out in any."""
        workers = [worker for node in self._nodes for worker in node]
        refs = [worker.take_place.remote(Path.cwd()) for worker in workers]
        answers = self._watchdog.wait(refs, name="starting the processes of the ranks", owner=OWNER, timeout_s=RANKS_START_S)
        gpus = dict(zip(workers, answers, strict=True))
        seated = [(worker, gpus[worker]) for node in self._nodes for worker in sorted(node, key=lambda one: gpu_order(gpus[one]))]
        for rank, (worker, _) in enumerate(seated):
            self._watchdog.watch(f"Megatron rank {rank}", worker.hold.remote().future())
        return seated

    @property
    def workers(self) -> list[Any]:
        """The actors by rank."""
        return [worker for worker, _ in self._seated]

    @property
    def gpus(self) -> list[tuple[str, ...]]:
        """The GPUs of every rank, by their names on its node: one, or none on the CPU."""
        return [gpus for _, gpus in self._seated]

    def check(self, checkpoint: Path) -> None:
        """Let the ranks compare the files of a checkpoint with its manifest, each a share of them on its own node, before they start.

        Raises DamagedCheckpointError.
        """
        num_shares = len(self.workers)
        refs = [worker.check.remote(checkpoint, share=share, num_shares=num_shares) for share, worker in enumerate(self.workers)]
        name = "comparing the checkpoint with its manifest"
        self._watchdog.wait(refs, name=name, owner=OWNER, timeout_s=self._settings.training.step_timeout_s)

    def begin_start(self) -> list[ray.ObjectRef]:
        """Ask every rank to build its model; wait for the result with `finish_start`."""
        address, port = self.free_address()
        init_method = f"tcp://{address}:{port}"
        return [worker.start.remote(self._settings, rank=rank, init_method=init_method) for rank, worker in enumerate(self.workers)]

    def finish_start(self, refs: list[ray.ObjectRef]) -> None:
        """Wait until every rank has built its model."""
        self._dp_ranks = self._watchdog.wait(refs, name="starting the Megatron ranks", owner=OWNER, timeout_s=RANKS_START_S)

    @property
    def dp(self) -> int:
        """Data-parallel size."""
        return max(self._dp_ranks) + 1

    def check_answers(self) -> None:
        """Raise DeadlineError when a rank takes no call within RANK_ANSWER_S, so that nobody waits for it once more."""
        refs = [worker.saves_are_written.remote() for worker in self.workers]
        self._watchdog.wait(refs, name="asking whether the ranks still answer", owner=OWNER, timeout_s=RANK_ANSWER_S)

    def _call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        refs = [getattr(worker, method).remote(*args, **kwargs) for worker in self.workers]
        return self._watchdog.wait(refs, name=method, owner=OWNER, timeout_s=self._settings.training.step_timeout_s)

    def train(self, batch: TrainBatch, *, step: int) -> list[dict[str, Metric]]:
        """Train on one rollout batch; the merged metrics of each optimizer step."""
        training = self._settings.training
        shards = divide(batch, training, seed=self._settings.run.seed + step)
        stored = [ray.put(shard) for shard in shards]
        refs = [worker.train.remote(stored[dp_rank]) for worker, dp_rank in zip(self.workers, self._dp_ranks, strict=True)]
        results = self._watchdog.wait(refs, name=f"training of step {step + 1}", owner=OWNER, timeout_s=training.step_timeout_s)
        return [merge_metrics(shares) for shares in zip(*results, strict=True)]

    def log_probs(self, batch: TrainBatch, *, temperature: float) -> Floats:
        """Log-probs [T] of the batch's tokens under the current weights."""
        return self._call("log_probs", batch, temperature=temperature)[0]

    def put_away(self, parts: frozenset[Part]) -> None:
        """Move these parts of the models to host memory."""
        self._call("put_away", parts)

    def take_back(self, parts: frozenset[Part]) -> None:
        """Move these parts of the models back to the device."""
        self._call("take_back", parts)

    def begin_save(self, directory: Path) -> None:
        """Begin a checkpoint that `load` continues from, as `Trainer.begin_save`."""
        self._call("begin_save", directory)

    def begin_save_hf(self, directory: Path) -> None:
        """Begin a Hugging Face directory of the policy, as `Trainer.begin_save_hf`."""
        self._call("begin_save_hf", directory)

    def saves_are_written(self) -> bool:
        """Whether `finish_saves` would not wait for the disk."""
        return all(self._call("saves_are_written"))

    def finish_saves(self) -> None:
        """Wait for what has begun, which is then in its place."""
        self._call("finish_saves")

    def load(self, directory: Path, *, weights_only: bool = False) -> tuple[str, ...]:
        """Continue from a checkpoint, as `Trainer.load`; a sentence for each setting that has changed since it was made."""
        changes: tuple[str, ...] = self._call("load", directory, weights_only=weights_only)[0]
        return changes

    def free_address(self) -> tuple[str, int]:
        """An address of rank 0's node and a free port on it."""
        asked = [self.workers[0].address.remote()]
        return self._watchdog.wait(asked, name="finding a free port", owner=OWNER, timeout_s=RANKS_START_S)[0]

    def begin_open_sender(self, plan: SenderPlan) -> list[Future[None]]:
        """Let every rank open its end of the transport to the engines."""
        stored = ray.put(plan)
        return [worker.open_sender.remote(stored).future() for worker in self.workers]

    def begin_close_sender(self) -> list[Future[None]]:
        """Let every rank close its end of the transport to the engines."""
        return [worker.close_sender.remote().future() for worker in self.workers]

    def begin_send(self, *, version: int) -> list[Future[None]]:
        """Let every rank send its current weights to the engines."""
        return [worker.send.remote(version=version).future() for worker in self.workers]
