"""Weights through a process group: trainer rank 0 sends, every rank of every engine receives. gloo on CPU, NCCL on GPU."""

import asyncio
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from megatron_rl.engines.client import EngineClient
from megatron_rl.errors import EngineError
from megatron_rl.system.rendezvous import serve_store
from megatron_rl.weights.transport import BucketTransport, Surroundings, WeightSender, WeightSource, WeightSpec, fill_buckets, take_all

# The rank's end


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastPlan:
    """A rank's input for sending `buckets` through a group on gloo or nccl.

    Its members are the trainer as rank 0 at `address`:`port`, then the ranks of the engines; they have
    `timeout_s` seconds to join.
    """

    address: str
    port: int
    world_size: int
    name: str
    backend: str
    buckets: tuple[tuple[WeightSpec, ...], ...]
    timeout_s: float

    def open(self, source: WeightSource, *, rank: int) -> "BroadcastSender":
        """Join the group as rank 0; other ranks stay outside."""
        return BroadcastSender(source, self.buckets, group=join_as_sender(self) if rank == 0 else None)


class BroadcastSender(WeightSender):
    """The sender of weights: all ranks gather, and the rank with the `group` sends."""

    def __init__(self, source: WeightSource, buckets: Sequence[Sequence[WeightSpec]], *, group: dist.ProcessGroup | None) -> None:
        super().__init__(source)
        self._buckets, self._group = buckets, group

    def _send(self, *, version: int, checked: bool) -> None:
        """Send bucket by bucket. Without the group only take part in gathering; the engines know the version from elsewhere."""
        weights = self._gathered(receivers=(0,), checked=checked and self._group is not None)
        try:
            if self._group is not None:
                for flat in fill_buckets(weights, self._buckets):
                    # On a GPU the next bucket is written after this one is sent, both being work of one stream.
                    failure = _broadcast(flat, self._group)
                    if failure is not None:
                        raise EngineError(f"weights {version} could not be sent to all engines: {failure}")
        finally:
            take_all(weights)

    def close(self) -> None:
        """Leave the group; its connections, at which engines may wait, end with the last reference to it."""
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)


def _broadcast(flat: Tensor, group: dist.ProcessGroup) -> str | None:
    """Send; return the reason of a failure as text: the traceback of torch's error would keep the group open."""
    try:
        dist.broadcast(flat, src=0, group=group)
    except RuntimeError as error:
        return str(error)
    return None


def join_as_sender(plan: BroadcastPlan) -> dist.ProcessGroup:
    """Open the group as rank 0 and wait until all engines have joined.

    torch's public `new_group` cannot express a group with members outside of the trainer's default group, so this
    calls the private function below (the same signature in torch 2.9 to 2.14).
    """
    store = serve_store(plan.address, port=plan.port, num_clients=plan.world_size, timeout_s=plan.timeout_s)
    with _unbound_default_group():
        process_group, _ = c10d._new_process_group_helper(
            plan.world_size,
            0,
            [],
            dist.Backend(plan.backend),
            dist.PrefixStore(plan.name, store),
            group_name=c10d.GroupName(plan.name),
            timeout=timedelta(seconds=plan.timeout_s),
            backend_options=None,
        )
    c10d._world.pg_group_ranks[process_group] = {member: member for member in range(plan.world_size)}
    return process_group


@contextmanager
def _unbound_default_group() -> Iterator[None]:
    """Hide the device of the trainer's default group, if there is one.

    torch would split the communicator of a bound default group, which waits for all ranks of the trainer.
    """
    if not dist.is_initialized():
        yield
        return
    default = dist.distributed_c10d._get_default_group()
    device, default.bound_device_id = default.bound_device_id, None
    try:
        yield
    finally:
        default.bound_device_id = device


# The engines' end


class BroadcastTransport(BucketTransport):
    """Directs engines to receive bucket by bucket while the ranks send. Ranks of the engines follow rank 0, engine by engine."""

    plan: BroadcastPlan

    def __init__(self, surroundings: Surroundings) -> None:
        super().__init__(surroundings)
        address, port = surroundings.free_address()
        self.plan = BroadcastPlan(
            address=address,
            port=port,
            world_size=1 + surroundings.num_engines * surroundings.ranks_per_engine,
            # No other group of an engine has this name, also where one could not be left.
            name=f"weights-{uuid.uuid4().hex}",
            backend=surroundings.backend,
            buckets=self.buckets,
            timeout_s=surroundings.timeout_s,
        )

    async def connect(self, clients: Sequence[EngineClient]) -> None:
        """Let every engine join the group."""
        group = {name: getattr(self.plan, name) for name in ("address", "port", "world_size", "name", "backend")}
        offsets = range(1, self.plan.world_size, self._num_ranks)
        await asyncio.gather(*(client.join_group(rank_offset=first, **group) for client, first in zip(clients, offsets, strict=True)))

    async def disconnect(self, client: EngineClient) -> None:
        """Let an engine leave the group."""
        await client.leave_group(self.plan.name)

    async def take(self, client: EngineClient, number: int, *, version: int, is_last: bool) -> None:
        """Let an engine receive a bucket."""
        bucket = self.buckets[number]
        await client.receive_bucket(
            [spec.name for spec in bucket],
            dtypes=[spec.dtype for spec in bucket],
            shapes=[spec.shape for spec in bucket],
            group=self.plan.name,
            version=version if is_last else None,
        )
