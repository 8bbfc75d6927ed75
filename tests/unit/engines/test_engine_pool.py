"""Who gets slots on which engine, while engines fail, join and leave, and requests come and go."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from megatron_rl.engines import engine_pool
from megatron_rl.engines.client import EngineClient
from megatron_rl.engines.engine import EngineAddress
from megatron_rl.engines.engine_pool import EnginePool, Urgency
from megatron_rl.errors import DeadlineError, EngineError


def make_clients(count: int) -> list[EngineClient]:
    addresses = [EngineAddress(f"http://engine-{number}", "key", 32, 64, 64, has_tokenizer=False) for number in range(count)]
    return [EngineClient(address, request_timeout_s=5.0) for address in addresses]


class Requests:
    """Requests to a pool that hold their slots until they are told to end."""

    def __init__(self, pool: EnginePool) -> None:
        self.pool = pool
        self.got: dict[str, EngineClient] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ends: dict[str, asyncio.Event] = {}

    async def start(self, name: str, count: int = 1, *, urgency: Urgency = Urgency.TRAINING, preferred: EngineClient | None = None) -> None:
        async def work() -> None:
            async with self.pool.slots(count, urgency=urgency, preferred=preferred) as client:
                self.got[name] = client
                await self._ends[name].wait()

        self._ends[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(work())
        await settle()

    async def end(self, *names: str) -> None:
        for name in names:
            self._ends[name].set()
        await asyncio.gather(*(self._tasks[name] for name in names))
        await settle()

    async def cancel(self, name: str) -> None:
        self._tasks[name].cancel()
        await settle()
        assert self._tasks[name].cancelled()

    def error(self, name: str) -> BaseException | None:
        return self._tasks[name].exception()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def run(test: Callable[[Requests, list[EngineClient]], Awaitable[None]], *, num_engines: int = 2, max_requests: int = 2) -> None:
    """Run `test` with the requests of a new pool and its engines; no slot may be taken after it."""

    async def work() -> None:
        clients = make_clients(num_engines)
        requests = Requests(EnginePool(clients, max_requests=max_requests))
        await test(requests, clients)
        for task in requests._tasks.values():
            task.cancel()
        await asyncio.gather(*requests._tasks.values(), return_exceptions=True)
        assert requests.pool.num_running == 0

    asyncio.run(work())


def test_the_epoch_rises_only_when_engines_join_or_leave() -> None:
    async def work() -> None:
        first, second, third = make_clients(3)
        pool = EnginePool([first, second], max_requests=1)
        assert (pool.membership.epoch, pool.membership.members) == (0, (first, second))
        pool.join(third)
        assert (pool.membership.epoch, pool.membership.members) == (1, (first, second, third))
        pool.leave(first, EngineError("gone"))
        assert (pool.membership.epoch, pool.membership.members) == (2, (second, third))
        for unchanged in (lambda: pool.leave(first, EngineError("again")), lambda: pool.retire(second, EngineError("slow")), pool.readmit):
            unchanged()
        pool.admit([third])
        assert pool.membership.epoch == 2

    asyncio.run(work())


def test_an_engine_that_joined_gets_requests_once_it_is_admitted() -> None:
    async def test(requests: Requests, clients: list[EngineClient]) -> None:
        (late,) = make_clients(1)
        requests.pool.join(late)
        requests.pool.readmit()
        for name in "abc":
            await requests.start(name)
        assert set(requests.got) == {"a", "b"}
        requests.pool.admit([late])
        await settle()
        assert requests.got["c"] is late

    run(test, num_engines=1)


def test_an_engine_may_have_a_limit_of_its_own() -> None:
    async def test(requests: Requests, clients: list[EngineClient]) -> None:
        for name in "abcd":
            await requests.start(name)
        assert set(requests.got) == {"a", "b"} and requests.pool.has_waiting
        requests.pool.set_limit(clients[0], 3)
        await settle()
        assert set(requests.got) == {"a", "b", "c"} and requests.pool.running(clients[0]) == 3
        requests.pool.set_limit(clients[0], 1)
        await requests.end("a", "b")
        assert "d" not in requests.got
        await requests.end("c")
        assert "d" in requests.got and not requests.pool.has_waiting

    run(test, num_engines=1)


def test_requests_wait_in_an_empty_pool_for_the_first_engine() -> None:
    async def test(requests: Requests, clients: list[EngineClient]) -> None:
        (first,) = make_clients(1)
        await requests.start("a")
        requests.pool.join(first)
        await settle()
        assert requests.pool.address is first.address and "a" not in requests.got
        requests.pool.admit([first])
        await settle()
        assert requests.got["a"] is first

    run(test, num_engines=0)


def test_an_engine_that_leaves_before_it_is_admitted_stays_away() -> None:
    async def test(requests: Requests, clients: list[EngineClient]) -> None:
        requests.pool.leave(clients[0], EngineError("gone"))
        requests.pool.admit(clients)
        for name in "abc":
            await requests.start(name)
        assert requests.got == {"a": clients[1], "b": clients[1]}
        # One that comes back is new: what it serves is not known.
        requests.pool.join(clients[0])
        await settle()
        assert "c" not in requests.got

    run(test)


def test_waiters_of_a_leaving_engine_get_another_or_its_error() -> None:
    async def test(requests: Requests, clients: list[EngineClient]) -> None:
        for name in "abcd":
            await requests.start(name)
        await requests.start("waiting", preferred=clients[0])
        requests.pool.leave(clients[0], EngineError("first"))
        await settle()
        assert "waiting" not in requests.got
        await requests.end(*(name for name in "abcd" if requests.got[name] is clients[1]))
        assert requests.got["waiting"] is clients[1]
        await requests.start("second")
        await requests.start("third")
        requests.pool.leave(clients[1], EngineError("last"))
        await settle()
        assert str(requests.error("third")) == "last"
        await requests.start("late")
        assert str(requests.error("late")) == "last"

    run(test)


def test_requests_wait_for_an_engine_that_returns() -> None:
    async def test(requests: Requests, clients: list[EngineClient]) -> None:
        pool = requests.pool
        (again,) = make_clients(1)
        with pool.returning():
            for client in clients:
                pool.leave(client, EngineError("gone"))
            await requests.start("a")
            assert pool.is_empty_for_now and "a" not in requests.got
            pool.join(again)
            assert pool.has_newcomers and not pool.is_empty_for_now
        # It waits for its weights.
        await settle()
        assert "a" not in requests.got
        pool.admit([again])
        await settle()
        assert requests.got["a"] is again and not pool.has_newcomers
        with pool.returning():
            pool.leave(again, EngineError("gone again"))
            await requests.start("b")
        await settle()
        assert str(requests.error("b")) == "gone again"

    run(test)


@pytest.mark.parametrize("dies", [True, False])
def test_a_failed_engine_may_be_a_dead_one_that_returns(monkeypatch: pytest.MonkeyPatch, dies: bool) -> None:
    monkeypatch.setattr(engine_pool, "LEAVE_S", 0.05)
    ended: list[tuple[EngineClient, str]] = []

    def end_failed(client: EngineClient, error: Exception) -> bool:
        ended.append((client, str(error)))
        return True

    async def test() -> None:
        (first,), (again,) = make_clients(1), make_clients(1)
        requests = Requests(EnginePool([first], max_requests=2))
        requests.pool.end_failed = end_failed
        requests.pool.retire(first, EngineError("broken pipe"))
        await requests.start("a")
        assert "a" not in requests.got
        with requests.pool.returning() if dies else contextlib.nullcontext():
            if dies:
                requests.pool.leave(first, EngineError("killed"))
            await asyncio.sleep(0.1)
            if dies:
                requests.pool.join(again)
                requests.pool.admit([again])
        await settle()
        if dies:
            assert requests.got["a"] is again
        else:
            assert str(requests.error("a")) == "broken pipe"
        assert ended == [(first, "broken pipe")]

    asyncio.run(test())


@pytest.mark.parametrize("stepped_s_ago", [1.0, 31.0])
def test_a_late_answer_ends_an_engine_without_a_step(stepped_s_ago: float) -> None:
    """One that makes steps may be slow."""

    async def test(requests: Requests, clients: list[EngineClient]) -> None:
        ended: list[EngineClient] = []
        requests.pool.end_failed = lambda client, error: bool(ended.append(client))
        clients[0].stepped_s = asyncio.get_running_loop().time() - stepped_s_ago
        requests.pool.retire(clients[0], DeadlineError("no answer within 600 s"))
        await requests.start("a")
        assert requests.got["a"] is clients[1]
        assert ended == ([clients[0]] if stepped_s_ago > 30 else [])

    run(test)


def test_a_retired_engine_is_a_member_until_readmitted() -> None:
    async def test(requests: Requests, clients: list[EngineClient]) -> None:
        requests.pool.retire(clients[0], EngineError("slow"))
        for name in "abc":
            await requests.start(name)
        assert requests.got == {"a": clients[1], "b": clients[1]}
        requests.pool.leave(clients[1], EngineError("gone"))
        await settle()
        assert str(requests.error("c")) == "gone"
        requests.pool.readmit()
        await requests.start("d")
        assert requests.got["d"] is clients[0]
        # What it failed at before it left says nothing of it when it comes back.
        requests.pool.retire(clients[0], EngineError("slow"))
        requests.pool.leave(clients[0], EngineError("gone"))
        requests.pool.retire(clients[0], EngineError("late"))
        requests.pool.join(clients[0])
        requests.pool.admit([clients[0]])
        await requests.start("e")
        assert requests.got["e"] is clients[0]

    run(test)


def test_departure_is_done_for_those_that_are_no_members() -> None:
    async def test(requests: Requests, clients: list[EngineClient]) -> None:
        (stranger,) = make_clients(1)
        staying, leaving = (requests.pool.departure(client) for client in clients)
        assert requests.pool.departure(stranger).done() and not leaving.done()
        requests.pool.leave(clients[1], EngineError("gone"))
        assert leaving.done() and not staying.done() and requests.pool.departure(clients[1]).done()
        requests.pool.join(clients[1])
        assert not requests.pool.departure(clients[1]).done()

    run(test)


def test_nobody_waits_for_the_answer_of_an_engine_that_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_pool, "DEATH_S", 0.01)
    ended: list[str] = []

    async def answer(seconds: float, error: Exception | None = None) -> int:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        if error is not None:
            raise error
        return 7

    async def test(requests: Requests, clients: list[EngineClient]) -> None:
        pool = requests.pool
        assert (await pool.unless_it_leaves(clients[0], answer(0.0)), await pool.while_it_stays(clients[0], answer(0.0))) == (7, 7)
        with pytest.raises(EngineError, match="refused"):
            await pool.unless_it_leaves(clients[0], answer(0.0, EngineError("refused")))
        asyncio.get_running_loop().call_later(0.02, pool.leave, clients[0], EngineError("gone"))
        assert await pool.unless_it_leaves(clients[0], answer(3600.0)) is None
        asyncio.get_running_loop().call_later(0.02, pool.leave, clients[1], EngineError("gone"))
        with pytest.raises(EngineError, match="engine-1 has left"):
            await pool.while_it_stays(clients[1], answer(3600.0))
        assert ended == ["cancelled"] * 2

    run(test)


def test_a_preferred_engine_is_taken_over_a_less_busy_one() -> None:
    async def test(requests: Requests, clients: list[EngineClient]) -> None:
        await requests.start("a", preferred=clients[1])
        await requests.start("b", preferred=clients[1])
        assert requests.got == {"a": clients[1], "b": clients[1]}
        await requests.start("c")
        assert requests.got["c"] is clients[0]

    run(test)


def test_waiting_for_a_preferred_engine_blocks_no_other_request() -> None:
    async def test(requests: Requests, clients: list[EngineClient]) -> None:
        await requests.start("a", 1, preferred=clients[0])
        await requests.start("pair", 2, preferred=clients[0])
        await requests.start("later")
        # Room for one is left beside "a", but "pair" came first.
        await requests.start("same", preferred=clients[0])
        assert requests.got == {"a": clients[0], "later": clients[1]}
        await requests.end("a")
        assert requests.got["pair"] is clients[0] and "same" not in requests.got
        await requests.end("pair")
        assert requests.got["same"] is clients[0]

    run(test)


def test_who_prefers_a_busy_engine_takes_another_after_a_while() -> None:
    async def test(requests: Requests, clients: list[EngineClient]) -> None:
        await requests.start("a", 2, preferred=clients[0])
        await requests.start("b", preferred=clients[0])
        assert "b" not in requests.got
        # Begun later, so over later.
        await asyncio.sleep(engine_pool.AFFINITY_WAIT_S)
        await asyncio.sleep(0)
        assert requests.got["b"] is clients[1]

    run(test)


@pytest.mark.parametrize("trouble", ["retire", "leave"])
def test_a_preferred_engine_that_is_unusable_is_replaced_at_once(trouble: str) -> None:
    async def test(requests: Requests, clients: list[EngineClient]) -> None:
        await requests.start("a", 2, preferred=clients[0])
        await requests.start("waiting", preferred=clients[0])
        getattr(requests.pool, trouble)(clients[0], EngineError("gone"))
        await requests.start("late", preferred=clients[0])
        assert requests.got["waiting"] is requests.got["late"] is clients[1]

    run(test)


def test_a_cancelled_waiter_keeps_no_slot() -> None:
    async def test(requests: Requests, clients: list[EngineClient]) -> None:
        await requests.start("a")
        await requests.start("pair", 2)
        await requests.start("b")
        assert set(requests.got) == {"a"}
        await requests.cancel("pair")
        assert requests.got["b"] is clients[0]

    run(test, num_engines=1)


def test_what_an_engine_gave_back_goes_first_then_evaluations() -> None:
    async def test(requests: Requests, clients: list[EngineClient]) -> None:
        await requests.start("running")
        for urgency in (Urgency.TRAINING, Urgency.EVALUATION, Urgency.AGAIN):
            await requests.start(urgency.name, urgency=urgency)
        order = ["running", "AGAIN", "EVALUATION", "TRAINING"]
        for position, name in enumerate(order):
            assert list(requests.got) == order[: position + 1]
            await requests.end(name)

    run(test, num_engines=1, max_requests=1)


@pytest.mark.parametrize("seed", range(5))
def test_no_slot_is_lost_and_no_engine_is_overloaded(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that are cancelled at any moment, engines that fail, leave and come back at any moment."""
    monkeypatch.setattr(engine_pool, "AFFINITY_WAIT_S", 0.001)
    draw = random.Random(seed)
    running: dict[EngineClient, list[int]] = {}

    @asynccontextmanager
    async def seen(client: EngineClient, count: int) -> AsyncIterator[None]:
        held = running.setdefault(client, [])
        held.append(count)
        assert sum(held) <= 4 or len(held) == 1
        try:
            yield
        finally:
            held.remove(count)

    async def work() -> None:
        clients = make_clients(3)
        pool = EnginePool(clients, max_requests=4)

        async def request() -> None:
            count, preferred = draw.randint(1, 6), draw.choice([None, *clients])
            async with pool.slots(count, urgency=draw.choice(list(Urgency)), preferred=preferred) as client, seen(client, count):
                await asyncio.sleep(draw.random() * 0.002)

        tasks: list[asyncio.Task[Any]] = []
        for _ in range(300):
            tasks.append(asyncio.create_task(request()))
            client, event = draw.choice(clients), draw.randrange(12)
            if event < 3:
                draw.choice(tasks).cancel()
            elif event == 3:
                pool.retire(client, EngineError("slow"))
            elif event == 4:
                pool.readmit()
            elif event == 5:
                pool.leave(client, EngineError("gone"))
            elif event > 8:
                for each in clients:
                    if each not in pool.membership.members:
                        pool.join(each)
                pool.admit(clients)
            if draw.random() < 0.5:
                await asyncio.sleep(0 if draw.random() < 0.7 else 0.0005)
        pool.admit(pool.membership.members)
        pool.readmit()
        answers = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
        assert {type(answer) for answer in answers} <= {type(None), asyncio.CancelledError, EngineError}
        assert sum(answer is None for answer in answers) > 20
        assert pool.num_running == 0 and not any(running.values())

    asyncio.run(work())
