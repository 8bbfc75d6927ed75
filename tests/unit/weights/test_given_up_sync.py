"""What becomes of engines in a sync whose ranks are gone, or send no more."""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sync_parts import BEGIN, END, RESUME, SILENT, UPDATES, Ranks, Run, done, parts_of
from torch.distributed import Store

from megatron_rl.engines.client import EngineClient
from megatron_rl.errors import EngineError
from megatron_rl.system.rendezvous import join_store, serve_store
from megatron_rl.weights import broadcast
from megatron_rl.weights.broadcast import announcement
from megatron_rl.weights.deltas import END as END_OF_MESSAGES
from megatron_rl.weights.transport import Sent, awaited

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


class Announcing(Ranks):
    """Ranks that send deltas: rank 0 serves the store of their announcements, and sends nothing more once an engine has died."""

    store: Store | None = None
    num_syncs = 0

    def begin_open_sender(self, plan: Any) -> list[Future[Any]]:
        def serve() -> None:
            # The first of two clients is the transport.
            self.store = serve_store(plan.address, port=plan.port, num_clients=2, timeout_s=30.0)

        self.plans.append(plan)
        return [self._thread.submit(serve), done()]

    def begin_close_sender(self) -> list[Future[Any]]:
        self.store = None
        return [done(), done()]

    def begin_send(self, *, version: int, checked: bool) -> list[Future[Any]]:
        assert self.store is not None, "opened before"
        self.num_syncs += 1
        self.store.set(announcement(0), "0")
        if self.num_syncs > 1:
            self.store.set(announcement(1), "1")
            self.store.set(announcement(2), END_OF_MESSAGES)
            return [done(Sent(0.0, 0.0, {})), done(Sent(0.0, 0.0, {}))]

        def breaks() -> None:
            time.sleep(0.1)
            raise EngineError("could not be sent to all engines")

        return [self._thread.submit(breaks), done(Sent(0.0, 0.0, {}))]


def test_an_engine_that_waits_for_a_delta_ends_its_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one dies in the first message: no more is announced, and an engine refuses a second update during the first."""
    monkeypatch.setattr("megatron_rl.weights.sync.DEATH_S", 0.1)
    update, ended = UPDATES["broadcast"], list[EngineClient]()
    run = Run(tmp_path, {"fails_at": update}, {})
    run.ranks = Announcing(run.log)

    async def work() -> None:
        sync = run.open("broadcast", deltas=True)
        # What engines join is a stand-in, too, and the transport alone is a client of the store.
        monkeypatch.setattr(broadcast, "join_store", lambda address, **place: join_store(address, **{**place, "num_clients": 2}))
        run.servers[0].dead = lambda: run.pool.leave(run.clients[0], EngineError("killed by signal 9"))
        run.pool.end_failed = lambda client, error: bool(ended.append(client))
        await asyncio.wait_for(sync.run(version=4), 60)
        assert parts_of(run.servers[1], "broadcast") == [SILENT, BEGIN, update, END, SILENT, BEGIN, update, update, END, RESUME]
        assert run.clients[1] not in ended and run.pool.membership.members == (run.clients[1],)

    asyncio.run(work())


def test_a_store_that_answers_nothing_leaves_the_loop_to_others() -> None:
    """As that of a stopped rank 0."""
    answers = threading.Event()

    def check(keys: list[str]) -> bool:
        assert answers.wait(5), "nothing else had a turn"
        return True

    store = SimpleNamespace(check=check, get=lambda key: key.encode())

    async def work() -> str:
        waiting = asyncio.create_task(awaited(store, "key"))  # type: ignore[arg-type]
        await asyncio.sleep(0.05)
        assert not waiting.done()
        answers.set()
        return await waiting

    assert asyncio.run(work()) == "key"
