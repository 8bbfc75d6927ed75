"""What an engine is told in which order, and when it may say that it serves new weights. The engines' HTTP and the ranks are stand-ins."""

import asyncio
import base64
import contextlib
import json
import pickle
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, get_args

import pytest
from sync_parts import BEGIN, BUCKETS, END, RESUME, SILENT, SYNC_TIMEOUT_S, UPDATES, Run, dies, done, parts_of, whole

from megatron_rl.config.settings import WeightSettings
from megatron_rl.engines import engine_pool
from megatron_rl.engines.client import EngineClient
from megatron_rl.engines.engine_pool import EnginePool, Urgency
from megatron_rl.engines.received_weights import checksum
from megatron_rl.engines.server_args import ORDER_LOADER
from megatron_rl.errors import DeadlineError, EngineError, ParityError
from megatron_rl.observe.metrics import metric_values
from megatron_rl.weights.sync import TRANSPORTS

COMPARE = UPDATES["ipc"]


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    # In stand-ins a death follows after 0.02 s.
    monkeypatch.setattr("megatron_rl.weights.sync.DEATH_S", 0.1)
    return lambda *servers: Run(tmp_path, *servers)


def test_every_transport_of_the_settings_is_in_the_table() -> None:
    named, unset = get_args(WeightSettings.model_fields["transport"].annotation)
    assert tuple(TRANSPORTS) == get_args(named) and unset is type(None)


def test_every_rank_of_every_engine_has_a_place_in_the_group(make_run: Callable[..., Run]) -> None:
    run = make_run({}, {})
    asyncio.run(run.open("broadcast", ranks_per_engine=2).connect())
    joined = [server.calls[0] for server in run.servers]
    assert [path for path, _ in joined] == ["/init_weights_update_group"] * 2
    assert [body.pop("rank_offset") for _, body in joined] == [1, 3]
    (plan,) = run.ranks.plans
    expected = {"master_address": "10.0.0.1", "master_port": 1234, "world_size": 5, "group_name": plan.name, "backend": "gloo"}
    assert all(body == expected for _, body in joined)
    assert (plan.address, plan.port, plan.world_size, plan.backend) == ("10.0.0.1", 1234, 5, "gloo")
    assert plan.buckets == BUCKETS and plan.timeout_s == SYNC_TIMEOUT_S


def test_the_version_comes_with_the_last_bucket(make_run: Callable[..., Run]) -> None:
    """A request between two buckets would otherwise be answered by half of the new weights, as the new version."""
    run = make_run({})
    metrics = run.sync("broadcast", version=3)
    (server,) = run.servers
    update = "/update_weights_from_distributed"
    assert [path for (path,) in run.log if path != "sent"] == [
        "/pause_generation", "/begin_weight_update", update, update, "/end_weight_update", "/continue_generation", "/model_info",
    ]  # fmt: skip
    received = [body for path, body in server.calls if path == update]
    assert [body["names"] for body in received] == [["w0", "w1"], ["w2"]]
    assert [body["shapes"] for body in received] == [[[2, 3], [2, 3]], [[2, 3]]]
    assert [(body.get("weight_version"), body["flush_cache"]) for body in received] == [(None, False), ("3", True)]
    assert dict(server.calls)["/pause_generation"] == {"mode": "retract"}
    assert counts(metrics) == {"weights/version": 3, "weights/bytes": 72, "engine/compared_weights": 0}


def counts(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("time/")}


@pytest.mark.parametrize("name", TRANSPORTS)
def test_seconds_of_a_sync_are_those_of_its_parts(make_run: Callable[..., Run], name: str) -> None:
    """Of the slowest engine and rank, each part here of another length; the weights of one tensor take `gather_s`."""
    run = make_run({}, {})
    run.servers[0].lasts_s = {SILENT: 0.3, RESUME: 0.2}
    run.servers[1].update_s, run.ranks.gather_s = 0.05, 0.02
    metrics = run.sync(name, version=1)
    least = {"drain": 0.3, "send" if name == "disk" else "gather": 0.06, "apply": 0.05, "resume": 0.2}
    assert {part: value for part, value in least.items() if metrics[f"time/sync_{part}"] < value} == {}
    assert {part for part in ("drain", "gather", "send", "apply", "resume") if metrics[f"time/sync_{part}"] < 0} == set()


