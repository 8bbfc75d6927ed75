"""All generation engines as one object, seen from the driver, and the Ray actor that starts each of them and watches it.

Neither this module nor what it imports knows torch or Megatron: the actor needs none of it, and importing it takes ten times as long as
everything else that the actor does, and ten times the memory.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import ray
from ray.exceptions import GetTimeoutError

from megatron_rl.config.derived import dtype_name
from megatron_rl.config.settings import Settings
from megatron_rl.deadlines import ENGINES_STOP_S
from megatron_rl.rollout.engine import Engine, EngineAddress
from megatron_rl.rollout.routing_record import MixtureShape
from megatron_rl.rollout.server_args import sent_prompt_tokens
from megatron_rl.runtime.cluster import Reservation, enter_directory, own_gpus
from megatron_rl.runtime.watchdog import ACTOR_DEATHS, Watchdog

if TYPE_CHECKING:
    from megatron_rl.runtime.engine_model import EngineModel

HEALTH_INTERVAL_S = 0.5


@ray.remote(concurrency_groups={"watch": 1})
class EngineWorker:
    """One SGLang server, a child process of this actor, on the GPUs that Ray gave it or, beside ranks, on `shared_gpus`."""

    def __init__(self, make_engine: Callable[..., Engine], *, directory: Path, shared_gpus: tuple[str, ...] = ()) -> None:
        enter_directory(directory)
        self._engine = make_engine(host=ray.util.get_node_ip_address(), gpu_ids=shared_gpus or own_gpus())
        self._stopping = False

    @ray.method(concurrency_group="watch")
    def watch(self) -> None:
        """Beside the other calls: return when the engine was stopped on purpose; raise with the tail of its log when it died."""
        while not self._stopping:
            self._engine.check()
            time.sleep(HEALTH_INTERVAL_S)

    def start(self) -> EngineAddress:
        """Start the server and wait until it serves."""
        return self._engine.start()

    def stop(self) -> None:
        """Stop the server and reap it."""
        self._stopping = True
        self._engine.stop()


class EngineGroup:
    """Starts one actor per engine, each with a server of its own, on `model`.

    `gpus_of_ranks` are the GPUs of every Megatron rank, of which colocated engines take those of the ranks beside them.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        model: "EngineModel",
        reservation: Reservation,
        watchdog: Watchdog,
        gpus_of_ranks: Sequence[tuple[str, ...]] = (),
    ) -> None:
        self._settings = settings
        self._watchdog = watchdog
        self._workers = []
        device_kind, placement = reservation.device_kind, reservation.placement
        mixture = recorded_mixture(settings)
        for number in range(settings.rollout.num_engines):
            make_engine = partial(
                Engine,
                model.path,
                settings=settings.rollout,
                device_kind=device_kind,
                dtype=dtype_name(settings.model, device_kind=device_kind),
                seed=settings.run.seed * settings.rollout.num_engines + number,
                log_path=settings.run.directory / "logs" / f"engine-{number}.log",
                mixture=mixture,
                colocated=settings.runtime.colocate,
                max_prompt_tokens=sent_prompt_tokens(settings),
                has_weights=model.has_weights,
            )
            beside = placement.ranks_beside(number) if placement.needs.colocated else ()
            shared_gpus = tuple(gpu for rank in beside for gpu in gpus_of_ranks[rank])
            worker = EngineWorker.options(**reservation.engine_options(number)).remote(  # type: ignore[attr-defined]
                make_engine, directory=Path.cwd(), shared_gpus=shared_gpus
            )
            self._workers.append(worker)

    def begin_start(self) -> list[ray.ObjectRef]:
        """Ask every engine to start; wait for the result with `finish_start`."""
        return [worker.start.remote() for worker in self._workers]

    def finish_start(self, refs: list[ray.ObjectRef]) -> list[EngineAddress]:
        """Wait until every engine serves."""
        addresses: list[EngineAddress] = self._watchdog.wait(
            refs, name="starting the engines", owner="engine", timeout_s=self._settings.rollout.startup_timeout_s + ENGINES_STOP_S
        )
        return addresses

    def watch(self, addresses: Sequence[EngineAddress], *, goes_on: Callable[[EngineAddress, Exception], bool]) -> None:
        """Watch every engine from now on; `goes_on` says whether the run goes on without one that has died."""
        for number, (worker, address) in enumerate(zip(self._workers, addresses, strict=True)):
            self._watchdog.watch(f"engine {number}", worker.watch.remote().future(), goes_on=partial(goes_on, address))

    def stop(self) -> None:
        """Stop the servers and reap them. An actor that is dead, or too slow, takes its server down with it when Ray ends."""
        self._watchdog.forget()
        stopping = [worker.stop.remote() for worker in self._workers]
        for ref in stopping:
            try:
                ray.get(ref, timeout=ENGINES_STOP_S)
            except (*ACTOR_DEATHS, GetTimeoutError):
                continue


def recorded_mixture(settings: Settings) -> MixtureShape | None:
    """The experts of the model, when the engines are to record to which of them they route tokens."""
    if not settings.training.routing_replay:
        return None
    # The driver has imported them already; the actor never does.
    from megatron_rl.models.read_spec import read_model_spec
    from megatron_rl.training.expert_load import check_routing_replay

    spec = read_model_spec(settings.model.path)
    check_routing_replay(settings.model, settings.training, spec)
    assert spec.moe is not None, "checked right above"
    return MixtureShape(
        num_layers=spec.num_layers,
        num_dense_layers=spec.moe.num_dense_layers,
        num_experts=spec.moe.num_experts,
        experts_per_token=spec.moe.num_experts_per_token,
    )


def ranks_per_engine(settings: Settings, *, device_kind: Literal["cpu", "cuda"]) -> int:
    """Processes of one engine that hold weights."""
    if device_kind == "cuda":
        return settings.runtime.num_gpus_per_engine
    return int(settings.rollout.sglang.get("tp_size", 1))
