"""The law of the limit on a simulated engine, and the watch over engines that are stubs."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from megatron_rl.engines.answers import EngineLoad
from megatron_rl.engines.engine import EngineAddress
from megatron_rl.engines.engine_pool import EnginePool, Urgency
from megatron_rl.observe.metrics import check_metrics, metric_values
from megatron_rl.rollout import engine_watch
from megatron_rl.rollout.engine_watch import EngineWatch, first_limit, next_limit

POOL_TOKENS, LONGEST = 40_000, 2_000
FLOOR = 20


def look(limit: int, kv_use: float, **changes: Any) -> int:
    """The next limit of a full engine whose requests turned over, but for `changes`."""
    seen = {"num_running": limit, "num_answers": limit, "num_retracted": 0, "wanted": True, "floor": FLOOR, **changes}
    return next_limit(limit, EngineLoad(kv_use, seen.pop("num_waiting", 0)), **seen)


def test_the_first_limit_fits_at_the_longest_length() -> None:
    assert first_limit(POOL_TOKENS, longest_sequence=LONGEST) == FLOOR
    assert first_limit(100, longest_sequence=LONGEST) == 8


@pytest.mark.parametrize(
    ("limit", "kv_use", "changes", "expected"),
    [
        (100, 0.59, {}, 105),
        (100, 0.59, {"floor": 2}, 101),
        (100, 0.3, {}, 105),
        (100, 0.29, {}, 200),
        (100, 0.29, {"num_answers": 99}, 100),
        (100, 0.6, {}, 100),
        (100, 0.8, {}, 100),
        (100, 0.59, {"num_answers": 99}, 100),
        (100, 0.59, {"wanted": False}, 100),
        (100, 0.59, {"num_waiting": 1}, 100),
        (100, 0.81, {"num_answers": 0}, 90),
        (100, 0.9, {"num_answers": 0}, 90),
        (100, 0.91, {"num_answers": 0}, 70),
        (100, 0.3, {"num_retracted": 1}, 70),
        (100, 0.3, {"num_retracted": 1, "num_answers": 99}, 100),
        (100, 0.85, {"num_retracted": 1, "num_answers": 99}, 90),
        # What an earlier fall left behind still runs, or a step's tail does.
        (100, 0.95, {"num_running": 101}, 100),
        (100, 0.95, {"num_running": 69}, 100),
        (100, 0.95, {"num_running": 70}, 70),
        (22, 0.95, {}, FLOOR),
        (FLOOR, 0.95, {"num_retracted": 5}, FLOOR),
    ],
)
def test_the_limit_after_one_look(limit: int, kv_use: float, changes: dict[str, Any], expected: int) -> None:
    assert look(limit, kv_use, **changes) == expected


class SimulatedEngine:
    """Requests that grow by 20 tokens a tick up to lengths of their own; the youngest are retracted when the pool is full."""

    def __init__(self, *, seed: int) -> None:
        self._random = random.Random(seed)
        self._running: list[list[int]] = []  # tokens, length, retractions
        self.limit, self.retractions, self._new = FLOOR, 0, Counter[str]()

    def tick(self, mean_length: int) -> None:
        for request in self._running:
            request[0] += 20
        for request in [each for each in self._running if each[0] >= each[1]]:
            self._running.remove(request)
            self._new.update(answers=1, retractions=request[2])
        waiting = []
        while sum(request[0] for request in self._running) > POOL_TOKENS:
            *_, length, retractions = self._running.pop()
            waiting.append([0, length, retractions + 1])
            self.retractions += 1
        self._running += waiting
        while len(self._running) < self.limit:
            self._running.append([0, min(LONGEST, int(self._random.expovariate(1 / mean_length)) + 20), 0])

    def look(self) -> EngineLoad:
        load = EngineLoad(sum(request[0] for request in self._running) / POOL_TOKENS, 0)
        new, running = self._new, len(self._running)
        counts = {"num_answers": new["answers"], "num_retracted": new["retractions"]}
        moved = next_limit(self.limit, load, floor=FLOOR, num_running=running, **counts, wanted=True)
        if moved != self.limit or new["answers"] >= self.limit:
            self._new = Counter()
        self.limit = moved
        return load


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mean_length", [150, 400, 900])
def test_the_limit_settles_where_the_memory_is_used(mean_length: int, seed: int) -> None:
    engine, limits, uses = SimulatedEngine(seed=seed), [], []
    for tick in range(6000):
        engine.tick(mean_length)
        if tick % 5 == 0:
            uses.append(engine.look().kv_use)
            limits.append(engine.limit)
    late = limits[-600:]
    assert 0.5 < sum(uses[-600:]) / 600 < 0.82
    # Few long requests make the use itself go up and down.
    assert min(late) > 0.4 * max(late) and min(limits) == FLOOR == limits[0]
    assert engine.retractions == 0


def test_a_first_step_reaches_the_limit() -> None:
    engine, num_answers = SimulatedEngine(seed=0), 0
    for tick in range(6000):
        before = engine._new["answers"]
        engine.tick(150)
        num_answers += (engine._new["answers"] - before) if engine.limit < 150 else 0
        if tick % 5 == 0:
            engine.look()
    # Of 190 in the end.
    assert engine.limit > 150 and num_answers < 256


def test_the_limit_follows_longer_and_shorter_responses() -> None:
    engine, ends = SimulatedEngine(seed=0), []
    for mean_length in (150, 900, 150):
        lowest = 10**9
        for tick in range(6000):
            engine.tick(mean_length)
            if tick % 5 == 0:
                engine.look()
            lowest = min(lowest, engine.limit)
        ends.append(engine.limit)
        assert lowest >= FLOOR
    assert ends[1] < 0.5 * ends[0] and ends[2] > 0.75 * ends[0]


class Client:
    """An engine with answers of the test's choice to the question of its load."""

    def __init__(self, *loads: EngineLoad | None) -> None:
        self.address = EngineAddress("url", "key", vocab_size=2, context_length=64, max_total_tokens=POOL_TOKENS, has_tokenizer=False)
        self.served: Counter[str] = Counter()
        self.is_paused, self.pending, self.num_ended, self.stepped_s = False, Counter[bool](), 0, 0.0
        self._loads = iter(loads)
        self.asked = asyncio.Event()

    async def load(self) -> EngineLoad | None:
        self.asked.set()
        return next(self._loads)


