"""Checks of a run before any process starts, so that failures come at once and not an hour later.

Nothing is written and no process of the run is started. Upstream libraries are asked for their
accepted values, so importing them is the greatest cost: a few seconds.
"""

import os
import shutil
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from math import prod
from pathlib import Path

from megatron_rl.algorithms.objective import Objective
from megatron_rl.algorithms.plug_in import PlugInAdvantage, PlugInLoss
from megatron_rl.config.checks import gpu_contradictions, setting_notes
from megatron_rl.config.messages import joined_error
from megatron_rl.config.settings import (
    DataSettings,
    ModelSettings,
    ObserveSettings,
    RewardSettings,
    RolloutSettings,
    RuntimeSettings,
    Settings,
)
from megatron_rl.data.row_files import check_is_data_file
from megatron_rl.data.source import RunPrompts
from megatron_rl.data.tokenizer import check_ends, load_tokenizer
from megatron_rl.device import Device, local_device, quiet_megatron_imports
from megatron_rl.engines.server_args import check_environment, check_records_routing, check_tensor_parallel, validate_server_args
from megatron_rl.errors import UserError, counted, sized
from megatron_rl.files import MANIFEST
from megatron_rl.observe.sinks import check_installed
from megatron_rl.plugins.loader import load
from megatron_rl.process_variables import interface_names
from megatron_rl.rewards.runner import RewardRunner
from megatron_rl.rollout.groups import load_rollout
from megatron_rl.rollout.rollout_trial import RolloutTrial
from megatron_rl.runtime.cluster import no_gpu
from megatron_rl.runtime.engine_model import planned_model
from megatron_rl.runtime.placement import Placement
from megatron_rl.runtime.plugin_contracts import require
from megatron_rl.runtime.ray_session import check_answers
from megatron_rl.runtime.resources import available_memory_bytes

with quiet_megatron_imports():
    from megatron_rl.checkpoints.manifest import changed_texts
    from megatron_rl.checkpoints.stored_weights import check_stored, open_weights
    from megatron_rl.models.config_json import read_config
    from megatron_rl.models.read_spec import read_model_spec
    from megatron_rl.models.weight_table import tensor_shapes
    from megatron_rl.runtime.resumption import (
        check_checkpoint_files,
        check_has_checkpoint,
        check_same_model,
        check_steps_left,
        check_written_files,
    )
    from megatron_rl.runtime.target import Target, find_target
    from megatron_rl.training.critic import critic_optimizer
    from megatron_rl.training.model_check import check_layout, check_model, check_tokens
    from megatron_rl.training.optimizer import make_configs
    from megatron_rl.training.teacher import check_vocabulary, read_teacher_spec, teacher_config
    from megatron_rl.training.topology import Topology
    from megatron_rl.training.trained_model import model_dtype

GIB = 2**30
OPTIMIZER_BYTES = 12
"""Bytes per parameter of an fp32 main weight and Adam's two moments."""
START_FILES = ("settings.yaml", "run.lock", "buffer.sqlite", "logs", "engine-", ".engine-")
"""What a start writes before the first step. A directory with nothing else is that of a start that failed, and may be used again."""
RESUME_CHECKS = (check_has_checkpoint, check_steps_left, check_checkpoint_files, check_same_model, check_written_files)
RANK_BYTES = int(0.5 * GIB)
ENGINE_BYTES = int(1.6 * GIB)
"""What a Megatron rank and an SGLang server take on the CPU before any weight, mostly imported code."""


def preflight(settings: Settings, *, resume: bool = False, probe: bool = True) -> list[str]:
    """Check the run before the start, and return notes.

    Checked are model, layout, upstream fields, reward function, data, run directory and resources.
    With `probe` False the data files and the reward function are only found: no file is read and
    the function is not called. This is for a caller that does both anyway before any expensive
    start. Raises UserError with one line for every problem found.
    """
    if settings.runtime.cluster.gpu is not None and settings.runtime.ray_address is None and local_device().kind == "cpu":
        raise UserError(no_gpu(settings.runtime.cluster.gpu, "this machine"))
    checks: list[Callable[[], list[str]]] = [
        partial(check_run_directory, settings.run.directory, resume=resume),
        *(partial(check, settings) for check in RESUME_CHECKS if resume),
        *_config_checks(settings, find_target(settings, config_only=False)),
        partial(_check_weights, settings.model.path),
        partial(_check_teacher, settings.model),
        partial(_check_sinks, settings.observe),
        partial(check_interface, settings.runtime),
        *_data_checks(settings, probe=probe),
        partial(_check_resources, settings),
        *([] if probe else [partial(_check_cluster, settings.runtime)]),
    ]
    if settings.rollout.function is not None and not settings.supervised:
        need_experts = settings.training.routing_replay
        checks.append(partial(_check_rollout_function, settings.rollout, settings.model.path, need_experts=need_experts))
    return _run_checks(checks, settings)