@pytest.mark.parametrize("name", TRANSPORTS)
def test_engines_compare_checksums_when_they_are_due(make_run: Callable[..., Run], name: str) -> None:
    """At the first sync of a connection and by the interval: before any weights, and behind all while nothing is generated."""
    run = make_run({}, {})
    # The ranks of this test are no members of a group that broadcasts.
    expected = {} if name == "broadcast" else {key: checksum(tensor) for key, tensor in run.ranks.weights()}
    num_sent = len(expected)

    async def work() -> None:
        sync = run.open(name, check_interval=3)
        compared = [metric_values(await sync.run(version=version))["engine/compared_weights"] for version in (1, 2, 3, 4)]
        assert compared == [num_sent, 0, num_sent, 0]
        run.pool.leave(run.clients[0], EngineError("gone"))
        assert metric_values(await sync.run(version=5))["engine/compared_weights"] == num_sent

    asyncio.run(work())
    calls = [(path, body) for path, body in run.servers[1].calls if path in (SILENT, BEGIN, UPDATES[name], COMPARE, END, RESUME)]
    syncs = [[path if (body or {}).get("load_format") != ORDER_LOADER else "compare" for path, body in each] for each in split(calls)]
    update = UPDATES[name]
    middle = [update] * (1 if name == "disk" else 2)
    checked = [SILENT, BEGIN, "compare", *middle, "compare", END, RESUME]
    assert syncs == [checked, whole(name), checked, whole(name), checked]
    orders = [body["serialized_named_tensors"] for _, body in calls if (body or {}).get("load_format") == ORDER_LOADER]
    texts = [pickle.loads(base64.b64decode(each))[0][0] for (each,) in orders]
    assert [json.loads(text)["step"] for text in texts] == ["note", "end"] * 3
    assert [json.loads(text)["expected"] for text in texts[1::2]] == [expected] * 3


def test_an_engine_with_weights_from_elsewhere_gets_all(make_run: Callable[..., Run]) -> None:
    """Deltas are checked at the second sync of a connection, too: what they leave against what all weights leave."""
    run = make_run({})

    async def work() -> None:
        sync = run.open("disk", check_interval=10, deltas=True)
        for version in range(1, 5):
            await sync.run(version=version)
        await run.clients[0].load_weights(Path("elsewhere"), version=4)
        await sync.run(version=5)

    asyncio.run(work())
    read = [Path(body["model_path"]).name for path, body in run.servers[0].calls if path == UPDATES["disk"]]
    assert read == ["weights", "weights", "again", "weights", "weights", "elsewhere", "weights"]
    orders = [body["serialized_named_tensors"][0] for _, body in run.servers[0].calls if (body or {}).get("load_format") == ORDER_LOADER]
    steps = [json.loads(pickle.loads(base64.b64decode(order))[0][0])["step"] for order in orders]
    assert steps == ["note", "end", "note", "digest", "end", "begin", "end", "begin", "end", "note", "end"]
    assert len(run.ranks.plans) == 2 and run.ranks.plans[0].token != run.ranks.plans[1].token


def split(calls: list[tuple[str, Any]]) -> list[list[tuple[str, Any]]]:
    """One list per sync."""
    starts = [index for index, (path, _) in enumerate(calls) if path == SILENT]
    return [calls[start:end] for start, end in zip(starts, [*starts[1:], len(calls)], strict=True)]


@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_rank_that_fails_a_checked_sync_is_not_the_engines_fault(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(engine_pool, "DEATH_S", 0.05)
    run = make_run({})

    async def work() -> list[EngineClient]:
        sync, ended = run.open(name, check_interval=1), list[EngineClient]()
        run.pool.end_failed = lambda client, error: bool(ended.append(client))
        begin_send = run.ranks.begin_send

        def fails(*, version: int, checked: bool) -> list[Future[Any]]:
            failed: Future[Any] = Future()
            sent = begin_send(version=version, checked=checked)[0]
            sent.add_done_callback(lambda _: failed.set_exception(RuntimeError("rank 1")))
            return [sent, failed]

        run.ranks.begin_send = fails  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="rank 1"):
            await sync.run(version=1)
        return ended

    assert asyncio.run(work()) == []


def test_shared_memory_is_handed_over_as_buckets_are_broadcast(make_run: Callable[..., Run]) -> None:
    run = make_run({})
    metrics = run.sync("ipc", version=3)
    (server,) = run.servers
    update = "/update_weights_from_tensor"
    assert [path for (path,) in run.log if path != "sent"] == [
        "/pause_generation", "/begin_weight_update", update, update, "/end_weight_update", "/continue_generation", "/model_info",
    ]  # fmt: skip
    received = [body for path, body in server.calls if path == update]
    assert [(body.get("weight_version"), body["flush_cache"]) for body in received] == [(None, False), ("3", True)]
    assert all(body["load_format"] == "flattened_bucket" and len(body["serialized_named_tensors"]) == 1 for body in received)
    assert counts(metrics) == {"weights/version": 3, "weights/bytes": 72, "engine/compared_weights": 0}


