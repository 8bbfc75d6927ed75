"""The places on the engines: bounded, balanced, given in order, and taken from an engine that fails."""

import asyncio
import heapq
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from enum import IntEnum

from megatron_rl.rollout.client import EngineClient


class Urgency(IntEnum):
    """Who gets a free place on an engine first; among equals, who asked first."""

    AGAIN = 0
    """What an engine that failed gave back."""
    EVALUATION = 1
    TRAINING = 2


class EnginePool:
    """The places on all engines: at most `max_samples` samples run on one engine at a time, or one request if that is larger.

    A place is on the least busy engine that has not failed.
    """

    def __init__(self, clients: Sequence[EngineClient], *, max_samples: int) -> None:
        self._clients = tuple(clients)
        self._healthy = list(clients)
        self._max_samples = max_samples
        self._running: Counter[EngineClient] = Counter()
        self._waiting: list[tuple[Urgency, int, int, asyncio.Future[EngineClient]]] = []
        self._arrivals = itertools.count()
        self._failure: Exception | None = None

    @asynccontextmanager
    async def place(self, num_samples: int, *, urgency: Urgency) -> AsyncIterator[EngineClient]:
        """Inside, `num_samples` samples may run on the engine given. Raises why the last engine failed when none is left."""
        client = await self._take(num_samples, urgency)
        try:
            yield client
        finally:
            self._give_back(client, num_samples)

    def join(self, client: EngineClient) -> None:
        """Give `client` work from now on."""
        self._clients, self._healthy = (*self._clients, client), [*self._healthy, client]
        self._fill()

    def retire(self, client: EngineClient, error: Exception) -> None:
        """Give `client` no more work because of `error`, which whoever waits is told when it was the last engine."""
        self._healthy = [other for other in self._healthy if other is not client]
        if not self._healthy:
            self._failure = error
        self._fill()

    def readmit(self) -> None:
        """Give every engine that failed another chance: a request that was too slow says little about the next."""
        self._healthy, self._failure = list(self._clients), None
        self._fill()

    async def _take(self, num_samples: int, urgency: Urgency) -> EngineClient:
        future: asyncio.Future[EngineClient] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (urgency, next(self._arrivals), num_samples, future))
        self._fill()
        try:
            return await future
        except asyncio.CancelledError:
            # The place was given in the very moment in which nobody wanted it any more.
            if not future.cancelled() and future.exception() is None:
                self._give_back(future.result(), num_samples)
            raise

    def _give_back(self, client: EngineClient, num_samples: int) -> None:
        self._running[client] -= num_samples
        self._fill()

    def _fill(self) -> None:
        """Give free places to those who wait, in order."""
        while self._waiting:
            _, _, num_samples, future = self._waiting[0]
            if not future.cancelled():
                if self._failure is not None:
                    future.set_exception(self._failure)
                elif not self._healthy:
                    return
                else:
                    client = min(self._healthy, key=self._running.__getitem__)
                    if self._running[client] and self._running[client] + num_samples > self._max_samples:
                        return
                    self._running[client] += num_samples
                    future.set_result(client)
            heapq.heappop(self._waiting)
