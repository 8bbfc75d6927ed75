"""Membership and slots of a run's engines: bounded, balanced, ordered, and revoked on failure."""

import asyncio
import contextlib
import heapq
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, TypeVar

from megatron_rl.engines.client import EngineClient
from megatron_rl.engines.engine import EngineAddress
from megatron_rl.errors import DeadlineError, EngineError
from megatron_rl.observe.spans import Spans
from megatron_rl.system.deadlines import DEATH_S, LEAVE_S, SILENT_S

if TYPE_CHECKING:
    from megatron_rl.engines.sglang_router import Router

AFFINITY_WAIT_S = 1.0  # wait for a slot on the preferred engine: about the time to compute a prefix of 10,000 tokens
ABORT_INTERVAL_S = 0.05  # between aborts of requests that may still have been on their way to the engine

Result = TypeVar("Result")


class Urgency(IntEnum):
    """Priority for a free slot; among equals the earlier group, then the earlier request."""

    AGAIN = 0  # a repetition after the failure of an engine
    EVALUATION = 1
    TRAINING = 2


@dataclass(frozen=True, slots=True)
class Membership:
    """The engines of a run. `epoch` rises by one whenever an engine joins or leaves."""

    epoch: int
    members: tuple[EngineClient, ...]


@dataclass(order=True, slots=True)
class _Waiter:
    """A request waiting for `num_slots` on one engine; only on `preferred` while set and usable."""

    urgency: Urgency
    arrival: int
    number: int
    num_slots: int = field(compare=False)
    preferred: EngineClient | None = field(compare=False)
    slot: "asyncio.Future[EngineClient]" = field(compare=False, default_factory=asyncio.Future)


