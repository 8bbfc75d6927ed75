"""From settings to a finished run: everything is checked, then placed, then started, and stopped whatever happens."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from megatron_rl.config.checks import gpu_contradictions
from megatron_rl.config.load import dump_settings
from megatron_rl.config.messages import joined_error
from megatron_rl.config.settings import Settings
from megatron_rl.device import chosen_row_maths, quiet_megatron_imports
from megatron_rl.errors import MegatronRLError, UserError
from megatron_rl.files import write_atomic
from megatron_rl.leftovers import remove_leftovers
from megatron_rl.observe.console import RL_COLUMNS, RL_COLUMNS_WITHOUT_REFERENCE, SUPERVISED_COLUMNS, Column, RunConsole
from megatron_rl.observe.memory import PeakMemory
from megatron_rl.observe.metrics import metric_values
from megatron_rl.observe.sinks import Sinks
from megatron_rl.observe.summary import SUMMARY_FILE
from megatron_rl.observe.timing import PhaseTimer
from megatron_rl.rollout.engine import EngineAddress
from megatron_rl.runtime.background import BackgroundLoop
from megatron_rl.runtime.checkpoint import newest_checkpoint
from megatron_rl.runtime.cluster import Places, cluster_device_kind, no_gpu, reserved_places
from megatron_rl.runtime.engines import EngineGroup, engine_dtype, ranks_per_engine
from megatron_rl.runtime.launch_plan import weight_sync
from megatron_rl.runtime.loop import train_loop
from megatron_rl.runtime.placement import Needs
from megatron_rl.runtime.ray_session import ray_cluster
from megatron_rl.runtime.samples import GeneratedSamples, SampleSource, SupervisedSamples
from megatron_rl.runtime.start_report import StartReport
from megatron_rl.runtime.trainers import TrainerGroup
from megatron_rl.runtime.training_run import SETTINGS_FILE, TrainingRun
from megatron_rl.runtime.turns import NoTurns, SharedDevices, Turn, Turns
from megatron_rl.runtime.watchdog import Watchdog
from megatron_rl.weights.interface import Surroundings, WeightTransport
from megatron_rl.weights.sync import TRANSPORTS

with quiet_megatron_imports():
    from megatron_rl.models.read_spec import read_model_spec
    from megatron_rl.weights.manifest import make_manifest

PLACE_TIMEOUT_S = 120.0
BUFFER_FILE = "buffer.sqlite"


def _columns(settings: Settings) -> tuple[Column, ...]:
    """The console's columns of what a run with `settings` measures."""
    if settings.supervised:
        return SUPERVISED_COLUMNS
    return RL_COLUMNS if settings.training.keeps_reference(settings.objective) else RL_COLUMNS_WITHOUT_REFERENCE


def train(settings: Settings, *, resume: bool) -> None:
    """Train; see `run.run_training`."""
    directory = settings.run.directory
    timer = PhaseTimer()
    with ExitStack() as stack:
        console = stack.enter_context(RunConsole(settings.run.num_steps, columns=_columns(settings)))
        memory = stack.enter_context(PeakMemory([os.getpid()]))
        with _announcing_failure(console, settings):
            _clean_up(console)
            start = StartReport(console, timer)
            with timer.measure("start"), console.phase("start"):
                samples, trainers, turns = _start(settings, stack, start)
            console.say(str(start))
            console.say(f"statistics of logits: {_row_maths(settings)}")
            if not settings.supervised:
                console.say(f"weight sync: {weight_sync(settings, device_kind=cluster_device_kind())}")
            if isinstance(samples, GeneratedSamples):
                console.say(f"what the reward function prints is in {samples.rollouts.reward_log}")
            write_atomic(directory / SETTINGS_FILE, dump_settings(settings))
            # An earlier life of the run may have ended, but this one has not.
            (directory / SUMMARY_FILE).unlink(missing_ok=True)
            sinks = stack.enter_context(_open_sinks(settings, resume=resume))
            run = TrainingRun(
                settings, samples=samples, trainers=trainers, turns=turns, console=console, sinks=sinks, memory=memory, timer=timer
            )
            with _keeping_what_it_has(run, console):
                first_step = run.resume() if resume else 0
                train_loop(run, first_step=first_step)
                run.finish()


def _clean_up(console: RunConsole) -> None:
    """Remove what runs that were killed have left on this machine, and say so."""
    removed = remove_leftovers()
    if removed:
        console.say(f"removed what a run that was killed had left: {', '.join(removed)}")


def _open_sinks(settings: Settings, *, resume: bool) -> Sinks:
    """The sinks, at the step at which the run goes on."""
    found = newest_checkpoint(settings.run.directory) if resume else None
    step, row = (found[1].step, found[1].metrics) if found is not None else (0, {})
    return Sinks(settings.run.directory, settings.observe, first_step=step, row=row, config=settings.model_dump(mode="json"))


@contextmanager
def _keeping_what_it_has(run: TrainingRun, console: RunConsole) -> Iterator[None]:
    """When the body raises, let the run write what it has; that this fails as well must not hide why the run ended."""
    try:
        yield
    except BaseException as error:
        try:
            run.break_off(error)
        except (MegatronRLError, OSError) as second:
            console.say(f"the summary of this run could not be written: {second}")
        raise


def _row_maths(settings: Settings) -> str:
    """What the ranks make log-probs and entropies with, and why."""
    kind = cluster_device_kind()
    dtype = engine_dtype(settings, device_kind=kind)
    return f"{chosen_row_maths(kind, dtype)}, for {dtype} on {kind}"


