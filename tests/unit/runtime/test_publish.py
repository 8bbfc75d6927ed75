"""In which order an engine is told what, and when it may say that it serves new weights. The engines and the ranks are stand-ins."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.errors import EngineError
from megatron_rl.observe.metrics import metric_values
from megatron_rl.runtime import publish as module
from megatron_rl.runtime.background import BackgroundLoop
from megatron_rl.runtime.publish import BroadcastPublisher, DiskPublisher, Parties
from megatron_rl.runtime.watchdog import Watchdog
from megatron_rl.weights.bucket import WeightSpec

SPECS = tuple(WeightSpec(f"w{index}", "float32", (2, 3)) for index in range(3))
BUCKETS = [SPECS[:2], SPECS[2:]]


class Engine:
    """Records what it is asked; `version` is what it says that it serves, `deaf` lets that stay as it is."""

    def __init__(self, *, deaf: bool = False) -> None:
        self.address = SimpleNamespace(url="http://engine")
        self.calls: list[tuple[Any, ...]] = []
        self.version, self._deaf = 0, deaf

    async def pause(self, mode: str) -> None:
        self.calls.append(("pause", mode))

    async def begin_weight_update(self) -> None:
        self.calls.append(("begin",))

    async def receive_bucket(
        self, names: Sequence[str], *, dtypes: Sequence[str], shapes: Any, group: str, version: int | None = None
    ) -> None:
        assert len(names) == len(dtypes) == len(list(shapes))
        self.calls.append(("bucket", tuple(names), group))
        self._announce(version)

    async def load_weights(self, path: Path, *, version: int) -> None:
        assert sorted(file.name for file in path.iterdir()) == ["config.json", "model.safetensors"]
        self.calls.append(("load", path.name))
        self._announce(version)

    def _announce(self, version: int | None) -> None:
        if version is not None:
            self.calls.append(("serves", version))
            self.version = self.version if self._deaf else version

    async def end_weight_update(self) -> None:
        self.calls.append(("end",))

    async def resume(self) -> None:
        self.calls.append(("resume",))

    async def weight_version(self) -> int:
        self.calls.append(("asked",))
        return self.version

    async def join_group(self, **arguments: Any) -> None:
        self.calls.append(("join", arguments))


class Ref:
    """A Ray call that is done."""

    def future(self) -> "Future[None]":
        done: Future[None] = Future()
        done.set_result(None)
        return done


class Ranks:
    """Megatron ranks that record what they send."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def manifest(self) -> tuple[WeightSpec, ...]:
        return SPECS

    def free_address(self) -> tuple[str, int]:
        return "10.0.0.1", 1234

    def begin_join(self, group: Any, *, timeout_s: float) -> list[Ref]:
        self.sent.append(("join", group))
        return [Ref()]

    def begin_send(self, buckets: Any) -> list[Ref]:
        self.sent.append(("send", buckets))
        return [Ref(), Ref()]

    def save_hf(self, path: Path) -> None:
        path.mkdir()
        (path / "config.json").write_text("{}")
        (path / "model.safetensors").write_bytes(b"x" * 72)


@pytest.fixture
def make_parties(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Parties]]:
    monkeypatch.setattr(module, "make_buckets", lambda manifest: BUCKETS)
    background = BackgroundLoop()

    def make(*engines: Engine) -> Parties:
        return Parties(
            trainers=Ranks(),  # type: ignore[arg-type]
            clients=engines,  # type: ignore[arg-type]
            background=background,
            watchdog=Watchdog(),
            timeout_s=30.0,
        )

    yield make
    background.close()


def test_every_rank_of_every_engine_has_a_place_in_the_group(make_parties: Callable[..., Parties]) -> None:
    engines = (Engine(), Engine())
    parties = make_parties(*engines)
    BroadcastPublisher(parties, backend="gloo", ranks_per_engine=2)
    ((_, group),) = parties.trainers.sent  # type: ignore[attr-defined]
    assert (group.address, group.port, group.world_size) == ("10.0.0.1", 1234, 5)
    joined = [dict(engine.calls[0][1]) for engine in engines]
    assert [arguments.pop("rank_offset") for arguments in joined] == [1, 3]
    assert all(
        arguments == {"address": "10.0.0.1", "port": 1234, "world_size": 5, "name": group.name, "backend": "gloo"} for arguments in joined
    )


def test_the_version_comes_with_the_last_bucket(make_parties: Callable[..., Parties]) -> None:
    """A request between two buckets would otherwise be answered by half of the new weights, as the new version."""
    engine = Engine()
    parties = make_parties(engine)
    publisher = BroadcastPublisher(parties, backend="gloo", ranks_per_engine=1)
    engine.calls.clear()
    metrics = metric_values(publisher.publish(version=3))
    assert engine.calls == [
        ("pause", "retract"),
        ("begin",),
        ("bucket", ("w0", "w1"), "weights"),
        ("bucket", ("w2",), "weights"),
        ("serves", 3),
        ("end",),
        ("resume",),
        ("asked",),
    ]
    assert parties.trainers.sent[-1] == ("send", BUCKETS)  # type: ignore[attr-defined]
    assert metrics == {"weights/version": 3, "weights/bytes": 72}


def test_weights_through_a_directory_leave_nothing_there(make_parties: Callable[..., Parties], tmp_path: Path) -> None:
    engine = Engine()
    publisher = DiskPublisher(make_parties(engine), directory=tmp_path / "weights")
    metrics = metric_values(publisher.publish(version=2))
    assert engine.calls == [("pause", "retract"), ("load", "version-000002"), ("serves", 2), ("resume",), ("asked",)]
    assert metrics == {"weights/version": 2, "weights/bytes": 72}
    assert list((tmp_path / "weights").iterdir()) == []


@pytest.mark.parametrize("kind", ["broadcast", "disk"])
def test_one_engine_that_serves_other_weights_stops_the_run(make_parties: Callable[..., Parties], tmp_path: Path, kind: str) -> None:
    parties = make_parties(Engine(), Engine(deaf=True))
    publisher = (
        BroadcastPublisher(parties, backend="gloo", ranks_per_engine=1)
        if kind == "broadcast"
        else DiskPublisher(parties, directory=tmp_path / "weights")
    )
    with pytest.raises(EngineError, match="serves weights 0 after a sync, needs 1"):
        publisher.publish(version=1)