class EnginePool:
    """The slots of all engines. Each generated sample takes one; an engine has `max_requests`, or its `limit`.

    A request takes the slots of all its samples together, from the least busy usable engine; an
    idle engine also gives more than `max_requests`. A usable engine is a member that serves the
    current weights (an initial or admitted one) and has not failed since the last `readmit`. A
    request waits while an engine is expected, and raises the reason once the last usable engine has
    failed or left. Expected are members that were not admitted yet, dead engines that are
    `returning`, and for LEAVE_S seconds one that failed and is ended.
    While the pool `is_interrupted`, only evaluation gets slots. Lives on one event loop.
    """

    def __init__(self, clients: Sequence[EngineClient] = (), *, max_requests: int) -> None:
        self.membership = Membership(epoch=0, members=tuple(clients))
        self._max_requests = max_requests
        self._limits: dict[EngineClient, int] = {}
        self._admitted = set(clients)
        self._retired: set[EngineClient] = set()
        self._usable = list(clients)
        self._departures: dict[EngineClient, asyncio.Future[None]] = {}
        self._running: Counter[EngineClient] = Counter()
        self._waiting: list[_Waiter] = []
        self._arrivals = itertools.count()
        self._failure: Exception | None = None
        self.is_interrupted = False
        self._num_returning = 0
        self.end_failed: Callable[[EngineClient, Exception], bool] = lambda client, error: False
        """Ends an engine that failed; True where it leaves the pool, and another one is started in its place."""
        self.end_hanging: Callable[[EngineClient, bool, bool], None] = lambda client, answers, waits: None
        """Ends an engine that makes no progress, if its processes do no work; `answers` is False where its server is silent, too.

        One that `waits` for others, as in a process group, has to be stopped.
        """
        self.router: Router | None = None
        """Asked for answers instead of the engine with the slots; it chooses one of the usable engines."""
        self._address = clients[0].address if clients else None
        self.spans = Spans()
        """Requests, syncs and groups, as they end."""

    # Membership

    @property
    def address(self) -> EngineAddress:
        """Return the address of an engine or former member; facts of the model hold for all."""
        assert self._address is not None, "no engine has joined yet"
        return self._address

    def join(self, client: EngineClient) -> None:
        """Make an open client a member, for requests after the next weight sync."""
        assert client not in self.membership.members, f"the engine at {client.address.url} is a member already"
        self._departures.pop(client, None)
        self._address = client.address
        self._set_members((*self.membership.members, client))

    def leave(self, client: EngineClient, error: Exception) -> None:
        """Remove a member for good. Its requests by `while_it_stays` get another engine, or `error`."""
        if client not in self.membership.members:
            return
        self.departure(client).set_result(None)
        self._admitted.discard(client)
        self._retired.discard(client)
        self._failure = error
        self._set_members(tuple(member for member in self.membership.members if member is not client))

    def departure(self, client: EngineClient) -> "asyncio.Future[None]":
        """Return a shared future, done once `client` is no member; wait by `asyncio.wait` alone."""
        if client not in self._departures:
            self._departures[client] = asyncio.get_running_loop().create_future()
            if client not in self.membership.members:
                self._departures[client].set_result(None)
        return self._departures[client]

    @property
    def usable(self) -> dict[str, EngineClient]:
        """Return the usable engines by URL."""
        return {client.address.url: client for client in self._usable}

    def has_all(self, clients: Iterable[EngineClient]) -> bool:
        """Return True when all `clients` are members."""
        return all(client in self.membership.members for client in clients)

    async def loses_one_of(self, clients: Iterable[EngineClient]) -> bool:
        """Return True when one of `clients` has left, or leaves within DEATH_S seconds."""
        departures = [self.departure(client) for client in clients]
        left, _ = await asyncio.wait(departures, timeout=DEATH_S, return_when=asyncio.FIRST_COMPLETED)
        return bool(left)

    async def while_it_stays(self, client: EngineClient, call: Awaitable[Result]) -> Result:
        """Return the result of a `call`. Raises EngineError when the engine leaves: no answer comes."""
        asking = asyncio.ensure_future(call)
        try:
            await asyncio.wait((asking, self.departure(client)), return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise EngineError(f"the engine at {client.address.url} has left")
            return asking.result()
        finally:
            if asking.cancel():
                await asyncio.wait([asking])

    async def unless_it_leaves(self, client: EngineClient, call: Awaitable[Result]) -> Result | None:
        """Return the result of a `call`, None for an engine that leaves. Raises EngineError otherwise."""
        try:
            return await self.while_it_stays(client, call)
        except EngineError:
            if not await self.loses_one_of([client]):
                raise
            return None

    def admit(self, clients: Iterable[EngineClient]) -> None:
        """Admit those of `clients` that are still members: they serve the current weights."""
        self._admitted |= {client for client in clients if client in self.membership.members}
        self._update()

    def retire(self, client: EngineClient, error: Exception) -> None:
        """Give a member no more work because of `error`, raised where no other engine is usable.

        A late answer does not end one that makes steps: it is slow.
        """
        if client not in self.membership.members:
            return
        self._retired.add(client)
        self._failure = error
        is_slow = isinstance(error, DeadlineError) and asyncio.get_running_loop().time() - client.stepped_s < SILENT_S
        if not is_slow and self.end_failed(client, error):
            # A death is known later than its consequences.
            self._num_returning += 1
            asyncio.get_running_loop().call_later(LEAVE_S, self._end_return)
        self._update()

    def readmit(self) -> None:
        """Make every failed engine usable again, because one slow request says little about the next, and end an interruption."""
        self._retired.clear()
        self.is_interrupted = False
        self._update()

    def _set_members(self, members: tuple[EngineClient, ...]) -> None:
        self.membership = Membership(epoch=self.membership.epoch + 1, members=members)
        self._update()

    def _update(self) -> None:
        self._usable = [client for client in self.membership.members if client in self._admitted and client not in self._retired]
        self._fill()

    async def interrupt(self) -> None:
        """Abort all requests, which answer with their tokens so far, and give no slots until `readmit`."""
        self.is_interrupted = True
        while self.num_running:
            # The deadline of a request on an engine that does not answer ends the wait.
            with contextlib.suppress(EngineError, DeadlineError):
                asked = [client for client, count in self._running.items() if count] if self.router is None else self.membership.members
                await asyncio.gather(*(client.abort_all() for client in asked))
            await asyncio.sleep(ABORT_INTERVAL_S)

    @property
    def has_newcomers(self) -> bool:
        """Return True when a member waits for its first weights. Safe in any thread."""
        return any(client not in self._admitted for client in self.membership.members)

    @property
    def waits_for_weights(self) -> bool:
        """Return True when no member gets requests before it has its first weights. Safe in any thread."""
        return self.has_newcomers and not self._usable

    @property
    def is_empty_for_now(self) -> bool:
        """Return True when there is no member, but one is being started again."""
        return not self.membership.members and self._num_returning > 0

    @contextlib.contextmanager
    def returning(self) -> Iterator[None]:
        """Let requests wait for the engine that the body starts and joins."""
        self._num_returning += 1
        try:
            yield
        finally:
            self._end_return()

    def _end_return(self) -> None:
        self._num_returning -= 1
        self._update()

    # Slots

    @property
    def num_running(self) -> int:
        """Number of taken slots, on all engines."""
        return self._running.total()

    @property
    def has_waiting(self) -> bool:
        """Return True when a request waits for a slot."""
        return any(not waiter.slot.done() for waiter in self._waiting)

    def running(self, client: EngineClient) -> int:
        """Return the number of taken slots of an engine, or of its requests at the last look at a router."""
        return self._running[client] if self.router is None else self.router.loads[client.address.url]

    def limit(self, client: EngineClient) -> int:
        """Return the number of slots of an engine."""
        return self._limits.get(client, self._max_requests)

    def set_limit(self, client: EngineClient, limit: int) -> None:
        """Give an engine `limit` slots; taken ones beyond are not revoked."""
        self._limits[client] = limit
        self._fill()

    @asynccontextmanager
    async def slots(
        self, count: int, *, urgency: Urgency, arrival: int | None = None, preferred: EngineClient | None = None
    ) -> AsyncIterator[EngineClient]:
        """Yield an engine with slots for `count` samples during the block.

        `arrival` is the group's, by default now: later turns of a group precede other groups, which
        would push its prefixes out of the engines' caches. `preferred` is chosen when usable and
        free within AFFINITY_WAIT_S; meanwhile later requests do not get these slots.
        """
        number = self.arrival()
        client = await self._take(_Waiter(urgency, number if arrival is None else arrival, number, count, preferred))
        try:
            with self.spans.measure(f"request, {urgency.name.lower()}", who=f"engine {client.address.url}", count=count):
                yield client
        finally:
            self._give_back(client, count)

    def arrival(self) -> int:
        """Return the number of a new group, above all before."""
        return next(self._arrivals)

    async def _take(self, waiter: _Waiter) -> EngineClient:
        heapq.heappush(self._waiting, waiter)
        self._fill()
        patience = None
        if waiter.preferred is not None and not waiter.slot.done():
            patience = asyncio.get_running_loop().call_later(AFFINITY_WAIT_S, self._take_any, waiter)
        try:
            return await waiter.slot
        except asyncio.CancelledError:
            if not waiter.slot.cancelled() and waiter.slot.exception() is None:
                # The slots were granted in the moment of the cancellation.
                self._give_back(waiter.slot.result(), waiter.num_slots)
            else:
                # Slots reserved for this request are free for later ones.
                self._fill()
            raise
        finally:
            if patience is not None:
                patience.cancel()

    def _take_any(self, waiter: _Waiter) -> None:
        waiter.preferred = None
        self._fill()

    def _give_back(self, client: EngineClient, count: int) -> None:
        self._running[client] -= count
        self._fill()

    def _fill(self) -> None:
        """Give free slots to waiting requests, in order."""
        candidates, patient = list(self._usable), []
        failure = None if self._usable or self._num_returning or self.has_newcomers else self._failure
        while self._waiting and (candidates or failure is not None):
            waiter = heapq.heappop(self._waiting)
            if waiter.slot.done():
                continue
            if failure is not None:
                waiter.slot.set_exception(failure)
                continue
            if self.is_interrupted and waiter.urgency is not Urgency.EVALUATION:
                patient.append(waiter)
                continue
            wanted = [waiter.preferred] if waiter.preferred in self._usable else candidates
            free = [client for client in wanted if client in candidates and self._has_room(client, waiter.num_slots)]
            if free:
                client = min(free, key=self._running.__getitem__)
                self._running[client] += waiter.num_slots
                waiter.slot.set_result(client)
            else:
                patient.append(waiter)
                # Later requests do not overtake: slots awaited by this request stay reserved.
                candidates = [client for client in candidates if client not in wanted]
        for waiter in patient:
            heapq.heappush(self._waiting, waiter)

    def _has_room(self, client: EngineClient, count: int) -> bool:
        return not self._running[client] or self._running[client] + count <= self.limit(client)
