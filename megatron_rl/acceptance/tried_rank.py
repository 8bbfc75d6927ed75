"""What a line of the acceptance asks of one Megatron rank, in that rank's process."""

import time
from collections.abc import Collection
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl.acceptance.device_rates import device_rates, now
from megatron_rl.config.settings import Settings
from megatron_rl.device import local_device, quiet_megatron_imports
from megatron_rl.types import Floats, TrainBatch
from megatron_rl.weights.interface import SenderPlan, WeightSender

with quiet_megatron_imports():
    from megatron_rl.models.model_spec import ModelSpec
    from megatron_rl.planning.step_time import Rates
    from megatron_rl.planning.tracking import MemoryTracker
    from megatron_rl.training.offload import Part
    from megatron_rl.training.trainer import Trainer

ALL_REDUCE_TIMEOUT_S = 120.0


class Rank:
    """Rank `number`, on GPU `number` where there are GPUs. Without a model until `open`."""

    def __init__(self, number: int) -> None:
        self._number, self._device = number, local_device(number)
        self._trainer: Trainer | None = None
        self._sender: WeightSender | None = None

    @property
    def trainer(self) -> Trainer:
        """The trainer of the layout that is open."""
        assert self._trainer is not None, "a layout is open"
        return self._trainer

    def open(self, settings: Settings, init_method: str) -> None:
        """Build the model as this rank of the layout."""
        self._trainer = Trainer.of(settings, rank=self._number, init_method=init_method, local_rank=self._number)

    def close(self) -> None:
        """Drop the model."""
        if self._trainer is not None:
            self._trainer.close()
        self._trainer = self._sender = None
        if self._device.kind == "cuda":
            torch.cuda.empty_cache()

    def all_reduce(self, world: int, init_method: str, num_bytes: int, repeats: int) -> float:
        """Seconds of one all-reduce, the fastest; AssertionError when the sum is wrong."""
        if self._device.kind == "cuda":
            torch.cuda.set_device(self._device.torch_device)
        timeout = timedelta(seconds=ALL_REDUCE_TIMEOUT_S)
        dist.init_process_group(self._device.backend, init_method=init_method, rank=self._number, world_size=world, timeout=timeout)
        seconds = []
        try:
            for _ in range(repeats + 1):
                data = torch.full((num_bytes // 4,), float(self._number + 1), device=self._device.torch_device)
                dist.barrier()
                self._wait()
                start = time.perf_counter()
                dist.all_reduce(data)
                self._wait()
                seconds.append(time.perf_counter() - start)
                assert bool((data == world * (world + 1) / 2).all()), "the all-reduce gave another sum"
        finally:
            dist.destroy_process_group()
        return min(seconds[1:])

    def _wait(self) -> None:
        if self._device.kind == "cuda":
            torch.cuda.synchronize(self._device.torch_device)

    def train(self, batch: TrainBatch) -> dict[str, float]:
        """One step; its metrics, and its `seconds` by the clock of `device_rates`."""
        start = now(self._device)
        metrics = self.trainer.train(batch)[-1]
        return {**metrics, "seconds": now(self._device) - start}

    def peak_of_step(self, batch: TrainBatch) -> int:
        """The most bytes that a training step had on the device beyond those at its start."""
        if self._device.kind == "cpu":
            with MemoryTracker() as tracker:
                self.trainer.train(batch)
            return tracker.peak
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.trainer.train(batch)
        return torch.cuda.max_memory_allocated() - before

    def foreign_bytes(self) -> int:
        """Bytes of this rank's GPU that are not torch's here: those of an engine beside it, CUDA's and NCCL's; 0 without a GPU."""
        if self._device.kind == "cpu":
            return 0
        free, total = torch.cuda.mem_get_info(self._device.torch_device)
        return total - free - torch.cuda.memory_reserved(self._device.torch_device)

    def rates(self, spec: ModelSpec, num_tokens: int, length: int, dtype: str) -> Rates:
        """What this rank's device does in bare work of the model's shapes, while all others of the layout do the same."""
        return device_rates(spec, num_tokens=num_tokens, length=length, dtype=dtype, device=self._device)

    def state_bytes(self) -> int:
        """Bytes of the policy's parameters on the device; on a GPU of everything that torch has allocated."""
        if self._device.kind == "cuda":
            return torch.cuda.memory_allocated()
        chunks = self.trainer.trained_models()["policy"].chunks
        storages = {parameter.untyped_storage()._cdata: parameter.untyped_storage() for chunk in chunks for parameter in chunk.parameters()}
        return sum(storage.nbytes() for storage in storages.values())

    def log_probs(self, batch: TrainBatch, temperature: float) -> Floats:
        """Log-probs [T] of the batch's tokens."""
        return self.trainer.own_log_probs(batch, temperature=temperature)

    def put_away(self, parts: Collection[Part]) -> None:
        """Move parts of the models to host memory."""
        self.trainer.put_away(parts)

    def take_back(self, parts: Collection[Part]) -> None:
        """Move parts of the models back."""
        self.trainer.take_back(parts)

    def save(self, directory: Path) -> None:
        """Write a checkpoint."""
        self.trainer.save(directory)

    def load(self, directory: Path) -> None:
        """Continue from a checkpoint."""
        self.trainer.load(directory)

    def save_hf(self, directory: Path) -> None:
        """Write a Hugging Face directory."""
        self.trainer.save_hf(directory)

    def open_sender(self, plan: SenderPlan) -> None:
        """Open this rank's end of a transport."""
        self._sender = plan.open(self.trainer, rank=self._number)

    def close_sender(self) -> None:
        """Close it."""
        assert self._sender is not None, "a sender is open"
        self._sender.close()

    def send(self, version: int) -> None:
        """Send the weights."""
        assert self._sender is not None, "a sender is open"
        self._sender.send(version=version)
