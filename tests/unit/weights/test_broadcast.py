"""The group of trainer and engines, and what a rank sends into it."""

import socket
import weakref
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from megatron_rl.errors import EngineError
from megatron_rl.weights import broadcast
from megatron_rl.weights.broadcast import BroadcastPlan, BroadcastSender, join_as_sender
from megatron_rl.weights.transport import WeightSpec


class FakeNccl(c10d.ProcessGroupGloo):
    """Torch's NCCL groups where there is no NCCL: the options of each that was made, in gloo's place."""

    made: ClassVar[list[Any]] = []
    Options = SimpleNamespace  # type: ignore[assignment]

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        super().__init__(store, rank, size, timedelta(seconds=30))
        self.made.append(options)


@pytest.fixture
def default_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.ProcessGroup]:
    """A trainer's default group that is bound to a device, as on GPUs."""
    monkeypatch.setattr(FakeNccl, "made", [])
    monkeypatch.setattr(c10d, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(c10d, "is_nccl_available", lambda: True)
    monkeypatch.setattr(c10d, "_get_split_source", lambda group: "the trainer's communicator")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = c10d._get_default_group()
    group.bound_device_id = torch.device("cuda", 0)
    yield group
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_plan(backend: str = "gloo") -> BroadcastPlan:
    group = {"address": "127.0.0.1", "port": free_port(), "world_size": 1, "name": "weights", "backend": backend}
    return BroadcastPlan(**group, buckets=BUCKETS, timeout_s=30.0)


def test_the_group_of_a_sync_is_not_split_from_the_trainers(default_group: dist.ProcessGroup) -> None:
    """To split, NCCL waits for all ranks of the trainer, of which only rank 0 joins."""
    join_as_sender(make_plan(backend="nccl"), dist.HashStore())
    (options,) = FakeNccl.made
    assert "split_from" not in vars(options) or options.split_from is None
    assert default_group.bound_device_id == torch.device("cuda", 0)


def test_a_group_that_cannot_be_made_leaves_the_trainers_bound(default_group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no engines")

    monkeypatch.setattr(c10d, "_new_process_group_helper", fail)
    with pytest.raises(RuntimeError, match="no engines"):
        join_as_sender(make_plan(backend="nccl"), dist.HashStore())
    assert default_group.bound_device_id == torch.device("cuda", 0)


class Source:
    """A trainer with two weights; `taken` counts those that were gathered."""

    def __init__(self) -> None:
        self.taken = 0

    def weights(self, *, receivers: object) -> Iterator[tuple[str, Tensor]]:
        assert receivers == (0,), "copies of what rank 0 has are not gathered for nobody"
        for name, tensor in (("a", torch.arange(3.0)), ("b", torch.ones(2, 2))):
            self.taken += 1
            yield name, tensor


BUCKETS = ((WeightSpec("a", "float32", (3,)),), (WeightSpec("b", "float32", (2, 2)),))


def test_rank_zero_sends_every_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[list[float], int, object]] = []
    monkeypatch.setattr(dist, "broadcast", lambda flat, src, group: sent.append((flat.view(torch.float32).tolist(), src, group)))
    monkeypatch.setattr(broadcast, "serve_store", lambda address, **options: options["timeout_s"])
    monkeypatch.setattr(broadcast, "join_as_sender", lambda plan, store: (plan.name, store))
    make_plan().open(Source(), rank=0).send(version=1)  # type: ignore[arg-type]
    assert sent == [([0.0, 1.0, 2.0], 0, ("weights", 30.0)), ([1.0] * 4, 0, ("weights", 30.0))]


def test_other_ranks_take_part_in_gathering_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast, "join_as_sender", lambda plan, store: pytest.fail("only rank 0 is in the group"))
    monkeypatch.setattr(broadcast, "fill_buckets", lambda weights, buckets: pytest.fail("only the sender needs the memory of a bucket"))
    source = Source()
    sender = make_plan().open(source, rank=3)  # type: ignore[arg-type]
    assert isinstance(sender, BroadcastSender)
    sender.send(version=1)
    assert source.taken == 2


def test_a_rank_that_cannot_send_gathers_and_leaves_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks gather, and would wait for it; engines wait for what is not sent as long as their connections are open."""

    def fail(flat: Tensor, src: int, group: object) -> None:
        raise RuntimeError("Connection closed by peer")

    class Group:
        pass

    monkeypatch.setattr(dist, "broadcast", fail)
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: None)
    source, group = Source(), Group()
    alive, sender = weakref.ref(group), BroadcastSender(source, make_plan(), group=group)  # type: ignore[arg-type]
    del group
    # Whoever waits for the call keeps its error.
    with pytest.raises(EngineError, match="closed by peer"):
        sender.send(version=1)
    assert source.taken == 2
    sender.close()
    assert alive() is None


def test_a_closed_sender_has_left_its_group_for_the_next() -> None:
    for _ in range(2):
        plan = make_plan()
        sender = plan.open(Source(), rank=0)  # type: ignore[arg-type]
        assert "weights" in c10d._world.pg_names.values()
        sender.send(version=1)
        joined = weakref.ref(sender._group)  # type: ignore[type-var]
        sender.close()
        assert "weights" not in c10d._world.pg_names.values()
        assert joined() is None, "its connections end with it, and with them what engines wait for"
    plan.open(Source(), rank=1).close()  # type: ignore[arg-type]
