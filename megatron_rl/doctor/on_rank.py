"""Questions of the trial to one Megatron rank, as functions for `TrainerGroup.apply`.

The call has the trainer in the rank's process. Rates of the device are of bare work of a model's
shapes, for forecasts by `planning.step_time`.
"""

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.weight_table import rules
from megatron_rl.planning.step_time import Flops, ModelSize, Rates
from megatron_rl.planning.tracking import MemoryTracker
from megatron_rl.system.device import Device, local_device
from megatron_rl.training.trainer import Trainer
from megatron_rl.types import TrainBatch

TURNS, CALLS = 5, 3
COPIED_BYTES = {"cuda": 2**30, "cpu": 2**26}
"""Bytes beyond the size of any cache."""


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
    """Return the bytes of this rank's GPU outside of torch here: an engine's, CUDA's, NCCL's; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def state_bytes(trainer: Trainer) -> int:
    """Return the bytes of the policy's parameters; on a GPU all bytes allocated by torch."""
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated()
    chunks = trainer.trained_models()["policy"].chunks
    storages = {parameter.untyped_storage()._cdata: parameter.untyped_storage() for chunk in chunks for parameter in chunk.parameters()}
    return sum(storage.nbytes() for storage in storages.values())


def device_rates(trainer: Trainer, *, spec: ModelSpec, num_tokens: int, length: int, dtype: str) -> Rates:
    """Return the device's rates at micro-batches of `num_tokens` tokens, sequences of `length`.

    Collective over the default group: its ranks sum a buffer, and share all parts of the device
    that a step shares.
    """
    device = local_device()
    options = {"dtype": getattr(torch, dtype), "device": device.torch_device}
    source = torch.ones(COPIED_BYTES[device.kind] // 4, device=device.torch_device)
    target, world = torch.empty_like(source), dist.get_world_size()
    copied = 2 * source.nbytes / _seconds(lambda: target.copy_(source), device)
    sent = math.inf
    if world > 1:
        sent = 2 * (world - 1) / world * source.nbytes / _seconds(lambda: dist.all_reduce(source), device)
    return Rates(
        products=_product_rate(spec, num_tokens, device, options),
        attention=_attention_rate(spec, num_tokens // length, length, device, options),
        memory=copied,
        node=sent,
        network=sent,
    )


def now(device: Device) -> float:
    """Return the seconds when the work of `device` is done; of a shared CPU, this process's CPU seconds."""
    if device.kind == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device.torch_device)
    return time.perf_counter()


def _seconds(work: Callable[[], object], device: Device) -> float:
    """Return the seconds of a call in the fastest turn, after one call to warm up."""

    def turn() -> float:
        start = now(device)
        for _ in range(CALLS):
            work()
        return (now(device) - start) / CALLS

    return min([turn() for _ in range(1 + TURNS)][1:])


def _product_rate(spec: ModelSpec, num_tokens: int, device: Device, options: dict[str, Any]) -> float:
    """Return operations a second of the first layer's products, forward and backward, one after the other."""
    found = [rule.tensors for rule in rules(spec) if rule.megatron.startswith("decoder.layers.0.") and len(rule.tensors[0].shape) > 1]
    matrices = [(sum(tensor.shape[0] for tensor in tensors), tensors[0].shape[1]) for tensors in found]
    cases = [(torch.randn(num_tokens, columns, **options), torch.randn(rows, columns, **options)) for rows, columns in matrices]
    gradients = [torch.randn(num_tokens, rows, **options) for rows, _ in matrices]

    def work() -> None:
        for (given, weight), gradient in zip(cases, gradients, strict=True):
            torch.mm(given, weight.t())
            torch.mm(gradient, weight)
            torch.mm(gradient.t(), given)

    return 6.0 * num_tokens * sum(rows * columns for rows, columns in matrices) / _seconds(work, device)


def _attention_rate(spec: ModelSpec, count: int, length: int, device: Device, options: dict[str, Any]) -> float:
    """Return operations a second of torch's causal attention, forward and backward."""
    shapes = [(spec.num_heads, spec.head_dim), (spec.num_kv_heads, spec.head_dim), (spec.num_kv_heads, spec.value_dim)]
    query, key, value = (torch.randn(count, heads, length, channels, **options).requires_grad_() for heads, channels in shapes)

    def work() -> None:
        F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).sum().backward()

    flops = Flops.of(ModelSize.of(spec), np.full(count, length))
    return flops.scores(recompute=None) / spec.num_layers / _seconds(work, device)
