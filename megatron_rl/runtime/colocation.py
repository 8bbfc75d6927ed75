"""Phases of devices shared by ranks and engines: one side frees memory before the other takes
memory.

The weight sync is in between. The sync needs the trainer's parameters and the engines' weights at
once, but neither the optimizer nor the key-value cache, so that the four never add up. A run with
separate devices for engines has no phases.
"""

from collections.abc import Collection, Coroutine
from enum import Enum
from typing import Any, TypeAlias

from megatron_rl.config.derived import DEADLINE
from megatron_rl.engines.client import ENGINE_PARTS, EngineClient, EnginePart
from megatron_rl.rollout.manager import RolloutManager
from megatron_rl.runtime.trainers import TrainerGroup
from megatron_rl.runtime.watchdog import Watchdog
from megatron_rl.system.deadlines import SYNC_S
from megatron_rl.training.offload import PARTS, Part

Engines: TypeAlias = RolloutManager | EngineClient


class Phase(Enum):
    """Memory on the devices: parts of the trained models, and parts of the engines' memory."""

    TRAINING = (PARTS, ())
    """Also for loading and saving a checkpoint."""
    SYNC = (("parameters",), ("weights",))
    GENERATION = ((), ENGINE_PARTS)

    def __init__(self, trainer_parts: Collection[Part], engine_parts: Collection[EnginePart]) -> None:
        self.trainer_parts, self.engine_parts = frozenset(trainer_parts), frozenset(engine_parts)


class SharedDevices:
    """Devices on which engines have just started while the trainer was away; engines have `timeout_s` to answer."""

    def __init__(self, ranks: TrainerGroup, engines: Engines, *, watchdog: Watchdog, timeout_s: float = SYNC_S) -> None:
        self._ranks, self._engines, self._watchdog, self._timeout_s = ranks, engines, watchdog, timeout_s
        self._trainer_parts: frozenset[Part] = frozenset()
        self._engine_parts: frozenset[EnginePart] = frozenset(ENGINE_PARTS)

    def changes(self, phase: Phase) -> bool:
        """Return True when the parts on the devices differ from the parts of `phase`."""
        return (self._trainer_parts, self._engine_parts) != (phase.trainer_parts, phase.engine_parts)

    def take(self, phase: Phase) -> None:
        """Free what `phase` does not need, then allocate the rest: never more than one side and a half at once."""
        assert phase is not Phase.GENERATION or "weights" in self._engine_parts, "released weights come back empty: a sync goes first"
        if leaving := self._trainer_parts - phase.trainer_parts:
            self._ranks.call("put_away", leaving)
        if released := self._engine_parts - phase.engine_parts:
            self._wait(self._engines.release_memory(released), name="releasing the engines' memory")
        if restored := phase.engine_parts - self._engine_parts:
            self._wait(self._engines.restore_memory(restored), name="restoring the engines' memory")
        if coming := phase.trainer_parts - self._trainer_parts:
            self._ranks.call("take_back", coming)
        self._trainer_parts, self._engine_parts = phase.trainer_parts, phase.engine_parts

    def _wait(self, work: Coroutine[Any, Any, None], *, name: str) -> None:
        self._watchdog.wait(work, name=name, owner="the engines", timeout_s=self._timeout_s, see=DEADLINE)
