"""Turns on devices shared by ranks and engines: one side frees memory before the other takes
memory.

The weight sync is in between. The sync needs the trainer's parameters and the engines' weights at
once, but neither the optimizer nor the key-value cache, so that the four never add up. A run with
separate devices for engines has no turns.
"""

from collections.abc import Coroutine
from enum import Enum
from typing import Any, Protocol

from megatron_rl.deadlines import SYNC_S
from megatron_rl.engines.client import ENGINE_PARTS, EnginePart
from megatron_rl.runtime.watchdog import Watchdog
from megatron_rl.training.offload import PARTS, Part


class Turn(Enum):
    """Memory on the devices: parts of the trained models, and parts of the engines' memory."""

    TRAINING = (PARTS, ())
    """Also for loading and saving a checkpoint."""
    SYNC = (("parameters",), ("weights",))
    GENERATION = ((), ENGINE_PARTS)

    @property
    def trainer_parts(self) -> frozenset[Part]:
        """Parts of the trained models."""
        return frozenset(self.value[0])

    @property
    def engine_parts(self) -> frozenset[EnginePart]:
        """Parts of the engines' memory."""
        return frozenset(self.value[1])


class TrainerMemory(Protocol):
    """The ranks' side of a turn."""

    def put_away(self, parts: frozenset[Part]) -> None:
        """Move the given parts of the models to host memory."""
        ...

    def take_back(self, parts: frozenset[Part]) -> None:
        """Move the given parts of the models back to the device."""
        ...


class EngineMemory(Protocol):
    """The engines' side of a turn. No request may be running."""

    def release_memory(self, parts: frozenset[EnginePart]) -> Coroutine[Any, Any, None]:
        """Free the given parts of every engine; the content is lost."""
        ...

    def restore_memory(self, parts: frozenset[EnginePart]) -> Coroutine[Any, Any, None]:
        """Allocate the given parts of every engine again, after a release."""
        ...


class SharedDevices:
    """Turns on shared devices, on which engines have just been started while the trainer was away.

    Engines have `timeout_s` seconds.
    """

    def __init__(self, trainers: TrainerMemory, engines: EngineMemory, *, watchdog: Watchdog, timeout_s: float = SYNC_S) -> None:
        self._trainers, self._engines, self._watchdog, self._timeout_s = trainers, engines, watchdog, timeout_s
        self._trainer_parts: frozenset[Part] = frozenset()
        self._engine_parts: frozenset[EnginePart] = frozenset(ENGINE_PARTS)

    def changes(self, turn: Turn) -> bool:
        """Return True when the parts on the devices differ from the parts of `turn`."""
        return (self._trainer_parts, self._engine_parts) != (turn.trainer_parts, turn.engine_parts)

    def take(self, turn: Turn) -> None:
        """Free everything that `turn` does not need, then allocate the needed parts.

        So the devices never hold more than one side and a half.
        """
        assert turn is not Turn.GENERATION or "weights" in self._engine_parts, "released weights come back empty: a sync goes first"
        if leaving := self._trainer_parts - turn.trainer_parts:
            self._trainers.put_away(leaving)
        if released := self._engine_parts - turn.engine_parts:
            self._wait(self._engines.release_memory(released), name="releasing the engines' memory")
        if restored := turn.engine_parts - self._engine_parts:
            self._wait(self._engines.restore_memory(restored), name="restoring the engines' memory")
        if coming := turn.trainer_parts - self._trainer_parts:
            self._trainers.take_back(coming)
        self._trainer_parts, self._engine_parts = turn.trainer_parts, turn.engine_parts

    def _wait(self, work: Coroutine[Any, Any, None], *, name: str) -> None:
        self._watchdog.wait(work, name=name, owner="the engines", timeout_s=self._timeout_s)
