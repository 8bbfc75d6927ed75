"""All generation engines as one object for the driver, and the Ray actor of one engine.

This module imports neither torch nor Megatron. The actor needs neither, and the import takes ten
times the time and ten times the memory of the actor's other work.
"""

import asyncio
import importlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import ray
from ray.exceptions import RayError, RayTaskError

from megatron_rl.config.derived import DEADLINE, dtype_name, start_deadline_s
from megatron_rl.config.settings import ModelSettings, Settings, TrainingSettings, WeightSettings
from megatron_rl.config.yaml_text import format_value
from megatron_rl.engines.answers import MixtureShape
from megatron_rl.engines.engine import Engine, EngineAddress
from megatron_rl.engines.server_args import server_arguments
from megatron_rl.errors import DeadlineError, EngineDiedError, EngineError
from megatron_rl.runtime.cluster import Reservation, enter_directory, own_gpus
from megatron_rl.runtime.watchdog import ACTOR_DEATHS, Watchdog, exit_of
from megatron_rl.system.deadlines import ENGINE_STOP_S, ENGINES_STOP_S
from megatron_rl.system.stacks import answer_stack_requests

if TYPE_CHECKING:
    from megatron_rl.runtime.engine_model import EngineModel

HEALTH_INTERVAL_S = 0.5
HOUR_S, MAX_BACKOFF_S = 3600.0, 60.0


@ray.remote(concurrency_groups={"watch": 1})
class EngineWorker:
    """One SGLang server, a child of this actor, on the GPUs that Ray gave or on those of ranks, `shared_gpus`.

    The actor of an engine's first node owns those of its other nodes, `elsewhere`, by Ray's options
    and shared GPUs: their servers start, hang, end and return with its own.
    """

    def __init__(
        self,
        make_engine: Callable[..., Engine],
        *,
        directory: Path,
        shared_gpus: tuple[str, ...] = (),
        elsewhere: Sequence[tuple[dict[str, Any], tuple[str, ...]]] = (),
    ) -> None:
        enter_directory(directory)
        answer_stack_requests()
        gpus = shared_gpus or own_gpus()
        self._engine = make_engine(host=ray.util.get_node_ip_address(), gpu_ids=gpus, check_others=self._check_others)
        self._stopping = False
        self._fault: str | None = None
        self._address: EngineAddress | None = None
        self._runs: list[ray.ObjectRef] = []
        # The module's actor: here this name is the class alone.
        actor: Any = importlib.import_module(__name__).EngineWorker
        self._others = [
            actor.options(**options).remote(
                partial(make_engine, node_rank=node_rank, meeting_point=self._engine.meeting_point), directory=directory, shared_gpus=shared
            )
            for node_rank, (options, shared) in enumerate(elsewhere, start=1)
        ]

    def call(self, method: str, **keywords: Any) -> Any:
        """Return the result of a method of this node's Engine, or the value of a property."""
        found = getattr(self._engine, method)
        return found(**keywords) if callable(found) else found

    def _check_others(self) -> None:
        """Raise EngineError where a server on another node of the engine ended."""
        if not self._runs:
            return
        try:
            ray.get(ray.wait(self._runs, num_returns=len(self._runs), timeout=0)[0])
        except RayError as error:
            if isinstance(error, RayTaskError) and isinstance(error.cause, EngineError):
                raise error.cause from None
            raise EngineDiedError(f"a part of the engine at {self._engine.url} on another node {exit_of(error)}") from error

    @ray.method(concurrency_group="watch")
    def run(self, timeout_s: float) -> None:
        """Start a server whose engine is served by another node, and `watch` it."""
        self._engine.follow(timeout_s=timeout_s)
        self.watch()

    @ray.method(concurrency_group="watch")
    def watch(self) -> None:
        """Return when the engine was stopped on purpose; raise when it died, with the tail of the log, or was ended."""
        while not self._stopping:
            if self._fault is not None:
                raise EngineDiedError(f"the SGLang server at {self._engine.url} was ended: {self._fault}")
            try:
                self._engine.check()
            except EngineError:
                self._stop_all()
                raise
            time.sleep(HEALTH_INTERVAL_S)

    def start(self, timeout_s: float) -> EngineAddress:
        """Start the server, once, and wait at most `timeout_s` until requests are served."""
        if self._address is None:
            self._runs = [other.run.remote(timeout_s) for other in self._others]
            hosts = ray.get([other.call.remote("host") for other in self._others], timeout=timeout_s)
            address = self._engine.start(timeout_s=timeout_s)
            self._address = replace(address, hosts=(self._engine.host, *hosts)) if hosts else address
        return self._address

    def end(self, fault: str, *, hangs: bool = False, **hang: bool) -> None:
        """End a server that runs, because of its `fault`; one that `hangs` only if its processes do no work, see `Engine.is_still`."""
        if self._engine.pid is None:
            return
        if hangs:
            # The main process on another node never does work.
            looks = [other.call.remote("is_still", **{**hang, "answers": True}) for other in self._others]
            if not (self._engine.is_still(**hang) or any(ray.get(looks, timeout=ENGINES_STOP_S))):
                return
        self._fault = fault
        self._stop_all()

    def stop(self) -> None:
        """Stop and reap the server, and those on other nodes."""
        self._stopping = True
        self._stop_all()

    def _stop_all(self) -> None:
        stops = [other.stop.remote() for other in self._others]
        self._engine.stop()
        if stops:
            ray.wait(stops, num_returns=len(stops), timeout=ENGINE_STOP_S)


