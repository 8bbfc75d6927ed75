"""Weights from the trainer to the engines, versioned: pause, move, resume, then check the versions.

ranks ---- send ----> transport ---- deliver ----> engines
                      (one of TRANSPORTS)
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from megatron_rl.engines.client import EngineClient
from megatron_rl.engines.engine_pool import EnginePool, Membership
from megatron_rl.errors import DeadlineError, EngineError
from megatron_rl.observe.metrics import Last, Metric, Sum
from megatron_rl.system.deadlines import DEATH_S
from megatron_rl.weights.broadcast import BroadcastTransport
from megatron_rl.weights.disk import DiskTransport
from megatron_rl.weights.ipc import IpcTransport
from megatron_rl.weights.transport import SenderPlan, Sent, Surroundings, WeightTransport

TRANSPORTS: Mapping[str, Callable[[Surroundings], WeightTransport]] = {
    "broadcast": BroadcastTransport,
    "disk": DiskTransport,
    "ipc": IpcTransport,
}
"""Every way for weights to reach the engines, by its name in weights.transport."""

CHECK_INTERVAL = 10
"""Versions from one comparison of checksums to the next, of 3.5 copies of the weights at each end."""
PARTING = "parting trainer and engines"
GIVE_UP_S = 15.0  # for an engine's part in ending a sync whose ranks are gone
RETURN_POLL_S = 0.1  # looks for an engine that is being started again, where there is no other

MakeTransport = Callable[[Sequence[str]], WeightTransport]
"""Makes a transport to the engines at these URLs."""
Prove = Callable[[Sequence[EngineClient]], Awaitable[None]]
"""Raises ParityError for engines that compute otherwise than the trainer."""


class Ranks(Protocol):
    """The trainer's ranks; each call starts work on all, and returns a future per rank."""

    @property
    def has_died(self) -> bool:
        """Return True when the process of a rank has ended."""

    def begin_open_sender(self, plan: SenderPlan) -> "Sequence[Future[Any]]":
        """Let every rank open its end of the transport."""

    def begin_close_sender(self) -> "Sequence[Future[Any]]":
        """Let every rank close its open end."""

    def begin_send(self, *, version: int, checked: bool) -> "Sequence[Future[Sent]]":
        """Let every rank send the current weights, `checked` with checksums."""


@dataclass(frozen=True, slots=True)
class Connection:
    """Ranks and the engines of `membership`, connected by `transport`."""

    membership: Membership
    transport: WeightTransport


