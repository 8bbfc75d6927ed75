"""The one mend that saving megatron-core's distributed optimizer needs when there are several gradient buckets.

Upstream (seen in 0.16.1; 0.18.0 and 0.19.2 have the same code) gathers the states of a buffer without the padding at the end of each
bucket, and cuts the parameters out of it at offsets that count this padding. So behind the first bucket with padding, main weights and
moments are saved shifted, without an error, and a run that resumes from them goes on with other weights. Buckets are several when
gradients are reduced during the backward (`training.ddp.overlap_grad_reduce`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer, DistributedOptimizer, MegatronOptimizer


@contextmanager
def states_at_padded_offsets(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Inside, `optimizer.sharded_state_dict` finds every state at the offset where it looks for it."""
    parts = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    distributed = [part for part in parts if isinstance(part, DistributedOptimizer)]
    for part in distributed:
        # On the instance, so that no other optimizer in this process is touched.
        part.get_parameter_state_dp_zero = partial(_padded_states, part)
    try:
        yield
    finally:
        for part in distributed:
            del part.get_parameter_state_dp_zero


def _padded_states(optimizer: DistributedOptimizer, **options: Any) -> dict[Any, Any] | None:
    """The states as upstream gathers them, [numel_unpadded] each, with the padding of every bucket put back."""
    states: dict[Any, Any] | None = DistributedOptimizer.get_parameter_state_dp_zero(optimizer, **options)
    if states is None:
        return None
    for index, buffer in enumerate(optimizer.buffers):
        for tensors in states[index].values():
            for name, flat in tensors.items():
                if isinstance(flat, torch.Tensor):
                    tensors[name] = _with_padding(flat, buffer)
    return states


def _with_padding(flat: torch.Tensor, buffer: Any) -> torch.Tensor:
    """`flat` [numel_unpadded] laid out like the buffer's gradients, zeros as padding."""
    padded, start = flat.new_zeros(buffer.numel), 0
    for bucket in buffer.buckets:
        padded[bucket.offset : bucket.offset + bucket.numel_unpadded] = flat[start : start + bucket.numel_unpadded]
        start += bucket.numel_unpadded
    return padded