def run(test: Callable[[EnginePool, EngineWatch], Awaitable[None]], *clients: Client, follows: bool = False) -> None:
    async def work() -> None:
        pool = EnginePool(clients, max_requests=6)  # type: ignore[arg-type]
        await test(pool, EngineWatch(pool, longest_sequence=LONGEST if follows else None))

    asyncio.run(work())


def test_metrics_compare_engines_and_count_from_step_to_step() -> None:
    first, second = Client(EngineLoad(0.5, 0), EngineLoad(0.7, 3)), Client(EngineLoad(0.1, 1), None)

    async def test(pool: EnginePool, watch: EngineWatch) -> None:
        assert watch.metrics() == {}
        first.served.update(answers=2, prompt_tokens=30, cached_tokens=6, retractions=1, milliseconds=600, tokens=20)
        second.served.update(answers=3, prompt_tokens=10, cached_tokens=5, milliseconds=900, tokens=10)
        async with pool.slots(4, urgency=Urgency.TRAINING):
            await watch.look()
            await watch.look()
        metrics = watch.metrics()
        check_metrics(metrics)
        values = metric_values(metrics)
        assert values == pytest.approx({
            "engine/kv_use": 1.3 / 3, "engine/kv_use_max": 0.7, "engine/kv_use_of_idlest": 0.1, "engine/kv_use_of_busiest": 0.6,
            "engine/requests": 8 / 3, "engine/queue": 4 / 3, "engine/queue_max": 3,
            "engine/prefix_hits": 11 / 40, "engine/prefix_hits_min": 0.2, "engine/prefix_hits_max": 0.5,
            "engine/retractions": 1, "engine/retractions_max": 1,
            "engine/token_s_of_fastest": 0.03, "engine/token_s_of_slowest": 0.09,
        })  # fmt: skip
        states = watch.states()
        assert [(each.requests, each.limit, each.answers, each.queue, each.kv_use) for each in states] == [
            (0, 6, 2, 3, 0.7),
            (0, 6, 3, 1, 0.1),
        ]
        second.served.update(answers=1, prompt_tokens=4)
        assert metric_values(watch.metrics()) == {
            **dict.fromkeys(("engine/prefix_hits", "engine/prefix_hits_min", "engine/prefix_hits_max"), 0.0),
            **dict.fromkeys(("engine/retractions", "engine/retractions_max"), 0.0),
        }
        pool.leave(second, RuntimeError("gone"))  # type: ignore[arg-type]
        assert watch.metrics() == {}

    run(test, first, second)