def test_weights_in_a_directory_are_complete_and_then_removed(make_run: Callable[..., Run], tmp_path: Path) -> None:
    run = make_run({})
    metrics = run.sync("disk", version=2)
    assert [path for (path,) in run.log] == [
        "sent", "/pause_generation", "/update_weights_from_disk", "/continue_generation", "/model_info",
    ]  # fmt: skip
    assert dict(run.servers[0].calls)["/update_weights_from_disk"] == {
        "model_path": str(tmp_path / "weights" / "version-000002"),
        # Else that of the server's start, which makes weights up where it had none.
        "load_format": "auto",
        "flush_cache": True,
        "weight_version": "2",
    }
    assert counts(metrics) == {"weights/version": 2, "weights/bytes": 72, "engine/compared_weights": 0}
    assert list((tmp_path / "weights").iterdir()) == []


@pytest.mark.parametrize("name", TRANSPORTS)
def test_one_engine_that_serves_other_weights_stops_the_run(make_run: Callable[..., Run], name: str) -> None:
    with pytest.raises(EngineError, match=r"127\.0\.1\.1 serves weights 0 after a sync, needs 1"):
        make_run({}, {"deaf": True}).sync(name, version=1)


@pytest.mark.parametrize("name", TRANSPORTS)
def test_every_call_of_a_sync_gets_the_time_of_a_sync(make_run: Callable[..., Run], name: str) -> None:
    """An engine that reads a large model over a slow network takes more than the minute that other control calls have."""
    run = make_run({})
    run.sync(name, version=1)
    # What reads on its own leaves time for a sync without it.
    assert run.servers[0].timeouts == {SYNC_TIMEOUT_S, SYNC_TIMEOUT_S / (2 if name == "disk" else 1)}


@pytest.mark.parametrize("name", TRANSPORTS)
def test_the_deadline_names_the_engine_that_is_missing(make_run: Callable[..., Run], name: str) -> None:
    run = make_run({}, {"fails_at": SILENT, "hangs": True})
    with pytest.raises(
        DeadlineError, match=r"weight sync to version 1 did not finish within 0 s, still waiting for: .*engine at http://127\.0\.1\.1;"
    ):
        run.sync(name, version=1, timeout_s=0.3)


def test_a_rank_that_fails_ends_the_sync_at_once(make_run: Callable[..., Run]) -> None:
    """The engines would otherwise be waited for until the deadline: they receive what nobody sends."""
    run = make_run({"fails_at": SILENT, "hangs": True})
    failed: Future[None] = Future()
    failed.set_exception(ZeroDivisionError("rank 1"))
    run.ranks.begin_send = lambda *, version, checked: [done(), failed]  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError, match="rank 1"):
        run.sync("broadcast", version=1)


CONNECT, DISCONNECT = "/init_weights_update_group", "/destroy_weights_update_group"


async def can_generate(pool: EnginePool) -> set[str]:
    """The engines that get requests now, one at a time each."""
    got = set[str]()
    async with AsyncExitStack() as stack:
        for _ in pool.membership.members:
            with contextlib.suppress(asyncio.TimeoutError):
                client = await asyncio.wait_for(stack.enter_async_context(pool.slots(1, urgency=Urgency.TRAINING)), 0.01)
                got.add(client.address.url)
    return got


def test_an_engine_gets_requests_once_it_is_proved(make_run: Callable[..., Run]) -> None:
    run = make_run({}, {})

    async def work() -> None:
        sync = run.open("broadcast", num_members=1)
        run.pool.join(run.clients[1])
        seen: list[bool] = []

        async def prove(clients: Sequence[EngineClient]) -> None:
            seen.append(run.pool.has_newcomers)
            assert list(clients) == run.clients and [server.served for server in run.servers] == [len(seen)] * 2
            if len(seen) == 1:
                raise ParityError("other log-probs")

        with pytest.raises(ParityError):
            await sync.run(version=1, prove=prove)
        assert await can_generate(run.pool) == {run.clients[0].address.url}
        await sync.run(version=2, prove=prove)
        assert seen == [True, True] and not run.pool.has_newcomers

    asyncio.run(work())


