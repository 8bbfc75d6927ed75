"""Requests of rollouts with several turns: what each holds, where it goes, what it costs the others when it fails or is cancelled."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from maker_parts import Engine, generator_of, make_maker

from megatron_rl.engines.engine_pool import EnginePool
from megatron_rl.engines.sampling import Sampling
from megatron_rl.errors import DeadlineError, EngineError, EngineRefusal, UserError
from megatron_rl.plugins.kinds import Generator, Rollout
from megatron_rl.rollout.groups import single_turn
from megatron_rl.rollout.rollout_trial import NumberTokenizer
from megatron_rl.types import Group, Prompt, Sample

PROMPT = Prompt(id="p", token_ids=np.array([1, 2]), text="1 2")
SAMPLING = Sampling(max_tokens=4)


def run(test: Callable[[EnginePool, list[Engine]], Awaitable[None]], *, num_engines: int = 2, max_requests: int = 8) -> None:
    """Run `test` with a new pool and its engines; nothing may run after it."""

    async def work() -> None:
        engines = [Engine(version=version) for version in range(num_engines)]
        pool = EnginePool(engines, max_requests=max_requests)  # type: ignore[arg-type]
        await asyncio.wait_for(test(pool, engines), 5)
        assert pool.num_running == 0 and [engine.running for engine in engines] == [0] * num_engines

    asyncio.run(work())


async def settle() -> None:
    for _ in range(40):
        await asyncio.sleep(0)


def make(pool: EnginePool, rollout: Rollout, *, num_samples: int = 1, prompt: Prompt = PROMPT, seed: int = 0) -> Coroutine[Any, Any, Group]:
    return make_maker(pool, rollout, seed=seed).make(prompt, num_samples=num_samples)


def two_turns(tool: Callable[[int], Awaitable[None]], *, named: bool = True) -> Rollout:
    """Conversations of two turns beside each other, with `tool` between, which is given their index; sessions are `named` by it."""

    async def rollout(
        *, prompt: Prompt, generator: Generator, sampling: Sampling, num_samples: int, tokenizer: NumberTokenizer
    ) -> Sequence[Sample]:
        async def conversation(index: int) -> Sample:
            session = f"conversation {index}" if named else None
            (first,) = await generator.generate(prompt.token_ids, sampling=sampling, session=session)
            await tool(index)
            seen = np.concatenate([prompt.token_ids, first.token_ids])
            (second,) = await generator.generate(seen, sampling=sampling, session=session)
            return Sample(
                group_id=prompt.id,
                index=index,
                prompt=prompt,
                response_ids=np.concatenate([first.token_ids, second.token_ids]),
                loss_mask=np.ones(len(first.token_ids) + len(second.token_ids), np.bool_),
                rollout_log_probs=np.concatenate([first.log_probs, second.log_probs]),
                weight_versions=np.concatenate([first.weight_versions, second.weight_versions]),
                stop_reason=second.stop_reason,
                response_text="",
            )

        return await asyncio.gather(*map(conversation, range(num_samples)))

    return rollout


def test_a_slow_tool_between_turns_holds_no_slot() -> None:
    async def test(pool: EnginePool, engines: list[Engine]) -> None:
        answer = asyncio.Event()

        async def tool(index: int) -> None:
            await answer.wait()

        slow = asyncio.create_task(make(pool, two_turns(tool), num_samples=3))
        await settle()
        assert len(engines[0].asked) == 3 and pool.num_running == 0
        # The only slot there is serves others in the meantime.
        others = [make(pool, single_turn, prompt=replace(PROMPT, id=str(number))) for number in range(5)]
        assert len(await asyncio.gather(*others)) == 5
        assert not slow.done()
        answer.set()
        assert len((await slow).samples) == 3
        assert len(engines[0].asked) == 3 + 5 + 3

    run(test, num_engines=1, max_requests=1)


def test_a_failing_engine_costs_each_of_its_requests_one_retry() -> None:
    async def test(pool: EnginePool, engines: list[Engine]) -> None:
        engines[0].free.clear()
        engines[1].free.clear()
        prompts = [replace(PROMPT, token_ids=np.array([number])) for number in range(16)]
        async with generator_of(pool) as generator:
            calls = [asyncio.create_task(generator.generate(prompt.token_ids, sampling=SAMPLING)) for prompt in prompts]
            await settle()
            assert [len(engine.asked) for engine in engines] == [8, 8]
            lost = engines[0].asked[:]
            engines[0].error = EngineError("died")
            engines[0].free.set()
            await settle()
            engines[1].free.set()
            answers = await asyncio.gather(*calls)
        assert [answer.token_ids.tolist() for (answer,) in answers] == [[number] for number in range(16)]
        assert len(engines[0].asked) == 8
        # With the seeds that they had.
        assert sorted(engines[1].asked[8:]) == sorted(lost)
        assert len({seed for _, seed in engines[1].asked}) == 16

    run(test)


def test_later_turns_go_before_first_turns_of_later_groups() -> None:
    async def test(pool: EnginePool, engines: list[Engine]) -> None:
        async def no_tool(index: int) -> None: ...

        prompts = [replace(PROMPT, id=str(number), token_ids=np.array([number])) for number in range(5)]
        await asyncio.gather(*(make(pool, two_turns(no_tool), prompt=prompt) for prompt in prompts))
        # The next one's slot is given before a group has asked for its second turn.
        order = [(tokens[0], len(tokens)) for tokens, _ in engines[0].asked]
        assert order == [(0, 1), (1, 1), (0, 2), (1, 2), (2, 1), (3, 1), (2, 2), (3, 2), (4, 1), (4, 2)]

    run(test, num_engines=1, max_requests=1)


@pytest.mark.parametrize("error", [EngineError("died"), DeadlineError("slow")])
def test_a_lost_turn_is_repeated_alone_and_first(error: Exception) -> None:
    async def test(pool: EnginePool, engines: list[Engine]) -> None:
        async def tool(index: int) -> None:
            engines[0].error = error

        engines[1].free.clear()
        waiting = generator_of(pool, "other")
        # One for engine 1, which answers only at the end, and one that finds no slot.
        making = asyncio.create_task(make(pool, two_turns(tool)))
        while not pool.num_running:
            await asyncio.sleep(0)
        first = asyncio.create_task(waiting.generate(np.array([7]), sampling=SAMPLING))
        await settle()
        last = asyncio.create_task(waiting.generate(np.array([8]), sampling=SAMPLING))
        await settle()
        engines[1].free.set()
        (sample,) = (await making).samples
        await asyncio.gather(first, last)
        # The first turn is not asked for again; the second is, on the other engine, whose weights may be newer.
        assert [asked for asked, _ in engines[0].asked] == [[1, 2], [1, 2, 1, 2]]
        assert [asked for asked, _ in engines[1].asked] == [[7], [1, 2, 1, 2], [8]]
        assert sample.weight_versions.tolist() == [0] * 2 + [1] * 4

    run(test, max_requests=1)


def test_a_refused_request_is_raised_and_retires_no_engine() -> None:
    async def test(pool: EnginePool, engines: list[Engine]) -> None:
        engines[0].error = EngineRefusal("no", status=400)
        async with generator_of(pool) as generator:
            with pytest.raises(EngineRefusal):
                await generator.generate(PROMPT.token_ids, sampling=SAMPLING)
            engines[0].error = None
            await generator.generate(PROMPT.token_ids, sampling=SAMPLING)
        assert [len(engine.asked) for engine in engines] == [2, 0]

    run(test)


def test_a_server_at_fault_is_ended_and_another_one_answers() -> None:
    async def test(pool: EnginePool, engines: list[Engine]) -> None:
        ended: list[str] = []
        pool.end_failed = lambda client, error: ended.append(str(error)) is None
        engines[0].error = EngineRefusal("broken (HTTP 500)", status=500)
        async with generator_of(pool) as generator:
            (answer,) = await generator.generate(PROMPT.token_ids, sampling=SAMPLING)
        assert answer.weight_versions.tolist() == [1] * len(answer.token_ids) and ended == ["broken (HTTP 500)"]

    run(test)


def test_a_request_whose_last_engine_fails_raises_why() -> None:
    async def test(pool: EnginePool, engines: list[Engine]) -> None:
        for engine in engines:
            engine.error = EngineError(f"died {engine.version}")
        async with generator_of(pool) as generator:
            with pytest.raises(EngineError, match="died 1"):
                await generator.generate(PROMPT.token_ids, sampling=SAMPLING)

    run(test)


def test_a_cancelled_request_is_aborted_alone() -> None:
    async def test(pool: EnginePool, engines: list[Engine]) -> None:
        (engine,) = engines
        engine.free.clear()
        async with generator_of(pool) as generator:
            calls = [asyncio.create_task(generator.generate(np.array([number]), sampling=SAMPLING)) for number in range(4)]
            await settle()
            assert engine.running == 2
            for cancelled in (calls[0], calls[3]):
                cancelled.cancel()
            await asyncio.gather(calls[0], calls[3], return_exceptions=True)
            await settle()
            # The third has the first one's slot.
            assert engine.aborted == 1 and engine.running == 2
            engine.free.set()
            assert [len(await call) for call in calls[1:3]] == [1, 1]
        assert [tokens for tokens, _ in engine.asked] == [[0], [1], [2]]

    run(test, num_engines=1, max_requests=2)


def test_requests_that_a_rollout_left_behind_end_with_it() -> None:
    """`asyncio.gather` does not cancel the others when one conversation fails, and they would hold their slots."""

    async def test(pool: EnginePool, engines: list[Engine]) -> None:
        (engine,) = engines
        engine.free.clear()
        async with generator_of(pool) as generator:
            calls = [asyncio.create_task(generator.generate(np.array([number]), sampling=SAMPLING)) for number in range(6)]
            await settle()
            assert engine.running == 2
        assert engine.aborted == 2 and pool.num_running == 0
        await settle()
        # What waited for a slot was not sent.
        assert len(engine.asked) == 2 and all(call.cancelled() for call in calls)
        with pytest.raises(UserError, match="when it had ended; await every call"):
            await generator.generate(PROMPT.token_ids, sampling=SAMPLING)

    run(test, num_engines=1, max_requests=2)


def test_a_cancelled_group_aborts_every_request_of_it() -> None:
    async def test(pool: EnginePool, engines: list[Engine]) -> None:
        async def no_tool(index: int) -> None:
            engines[0].free.clear()

        making = asyncio.create_task(make(pool, two_turns(no_tool), num_samples=6))
        await settle()
        assert engines[0].running == 4
        making.cancel()
        with pytest.raises(asyncio.CancelledError):
            await making
        assert engines[0].aborted == 4

    run(test, num_engines=1, max_requests=4)


def test_a_request_on_a_leaving_engine_moves_at_once() -> None:
    """One that hangs would otherwise be waited for until the request's own deadline."""

    async def test(pool: EnginePool, engines: list[Engine]) -> None:
        engines[0].free.clear()
        async with generator_of(pool) as generator:
            calls = [asyncio.create_task(generator.generate(PROMPT.token_ids, sampling=SAMPLING)) for _ in range(4)]
            await settle()
            pool.leave(engines[0], EngineError("hangs"))  # type: ignore[arg-type]
            answers = await asyncio.gather(*calls)
        assert engines[0].aborted == 2
        assert [answer.weight_versions[0] for (answer,) in answers] == [1] * 4
        assert len(engines[1].asked) == 4
        assert {seed for _, seed in engines[0].asked} < {seed for _, seed in engines[1].asked}

    run(test)


