"""The start of a run's processes, in order: cheap checks, Ray, ranks, engines, weight transport.

Ray reads the environment at import, and this module imports Ray:
`ray_session.prepare_environment` comes before the import of this module.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from megatron_rl.checkpoints.run_checkpoints import LOCK_FILE, naming_the_way_around, newest_checkpoint
from megatron_rl.config.derived import DEADLINE, dtype_name, sync_deadline_s
from megatron_rl.config.gpus import check_on_gpus
from megatron_rl.config.settings import Settings
from megatron_rl.data.buffer import BUFFER_FILE
from megatron_rl.data.source import RunPrompts
from megatron_rl.engines.engine import EngineAddress
from megatron_rl.errors import UserError
from megatron_rl.models.read_spec import read_model_spec
from megatron_rl.observe.console import RunConsole
from megatron_rl.observe.live_state import PhaseState, StatusFile
from megatron_rl.observe.timing import PhaseTimer
from megatron_rl.rollout.manager import RolloutManager
from megatron_rl.runtime.agent_nodes import spread_agents
from megatron_rl.runtime.cluster import Reservation, cluster_device_kind, reserve
from megatron_rl.runtime.colocation import Phase, SharedDevices
from megatron_rl.runtime.engine_model import EngineModel, make_model
from megatron_rl.runtime.engine_returns import EngineReturns
from megatron_rl.runtime.engines import EngineGroup
from megatron_rl.runtime.placement import Needs
from megatron_rl.runtime.ray_session import ray_cluster
from megatron_rl.runtime.resumption import open_record
from megatron_rl.runtime.run import RolloutRun, Run
from megatron_rl.runtime.runs_without_engines import ReplayRun, SupervisedRun
from megatron_rl.runtime.target import no_gpu
from megatron_rl.runtime.trainers import TrainerGroup, printed_stacks
from megatron_rl.runtime.watchdog import OpenWait, Watchdog
from megatron_rl.system.deadlines import ENGINE_CONTROL_S, PLACEMENT_S, REWARDS_START_S, STACK_S
from megatron_rl.system.files import claim
from megatron_rl.system.process_variables import shared_variables
from megatron_rl.system.stacks import STACKS_FILE, STACKS_VARIABLE, stacks_to, write_stacks
from megatron_rl.weights.sync import CHECK_INTERVAL, TRANSPORTS, WeightSync
from megatron_rl.weights.transport import Surroundings, WeightTransport, exported_specs


class StartReport:
    """Shows and measures parts, which may overlap, as phases `start_PART`; `str` gives the seconds of all."""

    def __init__(self, console: RunConsole, timer: PhaseTimer) -> None:
        self._console, self._timer = console, timer
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        self.notes: deque[str] = deque(maxlen=5)
        """The newest notes with the time of day."""

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """The body waits for `name`."""
        start_s = time.perf_counter()
        with self._console.phase(f"start: {name}"):
            yield
        self._seconds[name] = time.perf_counter() - start_s
        self._timer.add(f"start_{name.lower().replace(' ', '_')}", self._seconds[name])
        self._timer.spans.add("driver", f"start: {name}", seconds=self._seconds[name])

    def follow(self, name: str, futures: "Sequence[Future[Any]]") -> None:
        """Show the wait for all of `futures`, together called `name`; return at once."""
        phase = self.part(name)
        phase.__enter__()
        waiting = set(futures)

        def finished(future: "Future[Any]") -> None:
            with self._lock:
                waiting.discard(future)
                last = not waiting
            if last:
                phase.__exit__(None, None, None)

        for future in futures:
            future.add_done_callback(finished)

    def phases(self) -> tuple[PhaseState, ...]:
        """Return the phases in progress. Safe in any thread."""
        now_s = time.monotonic()
        return tuple(PhaseState(name=one.name, progress=one.text(), seconds=now_s - one.started_s) for one in self._console.phases)

    def note(self, text: str) -> None:
        """Say what is worth knowing about the run."""
        self.notes.append(f"{time.strftime('%H:%M:%S')} {text}")
        self._console.say(f"note: {text}")

    def __str__(self) -> str:
        return f"started: {', '.join(f'{name} {seconds:.1f} s' for name, seconds in self._seconds.items())}"


class RunStart:
    """Starts the parts of a run with `settings`; all of them end with `stack`.

    Parts in `life` end with the ranks, too: after `end_life` the same call starts them again, beside
    Ray and, where `engines_stay`, the engines.
    """

    def __init__(self, settings: Settings, stack: ExitStack, report: StartReport) -> None:
        self.settings, self._stack, self.report = settings, stack, report
        self._stacks = settings.run.directory / "logs" / STACKS_FILE
        self.watchdog = stack.enter_context(Watchdog(note=report.note, late=self._note_late))
        self.life = stack.enter_context(ExitStack())
        self.ranks: TrainerGroup | None = None
        self.ray: Future[None] = Future()  # fails when Ray is gone
        self._reservation: Reservation | None = None
        self._engines: EngineGroup | None = None
        self._sync: WeightSync | None = None
        self._manager: RolloutManager | None = None
        self._status: StatusFile | None = None
        self.engines_stay = not settings.runtime.colocate

    def _note_late(self, wait: OpenWait) -> None:
        """Say that a wait takes longer than usual, after writing the Python stacks of the run's processes."""
        state = wait.state()
        stacks = () if self.ranks is None else printed_stacks(self.ranks.stacks(timeout_s=STACK_S))
        try:
            write_stacks(self._stacks, title=str(state), others=stacks)
        except OSError as error:
            self.report.note(f"{state}; the stacks of the run's processes could not be written ({error.strerror})")
        else:
            self.report.note(f"{state}; Python stacks of the run's processes are in {self._stacks}")

    def _begin_stacks(self) -> None:
        """Let the processes started from now on write their stacks when asked."""
        if STACKS_VARIABLE not in os.environ:
            self._stack.enter_context(stacks_to(self._stacks))

    def _open_status(self) -> None:
        """Write the run's state from here until its end; only after the claim of its directory."""
        if self._status is not None:
            return
        run = self.settings.run
        status = StatusFile(
            run.directory,
            num_steps=run.num_steps,
            phases=self.report.phases,
            waits=lambda: tuple(wait.state() for wait in list(self.watchdog.open_waits)),
            engines=lambda: () if self._manager is None else self._manager.engine_states(),
            notes=lambda: list(self.report.notes),
        )
        self._status = self._stack.enter_context(status)

    def supervised(self, *, resume: bool) -> Callable[..., Run]:
        """Do the cheap checks, then start the ranks and wait; the returned function makes the run from `records`."""
        settings = self.settings
        self._claim_directory()
        prompts = self._read_prompts(supervised=True)
        ranks = self.ranks = TrainerGroup(settings, reservation=self.reserve(generates=False), watchdog=self.watchdog)
        self._start_ranks(ranks, resume=resume)
        groups = settings.data.prompts_per_step
        return partial(SupervisedRun, settings.run, groups_per_step=groups, source=prompts.source, ranks=ranks)

    def replayed(self, replay: Path, *, resume: bool) -> Callable[..., Run]:
        """Do as `supervised` with the batches that the run at `replay` recorded."""
        settings = self.settings
        self._claim_directory()
        sampling, objective = settings.rollout.sampling, settings.objective
        recorded, before = open_record(
            replay, settings.run.directory, sampling=sampling, objective=objective, resume=resume, note=self.report.note
        )
        self.life.enter_context(recorded)
        ranks = self.ranks = TrainerGroup(settings, reservation=self.reserve(generates=False), watchdog=self.watchdog)
        self._start_ranks(ranks, resume=resume)
        return partial(ReplayRun, settings, recorded=recorded, before=before, ranks=ranks)

    def with_engines(self, *, resume: bool) -> Callable[..., Run]:
        """Do as `supervised` with engines: ranks and engines start at once, or in turns on shared devices."""
        settings, watchdog = self.settings, self.watchdog
        self._begin_stacks()
        manager = self.open_manager(settings.run.directory / BUFFER_FILE)
        self._open_status()
        reservation = self.reserve()
        if reservation.device_kind == "cuda":
            check_on_gpus(settings.rollout.sglang, settings.weight_transport, colocate=settings.runtime.colocate)
        dtype = dtype_name(settings.model, device_kind=reservation.device_kind)
        model = make_model(
            settings.model.path, directory=settings.run.directory, sglang=settings.rollout.sglang, dtype=dtype, note=self.report.note
        )
        ranks = self.ranks = TrainerGroup(settings, reservation=reservation, watchdog=watchdog)
        engines = self.place_engines(model, reservation, gpus_of_ranks=ranks.gpus if settings.runtime.colocate else ())
        devices = None
        if settings.runtime.colocate:
            # An engine sizes the cache by the memory that is free at the start.
            self._start_ranks(ranks, resume=resume, then=lambda: ranks.call("put_away", Phase.TRAINING.trainer_parts))
            with self.report.part("engines"):
                addresses = self.join(manager, engines, engines.begin_start())
            devices = SharedDevices(ranks, manager, watchdog=watchdog, timeout_s=sync_deadline_s(settings.model))
            # The group of a transport takes device memory that is free in no other phase.
            devices.take(Phase.SYNC)
        else:
            starting = engines.begin_start()
            self.report.follow("engines", starting)
            self._start_ranks(ranks, resume=resume)
            addresses = self.join(manager, engines, starting)
        sync = self._open_sync(partial(make_transport, settings, ranks, reservation, addresses), ranks, manager)
        return partial(RolloutRun, settings, manager=manager, sync=sync, dtype=dtype, watchdog=watchdog, devices=devices, ranks=ranks)

    def _claim_directory(self) -> None:
        """Let no second run write in the run directory, and begin its files; in runs with engines the buffer is the lock."""
        directory = self.settings.run.directory
        try:
            self.life.enter_context(closing(claim(directory / LOCK_FILE, what=f"run.directory {directory}")))
        except OSError as error:
            self.report.note(f"{directory} cannot be locked ({error.strerror}), so nobody looks whether another run writes there, too")
        self._begin_stacks()
        self._open_status()

    def _read_prompts(self, **kind: bool) -> RunPrompts:
        settings = self.settings
        prompts = RunPrompts.read(settings.model.path, settings.data, sets=settings.eval.sets, seed=settings.run.seed, **kind)
        for note in prompts.notes:
            self.report.note(note)
        prompts.list_bad_rows(settings.run.directory / "logs" / "bad_rows.txt")
        return prompts

    def open_manager(self, buffer: Path, *, trains: bool = True) -> RolloutManager:
        """Read the prompts, and start the reward workers."""
        prompts = self._read_prompts(trains=trains)
        opening = RolloutManager.open(self.settings, prompts=prompts, buffer=buffer, say=self.report.note)
        with self.report.part("reward workers"):
            name = "checking the reward function and opening the buffer"
            manager = self.life.enter_context(
                self.watchdog.entered(opening, name=name, owner="the reward workers", timeout_s=REWARDS_START_S)
            )
        self._manager = manager
        return manager

    def reserve(self, *, trains: bool = True, generates: bool = True) -> Reservation:
        """Start or join Ray, and reserve, once, a place for every rank where a run `trains`, and for every engine where it `generates`."""
        if self._reservation is not None:
            return self._reservation
        settings, runtime, directory = self.settings, self.settings.runtime, self.settings.run.directory
        topology, rollout = settings.training.topology if trains else None, settings.rollout if generates else None
        needs_on = partial(Needs.of, topology, rollout, colocate=runtime.colocate)
        on_cpu = needs_on(device_kind="cpu")
        with self.report.part("Ray"):
            num_processes = on_cpu.num_ranks + on_cpu.num_engines
            cluster = ray_cluster(address=runtime.ray_address, num_processes=num_processes, logs=directory / "logs" / "ray")
            self.ray = self._stack.enter_context(cluster)
            self.watchdog.watch("Ray", self.ray)
            # Reward workers that were started again are children that Ray's end would kill.
            self._stack.push(self.life.__exit__)
            self._stack.callback(self.watchdog.forget)
        device_kind = cluster_device_kind()
        if device_kind == "cpu" and runtime.cluster.gpu is not None:
            raise UserError(no_gpu(runtime.cluster.gpu, "the Ray cluster"))
        needs = on_cpu if device_kind == "cpu" else needs_on(device_kind=device_kind)
        variables = shared_variables(os.environ, device_kind=device_kind, interface=runtime.network_interface)
        if variables:
            self.report.note(f"every rank and engine has {' '.join(f'{name}={value}' for name, value in variables.items())}")
        with self.report.part("reservation"):
            self._reservation = reserve(needs, cluster=runtime.cluster, device_kind=device_kind, timeout_s=PLACEMENT_S, variables=variables)
        return self._reservation

    def end_life(self) -> None:
        """End ranks and the driver's parts, for a new start. Engines on devices of their own stay."""
        self.watchdog.forget()
        assert self.ranks is not None, "started before"
        self.ranks.end()
        self.life.close()
        if self._engines is not None and not self.engines_stay:
            # The parts of their memory on the devices are not known.
            self._engines.stop()
            self._engines = self._sync = None
        self.watchdog.watch("Ray", self.ray)

    def _start_ranks(self, ranks: TrainerGroup, *, resume: bool, then: Callable[[], object] = lambda: None) -> None:
        """Wait for the ranks, which first check a resumed checkpoint: engines take longer, and the load gets shorter."""
        directory = self.settings.run.directory
        with self.report.part("ranks"):
            # Not before the claim of the directory: a run that is asked to end writes a checkpoint.
            if resume and (found := newest_checkpoint(directory)) is not None:
                with naming_the_way_around(directory):
                    ranks.check(found[0] / "megatron")
            ranks.start()
            then()

    def place_engines(self, model: EngineModel, reservation: Reservation, *, gpus_of_ranks: Sequence[tuple[str, ...]] = ()) -> EngineGroup:
        """Start the actors of the engines, without servers, where there are none."""
        if self._engines is None:
            engines = EngineGroup(self.settings, model=model, reservation=reservation, watchdog=self.watchdog, gpus_of_ranks=gpus_of_ranks)
            self._stack.callback(engines.stop)
            self._engines = engines
        return self._engines

    def join(
        self, manager: RolloutManager, engines: EngineGroup, starting: list[Future[EngineAddress | None]], *, serve_current: bool = False
    ) -> list[EngineAddress]:
        """Wait for the `starting` engines; give them to the manager, and watch them. Dead ones follow."""
        wait = partial(self.watchdog.wait, owner="the engines", timeout_s=ENGINE_CONTROL_S)
        found = engines.finish_start(starting)
        addresses = [address for address in found if address is not None]
        wait(manager.join(addresses, serve_current=serve_current), name="connecting to the engines")

        agent = self.settings.rollout.agent
        if agent is not None and agent.command and self._reservation is not None:
            logs = self.settings.run.directory / "logs"
            spread_agents(manager, agent.command, reservation=self._reservation, logs=logs, watchdog=self.watchdog)
        EngineReturns(engines, manager, found, wait=wait, note=self.report.note, serve_current=serve_current)
        return addresses

    def _open_sync(self, transport: Callable[[Sequence[str]], WeightTransport], ranks: TrainerGroup, manager: RolloutManager) -> WeightSync:
        timeout_s = sync_deadline_s(self.settings.model)
        # SGLang's loaders of one's own take no weights for engines of several data-parallel ranks.
        interval = 0 if self.settings.rollout.sglang.get("dp_size", 1) > 1 else CHECK_INTERVAL
        sync = WeightSync(transport, ranks=ranks, pool=manager.pool, timeout_s=timeout_s, check_interval=interval)
        before = self._sync
        with self.report.part("weight transport"):
            wait = partial(self.watchdog.wait, owner="the weight transport", timeout_s=timeout_s + ENGINE_CONTROL_S, see=DEADLINE)
            if before is not None:
                wait(before.give_up(manager.pool), name="parting the engines from dead ranks")
            wait(sync.connect(), name="joining trainer and engines")
        self._sync = sync
        return sync


def make_transport(
    settings: Settings, ranks: TrainerGroup, reservation: Reservation, addresses: Sequence[EngineAddress], urls: Sequence[str]
) -> WeightTransport:
    """Return the transport to the engines at `urls`, among those at `addresses`."""
    device_kind, placement = reservation.device_kind, reservation.placement
    colocated = addresses if placement.needs.colocated else ()
    surroundings = Surroundings(
        manifest=exported_specs(read_model_spec(settings.model.path), dtype=dtype_name(settings.model, device_kind=device_kind)),
        directory=settings.run.directory / "weights",
        free_address=ranks.free_address,
        backend="nccl" if device_kind == "cuda" else "gloo",
        num_engines=len(urls),
        ranks_per_engine=settings.rollout.ranks_per_engine,
        timeout_s=sync_deadline_s(settings.model),
        ranks_beside={address.url: placement.ranks_beside(number) for number, address in enumerate(colocated) if address.url in urls},
        hosts={address.url: address.hosts for address in addresses},
        deltas=settings.weights.delta,
    )
    return TRANSPORTS[settings.weight_transport](surroundings)
