"""Connections of a sync that fails: both ends are closed, and nothing is left of it."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from sync_parts import END, SILENT, UPDATES, Run, dies, done

from megatron_rl.engines import engine_pool
from megatron_rl.engines.client import EngineClient
from megatron_rl.errors import DeadlineError, EngineError

CONNECT, DISCONNECT = "/init_weights_update_group", "/destroy_weights_update_group"


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    # In stand-ins a death follows after 0.02 s.
    monkeypatch.setattr("megatron_rl.weights.sync.DEATH_S", 0.1)
    return lambda *servers: Run(tmp_path, *servers)


def test_both_ends_are_closed_when_nothing_goes_on_any_more(make_run: Callable[..., Run]) -> None:
    """What still runs would otherwise reach into the next attempt, or wait for who has left."""
    update = UPDATES["broadcast"]
    run = make_run({"fails_at": SILENT}, {})

    async def work() -> None:
        sync = run.open("broadcast")
        dies(run, 0)
        run.ranks.send_s, run.servers[1].update_s = 0.15, 0.05
        await sync.run(version=1)
        told = [path for path, _ in run.servers[1].calls if path in (CONNECT, DISCONNECT, update, END)]
        assert told == [CONNECT, update, update, END, DISCONNECT, CONNECT, update, update, END]
        assert run.log.index(("sent",)) < run.log.index(("closed",))

    asyncio.run(work())


def test_what_fails_while_every_engine_lives_ends_the_sync(make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_pool, "DEATH_S", 0.05)
    run = make_run({}, {"fails_at": UPDATES["disk"]})
    with pytest.raises(EngineError, match=r"cannot be reached for /update_weights_from_disk"):
        run.sync("disk", version=1)
    assert len(run.ranks.plans) == 1
    assert list((run.directory / "weights").iterdir()) == [], "nothing is left of weights that nobody reads any more"


def test_an_engine_that_dies_when_it_is_let_go_is_passed_over(make_run: Callable[..., Run]) -> None:
    run = make_run({}, {"fails_at": DISCONNECT}, {})

    async def work() -> None:
        sync = run.open("broadcast")
        dies(run, 1)
        await sync.run(version=1)
        run.pool.leave(run.clients[0], EngineError("gone"))
        await sync.run(version=2)
        assert [server.served for server in run.servers] == [1, 1, 2]
        assert len(run.ranks.plans) == 2

    asyncio.run(work())


def test_engines_that_are_left_join_again_when_one_dies_as_all_join(make_run: Callable[..., Run]) -> None:
    """One returns and gets a new group, and another one dies in it."""
    run = make_run({"fails_at": CONNECT, "fails_after": 1}, {}, {})

    async def work() -> None:
        sync = run.open("broadcast", num_members=2)
        dies(run, 0)
        await sync.run(version=1)
        run.pool.join(run.clients[2])
        await sync.run(version=2)
        assert [server.served for server in run.servers] == [1, 2, 2] and len(run.ranks.plans) == 3

    asyncio.run(work())


def test_ranks_that_wait_for_an_engine_that_died_are_late(make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """Which lets the run start them again: nothing ends their wait."""
    run, waiting = make_run({"fails_at": CONNECT}, {}), Future[None]()
    monkeypatch.setattr(run.ranks, "begin_open_sender", lambda plan: [waiting, done()])

    async def work() -> None:
        sync = run.open("broadcast")
        dies(run, 0)
        with pytest.raises(DeadlineError, match="ended for ranks that wait for an engine that has left: cannot be reached"):
            await sync.run(version=1)

    asyncio.run(work())


def ending(run: Run, ended: list[EngineClient]) -> Callable[[EngineClient, Exception], bool]:
    """An `end_failed` after which the engine leaves."""

    def end_failed(client: EngineClient, error: Exception) -> bool:
        ended.append(client)
        asyncio.get_running_loop().call_later(0.02, run.pool.leave, client, error)
        return True

    return end_failed


def test_who_fails_by_anothers_death_is_not_ended(make_run: Callable[..., Run]) -> None:
    """The scheduler of engine 1 is killed: the connection of engine 0 breaks, and only then the server of 1 ends."""
    update, ended = UPDATES["broadcast"], list[EngineClient]()
    run = make_run({"fails_at": update, "once": True}, {"fails_at": update, "hangs": True})

    async def work() -> None:
        sync = run.open("broadcast")
        run.pool.end_failed = ending(run, ended)
        run.servers[0].dead = lambda: run.pool.leave(run.clients[1], EngineError("killed by signal 9"))
        await sync.run(version=1)
        assert ended == [] and run.servers[0].served == 1

    asyncio.run(work())


@pytest.mark.parametrize("answer", [None, [], {"model_path": "x"}, {"weight_version": None}, {"weight_version": "x"}])
def test_an_engine_that_cannot_tell_its_version_is_ended(make_run: Callable[..., Run], answer: Any) -> None:
    run, ended = make_run({}, {}), list[EngineClient]()

    async def work() -> None:
        sync = run.open("disk")
        run.pool.end_failed = ending(run, ended)
        call = run.servers[0].call

        async def tell(method: str, path: str, body: Any = None, **words: Any) -> Any:
            return answer if path == "/model_info" else await call(method, path, body, **words)

        run.clients[0]._call = tell  # type: ignore[method-assign]
        await sync.run(version=1)
        assert ended == [run.clients[0]] and run.servers[1].served == 1

    asyncio.run(work())


def test_an_engine_that_reads_for_ever_is_ended_alone(make_run: Callable[..., Run]) -> None:
    run, ended = make_run({}, {}), list[EngineClient]()

    async def work() -> None:
        sync = run.open("disk", timeout_s=4.0)
        run.pool.end_failed = ending(run, ended)
        call = run.servers[0].call

        async def read(method: str, path: str, body: Any = None, *, timeout_s: float, attempts: int = 1) -> Any:
            if path == UPDATES["disk"]:
                await asyncio.sleep(timeout_s)
                raise DeadlineError("did not answer")
            return await call(method, path, body, timeout_s=timeout_s)

        run.clients[0]._call = read  # type: ignore[method-assign]
        await sync.run(version=1)
        assert ended == [run.clients[0]] and run.servers[1].served == 1

    asyncio.run(work())
