"""Questions of the trial to one Megatron rank, as functions for `TrainerGroup.apply`.

The call has the trainer in the rank's process.
"""

import time

import torch
import torch.distributed as dist

from megatron_rl.device import local_device, quiet_megatron_imports
from megatron_rl.doctor.device_rates import device_rates, now
from megatron_rl.types import TrainBatch

with quiet_megatron_imports():
    from megatron_rl.models.model_spec import ModelSpec
    from megatron_rl.planning.step_time import Rates
    from megatron_rl.planning.tracking import MemoryTracker
    from megatron_rl.training.trainer import Trainer


def close(trainer: Trainer) -> None:
    """Drop the model, so that the process can build another."""
    trainer.close()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def all_reduce(trainer: Trainer, *, num_bytes: int, repeats: int) -> float:
    """Return the seconds of the fastest all-reduce over all ranks. Raise AssertionError when the sum is wrong."""
    device, world = local_device().torch_device, dist.get_world_size()
    seconds = []
    for _ in range(repeats + 1):
        data = torch.full((num_bytes // 4,), float(dist.get_rank() + 1), device=device)
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(data)
        total = data.max().item(), data.min().item()
        seconds.append(time.perf_counter() - start)
        assert total == (world * (world + 1) / 2,) * 2, f"the all-reduce of 1 to {world} gave {total}"
    return min(seconds[1:])


def step(trainer: Trainer, *, batch: TrainBatch) -> dict[str, float]:
    """Take one step; return metrics, and `seconds` by the clock of `device_rates`."""
    start = now(local_device())
    metrics = trainer.train(batch)[-1]
    return {**metrics, "seconds": now(local_device()) - start}


def peak_of_step(trainer: Trainer, *, batch: TrainBatch) -> int:
    """Return the peak bytes of a training step on the device, beyond the bytes at the start."""
    if not torch.cuda.is_available():
        with MemoryTracker() as tracker:
            trainer.train(batch)
        return tracker.peak
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    trainer.train(batch)
    return torch.cuda.max_memory_allocated() - before


def foreign_bytes(trainer: Trainer) -> int:
    """Return the bytes of this rank's GPU outside of torch here: an engine's, CUDA's and NCCL's.

    0 without a GPU.
    """
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def rates(trainer: Trainer, *, spec: ModelSpec, num_tokens: int, length: int, dtype: str) -> Rates:
    """Return the device's rates in bare work of the model, as all ranks measure at once."""
    return device_rates(spec, num_tokens=num_tokens, length=length, dtype=dtype, device=local_device())


def state_bytes(trainer: Trainer) -> int:
    """Return the bytes of the policy's parameters; on a GPU all bytes allocated by torch."""
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated()
    chunks = trainer.trained_models()["policy"].chunks
    storages = {parameter.untyped_storage()._cdata: parameter.untyped_storage() for chunk in chunks for parameter in chunk.parameters()}
    return sum(storage.nbytes() for storage in storages.values())
