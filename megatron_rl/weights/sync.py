"""Weights from the trainer to the engines, versioned: pause, move, resume, then ask every engine what it serves now.

ranks ---- send ----> transport ---- deliver ----> engines
                      (one of TRANSPORTS)
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_rl.errors import DeadlineError, EngineError
from megatron_rl.observe.metrics import Last, Metric, Sum
from megatron_rl.rollout.client import EngineClient
from megatron_rl.rollout.engine_pool import EnginePool, Membership
from megatron_rl.weights.broadcast import BroadcastTransport
from megatron_rl.weights.disk import DiskTransport
from megatron_rl.weights.interface import SenderPlan, Surroundings, WeightTransport
from megatron_rl.weights.ipc import IpcTransport

TRANSPORTS: Mapping[str, Callable[[Surroundings], WeightTransport]] = {
    "broadcast": BroadcastTransport,
    "disk": DiskTransport,
    "ipc": IpcTransport,
}
"""Every way for weights to reach the engines, by its name in weights.transport."""

MakeTransport = Callable[[Sequence[str]], WeightTransport]
"""Makes a transport to the engines at these URLs."""


class Ranks(Protocol):
    """The trainer's ranks; each call starts something on all of them and returns one future per rank, in order."""

    def begin_open_sender(self, plan: SenderPlan) -> "Sequence[Future[Any]]":
        """Let every rank open its end of the transport."""
        ...

    def begin_close_sender(self) -> "Sequence[Future[Any]]":
        """Let every rank close the end that it has open."""
        ...

    def begin_send(self, *, version: int) -> "Sequence[Future[Any]]":
        """Let every rank send its current weights."""
        ...


@dataclass(frozen=True, slots=True)
class Connection:
    """Ranks and the engines of `membership`, connected by `transport`."""

    membership: Membership
    transport: WeightTransport


class WeightSync:
    """Syncs the members of `pool` with the trainer's `ranks`, through a transport that `make_transport` makes for engines at some URLs.

    Where the membership has another epoch than at the last connection, the transport is closed at both ends and a new one opened for
    the present members, before anything is sent: an engine that left is not waited for, and one that joined gets the weights. Only
    after that, and after it said that it serves them, the pool may give it requests (`EnginePool.admit`). An engine that joins or leaves
    during a sync counts from the next one on; one that fails during a sync fails the sync.

    Connecting and each sync, with connecting anew, may take `timeout_s` seconds.
    """

    def __init__(self, make_transport: MakeTransport, *, ranks: Ranks, pool: EnginePool, timeout_s: float) -> None:
        self._make_transport, self._ranks, self._pool = make_transport, ranks, pool
        self._timeout_s = timeout_s
        self._connection: Connection | None = None

    async def connect(self) -> None:
        """Connect now, which the first sync would do. Raises what `run` raises."""
        await self._connect(self._deadline())

    async def disconnect(self) -> None:
        """Close both ends; the next sync connects anew. Raises what `run` raises."""
        await self._disconnect(self._deadline())

    async def run(self, *, version: int) -> dict[str, Metric]:
        """Give every member the trainer's current weights as `version`.

        Raises:
            EngineError: an engine failed, or serves another version afterwards, or there is none.
            DeadlineError: the sync took too long; the message names who is missing.
        """
        deadline = self._deadline()
        connection = await self._connect(deadline)
        transport, members = connection.transport, connection.membership.members
        sending = _named(self._ranks.begin_send(version=version))
        if transport.sends_first:
            await self._wait(sending, version=version, deadline=deadline)
            sending = {}
        receiving = {f"engine at {client.address.url}": self._update(transport, client, version) for client in members}
        await self._wait({**sending, **receiving}, version=version, deadline=deadline)
        asked = {f"version of {client.address.url}": self._check_version(client, version) for client in members}
        await self._wait(asked, version=version, deadline=deadline)
        self._pool.admit(members)
        num_bytes = await asyncio.to_thread(transport.finish, version=version)
        return {"weights/version": Last(version), "weights/bytes": Sum(num_bytes)}

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._timeout_s

    async def _connect(self, deadline: float) -> Connection:
        """The connection to the present members."""
        membership = self._pool.membership
        if self._connection is not None and self._connection.membership.epoch == membership.epoch:
            return self._connection
        if not membership.members:
            raise EngineError("no engine is left that weights could be sent to; see the logs of the engines")
        await self._disconnect(deadline)
        # In a thread, because it asks a rank for an address and waits for the answer.
        transport = await asyncio.to_thread(self._make_transport, [client.address.url for client in membership.members])
        connecting = {"engines": transport.connect(membership.members), **_named(self._ranks.begin_open_sender(transport.plan))}
        await self._all_of(connecting, what="joining trainer and engines for weight syncs", deadline=deadline)
        self._connection = Connection(membership, transport)
        return self._connection

    async def _disconnect(self, deadline: float) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        # Both ends at the same time, as NCCL wants it.
        closing: dict[str, Awaitable[None]] = {
            f"engine at {client.address.url}": connection.transport.disconnect(client)
            for client in connection.membership.members
            if client in self._pool.membership.members
        }
        closing |= _named(self._ranks.begin_close_sender())
        await self._all_of(closing, what="parting trainer and engines", deadline=deadline)

    async def _wait(self, works: Mapping[str, Awaitable[Any]], *, version: int, deadline: float) -> None:
        await self._all_of(works, what=f"weight sync to version {version}", deadline=deadline)

    async def _all_of(self, works: Mapping[str, Awaitable[Any]], *, what: str, deadline: float) -> None:
        """Wait for all until `deadline`, a time of the loop's clock; the first failure or the deadline cancels what still runs."""
        tasks = {name: asyncio.ensure_future(work) for name, work in works.items()}
        try:
            left_s = max(0.0, deadline - asyncio.get_running_loop().time())
            done, pending = await asyncio.wait(tasks.values(), timeout=left_s, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            if pending:
                missing = ", ".join(name for name, task in tasks.items() if task in pending)
                raise DeadlineError(
                    f"{what} did not finish within {self._timeout_s:.0f} s, still waiting for: {missing}; see weights.sync_timeout_s"
                )
        finally:
            for task in tasks.values():
                task.cancel()

    @staticmethod
    async def _update(transport: WeightTransport, client: EngineClient, version: int) -> None:
        await client.pause("retract")
        await transport.deliver(client, version=version)
        await client.resume()

    @staticmethod
    async def _check_version(client: EngineClient, version: int) -> None:
        got = await client.weight_version()
        if got != version:
            raise EngineError(f"the engine at {client.address.url} serves weights {got} after a sync, needs {version}; see its log")


def _named(futures: "Sequence[Future[Any]]") -> dict[str, Awaitable[Any]]:
    return {f"Megatron rank {rank}": asyncio.wrap_future(future) for rank, future in enumerate(futures)}
