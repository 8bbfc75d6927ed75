"""Buckets in memory that another process opens: what a rank offers, what an engine is handed, and what is left of both."""

import asyncio
import base64
import io
import json
import os
import pickle
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore, Store
from torch.multiprocessing import reductions

from megatron_rl.errors import EngineError, UserError
from megatron_rl.system.leftovers import PREFIX
from megatron_rl.weights import ipc
from megatron_rl.weights.ipc import (
    IpcSender,
    IpcTransport,
    Seat,
    allocate_shared,
    check_allocator,
    check_same_host,
    handle_of,
    shared_files,
)
from megatron_rl.weights.transport import Surroundings, WeightSpec

SPECS = (WeightSpec("a", "bfloat16", (2, 3)), WeightSpec("b", "float32", (2,)), WeightSpec("c", "float32", (1, 2)))
BUCKETS = (SPECS[:2], SPECS[2:])


def weights(scale: float = 1.0) -> dict[str, Tensor]:
    return {
        spec.name: (scale * torch.arange(1, 1 + torch.Size(spec.shape).numel())).to(spec.torch_dtype).view(spec.shape) for spec in SPECS
    }


class Source:
    """A trainer whose weights are those above; `taken` counts those that were gathered."""

    def __init__(self) -> None:
        self.taken, self.scale = 0, 1.0

    def weights(self, *, receivers: object = None) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights(self.scale).items():
            self.taken += 1
            yield name, tensor


class Engine:
    """An engine's client: it opens handles as SGLang does, and keeps what it finds at the time of the call."""

    def __init__(self, url: str, *, fails_at: int | None = None) -> None:
        self.address, self.calls = type("Address", (), {"url": url}), []
        self.held: list[dict[str, Tensor]] = []
        self.names_in_use: list[str] = []
        self._fails_at = fails_at

    async def begin_weight_update(self) -> None:
        self.calls.append("begin")

    async def take_bucket(self, handles: Sequence[str], *, version: int | None) -> None:
        if len(self.held) == self._fails_at:
            raise EngineError("died")
        self.calls.append((len(handles), version))
        found: dict[str, Tensor] = {}
        for handle in handles:
            payload = pickle.loads(base64.b64decode(handle))
            self.names_in_use += [path.name for path in Path("/dev/shm").glob(f"torch_{os.getpid()}_*")]
            for place in payload["metadata"]:
                assert place.numel == place.end_idx - place.start_idx
                found[place.name] = (
                    payload["flattened_tensor"][place.start_idx : place.end_idx].view(place.dtype).reshape(place.shape).clone()
                )
        self.held.append(found)

    async def end_weight_update(self) -> None:
        self.calls.append("end")

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: tensor for bucket in self.held for name, tensor in bucket.items()}


