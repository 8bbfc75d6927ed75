"""The group of trainer and engines, and what a rank sends into it."""

import socket
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from megatron_rl.errors import EngineError
from megatron_rl.weights import broadcast
from megatron_rl.weights.broadcast import BroadcastPlan, BroadcastSender
from megatron_rl.weights.transport import WeightSpec


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_plan() -> BroadcastPlan:
    group = {"address": "127.0.0.1", "port": free_port(), "world_size": 1, "name": "weights", "backend": "gloo"}
    return BroadcastPlan(**group, buckets=BUCKETS, timeout_s=30.0)


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