def test_the_last_leaving_engine_ends_requests_with_its_error() -> None:
    async def test(pool: EnginePool, engines: list[Engine]) -> None:
        engines[0].free.clear()
        async with generator_of(pool) as generator:
            calls = [asyncio.create_task(generator.generate(PROMPT.token_ids, sampling=SAMPLING)) for _ in range(3)]
            await settle()
            pool.leave(engines[0], EngineError("node lost"))  # type: ignore[arg-type]
            answers = await asyncio.gather(*calls, return_exceptions=True)
        assert [str(answer) for answer in answers] == ["node lost"] * 3

    run(test, num_engines=1, max_requests=2)


def test_a_session_stays_with_its_engine_until_that_fails() -> None:
    async def test(pool: EnginePool, engines: list[Engine]) -> None:
        async with generator_of(pool) as generator:

            async def ask(session: str | None) -> int:
                (answer,) = await generator.generate(PROMPT.token_ids, sampling=SAMPLING, session=session)
                return int(answer.weight_versions[0])

            assert await ask("a") == 0
            engines[0].free.clear()
            busy = asyncio.create_task(ask(None))
            await settle()
            assert await ask("b") == 1
            engines[0].free.set()
            assert await busy == 0
            # Both engines are idle: without a session the first would get each.
            assert [await ask(session) for session in "abba"] == [0, 1, 1, 0] and await ask(None) == 0
            engines[1].error = EngineError("died")
            assert await ask("b") == 0
            engines[1].error = None
            pool.readmit()
            assert await ask("b") == 0

    run(test)