def test_limits_follow_each_engine_by_itself() -> None:
    hard, idle = Client(*[EngineLoad(0.95, 0)] * 2), Client(*[EngineLoad(0.1, 0)] * 2)

    async def test(pool: EnginePool, watch: EngineWatch) -> None:
        for client in (hard, idle):
            watch.begin(client)  # type: ignore[arg-type]
            assert pool.limit(client) == FLOOR  # type: ignore[arg-type]
            pool.set_limit(client, 40)  # type: ignore[arg-type]
        held = [asyncio.create_task(_hold(pool)) for _ in range(81)]
        await asyncio.sleep(0)
        assert pool.has_waiting and [pool.running(client) for client in (hard, idle)] == [40, 40]  # type: ignore[arg-type]
        idle.served.update(answers=40, retractions=0)
        await watch.look()
        assert [pool.limit(client) for client in (hard, idle)] == [28, 80]  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert not pool.has_waiting and pool.running(idle) == 41  # type: ignore[arg-type]
        await watch.look()
        assert [pool.limit(client) for client in (hard, idle)] == [28, 80]  # type: ignore[arg-type]
        assert metric_values(watch.metrics())["engine/request_limit"] == 54
        for task in held:
            task.cancel()
        await asyncio.wait(held)

    run(test, hard, idle, follows=True)


def test_a_turnover_counts_once() -> None:
    """The second look finds a low use, but no answer since the turnover at a higher one."""
    client = Client(EngineLoad(0.7, 0), EngineLoad(0.1, 0), EngineLoad(0.1, 0))

    async def test(pool: EnginePool, watch: EngineWatch) -> None:
        watch.begin(client)  # type: ignore[arg-type]
        held = [asyncio.create_task(_hold(pool)) for _ in range(FLOOR + 9)]
        await asyncio.sleep(0)
        limits = []
        for num_answers in (FLOOR, FLOOR - 1, 1):
            client.served.update(answers=num_answers)
            await watch.look()
            limits.append(pool.limit(client))  # type: ignore[arg-type]
        assert limits == [FLOOR, FLOOR, 2 * FLOOR]
        for task in held:
            task.cancel()
        await asyncio.wait(held)

    run(test, client, follows=True)


def test_fixed_limits_stay() -> None:
    client = Client(EngineLoad(0.99, 9))

    async def test(pool: EnginePool, watch: EngineWatch) -> None:
        watch.begin(client)  # type: ignore[arg-type]
        async with pool.slots(6, urgency=Urgency.TRAINING):
            await watch.look()
        assert pool.limit(client) == 6  # type: ignore[arg-type]
        assert "engine/request_limit" not in watch.metrics()

    run(test, client)


async def _hold(pool: EnginePool) -> None:
    async with pool.slots(1, urgency=Urgency.TRAINING):
        await asyncio.Event().wait()


def test_engines_are_asked_while_they_work_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_watch, "POLL_S", 0.0)
    client = Client(*[EngineLoad(0.25, 0)] * 10**5)

    async def test(pool: EnginePool, watch: EngineWatch) -> None:
        async with watch:
            for _ in range(20):
                await asyncio.sleep(0)
            assert not client.asked.is_set()
            async with pool.slots(1, urgency=Urgency.TRAINING):
                await client.asked.wait()
                for _ in range(20):
                    await asyncio.sleep(0)
        assert metric_values(watch.metrics())["engine/kv_use"] == 0.25

    run(test, client)


def test_a_mistake_in_the_watch_is_raised_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_watch, "POLL_S", 0.0)

    async def test(pool: EnginePool, watch: EngineWatch) -> None:
        async with pool.slots(1, urgency=Urgency.TRAINING), watch:
            await pool.membership.members[0].asked.wait()  # type: ignore[attr-defined]
            await asyncio.sleep(0.01)

    with pytest.raises(RuntimeError):
        run(test, Client())