def _check_cluster(runtime: RuntimeSettings) -> list[str]:
    if runtime.ray_address is not None:
        check_answers(runtime.ray_address)
    return []


def check_interface(runtime: RuntimeSettings) -> list[str]:
    """Raise UserError for a network interface that is missing here, or unused by a run on one
    machine.
    """
    name = runtime.network_interface
    if name is None:
        return []
    if runtime.ray_address is None:
        raise UserError(
            f"runtime.network_interface is {name} without runtime.ray_address, but a run on one machine stays on its loopback interface; "
            "remove it, or give the address of the Ray cluster"
        )
    if name not in interface_names():
        raise UserError(
            f"runtime.network_interface is {name}, but the interfaces here are {', '.join(interface_names())}; name one that every node has"
        )
    return []


def preflight_config(settings: Settings) -> list[str]:
    """Run the checks of `preflight` that need only config.json of the model, no data and no
    machines.
    """
    checks = _config_checks(settings, find_target(settings, config_only=True))
    if not settings.supervised:
        checks.append(partial(_check_reward, settings.reward))
    return _run_checks(checks, settings)


def _config_checks(settings: Settings, target: Target) -> list[Callable[[], list[str]]]:
    checks: list[Callable[[], list[str]]] = [
        partial(_check_model, settings, target),
        partial(_check_objective, settings.objective),
        partial(_check_optimizer, settings, target.device),
        partial(_check_placement, settings, target),
        partial(_check_sharing, settings, target),
    ]
    return checks if settings.supervised else [*checks, partial(_check_rollout, settings)]


def _run_checks(checks: Sequence[Callable[[], list[str]]], settings: Settings) -> list[str]:
    problems: list[str] = []
    notes = setting_notes(settings)
    for check in checks:
        try:
            notes += check()
        except UserError as error:
            problems.append(str(error))
    if problems:
        # Several checks read the same file: what one cannot read is one problem.
        raise joined_error(list(dict.fromkeys(problems)), origin="before the start")
    return notes


def check_run_directory(directory: Path, *, resume: bool) -> list[str]:
    """Refuse an unwritable directory or one with another run; return a note without a run to
    resume.
    """
    for folder in (directory, *directory.absolute().parents):
        if (folder.exists() or folder.is_symlink()) and not folder.is_dir():
            kind = "a file" if folder.exists() else "a link to nothing"
            raise UserError(f"run.directory is {directory}, but {folder} is {kind}; choose another directory")
        if folder.is_dir():
            if not os.access(folder, os.W_OK | os.X_OK):
                raise UserError(
                    f"run.directory is {directory}, but {folder} is not writable; choose another directory, or mend its permissions"
                )
            break
    present = directory.is_dir() and any(not path.name.startswith(START_FILES) for path in directory.iterdir())
    if present and not resume:
        raise UserError(
            f"run.directory {directory} holds a run already, needs an empty or new directory; continue that run with --resume, "
            f"or set another run.directory"
        )
    return [f"there is nothing to resume in {directory}: a new run starts"] if resume and not present else []


def _check_model(settings: Settings, target: Target) -> list[str]:
    dtype = model_dtype(settings.model, target.device)
    spec = read_model_spec(settings.model.path)
    check_model(settings.model, settings.training, spec, dtype=dtype, attention=target.attention(settings, spec))
    if not settings.supervised:
        prompt, sampling = settings.data.max_prompt_tokens, settings.rollout.sampling
        check_tokens(spec, path=settings.model.path, max_prompt_tokens=prompt, sampling=sampling)
    if settings.model.teacher is not None:
        teacher = read_teacher_spec(settings.model.teacher)
        check_layout(Topology.of(settings.training.topology), teacher, settings.model.megatron)
        attention = target.attention(settings, teacher)
        teacher_config(settings.model, settings.training.topology, teacher, dtype=dtype, attention=attention)
    return []


def _check_teacher(model: ModelSettings) -> list[str]:
    teacher = model.teacher
    # Another check reports a missing directory.
    if teacher is None or not teacher.is_dir():
        return []
    check_vocabulary(model.path, teacher)
    return _check_weights(teacher)


def _check_weights(path: Path) -> list[str]:
    spec = read_model_spec(path)
    with closing(open_weights(path)) as weights:
        weights.check_files()
        check_stored(weights, spec)
    return [f"{path / name} is not the file of its {MANIFEST}: it is used as it is" for name in changed_texts(path)]


