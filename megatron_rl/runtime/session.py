"""The way from settings to a finished run: check, place, start, and always stop.

Ray reads the environment at import, and this module imports Ray:
`ray_session.prepare_environment` comes before the import of this module.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import ray

from megatron_rl.checkpoints.run_checkpoints import LOCK_FILE, SETTINGS_FILE, naming_the_way_around, newest_checkpoint
from megatron_rl.config.checks import gpu_contradictions
from megatron_rl.config.derived import dtype_name, sync_deadline_s
from megatron_rl.config.load import dump_settings
from megatron_rl.config.messages import joined_error
from megatron_rl.config.settings import Settings
from megatron_rl.data.buffer import BUFFER_FILE
from megatron_rl.data.source import RunPrompts
from megatron_rl.deadlines import ENGINE_CONTROL_S, PLACEMENT_S, REWARDS_START_S
from megatron_rl.device import chosen_row_maths, quiet_megatron_imports
from megatron_rl.engines.engine import EngineAddress
from megatron_rl.errors import CheckpointError, MegatronRLError, ResumableError, UserError, WorkerDiedError
from megatron_rl.files import claim, disk_errors, write_atomic
from megatron_rl.leftovers import remove_leftovers, scratch_directory
from megatron_rl.observe.console import RL_COLUMNS, RL_COLUMNS_WITHOUT_REFERENCE, SUPERVISED_COLUMNS, Column, RunConsole
from megatron_rl.observe.memory import PeakMemory
from megatron_rl.observe.metrics import metric_values
from megatron_rl.observe.sinks import Sinks
from megatron_rl.observe.summary import SUMMARY_FILE, asked_to_end, signal_of
from megatron_rl.observe.timing import PhaseTimer
from megatron_rl.process_variables import shared_variables
from megatron_rl.rollout.manager import RolloutManager, reward_log
from megatron_rl.runtime.cluster import Reservation, cluster_capability, cluster_device_kind, no_gpu, reserve
from megatron_rl.runtime.colocation import Phase, SharedDevices
from megatron_rl.runtime.engine_model import evaluated_model, make_model
from megatron_rl.runtime.engines import EngineGroup, weight_sync
from megatron_rl.runtime.garbage import spare_what_is_loaded
from megatron_rl.runtime.loop import train_loop
from megatron_rl.runtime.placement import Needs
from megatron_rl.runtime.ray_session import ray_cluster
from megatron_rl.runtime.run import RolloutRun, Run, generation_deadline_s
from megatron_rl.runtime.run_records import RunRecords
from megatron_rl.runtime.supervised_run import SupervisedRun
from megatron_rl.runtime.trainers import TrainerGroup
from megatron_rl.runtime.watchdog import Watchdog
from megatron_rl.types import Sample
from megatron_rl.weights.sync import TRANSPORTS, WeightSync
from megatron_rl.weights.transport import Surroundings, WeightTransport

with quiet_megatron_imports():
    from megatron_rl.models.attention.attention_choice import attention_name, resolve_attention
    from megatron_rl.models.read_spec import read_model_spec
    from megatron_rl.weights.transport import exported_specs


EVALUATION_FILE = "evaluation.json"
"""Of `eval`, in the run directory: its metrics; the samples stand beside it in evaluation.jsonl."""


def _columns(settings: Settings) -> tuple[Column, ...]:
    """Return the console's columns for the metrics of a run with `settings`."""
    if settings.supervised:
        return SUPERVISED_COLUMNS
    return RL_COLUMNS if settings.training.keeps_reference(settings.objective) else RL_COLUMNS_WITHOUT_REFERENCE


