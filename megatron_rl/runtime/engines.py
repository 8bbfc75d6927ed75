"""All generation engines as one object, seen from the driver."""

from functools import partial
from typing import Literal

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megatron_rl.config.settings import Settings
from megatron_rl.rollout.engine import Engine, EngineAddress
from megatron_rl.runtime.watchdog import Watchdog
from megatron_rl.runtime.workers import EngineWorker

STOP_TIMEOUT_S = 30.0


class EngineGroup:
    """Starts one actor per engine, each with a server of its own.

    `first_place` is the first bundle of `places` that belongs to an engine.
    """

    def __init__(
        self, settings: Settings, *, places: PlacementGroup, first_place: int, device_kind: Literal["cpu", "cuda"], watchdog: Watchdog
    ) -> None:
        self._settings = settings
        self._watchdog = watchdog
        self._workers = []
        num_gpus = settings.runtime.num_gpus_per_engine if device_kind == "cuda" else 0
        for number in range(settings.rollout.num_engines):
            make_engine = partial(
                Engine,
                settings.model.path,
                settings=settings.rollout,
                device_kind=device_kind,
                dtype=engine_dtype(settings, device_kind=device_kind),
                seed=settings.run.seed * settings.rollout.num_engines + number,
                log_path=settings.run.directory / "logs" / f"engine-{number}.log",
            )
            worker = EngineWorker.options(  # type: ignore[attr-defined]
                num_cpus=1,
                num_gpus=num_gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(places, placement_group_bundle_index=first_place + number),
            ).remote(make_engine)
            self._workers.append(worker)

    def begin_start(self) -> list[ray.ObjectRef]:
        """Ask every engine to start; wait for the result with `finish_start`."""
        return [worker.start.remote() for worker in self._workers]

    def finish_start(self, refs: list[ray.ObjectRef]) -> list[EngineAddress]:
        """Wait until every engine serves and watch them from now on."""
        addresses: list[EngineAddress] = self._watchdog.wait_refs(
            refs, name="starting the engines", timeout_s=self._settings.rollout.startup_timeout_s + STOP_TIMEOUT_S, owner="engine"
        )
        for number, worker in enumerate(self._workers):
            self._watchdog.watch(f"engine {number}", worker.watch.remote().future())
        return addresses

    def stop(self) -> None:
        """Stop the servers and reap them. An actor that is dead, or too slow, takes its server down with it when Ray ends."""
        self._watchdog.forget()
        stopping = [worker.stop.remote() for worker in self._workers]
        for ref in stopping:
            try:
                ray.get(ref, timeout=STOP_TIMEOUT_S)
            except (RayActorError, GetTimeoutError):
                continue


def engine_dtype(settings: Settings, *, device_kind: Literal["cpu", "cuda"]) -> str:
    """The engines' dtype: the trainer's."""
    if settings.model.dtype != "auto":
        return settings.model.dtype
    return "bfloat16" if device_kind == "cuda" else "float32"


def ranks_per_engine(settings: Settings, *, device_kind: Literal["cpu", "cuda"]) -> int:
    """Processes of one engine that hold weights."""
    if device_kind == "cuda":
        return settings.runtime.num_gpus_per_engine
    return int(settings.rollout.sglang.get("tp_size", 1))