class WeightSync:
    """Syncs of the `pool`'s members with the trainer's `ranks`, each within `timeout_s` seconds.

    When the membership has changed, a new transport connects the present members before anything is
    sent. So no sync waits for an engine that left, and one that joined gets the weights. An engine
    gets requests only after it confirmed the weights (`EnginePool.admit`). One that joins during a
    sync takes part from the next on. Without any member, a sync waits for one that returns.

    When a member dies or fails during a sync, the others get the version again from the start, over
    a new transport; an engine with a part of the weights stays paused. A sync fails when the last
    engine dies for good; it counts as late when ranks wait in a process group for an engine that has
    left. NCCL is not tried yet: there a deadline may end the sync, as engines wait on their GPUs for
    the dead one. With disk and ipc none waits.

    At the first sync of a transport, with deltas also at the second, and at every `check_interval`-th version, engines compare checksums
    of all weights with the ranks' (`received_weights`) before they serve them; 0 is never.
    """

    def __init__(self, make_transport: MakeTransport, *, ranks: Ranks, pool: EnginePool, timeout_s: float, check_interval: int = 0) -> None:
        self._make_transport, self._ranks, self._pool = make_transport, ranks, pool
        self._timeout_s, self._check_interval = timeout_s, check_interval
        self._num_checked = 0  # syncs, of the present connection
        self._connection: Connection | None = None

    async def connect(self) -> None:
        """Connect now instead of at the first sync. Raises the errors of `run`."""
        await self._connect(self._deadline())

    async def disconnect(self) -> None:
        """Close both ends; the next sync connects anew. Raises what `run` raises."""
        await self._disconnect(self._deadline())

    async def give_up(self, pool: EnginePool) -> None:
        """Close the engines' end, also in the middle of a sync, where the ranks are gone; `pool` has the engines now."""
        connection, self._connection = self._connection, None

        async def part(client: EngineClient, transport: WeightTransport) -> None:
            for call in (client.end_weight_update, partial(transport.disconnect, client)):
                # Neither an update in progress nor the connection of an engine that has come since.
                with contextlib.suppress(EngineError):
                    try:
                        await asyncio.wait_for(call(), GIVE_UP_S)
                    except TimeoutError as error:  # also a DeadlineError
                        pool.end_failed(client, error)
                        await pool.loses_one_of([client])
                        return

        if connection is not None:
            await asyncio.gather(*(part(client, connection.transport) for client in pool.membership.members))

    async def run(self, *, version: int, prove: Prove | None = None) -> dict[str, Metric]:
        """Give every member the trainer's current weights as `version`; `prove` them before a new one gets requests.

        Raises EngineError when an engine failed, or serves another version then, or none is left,
        and DeadlineError, with the names of the missing, when the sync took too long.
        """
        deadline = self._deadline()
        metrics: dict[str, Metric] | None = None
        while metrics is None:
            connection = await self._connect(deadline)
            try:
                metrics = await self._deliver(connection, version=version, deadline=deadline)
            finally:
                num_bytes = await asyncio.to_thread(connection.transport.finish, version=version)
        if prove is not None:
            await prove(connection.membership.members)
        self._pool.admit(connection.membership.members)
        return {"weights/version": Last(version), "weights/bytes": Sum(num_bytes), **metrics}

    async def _deliver(self, connection: Connection, *, version: int, deadline: float) -> dict[str, Metric] | None:
        """Return metrics when every member serves the weights, None when one died and all ended."""
        transport, members = connection.transport, connection.membership.members
        checked = self._check_interval > 0 and (self._num_checked <= transport.deltas or version % self._check_interval == 0)
        sending = _named(self._ranks.begin_send(version=version, checked=checked))
        for rank, sent in enumerate(sending.values()):
            sent.add_done_callback(partial(self._note_sent, f"rank {rank}", time.perf_counter()))
        expected = asyncio.ensure_future(_checksums(sending)) if checked else None
        receiving: dict[EngineClient, asyncio.Future[tuple[float, float, float]]] = {}
        what = f"weight sync to version {version}"
        try:
            if transport.sends_first:
                await self._all_of(_shielded(sending), what=what, deadline=deadline)
            receiving = {
                client: asyncio.ensure_future(self._pool.while_it_stays(client, self._update(transport, client, version, expected)))
                for client in members
            }
            works = sending | {f"engine at {client.address.url}": update for client, update in receiving.items()}
            await self._all_of(_shielded(works), what=what, deadline=deadline)
        except RuntimeError:
            # From an engine, or from a rank with a broken connection. A death is known later than its consequences.
            ended = [(client, update) for client, update in receiving.items() if update.done() and not update.cancelled()]
            if await self._has_lost_a_rank(members):
                raise
            for client, update in ended:
                # Where one has left meanwhile, the others' errors may come of that.
                if self._pool.has_all(members) and isinstance(fault := update.exception(), Exception):
                    self._pool.end_failed(client, fault)
            if not await self._pool.loses_one_of(members):
                raise
            await self._abandon(sending, receiving, deadline=deadline)
            return None
        finally:
            _end([*sending.values(), *receiving.values(), *([expected] if expected is not None else [])])
        self._num_checked += checked
        return _parts([rank.result() for rank in sending.values()], [engine.result() for engine in receiving.values()])

    def _note_sent(self, rank: str, begun_s: float, _: "asyncio.Future[Sent]") -> None:
        self._pool.spans.add(rank, "send weights", seconds=time.perf_counter() - begun_s)

    async def _has_lost_a_rank(self, members: Sequence[EngineClient]) -> bool:
        """Return True when a rank dies within DEATH_S seconds, and no engine: then what engines raise is no fault of theirs."""
        until_s = asyncio.get_running_loop().time() + DEATH_S
        while not self._ranks.has_died and self._pool.has_all(members):
            if asyncio.get_running_loop().time() > until_s:
                return False
            await asyncio.sleep(RETURN_POLL_S)
        return self._ranks.has_died

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._timeout_s

    async def _connect(self, deadline: float) -> Connection:
        """Return the connection to the present members, a new one where they have changed."""
        if self._connection is not None and self._connection.membership.epoch == self._pool.membership.epoch:
            members = self._connection.membership.members
            # One with weights from elsewhere takes no deltas, and gets all over a new connection.
            if not (self._connection.transport.deltas and self._num_checked and any(client.holds is None for client in members)):
                return self._connection
        await self._disconnect(deadline)
        while self._pool.is_empty_for_now and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(RETURN_POLL_S)
        membership = self._pool.membership
        if not membership.members:
            raise EngineError("no engine is left that weights could be sent to; see the logs of the engines")
        # In a thread, because the call asks a rank for an address and waits for the answer.
        transport = await asyncio.to_thread(self._make_transport, [client.address.url for client in membership.members])
        opening, what = _named(self._ranks.begin_open_sender(transport.plan)), "joining trainer and engines for weight syncs"
        try:
            await self._all_of({"engines": transport.connect(membership.members), **_shielded(opening)}, what=what, deadline=deadline)
        except RuntimeError as error:
            if self._ranks.has_died or not await self._pool.loses_one_of(membership.members):
                raise
            if all(each.done() for each in opening.values()):
                return await self._connect(deadline)
            # They wait in a process group that never comes about; new ones do not.
            raise DeadlineError(f"{what} ended for ranks that wait for an engine that has left: {error}") from error
        finally:
            _end(opening.values())
        self._connection, self._num_checked = Connection(membership, transport), 0
        return self._connection

    async def _disconnect(self, deadline: float) -> None:
        """Close both ends where open; at the same time, as NCCL requires."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        closing: dict[str, Awaitable[None]] = {
            f"engine at {client.address.url}": self._pool.unless_it_leaves(client, connection.transport.disconnect(client))
            for client in connection.membership.members
            if client in self._pool.membership.members
        }
        await self._all_of(closing | _named(self._ranks.begin_close_sender()), what=PARTING, deadline=deadline)

    async def _abandon(
        self, sending: "Mapping[str, asyncio.Future[Any]]", receiving: "Mapping[EngineClient, asyncio.Future[Any]]", *, deadline: float
    ) -> None:
        """Wait until all work of a failed sync has ended, and close both ends.

        In a process group each end waits for the other: ranks stop sending when all engines that
        take no more have left, and engines stop receiving when the ranks have closed their end.
        """
        connection, self._connection = self._connection, None
        assert connection is not None, "something was sent"

        async def part(client: EngineClient) -> None:
            if client in receiving:
                await asyncio.wait([receiving[client]])
            await self._pool.unless_it_leaves(client, connection.transport.disconnect(client))

        left = [client for client in connection.membership.members if client in self._pool.membership.members]
        parting = {f"engine at {client.address.url}": asyncio.ensure_future(part(client)) for client in left}
        try:
            await self._all_of({name: asyncio.wait([future]) for name, future in sending.items()}, what=PARTING, deadline=deadline)
            await self._all_of(_shielded(parting) | _named(self._ranks.begin_close_sender()), what=PARTING, deadline=deadline)
        finally:
            _end(parting.values())

    async def _all_of(self, works: Mapping[str, Awaitable[Any]], *, what: str, deadline: float) -> list[Any]:
        """Return all results. A failure, or `deadline` on the loop's clock, cancels the others."""
        tasks = {name: asyncio.ensure_future(work) for name, work in works.items()}
        try:
            left_s = max(0.0, deadline - asyncio.get_running_loop().time())
            done, pending = await asyncio.wait(tasks.values(), timeout=left_s, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            if pending:
                missing = ", ".join(name for name, task in tasks.items() if task in pending)
                raise DeadlineError(
                    f"{what} did not finish within {self._timeout_s:.0f} s, still waiting for: {missing}; see model.deadline_s"
                )
            return [task.result() for task in tasks.values()]
        finally:
            _end(tasks.values())

    async def _update(
        self, transport: WeightTransport, client: EngineClient, version: int, expected: "asyncio.Future[Mapping[str, int]] | None"
    ) -> tuple[float, float, float]:
        """Return the seconds of the pause, of taking and comparing the weights, and of going on."""
        clock_s, measure = [time.perf_counter()], partial(self._pool.spans.measure, who=f"engine {client.address.url}")
        try:
            with measure("pause"):
                await client.pause("retract")
            clock_s.append(time.perf_counter())
            with measure("take weights"):
                await transport.deliver(client, version=version, expected=None if expected is None else asyncio.shield(expected))
            clock_s.append(time.perf_counter())
            with measure("resume"):
                await client.resume()
            if (got := await client.weight_version()) != version:
                raise EngineError(f"the engine at {client.address.url} serves weights {got} after a sync, needs {version}; see its log")
        except BaseException as error:
            transport.give_up(client, version=version)
            if isinstance(error, DeadlineError):  # this engine's own
                raise EngineError(str(error)) from error
            raise
        clock_s.append(time.perf_counter())
        drain_s, apply_s, resume_s = (end_s - begun_s for begun_s, end_s in itertools.pairwise(clock_s))
        return drain_s, apply_s, resume_s


async def _checksums(sending: "Mapping[str, asyncio.Future[Sent]]") -> Mapping[str, int]:
    """Return the checksums of what the ranks sent."""
    await asyncio.wait(sending.values())
    return {name: value for rank in sending.values() for name, value in rank.result().checksums.items()}


def _parts(sent: "Sequence[Sent]", taken: Sequence[tuple[float, float, float]]) -> dict[str, Metric]:
    """Return the seconds of the parts of a sync, of the slowest rank and the slowest engine, and the number of compared weights."""
    drain_s, apply_s, resume_s = (max(each) for each in zip(*taken, strict=True))
    seconds = {"drain": drain_s, "gather": max(rank.gather_s for rank in sent), "send": max(rank.send_s for rank in sent)}
    seconds |= {"apply": apply_s, "resume": resume_s}
    compared = max(len(rank.checksums) for rank in sent)
    return {**{f"time/sync_{part}": Sum(value) for part, value in seconds.items()}, "engine/compared_weights": Sum(compared)}


def _named(futures: "Sequence[Future[Any]]") -> "dict[str, asyncio.Future[Any]]":
    return {f"Megatron rank {rank}": asyncio.wrap_future(future) for rank, future in enumerate(futures)}


def _shielded(works: "Mapping[str, asyncio.Future[Any]]") -> "dict[str, asyncio.Future[Any]]":
    """Return the same works for waiting; cancelling the wait does not cancel the works."""
    return {name: asyncio.shield(work) for name, work in works.items()}


def _end(tasks: "Iterable[asyncio.Future[Any]]") -> None:
    """Cancel all unfinished tasks; read other failures silently, because one was raised already."""
    for task in tasks:
        if not task.cancel() and not task.cancelled():
            task.exception()