def train(settings: Settings, *, resume: bool, weights_only: bool = False) -> None:
    """Train as the settings say, or continue with `resume` from the run's newest checkpoint, with `weights_only` by a new optimizer.

    Raises UserError for what the user can mend and the failing process's own error otherwise; nothing keeps running.
    """
    timer = PhaseTimer()
    with ExitStack() as stack:
        console = stack.enter_context(RunConsole(settings.run.num_steps, columns=_columns(settings)))
        memory = stack.enter_context(PeakMemory([os.getpid()]))
        with _announcing_failure(console, settings):
            _clean_up(console)
            start = StartReport(console, timer)
            with timer.measure("start"), console.phase("start"):
                start_all = _start_supervised if settings.supervised else _start_with_engines
                make_run = start_all(settings, stack, start, resume=resume)
            console.say(str(start))
            console.say(f"attention: {_attention(settings)}; statistics of logits: {_row_maths(settings)}")
            if not settings.supervised:
                console.say(f"weight sync: {weight_sync(settings, device_kind=cluster_device_kind())}")
                console.say(f"what the reward function prints is in {reward_log(settings.run.directory)}")
            write_atomic(settings.run.directory / SETTINGS_FILE, dump_settings(settings))
            # An earlier life of the run may have ended, but this one has not.
            (settings.run.directory / SUMMARY_FILE).unlink(missing_ok=True)
            sinks = stack.enter_context(_open_sinks(settings, resume=resume))
            run = make_run(records=RunRecords(settings.run, console=console, sinks=sinks, memory=memory, timer=timer))
            with _keeping_what_it_has(run, console):
                first_step = run.resume(weights_only=weights_only) if resume else 0
                spare_what_is_loaded()
                train_loop(run, first_step=first_step)
                run.finish()


def _clean_up(console: RunConsole) -> None:
    """Remove the leftovers of killed runs on this machine, and report the removal."""
    removed = remove_leftovers()
    if removed:
        console.say(f"removed what a run that was killed had left: {', '.join(removed)}")


def _open_sinks(settings: Settings, *, resume: bool) -> Sinks:
    """Open the sinks at the step of resumption."""
    found = newest_checkpoint(settings.run.directory) if resume else None
    step, row = (found[1].step, found[1].metrics) if found is not None else (0, {})
    return Sinks(settings.run.directory, settings.observe, first_step=step, row=row, config=settings.model_dump(mode="json"))


@contextmanager
def _keeping_what_it_has(run: Run, console: RunConsole) -> Iterator[None]:
    """Let the run write the results so far when the body raises; a failure here must not hide the
    cause.
    """
    try:
        yield
    except BaseException as error:
        try:
            run.break_off(error)
        except (MegatronRLError, OSError) as second:
            console.say(f"the summary of this run could not be written: {second}")
        raise


def _attention(settings: Settings) -> str:
    """Return the attention of the ranks, and the attention that Transformer Engine may choose."""
    model, cp = settings.model, settings.training.topology.cp
    spec, capability = read_model_spec(model.path), cluster_capability() if cluster_device_kind() == "cuda" else None
    attention = resolve_attention(model.attention, spec, overrides=model.megatron, cp=cp, capability=capability)
    return attention_name(attention, model.megatron)


def _row_maths(settings: Settings) -> str:
    """Return the method of the ranks for log-probs and entropies, with the reason."""
    kind = cluster_device_kind()
    dtype = dtype_name(settings.model, device_kind=kind)
    return f"{chosen_row_maths(kind, dtype)}, for {dtype} on {kind}"


@contextmanager
def _announcing_failure(console: RunConsole, settings: Settings) -> Iterator[None]:
    """When the body raises, announce at once the stop of everything and the step to resume from.

    Raises:
        ResumableError: a signal or the death of a process ended a run that has a checkpoint.
    """
    try:
        yield
    except BaseException as error:
        found = None if isinstance(error, CheckpointError) else newest_checkpoint(settings.run.directory)
        rest = f"; --resume continues after step {found[1].step}" if found is not None else ""
        console.say(f"stopping every process of the run{rest}")
        if found is not None and (asked_to_end(error) or isinstance(error, WorkerDiedError)):
            cause = f"ended by {signal_of(error).name}" if asked_to_end(error) else str(error)
            interrupted = asked_to_end(error) and signal_of(error) == signal.SIGINT
            sentence = f"{cause}; the same command with --resume continues after step {found[1].step}"
            raise ResumableError(sentence, interrupted=interrupted) from error
        raise