class EngineGroup:
    """Starts one actor with one server per engine, on `model`.

    `gpus_of_ranks` are the GPUs of every Megatron rank; a colocated engine takes the GPUs of the
    ranks beside the engine.
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
        self._settings, self._watchdog = settings, watchdog
        self._make_workers: list[Callable[[], Any]] = []
        device_kind, placement = reservation.device_kind, reservation.placement
        mixture = _recorded_mixture(settings.model, settings.training)
        for number in range(settings.rollout.num_engines):
            make_engine = partial(
                Engine,
                engine_arguments(settings, model=model, device_kind=device_kind, number=number),
                log_path=settings.run.directory / "logs" / f"engine-{number}.log",
                mixture=mixture,
            )
            beside = placement.ranks_beside(number) if placement.needs.colocated else ()
            nodes, size = reservation.engine_options(number), placement.needs.slots_per_part
            shared = [tuple(gpu for rank in beside[size * i : size * (i + 1)] for gpu in gpus_of_ranks[rank]) for i in range(len(nodes))]
            first, *elsewhere = zip(nodes, shared, strict=True)
            options = EngineWorker.options(**first[0])  # type: ignore[attr-defined]
            place = {"directory": Path.cwd(), "shared_gpus": first[1], "elsewhere": elsewhere}
            self._make_workers.append(partial(options.remote, make_engine, **place))
        self._workers = [make() for make in self._make_workers]
        self._watches: dict[int, Future[None]] = {}  # done when the engine is dead
        self._restarts: list[list[float]] = [[] for _ in self._workers]  # seconds of the clock
        self.lost: set[int] = set()
        """Engines that stay away for good, also when ranks come back."""
        self._stopped = False

    def begin_start(self) -> list[Future[EngineAddress | None]]:
        """Ask every engine to start; wait for all with `finish_start`. Those that have died are None."""
        timeout_s, dead = start_deadline_s(self._settings.model), Future[Any]()
        dead.set_result(None)
        # One without a watch was dead, and had not come back.
        watches = [self._watches.get(number, dead if restarts else None) for number, restarts in enumerate(self._restarts)]
        lives = [number not in self.lost and (watch is None or not watch.done()) for number, watch in enumerate(watches)]
        return [worker.start.remote(timeout_s).future() if each else dead for each, worker in zip(lives, self._workers, strict=True)]

    def finish_start(self, starting: list[Future[EngineAddress | None]]) -> list[EngineAddress | None]:
        """Wait until every engine serves, but for those that have died."""
        timeout_s = start_deadline_s(self._settings.model) + ENGINES_STOP_S
        how: dict[str, Any] = {"owner": "engine", "timeout_s": timeout_s, "see": DEADLINE}
        return self._watchdog.wait_for_all(starting, name="starting the engines", **how)

    def watch(self, number: int, *, goes_on: Callable[[Exception], bool]) -> None:
        """Watch an engine from now on; `goes_on` decides if the run continues after its death."""
        if number not in self._watches:
            self._watches[number] = self._workers[number].watch.remote().future()
        self._watchdog.watch(f"engine {number}", self._watches[number], goes_on=goes_on)

    def give_up(self, number: int, error: Exception) -> None:
        """End every wait of the run with the `error` of an engine that does not come back."""
        lost: Future[None] = Future()
        lost.set_exception(error)
        if not self._stopped:
            self._watchdog.watch(f"engine {number}", lost, goes_on=lambda _: False)

    def may_restart(self, number: int) -> bool:
        """Return True where rollout.engine_restarts allows another start of a dead engine."""
        hour = [begun_s for begun_s in self._restarts[number] if time.monotonic() - begun_s < HOUR_S]
        self._restarts[number] = hour
        stays_away = number in self.lost or self._settings.runtime.colocate or self._stopped
        return len(hour) < self._settings.rollout.engine_restarts and not stays_away

    def end(self, number: int, fault: str, **hang: bool) -> None:
        """Let an engine that failed end, as `EngineWorker.end`, which its watch then sees."""
        self._workers[number].end.remote(fault, **hang)

    async def restart(self, number: int) -> EngineAddress:
        """Start a dead engine in a process of its own, later the more often that was within an hour.

        Raises EngineError, DeadlineError and Ray's errors for an engine that does not start.
        """
        num_before, timeout_s = len(self._restarts[number]), start_deadline_s(self._settings.model)
        self._restarts[number].append(time.monotonic())
        await asyncio.sleep(min(MAX_BACKOFF_S, 2.0**num_before - 1))
        await asyncio.to_thread(self._renew, number)
        starting: asyncio.Future[EngineAddress] = asyncio.wrap_future(self._workers[number].start.remote(timeout_s).future())
        await asyncio.wait([starting], timeout=timeout_s + ENGINES_STOP_S)
        if not starting.done():
            raise DeadlineError(f"it did not start within {timeout_s + ENGINES_STOP_S:.0f} s; see {DEADLINE}")
        return starting.result()

    def _renew(self, number: int) -> None:
        """Make a new actor for an engine; what is left of the old one holds the place in Ray's reservation."""
        self._watches.pop(number, None)
        ray.kill(self._workers[number])
        self._workers[number] = self._make_workers[number]()

    def stop(self) -> None:
        """Stop and reap the servers. The server of a dead or slow actor ends when Ray ends."""
        self._stopped = True
        self._watchdog.forget()
        stopping = [worker.stop.remote() for worker in self._workers]
        # One deadline for all: the engines of lost nodes would each take theirs, one after the other.
        stopped, _ = ray.wait(stopping, num_returns=len(stopping), timeout=ENGINES_STOP_S)
        for ref in stopped:
            with suppress(*ACTOR_DEATHS):
                ray.get(ref)
        for worker in self._workers:
            # For other engines, their places in Ray's reservation.
            ray.kill(worker)


