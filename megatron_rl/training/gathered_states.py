"""How the states of megatron-core's distributed optimizer are gathered to be saved, instead of upstream's way (seen in 0.16.1 to 0.19.2).

Upstream gathers the states of a buffer without the padding at the end of each bucket, and cuts the parameters out of it at offsets that
count this padding. So behind the first bucket with padding, main weights and moments are saved shifted, without an error, and a run that
resumes from them goes on with other weights. Buckets are several when gradients are reduced during the backward
(`training.ddp.overlap_grad_reduce`).

It also gathers a whole bucket in float32 on the device of every data-parallel rank, 4 bytes for each of the rank's parameters when there is
one bucket, and keeps all states in the host memory of all of them, although one writes them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer, DistributedOptimizer, MegatronOptimizer
from torch import Tensor, distributed

from megatron_rl.training.collectives import collective_device

STATES = ("param", "exp_avg", "exp_avg_sq")
GATHERED_BYTES = 256 * 2**20
"""The most that is gathered on a device at once."""


@contextmanager
def states_at_padded_offsets(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Inside, `optimizer.sharded_state_dict` finds every state at the offset where it looks for it, on the ranks that save it."""
    parts = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    own = [part for part in parts if isinstance(part, DistributedOptimizer)]
    for part in own:
        # On the instance, so that no other optimizer in this process is touched.
        part.get_parameter_state_dp_zero = partial(_padded_states, part)
    try:
        yield
    finally:
        for part in own:
            del part.get_parameter_state_dp_zero


def _padded_states(optimizer: DistributedOptimizer, *, empty_data: bool, **_options: Any) -> dict[Any, Any] | None:
    """The states [numel] of every buffer in host memory, laid out as its gradients are; None on all but the first data-parallel rank.

    `empty_data` gives zeros on every rank, to be loaded into. Otherwise collective over data-parallel ranks.
    """
    here = optimizer.data_parallel_group.rank() == 0
    states: dict[Any, Any] = {"buckets_coalesced": True}
    for index, (buffer, ranges) in enumerate(zip(optimizer.buffers, optimizer.gbuf_ranges, strict=True)):
        ((dtype, range_maps),) = ranges.items()
        whole = {name: torch.zeros(buffer.numel if here or empty_data else 0) for name in STATES}
        for bucket, range_map in zip(buffer.buckets, range_maps, strict=True) if not empty_data else ():
            size = bucket.grad_data.numel()
            for name, shard in _own_shards(optimizer, range_map["param_map"], size=size // optimizer.data_parallel_group.size()).items():
                gather_in_pieces(shard, into=whole[name][bucket.offset : bucket.offset + size], group=optimizer.data_parallel_group)
        states[index] = {dtype: {**whole, "numel_unpadded": buffer.numel_unpadded}}
    return states if here or empty_data else None


def _own_shards(optimizer: DistributedOptimizer, param_map: dict[Any, Any], *, size: int) -> dict[str, Tensor]:
    """This rank's states [size] of one bucket, in host memory."""
    shards = {name: torch.zeros(size) for name in STATES}
    for parameter, ranges in param_map.items():
        own = ranges["gbuf_local"]
        tensors = optimizer._get_main_param_and_optimizer_states(parameter)
        for name, shard in shards.items():
            shard[own.start : own.end].copy_(tensors[name].detach())
    return shards


def gather_in_pieces(shard: Tensor, *, into: Tensor, group: distributed.ProcessGroup) -> None:
    """Put the shards [n] of all ranks of `group` one after the other `into` [ranks n] on its first rank; both are in host memory.

    At most `GATHERED_BYTES` lie on the device at once. Collective over the group.
    """
    here, device = group.rank() == 0, collective_device()
    step = max(1, GATHERED_BYTES // 4 // group.size())
    for start in range(0, len(shard), step):
        piece = shard[start : start + step]
        sent = piece.to(device)
        received = [torch.empty_like(sent) for _ in range(group.size())] if here else None
        distributed.gather(sent, received, group=group, group_dst=0)
        for rank, part in enumerate(received or ()):
            into[rank * len(shard) + start :][: len(piece)].copy_(part)