def evaluate(settings: Settings) -> None:
    """Evaluate the model at model.path on data.eval with engines alone; print and keep the result.

    The result is kept with the samples in run.directory. Raises as `train`.
    """
    result, lines = settings.run.directory / EVALUATION_FILE, list[str]()

    def keep(kind: str, samples: Sequence[Sample]) -> None:
        lines.extend(json.dumps(_sample_record(sample, kind=kind), ensure_ascii=False) for sample in samples)

    with disk_errors(result):
        result.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        console = stack.enter_context(RunConsole(1))
        _clean_up(console)
        start = StartReport(console, PhaseTimer())
        watchdog = stack.enter_context(Watchdog(note=start.note))
        with console.phase("start"):
            # Nothing is trained on, so nothing has to be kept.
            buffer = stack.enter_context(scratch_directory()).path / BUFFER_FILE
            manager = _open_manager(settings, stack, watchdog, start, buffer=buffer, trains=False)
            reservation = _reserve(settings, stack, start, watchdog, trains=False)
            dtype = dtype_name(settings.model, device_kind=reservation.device_kind)
            model = stack.enter_context(evaluated_model(settings, dtype=dtype, note=start.note))
            engines = EngineGroup(settings, model=model, reservation=reservation, watchdog=watchdog)
            stack.callback(engines.stop)
            with start.part("engines"):
                # The engines evaluate the weights of their start.
                _join(manager, engines, engines.begin_start(), watchdog, start, serve_current=True)
        console.say(str(start))
        num_prompts = len(manager.prompts.held_out)
        with console.phase("eval", total=2 * num_prompts, unit="prompts") as progress:
            timeout_s = 2 * generation_deadline_s(settings, num_samples=num_prompts)
            evaluation = manager.evaluate(progress=progress, keep=keep)
            metrics = watchdog.wait(evaluation, name="evaluation", owner="the engines", timeout_s=timeout_s)
        values = metric_values(metrics)
        for name, value in values.items():
            console.say(f"{name:<28} {value:.4f}")
        write_atomic(result.with_suffix(".jsonl"), "".join(f"{line}\n" for line in lines))
        about = {"model": str(settings.model.path), "data": str(settings.data.eval), "seed": settings.run.seed, "metrics": values}
        write_atomic(result, json.dumps(about, indent=2) + "\n")
        console.say(f"result   {result}\nsamples  {result.with_suffix('.jsonl')}")


def _sample_record(sample: Sample, *, kind: str) -> dict[str, Any]:
    """Return what a line of evaluation.jsonl says of a sample; `kind` is greedy or sampled."""
    reward = sample.reward
    return {
        "kind": kind,
        "prompt_id": sample.prompt.id,
        "prompt": sample.prompt.text,
        "label": sample.prompt.label,
        "response": sample.response_text,
        "num_tokens": len(sample.response_ids),
        "stop_reason": sample.stop_reason.value,
        **({} if reward is None else {"outcome": reward.outcome.value, "reward": reward.value, "components": dict(reward.components)}),
        **({"message": reward.message} if reward is not None and reward.message else {}),
    }


def _start_supervised(settings: Settings, stack: ExitStack, start: "StartReport", *, resume: bool) -> Callable[..., Run]:
    """Do the cheap checks, then start the ranks and wait.

    The returned function makes the run from `records`.
    """
    _claim_directory(settings.run.directory, stack, start)
    prompts = RunPrompts.read(settings.model.path, settings.data, seed=settings.run.seed, supervised=True)
    for note in prompts.notes:
        start.note(note)
    watchdog = stack.enter_context(Watchdog(note=start.note))
    trainers = TrainerGroup(settings, reservation=_reserve(settings, stack, start, watchdog), watchdog=watchdog)
    with start.part("ranks"):
        _start_ranks(trainers, settings, resume=resume)
    return partial(SupervisedRun, settings, source=prompts.source, ranks=trainers)


def _claim_directory(directory: Path, stack: ExitStack, start: "StartReport") -> None:
    """Let no second run write in `directory`; in runs with engines the buffer is the lock."""
    try:
        stack.enter_context(closing(claim(directory / LOCK_FILE, what=f"run.directory {directory}")))
    except OSError as error:
        start.note(f"{directory} cannot be locked ({error.strerror}), so nobody looks whether another run writes there, too")