def _check_objective(objective: Objective) -> list[str]:
    loss, advantage = objective.policy_loss, objective.advantage
    if isinstance(loss, PlugInLoss):
        require(loss.path, "policy_loss", loss.args)
    if isinstance(advantage, PlugInAdvantage):
        require(advantage.path, "advantage", advantage.args)
    return []


def _check_sinks(observe: ObserveSettings) -> list[str]:
    check_installed(observe)
    return []


def _check_optimizer(settings: Settings, device: Device) -> list[str]:
    training, dtype = settings.training, model_dtype(settings.model, device)
    make_configs(training.optimizer, training.ddp, dtype=dtype)
    notes = [] if "lr" in training.optimizer else ["training.optimizer.lr is not set: the learning rate is 1e-6"]
    if settings.objective.has_critic:
        fields = critic_optimizer(training)
        make_configs(fields, training.ddp, dtype=dtype, section="critic.optimizer")
        if "lr" not in training.critic.optimizer:
            notes.append(f"training.critic.optimizer.lr is not set: the critic's learning rate is {fields['lr']:g}, 10 times the policy's")
    return notes


def _data_checks(settings: Settings, *, probe: bool) -> list[Callable[[], list[str]]]:
    checks: list[Callable[[], list[str]]] = [partial(_check_tokenizer, settings.model.path), partial(_check_held_out, settings.data)]
    checks += [] if settings.data.source is None else [partial(_check_source, settings.data)]
    if probe:
        return [*checks, partial(_check_rows, settings)]
    checks += [partial(_check_file, path) for path in (settings.data.train, settings.data.eval) if path is not None]
    return checks if settings.supervised else [*checks, partial(_check_reward, settings.reward)]


def _check_tokenizer(model: Path) -> list[str]:
    check_ends(load_tokenizer(model), model)
    return []


def _check_file(path: Path) -> list[str]:
    check_is_data_file(path)
    return []


def _check_held_out(data: DataSettings) -> list[str]:
    if data.eval is not None and data.train is not None and os.path.realpath(data.eval) == os.path.realpath(data.train):
        return [f"data.eval is data.train ({data.train}): the run is evaluated on rows that it trains on"]
    return []


def _check_source(data: DataSettings) -> list[str]:
    assert data.source is not None, "asked for a source of the user's own"
    require(data.source, "data_source", data.args)
    return []


def _check_rows(settings: Settings) -> list[str]:
    """Check every row of the data files, and the reward function on first rows."""
    prompts = RunPrompts.read(settings.model.path, settings.data, seed=settings.run.seed, supervised=settings.supervised)
    if not settings.supervised:
        with RewardRunner(settings.reward) as runner:
            for prompt in prompts.probes:
                runner.probe(prompt)
    return list(prompts.notes)


def _check_sharing(settings: Settings, target: Target) -> list[str]:
    if target.device.kind == "cuda" and (wrong := gpu_contradictions(settings, environment=os.environ)):
        raise joined_error(wrong, origin="on GPUs")
    return []


def _check_rollout(settings: Settings) -> list[str]:
    planned_model(settings.model.path, directory=settings.run.directory, sglang=settings.rollout.sglang)
    with warnings.catch_warnings():
        # SGLang imports torchvision, whose image part is not used and cannot load next to a CPU build of torch.
        warnings.filterwarnings("ignore", message="Failed to load image Python extension")
        # Seconds of imports when arguments were given, nothing when there are none.
        validate_server_args(settings.rollout.sglang)
        check_tensor_parallel(settings.rollout.sglang, read_config(settings.model.path), origin=str(settings.model.path / "config.json"))
        check_environment(os.environ)
        if settings.training.routing_replay:
            check_records_routing()
    load_rollout(settings.rollout)
    if settings.rollout.filter is not None:
        require(settings.rollout.filter.function, "filter", settings.rollout.filter.args)
    return []


def _check_rollout_function(rollout: RolloutSettings, model: Path, *, need_experts: bool) -> list[str]:
    """Try the user's own rollout with a scripted engine and the model's tokenizer."""
    trial = RolloutTrial(rollout, tokenizer=load_tokenizer(model), need_experts=need_experts)
    trial.run()
    trial.check_trained()
    trial.check_masked()
    return []


def _check_reward(reward: RewardSettings) -> list[str]:
    load(reward.function, kind="reward", args=reward.args)
    return []


def _check_placement(settings: Settings, target: Target) -> list[str]:
    placement = target.placement(settings)
    if placement is None:
        return []
    asked, filled = settings.runtime.cluster.num_nodes, len(placement.nodes)
    if asked is not None and asked > filled:
        raise UserError(_idle_nodes(settings, asked=asked, filled=filled))
    return crossing_notes(placement, Topology.of(settings.training.topology))