def test_a_sync_after_a_change_connects_the_present_members(make_run: Callable[..., Run]) -> None:
    run = make_run({}, {}, {})

    def connections(number: int) -> list[tuple[str, str, int | None, int | None]]:
        server = run.servers[number]
        parts = [(path, body) for path, body in server.calls if path in (CONNECT, DISCONNECT)]
        server.calls.clear()
        return [(path, body["group_name"], body.get("rank_offset"), body.get("world_size")) for path, body in parts]

    async def work() -> None:
        sync = run.open("broadcast", num_members=2)
        await sync.run(version=1)
        await sync.run(version=2)
        (first,) = run.ranks.plans
        assert connections(0) == [(CONNECT, first.name, 1, 3)] and connections(1) == [(CONNECT, first.name, 2, 3)]

        run.pool.leave(run.clients[0], EngineError("gone"))
        await sync.run(version=3)
        second = run.ranks.plans[-1]
        assert second.name != first.name
        assert run.servers[0].calls == [] and [server.served for server in run.servers] == [2, 3, 0]
        assert connections(1) == [(DISCONNECT, first.name, None, None), (CONNECT, second.name, 1, 2)]

        run.pool.join(run.clients[2])
        await sync.run(version=4)
        third = run.ranks.plans[-1]
        assert connections(1) == [(DISCONNECT, second.name, None, None), (CONNECT, third.name, 1, 3)]
        assert connections(2) == [(CONNECT, third.name, 2, 3)]
        assert [server.served for server in run.servers] == [2, 4, 4] and len(run.ranks.plans) == 3
        assert run.log.count(("closed",)) == 2

    asyncio.run(work())


@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_joining_engine_generates_after_its_first_sync(make_run: Callable[..., Run], name: str) -> None:
    run = make_run({}, {}, {})

    async def work() -> None:
        sync = run.open(name, num_members=1)
        await sync.run(version=1)
        run.pool.join(run.clients[1])
        assert await can_generate(run.pool) == {"http://127.0.1.0"}
        syncing = asyncio.create_task(sync.run(version=2))
        while not run.servers[1].calls:
            await asyncio.sleep(0)
        # One that comes while the others are synced has not got these weights.
        run.pool.join(run.clients[2])
        await syncing
        assert [server.served for server in run.servers] == [2, 2, 0]
        assert await can_generate(run.pool) == {"http://127.0.1.0", "http://127.0.1.1"}
        await sync.run(version=3)
        assert await can_generate(run.pool) == {f"http://127.0.1.{number}" for number in range(3)}

    asyncio.run(work())


@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_joined_engine_with_other_weights_gets_no_requests(make_run: Callable[..., Run], name: str) -> None:
    run = make_run({}, {"deaf": True})

    async def work() -> None:
        sync = run.open(name, num_members=1)
        run.pool.join(run.clients[1])
        with pytest.raises(EngineError, match=r"127\.0\.1\.1 serves weights 0 after a sync, needs 1"):
            await sync.run(version=1)
        assert await can_generate(run.pool) == {"http://127.0.1.0"}

    asyncio.run(work())


@pytest.mark.parametrize("name", TRANSPORTS)
def test_when_the_last_engine_dies_a_sync_says_so(make_run: Callable[..., Run], name: str) -> None:
    run = make_run({"fails_at": SILENT}, {})

    async def work() -> None:
        sync = run.open(name)
        dies(run, 0)
        await sync.connect()
        run.pool.leave(run.clients[1], EngineError("gone"))
        await sync.run(version=1)

    with pytest.raises(EngineError, match="no engine is left that weights could be sent to"):
        asyncio.run(work())


@pytest.mark.parametrize("returns", [True, False])
def test_a_sync_waits_for_the_only_engine_to_return(make_run: Callable[..., Run], returns: bool) -> None:
    run = make_run({}, {})

    async def work() -> None:
        sync = run.open("broadcast", num_members=1)
        await sync.run(version=1)
        with run.pool.returning():
            run.pool.leave(run.clients[0], EngineError("gone"))
            syncing = asyncio.create_task(sync.run(version=2))
            await asyncio.sleep(0.15)
            assert not syncing.done()
            if returns:
                run.pool.join(run.clients[1])
        await syncing
        assert [server.served for server in run.servers] == [1, 2]
        assert await can_generate(run.pool) == {"http://127.0.1.1"}

    with contextlib.nullcontext() if returns else pytest.raises(EngineError, match="no engine is left"):
        asyncio.run(work())


