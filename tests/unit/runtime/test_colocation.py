"""What lies on shared devices at every moment of a run, in the order in which the loop takes its turns."""

import random
from collections.abc import Callable, Collection, Iterator

import pytest

from megatron_rl.runtime.colocation import SharedDevices, Turn
from megatron_rl.runtime.watchdog import Watchdog


class Memory:
    """The devices: what is there, and everything that ever was there at once."""

    def __init__(self) -> None:
        self.present = {"weights", "kv_cache", "cuda_graph"}
        self.seen: list[frozenset[str]] = []

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


MakeTurns = Callable[[], tuple[SharedDevices, Memory]]


@pytest.fixture
def make_turns() -> Iterator[MakeTurns]:
    """Devices that one memory stands for on both sides."""
    with Watchdog() as watchdog:

        def make() -> tuple[SharedDevices, Memory]:
            memory = Memory()
            return SharedDevices(memory, memory, watchdog=watchdog), memory

        yield make


def test_a_synchronous_step_goes_weights_cache_training(make_turns: MakeTurns) -> None:
    turns, memory = make_turns()
    order = []
    for turn in (Turn.SYNC, Turn.GENERATION, Turn.TRAINING, Turn.SYNC, Turn.GENERATION):
        turns.take(turn)
        order.append(sorted(memory.present))
    assert order == [
        ["parameters", "weights"],
        ["cuda_graph", "kv_cache", "weights"],
        ["gradients", "optimizer", "parameters"],
        ["parameters", "weights"],
        ["cuda_graph", "kv_cache", "weights"],
    ]


@pytest.mark.parametrize("seed", range(20))
def test_no_order_of_turns_ever_has_more_there_than_a_turn_needs(make_turns: MakeTurns, seed: int) -> None:
    turns, memory = make_turns()
    needs = {turn: set(turn.trainer_parts | turn.engine_parts) for turn in Turn}
    last = Turn.GENERATION
    for turn in random.Random(seed).choices(list(Turn), k=30):
        if (last, turn) == (Turn.TRAINING, Turn.GENERATION):
            turn = Turn.SYNC
        last = turn
        changes = turns.changes(turn)
        moves = len(memory.seen)
        turns.take(turn)
        assert memory.present == needs[turn]
        assert changes == (len(memory.seen) > moves)
        assert not turns.changes(turn)
    assert all(any(there <= need for need in needs.values()) for there in memory.seen[1:])
    for there in memory.seen:
        assert not there & {"kv_cache", "cuda_graph"} or not there & {"parameters", "gradients", "optimizer"}
        assert not there & {"gradients", "optimizer"} or "weights" not in there


def test_engines_never_generate_with_weights_that_were_released(make_turns: MakeTurns) -> None:
    turns, _ = make_turns()
    turns.take(Turn.TRAINING)
    with pytest.raises(AssertionError, match="a sync goes first"):
        turns.take(Turn.GENERATION)
