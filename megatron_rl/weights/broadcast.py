"""Weights through a process group: trainer rank 0 sends, every rank of every engine receives. gloo on CPU, NCCL on GPU."""

import asyncio
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store
from torch.distributed import distributed_c10d as c10d

from megatron_rl.engines.client import EngineClient
from megatron_rl.engines.received_deltas import DELTA
from megatron_rl.errors import EngineError
from megatron_rl.system.rendezvous import join_store, serve_store
from megatron_rl.weights.deltas import DIGEST, END, Deltas, holding
from megatron_rl.weights.transport import (
    BucketTransport,
    Expected,
    Surroundings,
    WeightSender,
    WeightSource,
    WeightSpec,
    awaited,
    fill_buckets,
    num_bucket_bytes,
    open_update,
    take_all,
)


def announcement(number: int) -> str:
    """Return the store's key for the announcement of a connection's message by number."""
    return f"message/{number}"


# The rank's end


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastPlan:
    """A rank's input for sending `buckets` through a group on gloo or nccl.

    Its members are the trainer as rank 0 at `address`:`port`, then the ranks of the engines; they have
    `timeout_s` seconds to join. With `deltas` rank 0 announces each message in the group's store.
    """

    address: str
    port: int
    world_size: int
    name: str
    backend: str
    buckets: tuple[tuple[WeightSpec, ...], ...]
    timeout_s: float
    deltas: bool = False

    def open(self, source: WeightSource, *, rank: int) -> "BroadcastSender":
        """Join the group as rank 0; other ranks stay outside."""
        if rank != 0:
            return BroadcastSender(source, self)
        store = serve_store(self.address, port=self.port, num_clients=self.world_size, timeout_s=self.timeout_s)
        return BroadcastSender(source, self, store=store, group=join_as_sender(self, store))


class BroadcastSender(WeightSender):
    """The sender of weights: all ranks gather, and the rank with the `group` sends."""

    def __init__(
        self, source: WeightSource, plan: BroadcastPlan, *, store: Store | None = None, group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(source)
        self._plan, self._store, self._group = plan, store, group
        self._deltas = Deltas(plan.buckets, token=plan.name) if plan.deltas else None
        self._num_announced = 0

    def _send(self, *, version: int, checked: bool) -> None:
        """Send bucket by bucket. Without the group only take part in gathering; the engines know the version from elsewhere."""
        weights = self._gathered(receivers=(0,), checked=checked and self._group is not None)
        try:
            if self._group is not None:
                for flat in self._flats(weights, version=version, checked=checked):
                    # On a GPU the next bucket is written after this one is sent, both being work of one stream.
                    failure = _broadcast(flat, self._group)
                    if failure is not None:
                        raise EngineError(f"weights {version} could not be sent to all engines: {failure}")
        finally:
            take_all(weights)

    def _flats(self, weights: Iterator[tuple[str, Tensor]], *, version: int, checked: bool) -> Iterator[Tensor]:
        """Yield what is to be broadcast; with deltas, announce each message and the end in the store."""
        if self._deltas is None:
            yield from fill_buckets(weights, self._plan.buckets)
            return
        for message in self._deltas.messages(weights, version=version, checked=checked):
            self._announce(str(message))
            if message.bucket is not None:
                yield message.content
        self._announce(END)

    def _announce(self, text: str) -> None:
        assert self._store is not None, "rank 0 serves it"
        self._store.set(announcement(self._num_announced), text)
        self._num_announced += 1

    def close(self) -> None:
        """Leave the group; its connections, at which engines may wait, end with the last reference to it."""
        group, self._group, self._store = self._group, None, None
        if group is not None:
            dist.destroy_process_group(group)


def _broadcast(flat: Tensor, group: dist.ProcessGroup) -> str | None:
    """Send; return the reason of a failure as text: the traceback of torch's error would keep the group open."""
    try:
        dist.broadcast(flat, src=0, group=group)
    except RuntimeError as error:
        return str(error)
    return None


def join_as_sender(plan: BroadcastPlan, store: Store) -> dist.ProcessGroup:
    """Open the group as rank 0 and wait until all engines have joined.

    torch's public `new_group` cannot express a group with members outside of the trainer's default group, so this
    calls the private function below (the same signature in torch 2.9 to 2.14).
    """
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
            deltas=surroundings.deltas,
        )
        self.deltas = surroundings.deltas
        self._store: Store
        self._num_heard, self._last, self._num_bytes = 0, -1, 0

    async def connect(self, clients: Sequence[EngineClient]) -> None:
        """Let every engine join the group."""
        group = {name: getattr(self.plan, name) for name in ("address", "port", "world_size", "name", "backend")}
        offsets = range(1, self.plan.world_size, self._num_ranks)
        await asyncio.gather(*(client.join_group(rank_offset=first, **group) for client, first in zip(clients, offsets, strict=True)))
        if self.plan.deltas:
            place: dict[str, Any] = {"port": self.plan.port, "num_clients": self.plan.world_size, "timeout_s": self.plan.timeout_s}
            self._store = await asyncio.to_thread(join_store, self.plan.address, **place)

    async def disconnect(self, client: EngineClient) -> None:
        """Let an engine leave the group."""
        await client.leave_group(self.plan.name)

    async def deliver(self, client: EngineClient, *, version: int, expected: Expected | None = None) -> None:
        """Let an engine receive every bucket, or with deltas every announced message."""
        if not self.plan.deltas:
            return await super().deliver(client, version=version, expected=expected)
        holds, number, num_bytes = holding(self.plan.name, version), self._num_heard, 0
        async with open_update(client, num_ranks=self._num_ranks, expected=expected, holds=holds, version=version):
            while (said := await awaited(self._store, announcement(number))) != END:
                num_bytes += await self._follow(client, said, version=version)
                number += 1
        self._last, self._num_bytes = number, num_bytes

    async def _follow(self, client: EngineClient, said: str, *, version: int) -> int:
        """Let an engine receive an announced message; return its bytes."""
        if said == DIGEST:
            await client.order(DIGEST, num_ranks=self._num_ranks)
            return 0
        number, *size = map(int, said.split())
        if not size:
            await self.take(client, number, version=version, is_last=False)
            return num_bucket_bytes(self.buckets[number])
        await client.receive_bucket([f"{DELTA}{number}"], dtypes=["uint8"], shapes=[size], group=self.plan.name)
        return size[0]

    def finish(self, *, version: int) -> int:
        """Return the bytes of all messages."""
        if not self.plan.deltas:
            return super().finish(version=version)
        self._num_heard = self._last + 1
        return self._num_bytes

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
