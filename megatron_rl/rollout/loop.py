"""Generation on several engines: bounded, balanced, and each group handed over as soon as it is complete."""

import asyncio
import heapq
import itertools
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from megatron_rl.errors import DeadlineError, EngineError
from megatron_rl.plugins import Rollout
from megatron_rl.rollout.client import EngineClient
from megatron_rl.rollout.generate import check_samples, single_turn, without_outdated_experts
from megatron_rl.rollout.sampling import Sampling
from megatron_rl.rollout.seeds import SeededGenerator, group_seed
from megatron_rl.rollout.transport import EngineRefusal
from megatron_rl.types import Group, Prompt, Reward, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Score = Callable[[Sample], Awaitable[Reward]]
Samples = tuple[Sample, ...]


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
                else:
                    client = min(self._healthy, key=self._running.__getitem__)
                    if self._running[client] and self._running[client] + num_samples > self._max_samples:
                        return
                    self._running[client] += num_samples
                    future.set_result(client)
            heapq.heappop(self._waiting)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMaker:
    """How one prompt becomes a group of `num_samples` samples on the engines of `pool`, with rewards when `score` is given.

    `rollout_name` is what messages call the rollout; `seed` is the run's.
    """

    pool: EnginePool
    sampling: Sampling
    num_samples: int
    tokenizer: "PreTrainedTokenizerBase"
    score: Score | None
    rollout: Rollout = single_turn
    rollout_name: str = "rollout.function"
    urgency: Urgency = Urgency.TRAINING
    seed: int = 0

    async def make(self, prompt: Prompt) -> Group:
        """Generate and score; scoring does not hold a place. A prompt whose engine fails goes to the others. Cancelling aborts it.

        Raises:
            EngineError, DeadlineError: the last engine failed, with its reason. EngineRefusal: an engine refused a request.
            UserError: a prompt that no engine can take, or a rollout that breaks its contract.
        """
        samples = await self._generate(prompt)
        if self.score is not None:
            rewards = await asyncio.gather(*map(self.score, samples))
            samples = tuple(replace(sample, reward=reward) for sample, reward in zip(samples, rewards, strict=True))
        return Group(id=prompt.id, prompt=prompt, samples=samples)

    async def _generate(self, prompt: Prompt) -> Samples:
        urgency = self.urgency
        while True:
            async with self.pool.place(self.num_samples, urgency=urgency) as client:
                try:
                    seeded = SeededGenerator(client, seed=group_seed(prompt, run_seed=self.seed))
                    samples = await self.rollout(
                        prompt=prompt,
                        generator=seeded,
                        sampling=self.sampling,
                        num_samples=self.num_samples,
                        tokenizer=self.tokenizer,
                    )
                    checked = check_samples(
                        samples,
                        prompt=prompt,
                        num_samples=self.num_samples,
                        vocab_size=client.address.vocab_size,
                        need_experts=client.address.mixture is not None,
                        rollout=self.rollout_name,
                    )
                    return tuple(map(without_outdated_experts, checked))
                except EngineRefusal:
                    raise  # the request is at fault, another engine would refuse it too
                except (EngineError, DeadlineError) as error:
                    self.pool.retire(client, error)
                    urgency = Urgency.AGAIN


async def make_groups(prompts: Iterable[Prompt], maker: GroupMaker) -> AsyncGenerator[Group, None]:
    """Yield one group for each prompt, as they finish. Closing the iterator early aborts what still runs. Raises what `maker` raises."""
    tasks = [asyncio.create_task(maker.make(prompt)) for prompt in prompts]
    try:
        for finished in asyncio.as_completed(tasks):
            yield await finished
    finally:
        await cancel(tasks)


async def cancel(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    """Cancel tasks and wait until they are gone, so that their aborts reach the engines."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
