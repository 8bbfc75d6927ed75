"""Generation for many prompts on several engines: bounded, balanced, and each group handed over as soon as it is complete."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from megatron_rl.errors import DeadlineError, EngineError
from megatron_rl.rollout.client import EngineClient
from megatron_rl.rollout.generate import Decode, Rollout, check_samples, single_turn
from megatron_rl.rollout.sampling import Sampling
from megatron_rl.rollout.transport import EngineRefusal
from megatron_rl.types import Group, Prompt, Reward, Sample

Score = Callable[[Sample], Awaitable[Reward]]
Samples = tuple[Sample, ...]


async def generate_groups(
    prompts: Iterable[Prompt],
    *,
    clients: Sequence[EngineClient],
    sampling: Sampling,
    num_samples: int,
    decode: Decode,
    score: Score | None,
    max_concurrent_requests: int,
    rollout: Rollout = single_turn,
) -> AsyncIterator[Group]:
    """Yield one group of `num_samples` samples for each prompt, as they finish, with rewards when `score` is given.

    At most `max_concurrent_requests` samples run on one engine at a time (at least one group); scoring does not hold a place.
    An engine that fails gives its prompts back to the others. Closing the iterator early aborts what still runs.

    Raises:
        EngineError, DeadlineError: the last engine failed, with its reason. EngineRefusal: an engine refused a request.
        UserError: a prompt that no engine can take, or a rollout that breaks its contract.
    """

    async def generate(prompt: Prompt, client: EngineClient) -> Samples:
        samples = await rollout(prompt, engine=client, sampling=sampling, num_samples=num_samples, decode=decode)
        return check_samples(samples, prompt=prompt, num_samples=num_samples, vocab_size=client.address.vocab_size)

    engines = _Engines(clients, capacity=max(1, max_concurrent_requests // num_samples))
    waiting = deque(prompts)
    generating: dict[asyncio.Task[Any], tuple[Prompt, EngineClient]] = {}
    scoring: set[asyncio.Task[Any]] = set()
    try:
        while waiting or generating or scoring:
            while waiting and (client := engines.take()) is not None:
                prompt = waiting.popleft()
                generating[asyncio.create_task(generate(prompt, client))] = (prompt, client)
            done, _ = await asyncio.wait([*generating, *scoring], return_when=asyncio.FIRST_COMPLETED)
            for task in done & generating.keys():
                prompt, client = generating.pop(task)
                engines.give_back(client)
                try:
                    scoring.add(asyncio.create_task(_score_group(prompt, task.result(), score)))
                except EngineRefusal:
                    raise  # the request is at fault, another engine would refuse it too
                except (EngineError, DeadlineError) as error:
                    engines.retire(client, error)
                    waiting.appendleft(prompt)
            for scored in done & scoring:
                scoring.discard(scored)
                yield scored.result()
    finally:
        await _cancel([*generating, *scoring])


class _Engines:
    """Which engine gets the next prompt: the least busy one that has not failed."""

    def __init__(self, clients: Sequence[EngineClient], *, capacity: int) -> None:
        self._healthy = list(clients)
        self._capacity = capacity
        self._running: Counter[EngineClient] = Counter()

    def take(self) -> EngineClient | None:
        """An engine with room for one more group, None when all are full."""
        client = min(self._healthy, key=self._running.__getitem__)
        if self._running[client] >= self._capacity:
            return None
        self._running[client] += 1
        return client

    def give_back(self, client: EngineClient) -> None:
        """A group on `client` ended."""
        self._running[client] -= 1

    def retire(self, client: EngineClient, error: Exception) -> None:
        """Give `client` no more work because of `error`, which is raised when it was the last engine."""
        self._healthy = [other for other in self._healthy if other is not client]
        if not self._healthy:
            raise error


async def _score_group(prompt: Prompt, samples: Samples, score: Score | None) -> Group:
    """All samples of a prompt as a group, rewarded when `score` is given."""
    if score is not None:
        rewards = await asyncio.gather(*map(score, samples))
        samples = tuple(replace(sample, reward=reward) for sample, reward in zip(samples, rewards, strict=True))
    return Group(id=prompt.id, prompt=prompt, samples=samples)


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they are gone, so that their aborts reach the engines."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
