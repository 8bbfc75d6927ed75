"""From settings to a finished run: everything is checked, then placed, then started, and stopped whatever happens."""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from megatron_rl.config.checks import gpu_contradictions
from megatron_rl.config.load import dump_settings
from megatron_rl.config.messages import joined_error
from megatron_rl.config.settings import Settings
from megatron_rl.device import chosen_row_maths
from megatron_rl.errors import UserError
from megatron_rl.files import write_atomic
from megatron_rl.observe.console import RL_COLUMNS, SUPERVISED_COLUMNS, RunConsole
from megatron_rl.observe.memory import PeakMemory
from megatron_rl.observe.metrics import metric_values
from megatron_rl.observe.sinks import Sinks
from megatron_rl.observe.timing import PhaseTimer
from megatron_rl.runtime.background import BackgroundLoop
from megatron_rl.runtime.checkpoint import newest_checkpoint
from megatron_rl.runtime.cluster import DeviceKind, Places, cluster_device_kind, no_gpu, ray_cluster, reserved_places
from megatron_rl.runtime.engines import EngineGroup, engine_dtype, ranks_per_engine
from megatron_rl.runtime.loop import train_loop
from megatron_rl.runtime.placement import Needs
from megatron_rl.runtime.publish import BroadcastPublisher, DiskPublisher, Parties, Publisher
from megatron_rl.runtime.samples import GeneratedSamples, SampleSource, SupervisedSamples
from megatron_rl.runtime.trainers import TrainerGroup
from megatron_rl.runtime.training_run import SETTINGS_FILE, TrainingRun
from megatron_rl.runtime.turns import NoTurns, SharedDevices, Turn, Turns
from megatron_rl.runtime.watchdog import Watchdog

PLACE_TIMEOUT_S = 120.0
BUFFER_FILE = "buffer.sqlite"


def train(settings: Settings, *, resume: bool) -> None:
    """Train; see `run.run_training`."""
    directory = settings.run.directory
    timer = PhaseTimer()
    with ExitStack() as stack:
        columns = SUPERVISED_COLUMNS if settings.supervised else RL_COLUMNS
        console = stack.enter_context(RunConsole(settings.run.num_steps, columns=columns))
        memory = stack.enter_context(PeakMemory([os.getpid()]))
        with _announcing_failure(console, settings):
            with timer.measure("start"), console.phase("start"):
                samples, trainers, turns = _start(settings, stack)
            if isinstance(samples, GeneratedSamples):
                console.say(f"what the reward function prints is in {samples.rollouts.reward_log}")
            write_atomic(directory / SETTINGS_FILE, dump_settings(settings))
            console.say(f"statistics of logits: {_row_maths(settings)}")
            sinks = stack.enter_context(Sinks(directory, settings.observe, config=settings.model_dump(mode="json")))
            run = TrainingRun(
                settings, samples=samples, trainers=trainers, turns=turns, console=console, sinks=sinks, memory=memory, timer=timer
            )
            first_step = run.resume() if resume else 0
            train_loop(run, first_step=first_step)
            run.finish(resume_command=_resume_command(settings))


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
        with console.phase("start"):
            samples = _open_samples(settings, stack, watchdog := Watchdog(), buffer=False)
            places = _reserve(settings, stack, trains=False)
            engines = EngineGroup(settings, places=places, watchdog=watchdog)
            stack.callback(engines.stop)
            samples.connect(engines.finish_start(engines.begin_start()))
        with console.phase("eval", total=2 * samples.num_eval_prompts, unit="prompts") as progress:
            metrics = samples.evaluate(progress=progress)
        for name, value in metric_values(metrics).items():
            console.say(f"{name:<28} {value:.4f}")