def test_seeds_of_sessions_do_not_depend_on_their_order() -> None:
    def seeds(order: Sequence[int], *, run_seed: int = 0) -> list[list[int | None]]:
        """Of each conversation's first and second turn, with tools that answer in `order`."""
        found: list[list[int | None]] = []

        async def test(pool: EnginePool, engines: list[Engine]) -> None:
            done = [asyncio.Event() for _ in range(len(order) + 1)]
            done[0].set()

            async def tool(index: int) -> None:
                await done[order.index(index)].wait()
                await settle()
                done[order.index(index) + 1].set()

            await make(pool, two_turns(tool), num_samples=len(order), seed=run_seed)
            asked = [seed for _, seed in engines[0].asked]
            second = {index: asked[len(order) + position] for position, index in enumerate(order)}
            found.extend([asked[index], second[index]] for index in range(len(order)))

        run(test, num_engines=1)
        return found

    first = seeds([0, 1, 2])
    assert seeds([2, 0, 1]) == first
    assert len({seed for turns in first for seed in turns}) == 6
    assert not {seed for turns in seeds([0, 1, 2], run_seed=1) for seed in turns} & {seed for turns in first for seed in turns}


def test_seeds_in_a_session_follow_requests_not_their_order() -> None:
    prompts = {"a": np.array([1, 2]), "b": np.array([1, 2, 3]), "c": np.array([1, 2])}
    samplings = {"a": SAMPLING, "b": SAMPLING, "c": replace(SAMPLING, max_tokens=SAMPLING.max_tokens - 1)}

    def seeds(names: str, session: str = "s", run_seed: str = "p") -> list[tuple[str, int | None]]:
        found: list[int | None] = []

        async def test(pool: EnginePool, engines: list[Engine]) -> None:
            async with generator_of(pool, run_seed) as generator:
                for name in names:
                    await generator.generate(prompts[name], sampling=samplings[name], session=session)
            found.extend(seed for _, seed in engines[0].asked)

        run(test, num_engines=1)
        return sorted(zip(names, found, strict=True))

    assert seeds("aabc") == seeds("caba") == seeds("bcaa")
    (_, first), (_, second), *others = seeds("aabc")
    assert first is not None and second == first + 1 and not {first, second} & {seed for _, seed in others}
    assert len({seed for one in (seeds("abc"), seeds("abc", "t"), seeds("abc", "s", "q")) for _, seed in one}) == 9


def test_samples_of_one_request_take_consecutive_seeds() -> None:
    async def test(pool: EnginePool, engines: list[Engine]) -> None:
        async with generator_of(pool) as generator:
            for count in (3, 1, 2):
                assert len(await generator.generate(PROMPT.token_ids, sampling=SAMPLING, num_samples=count)) == count
        first: Any = engines[0].asked[0][1]
        assert [seed for _, seed in engines[0].asked] == [first, first + 3, first + 4]

    run(test, num_engines=1, max_requests=2)