@pytest.mark.parametrize(
    ("reports", "paused", "requests", "looked_at"),
    [
        ((1.0, 1.0, 1.0), False, 1, [True, True]),
        ((None, None, None), False, 1, [False, False]),
        ((1.0, None, 1.0), False, 1, [False, True]),
        ((1.0, 2.0, 3.0), False, 1, []),
        ((1.0, 1.0, 2.0), False, 1, [True]),
        ((1.0, 1.0, 1.0), True, 1, []),
        ((1.0, 1.0, 1.0), False, 0, []),
    ],
)
def test_an_engine_with_requests_and_no_steps_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, reports: tuple[float | None, ...], paused: bool, requests: int, looked_at: list[bool]
) -> None:
    monkeypatch.setattr(engine_watch, "SILENT_S", -1.0)
    client = Client(*[None if report is None else EngineLoad(0.5, 0, told_at=report) for report in reports])
    client.is_paused = paused
    found: list[bool] = []

    async def test(pool: EnginePool, watch: EngineWatch) -> None:
        pool.end_hanging = lambda _, answers, waits: found.append(answers)
        async with pool.slots(requests, urgency=Urgency.TRAINING):
            for _ in reports:
                await watch.look()

    run(test, client)
    # The first look has nothing to compare a report with.
    assert found[-len(looked_at) :] == looked_at if looked_at else found == []


def test_the_time_of_a_step_is_that_of_a_new_report() -> None:
    client = Client(*[EngineLoad(0.5, 0, told_at=told) for told in (1.0, 2.0, 2.0)], None)

    async def test(pool: EnginePool, watch: EngineWatch) -> None:
        found = []
        for _ in range(4):
            await watch.look()
            found.append(client.stepped_s)
            await asyncio.sleep(0.01)
        assert found[0] < found[1] == found[2] == found[3]

    run(test, client)


def test_an_engine_is_not_looked_at_too_soon() -> None:
    client, found = Client(*[EngineLoad(0.5, 0, told_at=1.0)] * 3), list[bool]()

    async def test(pool: EnginePool, watch: EngineWatch) -> None:
        pool.end_hanging = lambda _, answers, waits: found.append(answers)
        async with pool.slots(1, urgency=Urgency.TRAINING):
            for _ in range(3):
                await watch.look()

    run(test, client)
    assert found == []


@pytest.mark.parametrize(
    ("joint", "reports", "ended", "looked_at"),
    [
        (False, (1.0, 1.0, 1.0), 0, [(True, False)] * 2),
        (True, (1.0, 1.0, 1.0), 0, [(True, True)] * 2),
        (False, (None, None, None), 0, [(False, False)] * 2),
        (False, (1.0, 2.0, 3.0), 0, []),
        (False, (1.0, 1.0, 1.0), 1, []),
    ],
)
def test_a_paused_engine_that_answers_no_call_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, joint: bool, reports: tuple[float | None, ...], ended: int, looked_at: list[tuple[bool, bool]]
) -> None:
    """`ended` calls between two looks are progress; a look without requests is no part of the metrics."""
    monkeypatch.setattr(engine_watch, "SILENT_S", -1.0)
    client = Client(*[None if report is None else EngineLoad(0.5, 0, told_at=report) for report in reports])
    client.is_paused, found = True, list[tuple[bool, bool]]()
    client.pending[joint] = 1

    async def test(pool: EnginePool, watch: EngineWatch) -> None:
        pool.end_hanging = lambda _, answers, waits: found.append((answers, waits))
        for _ in reports:
            await watch.look()
            client.num_ended += ended
        assert watch.metrics() == {}

    run(test, client)
    assert found[-len(looked_at) :] == looked_at if looked_at else found == []


@pytest.mark.parametrize("joint", [False, True])
def test_engines_are_asked_while_calls_of_a_sync_wait(monkeypatch: pytest.MonkeyPatch, joint: bool) -> None:
    monkeypatch.setattr(engine_watch, "POLL_S", 0.0)
    client = Client(*[EngineLoad(0.25, 0)] * 10**5)
    client.pending[joint] = 1

    async def test(pool: EnginePool, watch: EngineWatch) -> None:
        async with watch:
            await asyncio.wait_for(client.asked.wait(), 10)

    run(test, client)


def test_the_time_without_work_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_watch, "POLL_S", 0.0)
    client, found, later = Client(*[EngineLoad(0.25, 0, told_at=1.0)] * 10**5), list[bool](), [0.0]

    async def test(pool: EnginePool, watch: EngineWatch) -> None:
        pool.end_hanging = lambda _, answers, waits: found.append(answers)
        loop = asyncio.get_running_loop()
        own = loop.time
        monkeypatch.setattr(loop, "time", lambda: own() + later[0])
        async with watch:
            for _ in range(2):
                client.asked.clear()
                async with pool.slots(1, urgency=Urgency.TRAINING):
                    await client.asked.wait()
                    for _ in range(20):
                        await asyncio.sleep(0)
                for pause_s in (0, 3600):
                    later[0] += pause_s
                    for _ in range(20):
                        await asyncio.sleep(0)

    run(test, client)
    assert found == []