def _start_ranks(trainers: TrainerGroup, settings: Settings, *, resume: bool) -> None:
    """Wait for the ranks, which first check all of a resumed checkpoint.

    Engines take longer to start, and the load gets shorter by the same time.
    """
    # Not before the claim of the directory: a run that is asked to end writes a checkpoint.
    if resume and (found := newest_checkpoint(settings.run.directory)) is not None:
        with naming_the_way_around(settings.run.directory):
            trainers.check(found[0] / "megatron")
    trainers.finish_start(trainers.begin_start())


def _start_with_engines(settings: Settings, stack: ExitStack, start: "StartReport", *, resume: bool) -> Callable[..., Run]:
    """Do the cheap checks, then start every process and wait: at once, or in turns on shared
    devices.

    The returned function makes the run from `records`.
    """
    watchdog = stack.enter_context(Watchdog(note=start.note))
    manager = _open_manager(settings, stack, watchdog, start, buffer=settings.run.directory / BUFFER_FILE)
    reservation = _reserve(settings, stack, start, watchdog)
    if reservation.device_kind == "cuda" and (wrong := gpu_contradictions(settings, environment=os.environ)):
        raise joined_error(wrong, origin="on GPUs")
    dtype = dtype_name(settings.model, device_kind=reservation.device_kind)
    model = make_model(settings, dtype=dtype, note=start.note)
    trainers = TrainerGroup(settings, reservation=reservation, watchdog=watchdog)
    gpus_of_ranks = trainers.gpus if reservation.placement.needs.colocated else ()
    engines = EngineGroup(settings, model=model, reservation=reservation, watchdog=watchdog, gpus_of_ranks=gpus_of_ranks)
    stack.callback(engines.stop)
    if settings.runtime.colocate:
        # An engine sizes the cache by the memory that is free at the start.
        with start.part("ranks"):
            _start_ranks(trainers, settings, resume=resume)
            trainers.call("put_away", Phase.TRAINING.trainer_parts)
        with start.part("engines"):
            addresses = _join(manager, engines, engines.begin_start(), watchdog, start)
    else:
        engines_starting = engines.begin_start()
        start.follow("engines", [ref.future() for ref in engines_starting])
        with start.part("ranks"):
            _start_ranks(trainers, settings, resume=resume)
        addresses = _join(manager, engines, engines_starting, watchdog, start)
    devices = None
    if settings.runtime.colocate:
        timeout_s = sync_deadline_s(settings.model)
        devices = SharedDevices(trainers, manager, watchdog=watchdog, timeout_s=timeout_s)
        # The group of a transport takes device memory that is free in no other turn.
        devices.take(Phase.SYNC)
    with start.part("weight transport"):
        sync = _open_sync(settings, manager, trainers, watchdog, reservation=reservation, addresses=addresses)
    return partial(RolloutRun, settings, manager=manager, sync=sync, dtype=dtype, watchdog=watchdog, devices=devices, ranks=trainers)


def _open_manager(
    settings: Settings, stack: ExitStack, watchdog: Watchdog, start: "StartReport", *, buffer: Path, trains: bool = True
) -> RolloutManager:
    prompts = RunPrompts.read(settings.model.path, settings.data, seed=settings.run.seed, trains=trains)
    for note in prompts.notes:
        start.note(note)
    opening = RolloutManager.open(settings, prompts=prompts, buffer=buffer, say=start.note)
    with start.part("reward workers"):
        name = "checking the reward function and opening the buffer"
        return stack.enter_context(watchdog.entered(opening, name=name, owner="the reward workers", timeout_s=REWARDS_START_S))


def _join(
    manager: RolloutManager,
    engines: EngineGroup,
    starting: list[ray.ObjectRef],
    watchdog: Watchdog,
    start: "StartReport",
    *,
    serve_current: bool = False,
) -> list[EngineAddress]:
    """Wait for the engines that are `starting`, and give them to the manager, which may lose all
    but one.

    Return the engines' addresses, by number.
    """
    addresses = engines.finish_start(starting)
    joining = manager.join(addresses, serve_current=serve_current)
    watchdog.wait(joining, name="connecting to the engines", owner="the engines", timeout_s=ENGINE_CONTROL_S)

    def goes_on(address: EngineAddress, error: Exception) -> bool:
        leaving = manager.leave(address, error)
        left = watchdog.wait(leaving, name="going on without an engine", owner="the engines", timeout_s=ENGINE_CONTROL_S)
        if left:
            start.note(f"the run goes on with {len(manager.clients)} of {len(addresses)} engines, because one ended: {error}")
        return left

    engines.watch(addresses, goes_on=goes_on)
    return addresses