@contextmanager
def _announcing_failure(console: RunConsole, settings: Settings) -> Iterator[None]:
    """When the body raises, say at once that everything is being stopped, and from where the run can go on."""
    try:
        yield
    except BaseException:
        found = newest_checkpoint(settings.run.directory)
        rest = f"; --resume continues after step {found[1].step}" if found is not None else ""
        console.say(f"stopping every process of the run{rest}")
        raise


def evaluate(settings: Settings) -> None:
    """Evaluate; see `run.run_evaluation`."""
    with ExitStack() as stack:
        console = stack.enter_context(RunConsole(1))
        start = StartReport(console, PhaseTimer())
        with console.phase("start"):
            samples = _open_samples(settings, stack, watchdog := Watchdog(), start, buffer=False)
            places = _reserve(settings, stack, start, trains=False)
            engines = EngineGroup(settings, places=places, watchdog=watchdog)
            stack.callback(engines.stop)
            with start.part("engines"):
                samples.connect(engines.finish_start(engines.begin_start()))
        console.say(str(start))
        with console.phase("eval", total=2 * samples.num_eval_prompts, unit="prompts") as progress:
            metrics = samples.evaluate(progress=progress)
        for name, value in metric_values(metrics).items():
            console.say(f"{name:<28} {value:.4f}")


def _start(settings: Settings, stack: ExitStack, start: StartReport) -> tuple[SampleSource, TrainerGroup, Turns]:
    """Check what is cheap to check, then start every process and wait for all: at once, or in turns on shared devices."""
    watchdog = Watchdog()
    if settings.supervised:
        samples = SupervisedSamples(settings)
        trainers = TrainerGroup(settings, places=_reserve(settings, stack, start), watchdog=watchdog)
        with start.part("ranks"):
            trainers.finish_start(trainers.begin_start())
        return samples, trainers, NoTurns()
    generated = _open_samples(settings, stack, watchdog, start, buffer=True)
    places = _reserve(settings, stack, start)
    if places.device_kind == "cuda" and (wrong := gpu_contradictions(settings)):
        raise joined_error(wrong, origin="on GPUs")
    trainers = TrainerGroup(settings, places=places, watchdog=watchdog)
    engines = EngineGroup(
        settings, places=places, watchdog=watchdog, gpus_of_ranks=trainers.gpus if places.placement.needs.colocated else ()
    )
    stack.callback(engines.stop)
    if settings.runtime.colocate:
        # An engine sizes its cache by what is free when it starts.
        with start.part("ranks"):
            trainers.finish_start(trainers.begin_start())
            trainers.put_away(Turn.TRAINING.trainer_parts)
        with start.part("engines"):
            addresses = engines.finish_start(engines.begin_start())
            generated.connect(addresses)
    else:
        engines_starting = engines.begin_start()
        start.follow("engines", [ref.future() for ref in engines_starting])
        with start.part("ranks"):
            trainers.finish_start(trainers.begin_start())
        addresses = engines.finish_start(engines_starting)
        generated.connect(addresses)
    turns = SharedDevices(trainers, generated) if settings.runtime.colocate else NoTurns()
    # The group of a transport takes memory on the devices, which is there in no other turn.
    turns.take(Turn.SYNC)
    with start.part("weight transport"):
        make_transport = partial(_make_transport, settings, trainers, places, addresses)
        generated.attach(make_transport, trainers, dtype=engine_dtype(settings, device_kind=places.device_kind))
    return generated, trainers, turns


def _open_samples(settings: Settings, stack: ExitStack, watchdog: Watchdog, start: StartReport, *, buffer: bool) -> GeneratedSamples:
    background = BackgroundLoop()
    stack.callback(background.close)
    samples = GeneratedSamples(settings, background=background, watchdog=watchdog)
    stack.callback(samples.close)
    for note in samples.rollouts.label_notes:
        start.note(note)
    with start.part("reward workers"):
        samples.open(settings.run.directory / BUFFER_FILE if buffer else None)
    return samples


def _reserve(settings: Settings, stack: ExitStack, start: StartReport, *, trains: bool = True) -> Places:
    on_cpu, runtime = Needs.of(settings, device_kind="cpu", trains=trains), settings.runtime
    with start.part("Ray"):
        stack.enter_context(ray_cluster(address=runtime.ray_address, num_processes=on_cpu.num_ranks + on_cpu.num_engines))
    device_kind = cluster_device_kind()
    if device_kind == "cpu" and runtime.cluster.gpu is not None:
        raise UserError(no_gpu(runtime.cluster.gpu, "the Ray cluster"))
    needs = on_cpu if device_kind == "cpu" else Needs.of(settings, device_kind=device_kind, trains=trains)
    with start.part("places"):
        places = stack.enter_context(reserved_places(needs, cluster=runtime.cluster, device_kind=device_kind, timeout_s=PLACE_TIMEOUT_S))
    return places


def _make_transport(
    settings: Settings, trainers: TrainerGroup, places: Places, addresses: Sequence[EngineAddress], urls: Sequence[str]
) -> WeightTransport:
    """To the engines at `urls`, among those at `addresses`."""
    device_kind, placement = places.device_kind, places.placement
    colocated = addresses if placement.needs.colocated else ()
    surroundings = Surroundings(
        manifest=make_manifest(read_model_spec(settings.model.path), dtype=engine_dtype(settings, device_kind=device_kind)),
        directory=settings.run.directory / "weights",
        free_address=trainers.free_address,
        backend="nccl" if device_kind == "cuda" else "gloo",
        num_engines=len(urls),
        ranks_per_engine=ranks_per_engine(settings, device_kind=device_kind),
        timeout_s=settings.weights.sync_timeout_s,
        ranks_beside={address.url: placement.ranks_beside(number) for number, address in enumerate(colocated) if address.url in urls},
    )
    return TRANSPORTS[settings.weight_transport](surroundings)