@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_rank_that_dies_in_a_sync_ends_no_engine(make_run: Callable[..., Run], name: str) -> None:
    """What an engine raises comes first, as it does with a connection that breaks."""
    run, ended = make_run({}, {"fails_at": UPDATES[name]}), list[EngineClient]()
    run.servers[1].dead = lambda: setattr(run.ranks, "has_died", True)

    async def work() -> None:
        sync = run.open(name)
        run.pool.end_failed = lambda client, error: bool(ended.append(client))
        with pytest.raises(EngineError, match="cannot be reached"):
            await sync.run(version=1)
        assert ended == [] and len(run.pool.membership.members) == 2

    asyncio.run(work())


@pytest.mark.parametrize("name", TRANSPORTS)
@pytest.mark.parametrize("fault", [{"fails_at": SILENT}, {"deaf": True}], ids=["fails", "keeps its weights"])
def test_an_engine_that_fails_a_sync_is_ended(make_run: Callable[..., Run], name: str, fault: dict[str, Any]) -> None:
    run = make_run({}, fault)
    ended: list[EngineClient] = []

    def end_failed(client: EngineClient, error: Exception) -> bool:
        ended.append(client)
        asyncio.get_running_loop().call_later(0.02, run.pool.leave, client, error)
        return True

    async def work() -> None:
        sync = run.open(name)
        run.pool.end_failed = end_failed
        await sync.run(version=1)
        assert set(ended) == {run.clients[1]} and run.servers[0].served == 1
        assert await can_generate(run.pool) == {"http://127.0.1.0"}

    asyncio.run(work())


@pytest.mark.parametrize("name", TRANSPORTS)
@pytest.mark.parametrize("moment", ["pause", "first bucket", "last bucket", "version"])
@pytest.mark.parametrize("hangs", [False, True], ids=["breaks", "hangs"])
def test_the_others_get_a_version_again_after_a_death(make_run: Callable[..., Run], name: str, moment: str, hangs: bool) -> None:
    path = {"pause": SILENT, "version": "/model_info"}.get(moment, UPDATES[name])
    run = make_run({"fails_at": path, "fails_after": int(moment == "last bucket" and name != "disk"), "hangs": hangs}, {})

    async def work() -> None:
        sync = run.open(name)
        dies(run, 0)
        assert metric_values(await sync.run(version=4))["weights/version"] == 4
        assert len(run.ranks.plans) == 2 and run.log.count(("closed",)) == 1 and run.log.count(("sent",)) == 2
        assert parts_of(run.servers[1], name) == whole(name) * 2
        assert run.servers[1].served == 4 and await can_generate(run.pool) == {"http://127.0.1.1"}
        assert name != "disk" or list((run.directory / "weights").iterdir()) == []

    asyncio.run(work())


@pytest.mark.parametrize("name", ["broadcast", "ipc"])
def test_an_engine_with_part_of_a_version_does_not_generate(make_run: Callable[..., Run], name: str) -> None:
    """A connection that breaks is noticed by all that are connected."""
    update = UPDATES[name]
    run = make_run({"fails_at": update}, {"fails_at": update, "fails_after": 1, "once": True})
    begin_send = run.ranks.begin_send

    def fails_once(*, version: int, checked: bool) -> list[Future[Any]]:
        broken: Future[None] = Future()
        broken.set_exception(RuntimeError("Connection closed by peer"))
        run.ranks.begin_send = begin_send  # type: ignore[method-assign]
        return [begin_send(version=version, checked=checked)[0], broken]

    async def work() -> None:
        sync = run.open(name)
        dies(run, 0)
        run.ranks.begin_send = fails_once  # type: ignore[method-assign]
        await sync.run(version=4)
        assert parts_of(run.servers[1], name) == [*whole(name)[:-1], *whole(name)]
        assert run.servers[1].served == 4

    asyncio.run(work())


def test_a_sync_that_is_repeated_keeps_the_deadline_of_the_first(make_run: Callable[..., Run]) -> None:
    run = make_run({"fails_at": RESUME}, {"fails_at": SILENT, "hangs": True})

    async def work() -> None:
        sync = run.open("broadcast", timeout_s=0.5)
        dies(run, 0)
        await sync.run(version=1)

    start_s = time.monotonic()
    with pytest.raises(DeadlineError, match=r"did not finish within 0 s, still waiting for: .*engine at http://127\.0\.1\.1"):
        asyncio.run(work())
    assert time.monotonic() - start_s < 5
