"""What becomes of engines in a sync whose ranks are gone."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from sync_parts import END, Run

CONNECT, DISCONNECT = "/init_weights_update_group", "/destroy_weights_update_group"


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Run]:
    return lambda *servers: Run(tmp_path, *servers)


def test_engines_leave_the_connection_of_ranks_that_are_gone(make_run: Callable[..., Run]) -> None:
    """Also one without an update to end: another sync begins with open ends otherwise."""
    run = make_run({}, {"fails_at": END, "once": True})

    async def work() -> None:
        sync = run.open("broadcast")
        await sync.connect()
        await sync.give_up(run.pool)
        for server in run.servers:
            assert [path for path, _ in server.calls] == [CONNECT, END, DISCONNECT]
        await sync.give_up(run.pool)
        assert len(run.servers[0].calls) == 3, "nothing is left to be closed"

    asyncio.run(work())


def test_an_engine_that_hangs_is_ended_where_ranks_are_gone(make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_rl.weights.sync.GIVE_UP_S", 0.05)
    run = make_run({}, {"fails_at": END, "hangs": True})

    async def work() -> None:
        sync, ended = run.open("broadcast"), list[str]()
        run.pool.end_failed = lambda client, error: bool(ended.append(client.address.url)) or True
        monkeypatch.setattr(run.pool, "loses_one_of", lambda clients: asyncio.sleep(0))
        await sync.connect()
        await asyncio.wait_for(sync.give_up(run.pool), 10)
        assert ended == [run.clients[1].address.url]

    asyncio.run(work())
