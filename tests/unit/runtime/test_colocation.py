"""What lies on shared devices at every moment of a run, in the order in which the loop takes its devices."""

import random
from collections.abc import Callable, Collection, Iterator

import pytest

from megatron_rl.runtime.colocation import Phase, SharedDevices
from megatron_rl.runtime.watchdog import Watchdog


class Memory:
    """The devices: what is there, and everything that ever was there at once."""

    def __init__(self) -> None:
        self.present = {"weights", "kv_cache", "cuda_graph"}
        self.seen: list[frozenset[str]] = []

    def call(self, method: str, parts: Collection[str]) -> None:
        getattr(self, method)(parts)

    def put_away(self, parts: Collection[str]) -> None:
        assert set(parts) <= self.present
        self._move(self.present - set(parts))

    async def release_memory(self, parts: Collection[str]) -> None:
        self.put_away(parts)

    def take_back(self, parts: Collection[str]) -> None:
        assert not set(parts) & self.present, "an engine dies when it takes what it has"
        self._move(self.present | set(parts))

    async def restore_memory(self, parts: Collection[str]) -> None:
        self.take_back(parts)

    def _move(self, present: set[str]) -> None:
        self.present = present
        self.seen.append(frozenset(present))


MakeDevices = Callable[[], tuple[SharedDevices, Memory]]


@pytest.fixture
def make_devices() -> Iterator[MakeDevices]:
    """Devices that one memory stands for on both sides."""
    with Watchdog() as watchdog:

        def make() -> tuple[SharedDevices, Memory]:
            memory = Memory()
            return SharedDevices(memory, memory, watchdog=watchdog), memory

        yield make


def test_a_synchronous_step_goes_weights_cache_training(make_devices: MakeDevices) -> None:
    devices, memory = make_devices()
    order = []
    for phase in (Phase.SYNC, Phase.GENERATION, Phase.TRAINING, Phase.SYNC, Phase.GENERATION):
        devices.take(phase)
        order.append(sorted(memory.present))
    assert order == [
        ["parameters", "weights"],
        ["cuda_graph", "kv_cache", "weights"],
        ["gradients", "optimizer", "parameters"],
        ["parameters", "weights"],
        ["cuda_graph", "kv_cache", "weights"],
    ]


@pytest.mark.parametrize("seed", range(20))
def test_no_order_of_phases_has_more_there_than_one_needs(make_devices: MakeDevices, seed: int) -> None:
    devices, memory = make_devices()
    needs = {phase: set(phase.trainer_parts | phase.engine_parts) for phase in Phase}
    last = Phase.GENERATION
    for phase in random.Random(seed).choices(list(Phase), k=30):
        if (last, phase) == (Phase.TRAINING, Phase.GENERATION):
            phase = Phase.SYNC
        last = phase
        changes = devices.changes(phase)
        moves = len(memory.seen)
        devices.take(phase)
        assert memory.present == needs[phase]
        assert changes == (len(memory.seen) > moves)
        assert not devices.changes(phase)
    assert all(any(there <= need for need in needs.values()) for there in memory.seen[1:])
    for there in memory.seen:
        assert not there & {"kv_cache", "cuda_graph"} or not there & {"parameters", "gradients", "optimizer"}
        assert not there & {"gradients", "optimizer"} or "weights" not in there


def test_engines_never_generate_with_weights_that_were_released(make_devices: MakeDevices) -> None:
    devices, _ = make_devices()
    devices.take(Phase.TRAINING)
    with pytest.raises(AssertionError, match="a sync goes first"):
        devices.take(Phase.GENERATION)
