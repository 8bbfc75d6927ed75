"""Training and evaluation from settings to the last file: start, run, and always stop.

Ray reads the environment at import, and this module imports Ray:
`ray_session.prepare_environment` comes before the import of this module.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from megatron_rl.checkpoints.run_checkpoints import newest_checkpoint
from megatron_rl.config.derived import dtype_name, one_reward
from megatron_rl.config.load import dump_settings
from megatron_rl.config.settings import ModelSettings, Settings
from megatron_rl.data.buffer import BUFFER_FILE
from megatron_rl.errors import CheckpointError, MegatronRLError, ResumableError, UserError, WorkerDiedError
from megatron_rl.evaluation.evaluator import SetResult, weight_files
from megatron_rl.models.attention.attention_choice import attention_name, resolve_attention
from megatron_rl.models.read_spec import read_model_spec
from megatron_rl.observe.console import SUPERVISED_COLUMNS, RunConsole, rl_columns
from megatron_rl.observe.memory import PeakMemory
from megatron_rl.observe.sinks import Sinks
from megatron_rl.observe.summary import SETTINGS_FILE, SUMMARY_FILE, asked_to_end, signal_of
from megatron_rl.observe.timing import PhaseTimer
from megatron_rl.rollout.manager import RolloutManager, reward_log
from megatron_rl.runtime.cluster import cluster_capability, cluster_device_kind
from megatron_rl.runtime.engine_model import evaluated_model
from megatron_rl.runtime.engines import weight_sync
from megatron_rl.runtime.loop import train_loop
from megatron_rl.runtime.rank_returns import RankReturns, RanksLostError
from megatron_rl.runtime.run import Run
from megatron_rl.runtime.run_evaluations import GENERATION_SETTINGS, evaluation_deadline_s, generation_deadline_s, make_evaluator
from megatron_rl.runtime.run_records import RunRecords
from megatron_rl.runtime.start import RunStart, StartReport
from megatron_rl.runtime.trainers import spare_what_is_loaded
from megatron_rl.system.device import chosen_row_maths
from megatron_rl.system.files import disk_errors, write_atomic
from megatron_rl.system.leftovers import remove_leftovers, scratch_directory


def train(settings: Settings, *, resume: bool, weights_only: bool = False, replay: Path | None = None) -> None:
    """Train as the settings say, or continue with `resume` from the run's newest checkpoint, with `weights_only` by a new optimizer.

    With `replay`, a run directory or an exported file, train on the batches recorded there, without engines.

    Raises UserError for what the user can mend and the failing process's own error otherwise; nothing keeps running.
    """
    timer, directory = PhaseTimer(), settings.run.directory
    with ExitStack() as stack:
        keeps_reference = settings.training.keeps_reference(settings.objective)
        columns = SUPERVISED_COLUMNS if settings.supervised else rl_columns(tuple(settings.eval.sets), keeps_reference=keeps_reference)
        console = stack.enter_context(RunConsole(settings.run.num_steps, columns=columns))
        memory = stack.enter_context(PeakMemory(os.getpid()))
        with _announcing_failure(console, directory):
            _clean_up(console)
            start = RunStart(settings, stack, StartReport(console, timer))
            begin = partial(_begin, start, replay=replay, console=console, memory=memory, timer=timer)
            returns = RankReturns(settings.runtime.restarts, directory=directory, note=start.report.note)
            run, origin = begin(resume=resume), _newest(directory)
            while True:
                try:
                    with _keeping_what_it_has(run, console), returns.noticing(start):
                        first_step = run.resume(weights_only=weights_only) if resume else 0
                        spare_what_is_loaded()
                        train_loop(run, first_step=first_step)
                        run.finish()
                    return
                except RanksLostError:
                    with run.told_of_failure():
                        run = returns.bring_back(start, begin, after=run)
                    resume, weights_only = True, weights_only and _newest(directory) == origin


def _begin(start: RunStart, *, resume: bool, replay: Path | None, console: RunConsole, memory: PeakMemory, timer: PhaseTimer) -> Run:
    """Start the processes of the run that do not serve yet, and return the run."""
    settings, directory = start.settings, start.settings.run.directory
    # Seconds of a step that was broken off are none of the next row's.
    timer.take()
    with timer.measure("start"), console.phase("start"):
        if replay is not None:
            make_run = start.replayed(replay, resume=resume)
        else:
            make_run = start.supervised(resume=resume) if settings.supervised else start.with_engines(resume=resume)
    console.say(str(start.report))
    _say_choices(settings.model, cp=settings.training.topology.cp, console=console)
    if not settings.supervised and replay is None:
        colocate, kind = settings.runtime.colocate, cluster_device_kind()
        console.say(f"weight sync: {weight_sync(settings.weight_transport, settings.weights, colocate=colocate, device_kind=kind)}")
        if settings.reward.function is not None or any(each.reward for each in settings.eval.sets.values()):
            console.say(f"what the reward function prints is in {reward_log(directory)}")
    write_atomic(directory / SETTINGS_FILE, dump_settings(settings))
    # An earlier life of the run may have ended, but this one has not.
    (directory / SUMMARY_FILE).unlink(missing_ok=True)
    found = newest_checkpoint(directory) if resume else None
    step, row = (found[1].step, found[1].metrics) if found is not None else (0, {})
    sinks = Sinks(directory, settings.observe, first_step=step, row=row, config=settings.model_dump(mode="json"))
    records = RunRecords(
        settings.run,
        console=console,
        sinks=start.life.enter_context(sinks),
        memory=memory,
        timer=timer,
        replay=replay,
        report_interval=settings.observe.report_interval,
        one_reward=one_reward(settings.objective),
    )
    start.life.callback(records.end_report)
    run = make_run(records=records)
    start.life.callback(run.give_up)
    return run


def _newest(directory: Path) -> Path | None:
    found = newest_checkpoint(directory)
    return None if found is None else found[0]


def _clean_up(console: RunConsole) -> None:
    removed = remove_leftovers()
    if removed:
        console.say(f"removed what a run that was killed had left: {', '.join(removed)}")


def _say_choices(model: ModelSettings, *, cp: int, console: RunConsole) -> None:
    """Print what this machine decides: attention and statistics of logits."""
    kind = cluster_device_kind()
    capability = cluster_capability() if kind == "cuda" else None
    attention = resolve_attention(model.attention, read_model_spec(model.path), overrides=model.megatron, cp=cp, capability=capability)
    dtype = dtype_name(model, device_kind=kind)
    console.say(
        f"attention: {attention_name(attention, model.megatron)}; "
        f"statistics of logits: {chosen_row_maths(kind, dtype)}, for {dtype} on {kind}"
    )


@contextmanager
def _keeping_what_it_has(run: Run, console: RunConsole) -> Iterator[None]:
    """Let the run write the results so far when the body ends the run; a failure here must not hide the cause."""
    try:
        yield
    except RanksLostError:
        raise
    except BaseException as error:
        try:
            run.break_off(error)
        except (MegatronRLError, OSError) as second:
            console.say(f"the summary of this run could not be written: {second}")
        raise


@contextmanager
def _announcing_failure(console: RunConsole, directory: Path) -> Iterator[None]:
    """When the body raises, announce at once the stop of everything and the step to resume from.

    Raises:
        ResumableError: a signal, or a death that no restart mends, ended a run with a checkpoint.
    """
    try:
        yield
    except BaseException as error:
        found = None if isinstance(error, CheckpointError) else newest_checkpoint(directory)
        rest = f"; --resume continues after step {found[1].step}" if found is not None else ""
        console.say(f"stopping every process of the run{rest}")
        if found is not None and (asked_to_end(error) or isinstance(error, WorkerDiedError)):
            cause = f"ended by {signal_of(error).name}" if asked_to_end(error) else str(error)
            interrupted = asked_to_end(error) and signal_of(error) == signal.SIGINT
            sentence = f"{cause}; the same command with --resume continues after step {found[1].step}"
            raise ResumableError(sentence, interrupted=interrupted) from error
        raise


def evaluate(settings: Settings) -> list[SetResult]:
    """Evaluate model.path on eval.sets with engines alone; keep answers and results in run.directory. Raises as `train`.

    After a kill it goes on, where model and settings are the same.
    """
    directory, names = settings.run.directory, tuple(settings.eval.sets)
    with ExitStack() as stack:
        # Nothing is trained on, so nothing has to be kept.
        scratch = stack.enter_context(scratch_directory()).path
        start, console, manager, dtype = stack.enter_context(_engines_alone(settings, buffer=scratch / BUFFER_FILE, trains=False))
        rollout, reward = settings.rollout, settings.reward
        evaluator = make_evaluator(settings.eval, manager, rollout=rollout, reward=reward, seed=settings.run.seed, say=console.say)
        with console.phase("eval", total=evaluator.num_prompts(names), unit="prompts") as progress:
            facts = {"model": str(settings.model.path), "files": weight_files(settings.model.path), "dtype": dtype}
            running = evaluator.run(names, directory=directory, facts=facts, goes_on=True, advance=progress.advance)
            num_samples = evaluator.num_answers(names)
            timeout_s = evaluation_deadline_s(settings.eval, settings.model, rollout, reward, num_samples=num_samples)
            return start.watchdog.wait(running, name="evaluation", owner="the engines", timeout_s=timeout_s, see=GENERATION_SETTINGS)


def generate(settings: Settings, *, count: int) -> Path:
    """Make groups of the first `count` prompts of data.train with the weights of model.path; return the buffer, in run.directory.

    After a kill it goes on, where model and settings are the same. Raises as `train`, and UserError for others.
    """
    directory, weights = settings.run.directory, weight_files(settings.model.path)
    facts = f"{dump_settings(settings)}# weights {weights}, prompts {count}\n"
    begun = directory / SETTINGS_FILE
    if begun.exists() and begun.read_text("utf-8") != facts:
        raise UserError(f"{directory} has samples of another model, other settings or another --count; remove it, or give another --out")
    with _engines_alone(settings, buffer=directory / BUFFER_FILE, trains=True) as (start, console, manager, _):
        write_atomic(begun, facts)
        with console.phase("rollout", total=count, unit="groups") as progress:
            num_samples = count * settings.data.samples_per_prompt
            timeout_s = generation_deadline_s(settings.model, settings.rollout, settings.reward, num_samples=num_samples)
            making = manager.generate(count, progress=progress)
            start.watchdog.wait(making, name="rollout", owner="the engines", timeout_s=timeout_s, see=GENERATION_SETTINGS)
    return directory / BUFFER_FILE


@contextmanager
def _engines_alone(settings: Settings, *, buffer: Path, trains: bool) -> Iterator[tuple[RunStart, RunConsole, RolloutManager, str]]:
    """Start engines that serve the weights of model.path, in the dtype that is returned; `trains` reads data.train, too."""
    directory = settings.run.directory
    with disk_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        console = stack.enter_context(RunConsole(1))
        _clean_up(console)
        report = StartReport(console, PhaseTimer())
        with console.phase("start"):
            start = RunStart(settings, stack, report)
            manager = start.open_manager(buffer, trains=trains)
            reservation = start.reserve(trains=False)
            dtype = dtype_name(settings.model, device_kind=reservation.device_kind)
            model = evaluated_model(settings.model.path, directory=directory, dtype=dtype, note=report.note)
            engines = start.place_engines(stack.enter_context(model), reservation)
            with report.part("engines"):
                # The engines serve the weights of their start.
                start.join(manager, engines, engines.begin_start(), serve_current=True)
        console.say(str(report))
        yield start, console, manager, dtype
