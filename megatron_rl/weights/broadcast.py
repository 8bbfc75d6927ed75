"""Weights through a process group: trainer rank 0 sends, every rank of every engine receives. gloo on CPU, NCCL on GPU."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from megatron_rl.rendezvous import serve_store
from megatron_rl.weights.bucket import WeightSpec, fill_buckets


@dataclass(frozen=True, slots=True)
class BroadcastGroup:
    """Who takes part: the trainer as rank 0 at `address`:`port`, then the ranks of the engines. `backend` is gloo or nccl."""

    address: str
    port: int
    world_size: int
    name: str
    backend: str


def join_as_sender(group: BroadcastGroup, *, timeout_s: float) -> dist.ProcessGroup:
    """Open the group as rank 0 and wait until all engines have joined.

    The engines build their side outside of the trainer's default group, which torch's public `new_group` cannot express,
    so this uses the function underneath it (torch 2.9 to 2.14 have the same signature).
    """
    timeout = timedelta(seconds=timeout_s)
    store = serve_store(group.address, port=group.port, num_clients=group.world_size, timeout_s=timeout_s)
    process_group, _ = c10d._new_process_group_helper(
        group.world_size,
        0,
        [],
        dist.Backend(group.backend),
        dist.PrefixStore(group.name, store),
        group_name=c10d.GroupName(group.name),
        timeout=timeout,
        backend_options=None,
    )
    c10d._world.pg_group_ranks[process_group] = {member: member for member in range(group.world_size)}
    return process_group


def send_buckets(
    weights: Iterable[tuple[str, Tensor]], buckets: Sequence[Sequence[WeightSpec]], *, group: dist.ProcessGroup | None
) -> None:
    """Send the weights bucket by bucket; with `group` None only take part in the collectives that gather them.

    Every trainer rank calls this, because gathering a sharded weight is collective; only rank 0 has the group.
    """
    for flat in fill_buckets(weights, buckets):
        if group is not None:
            dist.broadcast(flat, src=0, group=group)
