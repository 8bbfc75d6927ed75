"""What the rollout of one prompt asks: requests, each of which finds its engine, fails, is repeated and is aborted by itself."""

import asyncio
import hashlib
from collections.abc import Iterable
from dataclasses import replace
from types import TracebackType
from typing import Any

from megatron_rl.errors import DeadlineError, EngineError
from megatron_rl.rollout.client import SHORT_RESPONSE_TOKENS, EngineClient, Generation
from megatron_rl.rollout.engine_pool import EnginePool, Urgency
from megatron_rl.rollout.kept_answers import KeptAnswers
from megatron_rl.rollout.sampling import Sampling
from megatron_rl.rollout.transport import EngineRefusal
from megatron_rl.types import Ints, Prompt


class PoolGenerator:
    """The engines of `pool` as the rollout of one prompt sees them; use in an `async with` block, whose end aborts what still runs.

    A request holds slots of an engine from the moment in which it is sent until it is answered, not while the rollout waits for a tool.

    The k-th sample that is asked for gets the seed `seed` + k, so that samples differ on an engine that draws by seeds, and come again.
    Each session counts from a seed of its own: the order in which sessions ask, which depends on how long tools take, changes nothing.

    Answers that are in `kept` are not asked for again, and those that may be long are put there, each as soon as it is finished.
    """

    def __init__(
        self,
        pool: EnginePool,
        *,
        prompt: Prompt,
        run_seed: int = 0,
        urgency: Urgency = Urgency.TRAINING,
        kept: KeptAnswers | None = None,
    ) -> None:
        self._pool, self._urgency, self._arrival, self._kept = pool, urgency, pool.arrival(), kept
        self._seed_source = f"{run_seed} {prompt.id}"
        self._next_seeds: dict[str | None, int] = {}
        self._engines: dict[str, EngineClient] = {}
        self._requests: set[asyncio.Task[tuple[Generation, ...]]] = set()

    async def __aenter__(self) -> "PoolGenerator":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await cancel(self._requests)
        if self._kept is not None:
            self._kept.close(finished=kind is None)

    async def generate(
        self, token_ids: Ints, *, sampling: Sampling, num_samples: int = 1, session: str | None = None
    ) -> tuple[Generation, ...]:
        """`num_samples` responses to `token_ids` [P], from one engine; see `plugins.Generator`.

        A `session` prefers the engine that answered it last, whose cache has its prefix: it waits for a slot there up to
        `engine_pool.AFFINITY_WAIT_S`, then takes the least busy engine. Without a session each request takes the least busy one.
        An engine that fails is retired, and the request goes to the next with the same seeds, before others; its tokens may then be of a
        newer weight version than those before. Cancelling the call aborts this request alone.

        Raises:
            EngineError, DeadlineError: the last engine failed, with its reason. EngineRefusal: an engine refused the request.
            UserError: a prompt that no engine can take.
        """
        if session not in self._next_seeds:
            self._next_seeds[session] = _seed(self._seed_source if session is None else f"{self._seed_source}\0{session}")
        seeded = replace(sampling, seed=self._next_seeds[session])
        self._next_seeds[session] += num_samples
        # A task of its own, so that the end of the rollout ends it, too, where the rollout did not wait for it.
        request = asyncio.create_task(self._request(token_ids, seeded, num_samples, session))
        self._requests.add(request)
        request.add_done_callback(self._requests.discard)
        return await request

    async def _request(self, token_ids: Ints, sampling: Sampling, num_samples: int, session: str | None) -> tuple[Generation, ...]:
        urgency, answers = self._urgency, self._found(token_ids, sampling, num_samples)
        while len(answers) < num_samples:
            preferred = None if session is None else self._engines.get(session)
            slots = num_samples - len(answers)
            async with self._pool.slots(slots, urgency=urgency, arrival=self._arrival, preferred=preferred) as client:
                try:
                    await self._ask(client, token_ids, sampling, num_samples, answers)
                except EngineRefusal:
                    raise  # the request is at fault, another engine would refuse it too
                except (EngineError, DeadlineError) as error:
                    self._pool.retire(client, error)
            if session is not None and len(answers) == num_samples:
                self._engines[session] = client
            urgency = Urgency.AGAIN
        return tuple(answers[index] for index in range(num_samples))

    def _found(self, token_ids: Ints, sampling: Sampling, num_samples: int) -> dict[int, Generation]:
        """The answers that are kept, by the numbers of their samples."""
        if self._kept is None:
            return {}
        found = {index: self._kept.find(token_ids, sampling.of_sample(index)) for index in range(num_samples)}
        return {index: answer for index, answer in found.items() if answer is not None and self._has_experts(answer)}

    def _has_experts(self, answer: Generation) -> bool:
        """Whether the answer has a record of experts, where engines make one: it may have been kept before they were asked to."""
        return answer.routed_experts is not None or self._pool.address.mixture is None

    async def _ask(
        self, client: EngineClient, token_ids: Ints, sampling: Sampling, num_samples: int, answers: dict[int, Generation]
    ) -> None:
        """Add the engine's answers, fewer when it leaves the pool before: one that hangs is not waited for until its deadline."""
        asking = asyncio.create_task(self._fill(client, token_ids, sampling, num_samples, answers))
        try:
            await asyncio.wait((asking, self._pool.departure(client)), return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                asking.result()
        finally:
            await cancel([asking])

    async def _fill(
        self, client: EngineClient, token_ids: Ints, sampling: Sampling, num_samples: int, answers: dict[int, Generation]
    ) -> None:
        kept = self._kept
        if kept is None or sampling.max_tokens <= SHORT_RESPONSE_TOKENS:
            # Short ones come together, and are soon made again.
            answers.update(enumerate(await client.generate(token_ids, sampling=sampling, num_samples=num_samples)))
            return

        async def ask_for(index: int) -> None:
            own = sampling.of_sample(index)
            (answers[index],) = await client.generate(token_ids, sampling=own)
            kept.add(token_ids, own, answers[index])

        each = [asyncio.create_task(ask_for(index)) for index in range(num_samples) if index not in answers]
        try:
            await asyncio.gather(*each)
        finally:
            await cancel(each)


def _seed(source: str) -> int:
    """A seed below 2^56: the same for the same run, prompt (whose id names its epoch) and session, also in a run that is resumed."""
    return int.from_bytes(hashlib.blake2b(source.encode(), digest_size=7).digest(), "big")


async def cancel(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    """Cancel tasks and wait until they are gone, so that their aborts reach the engines."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