def crossing_notes(placement: Placement, topology: Topology) -> list[str]:
    """Return a sentence for tensor parallel groups that no node holds whole: every layer then waits for the network."""
    spans = placement.spans(topology.tp)
    if topology.tp == 1 or max(spans) == 1:
        return []
    crossing = sum(count for nodes, count in spans.items() if nodes > 1)
    return [
        f"{crossing} of {spans.total()} tensor parallel groups of tp {topology.tp} ranks lie on {max(spans)} nodes of "
        f"{placement.nodes[0].slots} {placement.needs.unit}s, so that every layer waits for the network; choose a tp that divides "
        f"{placement.nodes[0].slots}, and more pp or cp instead"
    ]


def _idle_nodes(settings: Settings, *, asked: int, filled: int) -> str:
    """Return the error text for idle nodes, with ranks and engines that fill all or most nodes."""
    factor = max(1, asked // filled)
    fix = f"set runtime.cluster.num_nodes to {filled}"
    if factor > 1:
        ranks, engines = factor * settings.training.topology.num_ranks, factor * settings.rollout.num_engines
        engine_words = "" if settings.supervised else f" rollout.num_engines={engines}"
        fix += f", or fill {factor * filled} with training.topology.num_ranks={ranks}{engine_words}"
        if factor * filled != asked:
            fix += f" runtime.cluster.num_nodes={factor * filled}, as multiples of {filled} nodes can be filled"
    return f"runtime.cluster.num_nodes is {asked}, but the run fills {filled}: {asked - filled} would stay idle; {fix}"


def _check_resources(settings: Settings) -> list[str]:
    parameters = _num_parameters(settings.model.path)
    checkpoint_bytes = parameters * (OPTIMIZER_BYTES + 4) * (2 if settings.objective.has_critic else 1)
    notes = check_disk(settings.run.directory, checkpoint_bytes=checkpoint_bytes, keep=settings.run.keep_checkpoints)
    if settings.runtime.ray_address is not None or local_device().kind == "cuda":
        return notes
    teacher = settings.model.teacher if settings.objective.distillation_coef else None
    # Another check reports a missing directory.
    asked = _num_parameters(teacher) if teacher is not None and teacher.is_dir() else 0
    return notes + check_cpu_memory(settings, parameters=parameters, teacher_parameters=asked, available=available_memory_bytes())


def _num_parameters(model: Path) -> int:
    return sum(prod(shape) for _, shape in tensor_shapes(read_model_spec(model)))


def check_disk(directory: Path, *, checkpoint_bytes: int, keep: int) -> list[str]:
    """Refuse a disk without room for one checkpoint.

    Return a note without room for the `keep` newest and one in progress.
    """
    present = next(folder for folder in (directory.absolute(), *directory.absolute().parents) if folder.is_dir())
    usage = shutil.disk_usage(present)
    free = usage.free
    if not usage.total:
        raise UserError(f"run.directory is {directory}, but {present} is not writable: it is no place for files; choose another directory")
    if free < checkpoint_bytes:
        raise UserError(
            f"{present} has {sized(free)} free, a checkpoint of this model takes about {sized(checkpoint_bytes)}; "
            f"free space, or set run.directory to another disk"
        )
    needed = checkpoint_bytes * (keep + 1)
    if free < needed:
        return [f"{present} has {sized(free)} free, run.keep_checkpoints {keep} and one being written take about {sized(needed)}"]
    return []


def check_cpu_memory(settings: Settings, *, parameters: int, teacher_parameters: int, available: int) -> list[str]:
    """A note when weights, gradients, optimizers, reference, teacher and the processes themselves take more bytes than are available."""
    topology = settings.training.topology
    engines = 0 if settings.supervised else settings.rollout.num_engines
    model_copies = topology.num_ranks // (topology.tp * topology.pp)
    reference = 4 if settings.training.keeps_reference(settings.objective) else 0
    per_parameter = (OPTIMIZER_BYTES + 4 + 4) * (2 if settings.objective.has_critic else 1) + reference
    # A teacher keeps a copy of its own while answering, too.
    models = model_copies * (parameters * per_parameter + teacher_parameters * (4 + 4))
    needed = topology.num_ranks * RANK_BYTES + engines * (ENGINE_BYTES + 4 * parameters) + models
    if needed <= available:
        return []
    return [
        f"{counted(topology.num_ranks, 'rank')} and {counted(engines, 'engine')} take at least {sized(needed)} of memory, "
        f"{sized(available)} are available; fewer ranks or engines, or a smaller model, avoid that the system ends one of them"
    ]
