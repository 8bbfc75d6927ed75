"""How often and how fast a dead engine is started again, with actors that note their calls."""

import asyncio
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from megatron_rl.config.load import load_settings
from megatron_rl.errors import DeadlineError, EngineError
from megatron_rl.runtime import engines
from megatron_rl.runtime.engines import EngineGroup
from megatron_rl.runtime.watchdog import Watchdog

PATHS = ("run.directory=run", "model.path=model", "data.train=train.jsonl")


class Actors:
    """Actors of engines: what was started and killed, and how long was waited before; a start gives its number or raises `error`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started, self.killed, self.waits = list[int](), list[int](), list[float]()
        self.now_s, self.error = 1000.0, None
        monkeypatch.setattr(engines, "EngineWorker", SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self.make)))
        monkeypatch.setattr(engines.ray, "kill", lambda worker: self.killed.append(worker.number))
        monkeypatch.setattr(engines, "time", SimpleNamespace(monotonic=lambda: self.now_s))

        async def sleep(delay_s: float) -> None:
            self.waits.append(delay_s)

        monkeypatch.setattr(engines.asyncio, "sleep", sleep)
        monkeypatch.setattr(engines, "engine_arguments", lambda *_, **__: {})

    def make(self, *_: Any, **__: Any) -> Any:
        number = len(self.started)
        self.started.append(number)

        def start(timeout_s: float) -> Any:
            future: Future[Any] = Future()
            future.set_result(number) if self.error is None else future.set_exception(self.error)
            return SimpleNamespace(future=lambda: future)

        watch: Future[None] = Future()
        return SimpleNamespace(
            number=number,
            dies=watch.set_exception,
            start=SimpleNamespace(remote=start),
            watch=SimpleNamespace(remote=lambda: SimpleNamespace(future=lambda: watch)),
        )


def make_group(*overrides: str) -> EngineGroup:
    placement = SimpleNamespace(needs=SimpleNamespace(colocated=False, slots_per_part=1))
    reservation = SimpleNamespace(device_kind="cpu", placement=placement, engine_options=lambda number: [{}])
    settings = load_settings(None, [*PATHS, "rollout.num_engines=2", *overrides])
    model = SimpleNamespace(path=Path("model"), has_weights=True)
    watchdog = SimpleNamespace(watch=lambda name, future, goes_on: None)
    return EngineGroup(settings, model=model, reservation=reservation, watchdog=watchdog)  # type: ignore[arg-type]


def test_starts_of_an_hour_are_counted_and_come_later_and_later(monkeypatch: pytest.MonkeyPatch) -> None:
    actors = Actors(monkeypatch)
    group = make_group("rollout.engine_restarts=3")

    async def work() -> None:
        for again in range(3):
            assert group.may_restart(1) and await group.restart(1) == 2 + again
            actors.now_s += 60
        assert not group.may_restart(1) and group.may_restart(0), "each engine has its own"
        assert actors.killed == [1, 2, 3] and actors.waits == [0, 1, 3]
        actors.now_s += 3600 - 179
        assert group.may_restart(1) and await group.restart(1) == 5 and actors.waits[-1] == 3
        actors.error = EngineError("does not start")
        with pytest.raises(EngineError, match="does not start"):
            await group.restart(0)
        assert actors.killed[-1] == 0

    asyncio.run(work())


def test_an_engine_that_does_not_start_again_in_time_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    Actors(monkeypatch)
    group, silent = make_group("model.deadline_s=1"), SimpleNamespace(future=Future)
    made = SimpleNamespace(number=9, start=SimpleNamespace(remote=lambda timeout_s: silent))
    group._make_workers[1] = lambda: made
    monkeypatch.setattr(engines, "ENGINES_STOP_S", -0.95)
    with pytest.raises(DeadlineError, match=r"it did not start within 0 s; see model\.deadline_s"):
        asyncio.run(group.restart(1))


@pytest.mark.parametrize("override", ["rollout.engine_restarts=0", "runtime.colocate=true"])
def test_engines_that_stay_away(monkeypatch: pytest.MonkeyPatch, override: str) -> None:
    Actors(monkeypatch)
    assert not make_group(override).may_restart(0)


def test_engines_that_serve_go_on_with_new_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dead ones are left to `EngineReturns`, one that was lost for good also an hour later."""
    actors, group = Actors(monkeypatch), make_group("rollout.num_engines=4")
    assert [start.result() for start in group.begin_start()] == [0, 1, 2, 3]
    for number in range(4):
        group.watch(number, goes_on=lambda error: True)
    group._workers[1].dies(EngineError("dead"))
    actors.error = EngineError("does not start")
    for number in (2, 3):
        with pytest.raises(EngineError):
            asyncio.run(group.restart(number))
    actors.error = None
    group.lost.add(3)
    actors.now_s += 3601
    assert not group.may_restart(3)
    assert [start.result() for start in group.begin_start()] == [0, None, None, None]
    assert (actors.started, actors.killed) == ([0, 1, 2, 3, 4, 5], [2, 3])
    # The watch of the engine that goes on is the same call: another one would wait behind it for ever.
    first = group._watches[0]
    group.watch(0, goes_on=lambda error: True)
    assert group._watches[0] is first
    asyncio.run(group.restart(1))
    group.watch(1, goes_on=lambda error: True)
    assert not group._watches[1].done(), "another engine is watched by another call"


def test_an_engine_that_is_given_up_ends_every_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    Actors(monkeypatch)
    with Watchdog() as watchdog:
        group = make_group()
        group._watchdog = watchdog
        group.give_up(1, EngineError("killed by signal 9"))
        for _ in range(2):
            with pytest.raises(EngineError, match="killed by signal 9"):
                watchdog.wait(Future[None](), name="work", owner="a rank", timeout_s=10)
        watchdog.forget()
        group._stopped = True
        group.give_up(1, EngineError("killed by signal 9"))
        finished: Future[str] = Future()
        finished.set_result("done")
        assert watchdog.wait(finished, name="work", owner="a rank", timeout_s=10) == "done"


def test_all_engines_stop_within_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them is dead and another one does not answer; their places are free for others."""
    actors, group, asked = Actors(monkeypatch), make_group(), list[Any]()
    group._watchdog = SimpleNamespace(forget=lambda: None)  # type: ignore[assignment]
    for worker in group._workers:
        worker.stop = SimpleNamespace(remote=lambda number=worker.number: number)

    def wait(refs: list[int], **how: float) -> tuple[list[int], list[int]]:
        asked.append((refs, how))
        return refs[:1], refs[1:]

    def get(ref: int) -> None:
        raise RayActorError

    monkeypatch.setattr(engines.ray, "wait", wait)
    monkeypatch.setattr(engines.ray, "get", get)
    group.stop()
    assert asked == [([0, 1], {"num_returns": 2, "timeout": engines.ENGINES_STOP_S})] and actors.killed == [0, 1]