def engine_arguments(settings: Settings, *, model: "EngineModel", device_kind: Literal["cpu", "cuda"], number: int = 0) -> dict[str, Any]:
    """Return the arguments of engine `number` of a run, except address and key."""
    return server_arguments(
        settings.rollout.sglang,
        model_path=model.path,
        device_kind=device_kind,
        dtype=dtype_name(settings.model, device_kind=device_kind),
        seed=settings.run.seed * settings.rollout.num_engines + number,
        needs_tokenizer=settings.eval.has_stop_strings(settings.rollout.sampling) or settings.rollout.agent is not None,
        records_routing=settings.training.routing_replay,
        shapes_logits=settings.rollout.sampling.entropy is not None,
        colocated=settings.runtime.colocate,
        max_prompt_tokens=settings.data.max_prompt_tokens if settings.rollout.is_single_turn else None,
        has_weights=model.has_weights,
    )


def _recorded_mixture(model: ModelSettings, training: TrainingSettings) -> MixtureShape | None:
    """Return the experts of the model when engines are to record the routing of tokens."""
    if not training.routing_replay:
        return None
    # Imported here, because the driver has done so already and the actor never does.
    from megatron_rl.models.read_spec import read_model_spec
    from megatron_rl.training.expert_load import check_routing_replay

    spec = read_model_spec(model.path)
    check_routing_replay(model, training, spec)
    assert spec.moe is not None, "checked right above"
    return MixtureShape(
        num_layers=spec.num_layers,
        num_dense_layers=spec.moe.num_dense_layers,
        num_experts=spec.moe.num_experts,
        experts_per_token=spec.moe.num_experts_per_token,
    )


def weight_sync(name: str, weights: WeightSettings, *, colocate: bool, device_kind: Literal["cpu", "cuda"]) -> str:
    """Return how weights reach the engines by the transport `name`, and the setting that decides it."""
    means = {
        "broadcast": "a process group of NCCL" if device_kind == "cuda" else "a process group of gloo",
        "disk": "files in run.directory",
        "ipc": "the memory of the shared GPU" if device_kind == "cuda" else "shared memory of the host",
    }
    why = "weights.transport" if weights.transport is not None else f"weights.transport not set, runtime.colocate {format_value(colocate)}"
    return f"{name}: {means[name]} ({why})"