def _open_sync(
    settings: Settings,
    manager: RolloutManager,
    trainers: TrainerGroup,
    watchdog: Watchdog,
    *,
    reservation: Reservation,
    addresses: Sequence[EngineAddress],
) -> WeightSync:
    timeout_s = sync_deadline_s(settings.model)
    transport = partial(make_transport, settings, trainers, reservation, addresses)
    sync = WeightSync(transport, ranks=trainers, pool=manager.pool, timeout_s=timeout_s)
    name = "joining trainer and engines"
    watchdog.wait(sync.connect(), name=name, owner="the weight transport", timeout_s=timeout_s + ENGINE_CONTROL_S)
    return sync


def make_transport(
    settings: Settings, trainers: TrainerGroup, reservation: Reservation, addresses: Sequence[EngineAddress], urls: Sequence[str]
) -> WeightTransport:
    """Return the transport to the engines at `urls`, among those at `addresses`."""
    device_kind, placement = reservation.device_kind, reservation.placement
    colocated = addresses if placement.needs.colocated else ()
    surroundings = Surroundings(
        manifest=exported_specs(read_model_spec(settings.model.path), dtype=dtype_name(settings.model, device_kind=device_kind)),
        directory=settings.run.directory / "weights",
        free_address=trainers.free_address,
        backend="nccl" if device_kind == "cuda" else "gloo",
        num_engines=len(urls),
        ranks_per_engine=settings.rollout.ranks_per_engine,
        timeout_s=sync_deadline_s(settings.model),
        ranks_beside={address.url: placement.ranks_beside(number) for number, address in enumerate(colocated) if address.url in urls},
    )
    return TRANSPORTS[settings.weight_transport](surroundings)


def _reserve(settings: Settings, stack: ExitStack, start: "StartReport", watchdog: Watchdog, *, trains: bool = True) -> Reservation:
    on_cpu, runtime = Needs.of(settings, device_kind="cpu", trains=trains), settings.runtime
    with start.part("Ray"):
        num_processes, logs = on_cpu.num_ranks + on_cpu.num_engines, settings.run.directory / "logs" / "ray"
        lost = stack.enter_context(ray_cluster(address=runtime.ray_address, num_processes=num_processes, logs=logs))
    watchdog.watch("Ray", lost)
    device_kind = cluster_device_kind()
    if device_kind == "cpu" and runtime.cluster.gpu is not None:
        raise UserError(no_gpu(runtime.cluster.gpu, "the Ray cluster"))
    needs = on_cpu if device_kind == "cpu" else Needs.of(settings, device_kind=device_kind, trains=trains)
    variables = shared_variables(os.environ, device_kind=device_kind, interface=runtime.network_interface)
    if variables:
        start.note(f"every rank and engine has {' '.join(f'{name}={value}' for name, value in variables.items())}")
    with start.part("reservation"):
        return reserve(needs, cluster=runtime.cluster, device_kind=device_kind, timeout_s=PLACEMENT_S, variables=variables)


class StartReport:
    """Shows and measures every part as a separate phase, `start_PART`.

    Parts may overlap; `str` gives the seconds of all.
    """

    def __init__(self, console: RunConsole, timer: PhaseTimer) -> None:
        self._console, self._timer = console, timer
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """The body waits for `name`."""
        start_s = time.perf_counter()
        with self._console.phase(f"start: {name}"):
            yield
        self._ended(name, time.perf_counter() - start_s)

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

    def note(self, text: str) -> None:
        """Say what is worth knowing before the run goes on."""
        self._console.say(f"note: {text}")

    def _ended(self, name: str, seconds: float) -> None:
        self._timer.add(f"start_{name.lower().replace(' ', '_')}", seconds)
        self._seconds[name] = seconds

    def __str__(self) -> str:
        return f"started: {', '.join(f'{name} {seconds:.1f} s' for name, seconds in self._seconds.items())}"
