"""Connections of a sync that fails: both ends are closed, and nothing is left of it."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from sync_parts import END, SILENT, UPDATES, Run, dies

from megatron_rl.engines import engine_pool
from megatron_rl.errors import EngineError

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
