"""Weights from the trainer to the engines, versioned: pause, move, resume, then ask every engine what it serves now.

ranks ---- send ----> transport ---- deliver ----> engines
                      (one of TRANSPORTS)
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from megatron_rl.errors import DeadlineError, EngineError
from megatron_rl.observe.metrics import Last, Metric, Sum
from megatron_rl.rollout.client import EngineClient
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


class Ranks(Protocol):
    """The trainer's ranks; each call starts something on all of them and returns one future per rank, in order."""

    def begin_open_sender(self, plan: SenderPlan) -> "Sequence[Future[Any]]":
        """Let every rank open its end of the transport."""
        ...

    def begin_send(self, *, version: int) -> "Sequence[Future[Any]]":
        """Let every rank send its current weights."""
        ...


class WeightSync:
    """Syncs the engines of `clients` with the trainer's `ranks`; made by `open`, which connects the two ends of the transport."""

    def __init__(self, transport: WeightTransport, *, ranks: Ranks, clients: Sequence[EngineClient], timeout_s: float) -> None:
        self._transport, self._ranks, self._clients = transport, ranks, clients
        self.timeout_s = timeout_s

    @classmethod
    async def open(cls, transport: WeightTransport, *, ranks: Ranks, clients: Sequence[EngineClient], timeout_s: float) -> "WeightSync":
        """Connect ranks and engines; this and each later sync may take `timeout_s` seconds. Raises DeadlineError and EngineError."""
        connecting = {"engines": transport.connect(clients), **_named(ranks.begin_open_sender(transport.plan))}
        deadline = asyncio.get_running_loop().time() + timeout_s
        await _all_of(connecting, what="joining trainer and engines for weight syncs", timeout_s=timeout_s, deadline=deadline)
        return cls(transport, ranks=ranks, clients=clients, timeout_s=timeout_s)

    async def run(self, *, version: int) -> dict[str, Metric]:
        """Give every engine the trainer's current weights as `version`.

        Raises:
            EngineError: an engine failed, or serves another version afterwards.
            DeadlineError: the sync took too long; the message names who is missing.
        """
        deadline = asyncio.get_running_loop().time() + self.timeout_s
        sending = _named(self._ranks.begin_send(version=version))
        if self._transport.sends_first:
            await self._wait(sending, version=version, deadline=deadline)
            sending = {}
        receiving = {f"engine at {client.address.url}": self._update(client, version) for client in self._clients}
        await self._wait({**sending, **receiving}, version=version, deadline=deadline)
        asked = {f"version of {client.address.url}": self._check_version(client, version) for client in self._clients}
        await self._wait(asked, version=version, deadline=deadline)
        num_bytes = await asyncio.to_thread(self._transport.finish, version=version)
        return {"weights/version": Last(version), "weights/bytes": Sum(num_bytes)}

    async def _wait(self, works: Mapping[str, Awaitable[Any]], *, version: int, deadline: float) -> None:
        await _all_of(works, what=f"weight sync to version {version}", timeout_s=self.timeout_s, deadline=deadline)

    async def _update(self, client: EngineClient, version: int) -> None:
        await client.pause("retract")
        await self._transport.deliver(client, version=version)
        await client.resume()

    @staticmethod
    async def _check_version(client: EngineClient, version: int) -> None:
        got = await client.weight_version()
        if got != version:
            raise EngineError(f"the engine at {client.address.url} serves weights {got} after a sync, needs {version}; see its log")


def _named(futures: "Sequence[Future[Any]]") -> dict[str, Awaitable[Any]]:
    return {f"Megatron rank {rank}": asyncio.wrap_future(future) for rank, future in enumerate(futures)}


async def _all_of(works: Mapping[str, Awaitable[Any]], *, what: str, timeout_s: float, deadline: float) -> None:
    """Wait for all until `deadline`, a time of the loop's clock; the first failure or the deadline cancels what still runs."""
    tasks = {name: asyncio.ensure_future(work) for name, work in works.items()}
    try:
        left_s = max(0.0, deadline - asyncio.get_running_loop().time())
        done, pending = await asyncio.wait(tasks.values(), timeout=left_s, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
        if pending:
            missing = ", ".join(name for name, task in tasks.items() if task in pending)
            raise DeadlineError(f"{what} did not finish within {timeout_s:.0f} s, still waiting for: {missing}; see weights.sync_timeout_s")
    finally:
        for task in tasks.values():
            task.cancel()