def _start(settings: Settings, stack: ExitStack) -> tuple[SampleSource, TrainerGroup, Turns]:
    """Check what is cheap to check, then start every process and wait for all: at once, or in turns on shared devices."""
    watchdog = Watchdog()
    if settings.supervised:
        samples = SupervisedSamples(settings)
        trainers = TrainerGroup(settings, places=_reserve(settings, stack), watchdog=watchdog)
        trainers.finish_start(trainers.begin_start())
        return samples, trainers, NoTurns()
    generated = _open_samples(settings, stack, watchdog, buffer=True)
    places = _reserve(settings, stack)
    if places.device_kind == "cuda" and (wrong := gpu_contradictions(settings)):
        raise joined_error(wrong, origin="on GPUs")
    trainers = TrainerGroup(settings, places=places, watchdog=watchdog)
    engines = EngineGroup(
        settings, places=places, watchdog=watchdog, gpus_of_ranks=trainers.gpus if places.placement.needs.colocated else ()
    )
    stack.callback(engines.stop)
    if settings.runtime.colocate:
        # An engine sizes its cache by what is free when it starts.
        trainers.finish_start(trainers.begin_start())
        trainers.put_away(Turn.TRAINING.trainer_parts)
        generated.connect(engines.finish_start(engines.begin_start()))
    else:
        engines_starting, trainers_starting = engines.begin_start(), trainers.begin_start()
        trainers.finish_start(trainers_starting)
        generated.connect(engines.finish_start(engines_starting))
    turns = SharedDevices(trainers, generated) if settings.runtime.colocate else NoTurns()
    # A publisher looks at the weights that it is going to send.
    turns.take(Turn.SYNC)
    publisher = _publisher(settings, generated, trainers, watchdog, device_kind=places.device_kind)
    generated.attach(publisher, trainers, dtype=engine_dtype(settings, device_kind=places.device_kind))
    return generated, trainers, turns


def _open_samples(settings: Settings, stack: ExitStack, watchdog: Watchdog, *, buffer: bool) -> GeneratedSamples:
    background = BackgroundLoop()
    stack.callback(background.close)
    samples = GeneratedSamples(settings, background=background, watchdog=watchdog)
    stack.callback(samples.close)
    samples.open(settings.run.directory / BUFFER_FILE if buffer else None)
    return samples


def _reserve(settings: Settings, stack: ExitStack, *, trains: bool = True) -> Places:
    on_cpu, runtime = Needs.of(settings, device_kind="cpu", trains=trains), settings.runtime
    stack.enter_context(ray_cluster(address=runtime.ray_address, num_processes=on_cpu.num_ranks + on_cpu.num_engines))
    device_kind = cluster_device_kind()
    if device_kind == "cpu" and runtime.cluster.gpu is not None:
        raise UserError(no_gpu(runtime.cluster.gpu, "the Ray cluster"))
    needs = on_cpu if device_kind == "cpu" else Needs.of(settings, device_kind=device_kind, trains=trains)
    return stack.enter_context(reserved_places(needs, cluster=runtime.cluster, device_kind=device_kind, timeout_s=PLACE_TIMEOUT_S))


def _publisher(
    settings: Settings, samples: GeneratedSamples, trainers: TrainerGroup, watchdog: Watchdog, *, device_kind: DeviceKind
) -> Publisher:
    parties = Parties(
        trainers=trainers,
        clients=samples.rollouts.clients,
        background=samples.background,
        watchdog=watchdog,
        timeout_s=settings.weights.sync_timeout_s,
    )
    if settings.weights.transport == "disk":
        return DiskPublisher(parties, directory=settings.run.directory / "weights")
    backend = "nccl" if device_kind == "cuda" else "gloo"
    return BroadcastPublisher(parties, backend=backend, ranks_per_engine=ranks_per_engine(settings, device_kind=device_kind))


def _resume_command(settings: Settings) -> str:
    """The command that trains this run for half as many steps again."""
    steps = settings.run.num_steps + max(1, settings.run.num_steps // 2)
    return f"{sys.executable} -m megatron_rl train {settings.run.directory / SETTINGS_FILE} --resume run.num_steps={steps}"