def free_address() -> tuple[str, int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return "127.0.0.1", int(probe.getsockname()[1])


def make_transport(beside: dict[str, Sequence[int]], *, ranks_per_engine: int = 1, **surroundings: Any) -> IpcTransport:
    return IpcTransport(
        Surroundings(
            manifest=SPECS,
            directory=Path("unused"),
            free_address=free_address,
            backend="gloo",
            num_engines=len(beside),
            ranks_per_engine=ranks_per_engine,
            timeout_s=10.0,
            ranks_beside=beside,
            bucket_bytes=20,
            **surroundings,
        )
    )


def run(transport: IpcTransport, engines: Sequence[Engine], *, num_ranks: int, versions: Sequence[int] = (1,)) -> list[Source]:
    """Sync over `versions`, whose weights are those above times the version; each rank in a thread of its own. EngineError comes last."""
    sources = [Source() for _ in range(num_ranks)]
    failures: list[BaseException] = []
    # Rank 0 serves the store as long as it is there.
    senders = transport.senders = {}  # type: ignore[attr-defined]

    def rank(number: int) -> None:
        sender = senders[number] = transport.plan.open(sources[number], rank=number)  # type: ignore[arg-type]
        for version in versions:
            sources[number].scale = float(version)
            sender.send(version=version)

    async def deliver(engine: Engine, version: int) -> None:
        try:
            await transport.deliver(engine, version=version)  # type: ignore[arg-type]
        except EngineError as error:
            transport.give_up(engine, version=version)  # type: ignore[arg-type]
            failures.append(error)

    async def deliver_all() -> None:
        await transport.connect(engines)  # type: ignore[arg-type]
        for version in versions:
            await asyncio.gather(*(deliver(engine, version) for engine in engines))

    threads = [Thread(target=rank, args=[number]) for number in range(num_ranks)]
    for thread in threads:
        thread.start()
    asyncio.run(deliver_all())
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive()
    if failures:
        raise failures[0]
    return sources


def files_of_this_process() -> list[Path]:
    return [*Path("/dev/shm").glob(f"torch_{os.getpid()}_*"), *Path(tempfile.gettempdir()).glob(f"{PREFIX}*")]


@pytest.fixture(autouse=True)
def _own_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_every_engine_takes_the_buckets_of_the_ranks_beside_it() -> None:
    beside = {"http://127.0.0.1:1": (0, 1), "http://127.0.0.1:2": (3, 2)}
    transport = make_transport(beside, ranks_per_engine=2)
    first, second = (Seat(url, tp_rank) for url in ("http://127.0.0.1:1",) for tp_rank in (0, 1))
    assert (transport.plan.seats[0], transport.plan.seats[1]) == ((first,), (second,))
    assert transport.plan.seats[3] == (Seat("http://127.0.0.1:2", 0),)
    engines, before = [Engine(url) for url in beside], files_of_this_process()
    sources = run(transport, engines, num_ranks=5, versions=(1, 2))
    for engine in engines:
        # The version comes with the last bucket, so that half of the weights never count as new ones.
        assert engine.calls == ["begin", (2, None), (2, 1), "end", "begin", (2, None), (2, 2), "end"]
        assert_same(engine.weights, weights(2.0))
    assert [source.taken for source in sources] == [6] * 5, "a rank without an engine takes part in gathering"
    offers = [seat.offer(version, number) for seat in (first, second) for version in (1, 2) for number in (0, 1)]
    assert not any(transport._store.check([offer]) for offer in offers), "a key has one reader, who removes it"
    assert transport.finish(version=1) == 6 * 2 + 2 * 4 + 2 * 4
    assert set(files_of_this_process()) <= set(before)


def test_one_rank_serves_all_ranks_of_an_engine_on_the_cpu() -> None:
    transport = make_transport({"http://127.0.0.1:1": (0,)}, ranks_per_engine=2)
    engine = Engine("http://127.0.0.1:1")
    run(transport, [engine], num_ranks=1)
    assert engine.calls[1:3] == [(2, None), (2, 1)]
    assert_same(engine.weights, weights())


class SlowEngine(Engine):
    """One that reads a moment after it was asked to."""

    async def take_bucket(self, handles: Sequence[str], *, version: int | None) -> None:
        await asyncio.sleep(0.02)
        await super().take_bucket(handles, version=version)


def test_memory_is_used_again_by_the_bucket_after_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one is filled while each rank of an engine has one to read."""
    # In place of three tensors in two buckets, 7 in as many, of different sizes.
    specs = tuple(WeightSpec(f"w{number}", "float32", (4 if number % 2 else 3,)) for number in range(7))
    monkeypatch.setitem(globals(), "SPECS", specs)
    allocated = []
    monkeypatch.setattr(ipc, "allocate_shared", lambda *wanted: allocated.append(wanted) or allocate_shared(*wanted))
    transport, engine, before = (
        make_transport({"http://127.0.0.1:1": (0,)}, ranks_per_engine=2),
        SlowEngine("http://127.0.0.1:1"),
        files_of_this_process(),
    )
    run(transport, [engine], num_ranks=1, versions=(1, 2))
    assert_same(engine.weights, weights(2.0))
    assert [bucket.keys() for bucket in engine.held[:7]] == [{spec.name} for spec in specs]
    assert allocated == [(16, torch.device("cpu"))] * 6
    assert set(files_of_this_process()) <= set(before)


class WritingEngine(Engine):
    """One whose ranks but the first set what they were handed to zero before the first reads, as SGLang's loader of gpt-oss does."""

    async def take_bucket(self, handles: Sequence[str], *, version: int | None) -> None:
        payloads = [pickle.loads(base64.b64decode(handle)) for handle in handles]
        for payload in payloads[1:]:
            payload["flattened_tensor"].zero_()
        first = payloads[0]["flattened_tensor"]
        self.held.append(
            {
                place.name: first[place.start_idx : place.end_idx].view(place.dtype).reshape(place.shape).clone()
                for place in payloads[0]["metadata"]
            }
        )


@pytest.mark.parametrize("num_engines", [1, 2])
def test_a_rank_of_an_engine_writes_only_into_its_own_bucket(num_engines: int) -> None:
    urls = [f"http://127.0.0.1:{number}" for number in range(1, 1 + num_engines)]
    engines, before = [WritingEngine(url) for url in urls], files_of_this_process()
    run(make_transport(dict.fromkeys(urls, (0,)), ranks_per_engine=2), engines, num_ranks=1)
    for engine in engines:
        assert_same(engine.weights, weights())
    assert set(files_of_this_process()) <= set(before)


def test_a_bucket_keeps_its_memory_until_the_engine_answered() -> None:
    transport = make_transport({"http://127.0.0.1:1": (0,)})
    engine = Engine("http://127.0.0.1:1")
    run(transport, [engine], num_ranks=1)
    assert len(set(engine.names_in_use)) >= 2, "each bucket is in another file"


def wait_for(store: Store, key: str) -> None:
    deadline = time.monotonic() + 10
    while not store.check([key]):
        assert time.monotonic() < deadline, key
        time.sleep(0.001)


def test_a_rank_holds_a_bucket_until_taken_and_notes_it(tmp_path: Path) -> None:
    plan, store = make_transport({"http://127.0.0.1:1": (0,)}, ranks_per_engine=2).plan, HashStore()
    seats = plan.seats[0]
    sender = IpcSender(Source(), plan, seats=seats, store=store)  # type: ignore[arg-type]
    sending = Thread(target=sender.send, kwargs={"version": 1})
    sending.start()
    for number in range(2):
        for seat in seats:
            wait_for(store, seat.offer(1, number))
        store.set(seats[0].taken(1, number), "")
        time.sleep(0.02)
        assert sending.is_alive() and not any(store.check([seat.offer(1, number + 1)]) for seat in seats)
        noted = [json.loads(file.read_text()) for file in tmp_path.glob(f"{PREFIX}*/elsewhere.json")]
        assert len(noted) == 1 and all(Path(place).exists() for place in noted[0])
        assert len({place for place in noted[0] if Path(place).is_file()}) == len(seats)
        store.set(seats[1].taken(1, number), "")
    sending.join(timeout=10)
    assert not sending.is_alive() and not list(tmp_path.iterdir())
    taken = [seat.taken(1, number) for number in range(2) for seat in seats]
    assert not any(store.check([key]) for key in taken), "a key has one reader, who removes it"


def test_a_reader_that_has_let_go_leaves_the_writer_its_memory() -> None:
    flat = allocate_shared(20, torch.device("cpu"))
    (file, _) = shared_files(flat)
    payload = pickle.loads(base64.b64decode(handle_of(flat, BUCKETS[0])))
    flat.fill_(3)
    assert payload["flattened_tensor"].tolist() == [3] * 20
    del payload
    assert file.exists()
    del flat
    assert not file.exists()


def test_an_engine_that_fails_does_not_hold_up_the_ranks() -> None:
    """A rank would wait until the deadline for an answer that nobody gives, and the engines that live with it."""
    urls = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    transport = make_transport({urls[0]: (0,), urls[1]: (0,)})
    broken, sound = Engine(urls[0], fails_at=0), Engine(urls[1])
    before = files_of_this_process()
    with pytest.raises(EngineError, match="died"):
        run(transport, [broken, sound], num_ranks=1)
    assert_same(sound.weights, weights())
    assert broken.calls == ["begin", "end"], "it would refuse the next update during this one"
    (seat, _) = transport.plan.seats[0]
    assert not transport._store.check([seat.offer(1, 1)]), "memory for who takes nothing would never be free again"
    assert set(files_of_this_process()) <= set(before)


def test_a_rank_whose_engines_all_failed_gathers_for_others() -> None:
    transport = make_transport({"http://127.0.0.1:1": (0,), "http://127.0.0.1:2": (1,)})
    broken, sound = Engine("http://127.0.0.1:1", fails_at=0), Engine("http://127.0.0.1:2")
    with pytest.raises(EngineError, match="died"):
        run(transport, [broken, sound], num_ranks=2)
    assert_same(sound.weights, weights())
    senders = transport.senders  # type: ignore[attr-defined]
    assert [sender._source.taken for sender in senders.values()] == [3, 3]


def test_an_engine_that_shares_nothing_is_refused() -> None:
    transport = make_transport({"http://127.0.0.1:1": (0,)})
    with pytest.raises(UserError, match="shares no memory with a Megatron rank"):
        asyncio.run(transport.connect([Engine("http://127.0.0.1:9")]))  # type: ignore[list-item]


def test_an_engine_on_another_host_is_refused() -> None:
    check_same_host("http://127.0.0.7:80", rank=0)
    # An address of documentation (RFC 5737), which no machine has.
    with pytest.raises(UserError, match="is not on the machine of Megatron rank 2"):
        check_same_host("http://192.0.2.1:80", rank=2)
    url = "http://127.0.0.1:80"
    plan = make_transport({url: (0, 3)}, ranks_per_engine=4, hosts={url: ("127.0.0.1", "192.0.2.1")}).plan
    assert {rank: [(seat.tp_rank, seat.host) for seat in seats] for rank, seats in plan.seats.items()} == {
        0: [(0, "127.0.0.1"), (1, "127.0.0.1")],
        3: [(2, "192.0.2.1"), (3, "192.0.2.1")],
    }
    with pytest.raises(UserError, match="rank 3"):
        plan.open(Source(), rank=3)  # type: ignore[arg-type]
    plan = make_transport({"http://192.0.2.1:80": (1,)}).plan
    with pytest.raises(UserError, match="rank 1"):
        plan.open(Source(), rank=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reason", "kind", "sentence"),
    [
        ("No space left on device", UserError, r"/dev/shm has no room for a bucket of 20 bytes of weights; give it more .* to disk"),
        ("Permission denied", RuntimeError, "Permission denied"),
    ],
)
def test_no_room_in_shared_memory_is_a_sentence(monkeypatch: pytest.MonkeyPatch, reason: str, kind: type[Exception], sentence: str) -> None:
    def refuse(num_bytes: int) -> None:
        raise RuntimeError(f"unable to allocate shared memory(shm) for file </torch_1>: {reason} (28)")

    monkeypatch.setattr(torch.UntypedStorage, "_new_using_filename_cpu", refuse)
    with pytest.raises(kind, match=sentence):
        allocate_shared(20, torch.device("cpu"))


@pytest.mark.parametrize("name", ipc.ALLOCATOR_VARIABLES)
def test_memory_that_cannot_be_shared_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:64")
    check_allocator()
    monkeypatch.setenv(name, "max_split_size_mb:64, expandable_segments: True")
    with pytest.raises(UserError, match=f"{name}=.*cannot be shared"):
        check_allocator()
    with pytest.raises(UserError, match="cannot be shared"):
        make_transport({}).plan.open(Source(), rank=5)  # type: ignore[arg-type]


def test_a_gpu_is_named_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Visible device 0 of the rank can be any number in the engine."""
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda self: True))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("Properties", (), {"uuid": "uuid-7"}))
    arguments = tuple(f"argument {number}" for number in range(14))
    monkeypatch.setattr(reductions, "reduce_tensor", lambda tensor: (reductions.rebuild_cuda_tensor, arguments))
    function, found = ipc._HandlePickler(io.BytesIO()).reducer_override(torch.zeros(1))
    assert function is reductions.rebuild_cuda_tensor
    assert found == (*arguments[:6], "uuid-7", *arguments[7:])


def test_what_may_be_left_are_the_file_and_the_helpers_directory() -> None:
    flat = allocate_shared(16, torch.device("cpu"))
    file, directory = shared_files(flat)
    assert file.stat().st_size >= 16
    assert directory.is_dir() and directory.name.startswith("torch-shm-dir")


def test_released_memory_is_collected_before_the_next_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: events.append("collect"))
    monkeypatch.setattr(torch, "empty", lambda *_sizes, device, **_named: events.append(f"allocate on {device}"))
    allocate_shared(8, torch.device("cuda"))
    assert events == ["collect", "allocate on cuda"]
