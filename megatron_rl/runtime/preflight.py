"""Checks of a run before any process starts, so that failures come at once and not an hour later.

Nothing is written and no process of the run is started. Upstream libraries are asked for their
accepted values, so importing them is the greatest cost: a few seconds.
"""

import asyncio
import os
import shutil
import warnings
from collections.abc import Callable
from contextlib import closing
from functools import partial
from math import prod
from pathlib import Path
from typing import TypeAlias

import torch

from megatron_rl.algorithms.advantage import Gdpo
from megatron_rl.algorithms.objective import Objective
from megatron_rl.algorithms.plug_in import PlugInAdvantage, PlugInLoss
from megatron_rl.checkpoints.manifest import changed_texts
from megatron_rl.checkpoints.stored_weights import check_stored, open_weights
from megatron_rl.config.data_settings import DataSettings
from megatron_rl.config.derived import reward_workers
from megatron_rl.config.eval_sets import EvalSettings
from megatron_rl.config.gpus import check_on_gpus
from megatron_rl.config.messages import joined_error
from megatron_rl.config.setting_notes import setting_notes
from megatron_rl.config.settings import (
    ModelSettings,
    RewardSettings,
    RolloutSettings,
    RunSettings,
    RuntimeSettings,
    SamplingSettings,
    Settings,
    TopologySettings,
    TrainingSettings,
)
from megatron_rl.data.row_files import data_paths
from megatron_rl.data.row_source import OwnRows
from megatron_rl.data.row_table import read_first_row
from megatron_rl.data.source import RunPrompts
from megatron_rl.data.tokenizer import check_ends, load_tokenizer, model_type
from megatron_rl.engines.server_args import check_environment, check_records_routing, check_tensor_parallel, validate_server_args
from megatron_rl.errors import UserError, counted, sized
from megatron_rl.models.config_json import read_config
from megatron_rl.models.read_spec import read_model_spec
from megatron_rl.models.weight_table import tensor_shapes
from megatron_rl.observe.memory import available_memory_bytes
from megatron_rl.observe.sinks import check_installed
from megatron_rl.plugins.loader import load
from megatron_rl.rewards.gold import check_gold, check_held_out
from megatron_rl.rewards.mixture import part_weights
from megatron_rl.rewards.runner import RewardRunner
from megatron_rl.rollout.opened_rollout import load_rollout
from megatron_rl.rollout.renderers import choose_renderer
from megatron_rl.rollout.rollout_trial import RolloutTrial
from megatron_rl.runtime.engine_model import planned_model
from megatron_rl.runtime.placement import Placement
from megatron_rl.runtime.plugin_contracts import require
from megatron_rl.runtime.ray_session import check_answers
from megatron_rl.runtime.resumption import check_run_directory, open_record, resumption_checks
from megatron_rl.runtime.target import Target, find_target, no_gpu
from megatron_rl.system.device import local_device
from megatron_rl.system.files import MANIFEST
from megatron_rl.system.process_variables import interface_names
from megatron_rl.training.critic import critic_optimizer
from megatron_rl.training.model_check import check_layout, check_model, check_tokens
from megatron_rl.training.optimizer import make_configs
from megatron_rl.training.teacher import check_vocabulary, read_teacher_spec, teacher_config
from megatron_rl.training.topology import Topology
from megatron_rl.training.trained_model import model_dtype

GIB = 2**30
OPTIMIZER_BYTES = 12
"""Bytes per parameter of an fp32 main weight and Adam's two moments."""
RANK_BYTES = int(0.5 * GIB)
ENGINE_BYTES = int(1.6 * GIB)
"""What a Megatron rank and an SGLang server take on the CPU before any weight, mostly imported code."""
Checks: TypeAlias = list[Callable[[], list[str] | None]]
"""Each returns notes, if any, and raises UserError for a problem."""


def preflight(
    settings: Settings, *, resume: bool = False, probe: bool = True, replay: Path | None = None, config_only: bool = False
) -> list[str]:
    """Check the run before the start, and return notes.

    Checked are model, layout, upstream fields, reward function, data, run directory and resources.
    With `probe` False the data files and the reward function are only found, for a caller that
    reads and calls them before any expensive start. A `replay` of recorded batches needs no engine,
    data or code of the rollout. With `config_only` no data and no machine is needed, and of the model
    config.json alone. Raises UserError with one line for every problem found.
    """
    run, model, data, runtime = settings.run, settings.model, settings.data, settings.runtime
    generates = replay is None and not settings.supervised
    reward = settings.reward if generates else None
    target = find_target(settings.training.topology, settings.rollout if generates else None, runtime, config_only=config_only)
    of_config = [*_config_checks(settings, target, generates=generates)]
    if replay is not None:
        of_config.append(partial(_check_record, replay, run.directory, settings.rollout.sampling, settings.objective, resume=resume))
    if config_only:
        of_config += [] if reward is None else [partial(_check_reward, reward)]
        return _run_checks(of_config, setting_notes(settings))
    if runtime.cluster.gpu is not None and runtime.ray_address is None and local_device().kind == "cpu":
        raise UserError(no_gpu(runtime.cluster.gpu, "this machine"))
    checks: Checks = [
        partial(check_run_directory, run.directory, resume=resume),
        *(resumption_checks(run, model.path, has_buffer=not settings.supervised) if resume else []),
        *of_config,
        partial(_check_weights, model.path),
        partial(_check_teacher, model),
        partial(check_installed, settings.observe),
        partial(check_interface, runtime),
        lambda: check_ends(load_tokenizer(model.path), model.path),
    ]
    if replay is None:
        checks += _data_checks(data, settings.eval, model.path, reward, seed=run.seed, probe=probe)
    checks.append(partial(_check_disk, run, model.path, has_critic=settings.objective.has_critic))
    if runtime.ray_address is None and local_device().kind == "cpu":
        engines = settings.rollout.num_engines if generates else 0
        checks.append(partial(_check_cpu_memory, model, settings.training, settings.objective, num_engines=engines))
    elif runtime.ray_address is not None and not probe:
        checks.append(partial(check_answers, runtime.ray_address))
    if not settings.rollout.is_single_turn and generates:
        need_experts = settings.training.routing_replay
        must_reward = settings.reward.function is None
        own = partial(_check_own_rollout, settings.rollout, model.path, data, seed=run.seed, need_experts=need_experts)
        checks.append(partial(own, must_reward=must_reward))
    return _run_checks(checks, setting_notes(settings))


def _data_checks(
    data: DataSettings, evaluation: EvalSettings, model: Path, reward: RewardSettings | None, *, seed: int, probe: bool
) -> Checks:
    """Return the checks of rows and reward function, if any, which are called where they may be probed, else found."""
    checks: Checks = [] if data.source is None else [partial(require, data.source, "data_source", data.args)]
    if probe:
        return [*checks, partial(_check_rows, data, evaluation, model, reward, seed=seed)]
    paths = dict.fromkeys((*(files.path for files in data.sources), *(each.data for each in evaluation.sets.values())))
    checks += [partial(_check_found, path) for path in paths]
    return checks if reward is None else [*checks, partial(_check_reward, reward)]


def check_interface(runtime: RuntimeSettings) -> None:
    """Raise UserError for a network interface that is missing here, or unused by a run on one machine."""
    name = runtime.network_interface
    if name is not None and runtime.ray_address is None:
        raise UserError(
            f"runtime.network_interface is {name} without runtime.ray_address, but a run on one machine stays on its loopback interface; "
            "remove it, or give the address of the Ray cluster"
        )
    if name is not None and name not in interface_names():
        raise UserError(
            f"runtime.network_interface is {name}, but the interfaces here are {', '.join(interface_names())}; name one that every node has"
        )


def _check_record(replay: Path, directory: Path, sampling: SamplingSettings, objective: Objective, *, resume: bool) -> list[str]:
    notes: list[str] = []
    recorded, _ = open_record(replay, directory, sampling=sampling, objective=objective, resume=resume, note=notes.append)
    with recorded:
        return notes


def _config_checks(settings: Settings, target: Target, *, generates: bool) -> Checks:
    training, rollout = settings.training, settings.rollout
    checks: Checks = [
        partial(_check_model, settings.model, training, target),
        partial(_check_objective, settings.objective, settings.reward),
        partial(_check_optimizer, training, model_dtype(settings.model, target.device), has_critic=settings.objective.has_critic),
        partial(_check_placement, target, training.topology, num_nodes=settings.runtime.cluster.num_nodes),
    ]
    if generates:
        if target.device.kind == "cuda":
            checks.append(partial(check_on_gpus, rollout.sglang, settings.weight_transport, colocate=settings.runtime.colocate))
        path, directory = settings.model.path, settings.run.directory
        checks.append(partial(_check_rollout, rollout, path, directory=directory, replays=training.routing_replay))
        checks.append(partial(_check_tokens, path, settings.data.max_prompt_tokens, rollout.sampling, settings.eval))
    return checks


def _run_checks(checks: Checks, notes: list[str]) -> list[str]:
    problems: list[str] = []
    for check in checks:
        try:
            notes += check() or []
        except UserError as error:
            problems.append(str(error))
    if problems:
        # Several checks read the same file: what one cannot read is one problem.
        raise joined_error(list(dict.fromkeys(problems)), origin="before the start")
    return notes


def _check_model(model: ModelSettings, training: TrainingSettings, target: Target) -> None:
    dtype = model_dtype(model, target.device)
    spec = read_model_spec(model.path)
    check_model(model, training, spec, dtype=dtype, attention=target.attention(model, spec, cp=training.topology.cp))
    if model.teacher is not None:
        teacher = read_teacher_spec(model.teacher)
        check_layout(Topology.of(training.topology), teacher, model.megatron)
        attention = target.attention(model, teacher, cp=training.topology.cp)
        teacher_config(model, training.topology, teacher, dtype=dtype, attention=attention)


def _check_teacher(model: ModelSettings) -> list[str]:
    teacher = model.teacher
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


def _check_objective(objective: Objective, reward: RewardSettings) -> None:
    loss, advantage = objective.policy_loss, objective.advantage
    if isinstance(loss, PlugInLoss):
        require(loss.path, "policy_loss", loss.args)
    if isinstance(advantage, PlugInAdvantage):
        require(advantage.path, "advantage", advantage.args)
    if isinstance(advantage, Gdpo) and advantage.reward_weights is None:
        weights = dict(sorted(part_weights(reward.function, reward.args), key=lambda part: (part[0], part[1] != 1)))
        if any(weight != 1 for weight in weights.values()):
            raise UserError(
                f"reward.args.parts has the weights {list(weights.values())} of {', '.join(weights)}, which objective.advantage.kind gdpo "
                "does not read: it normalises each component before it weighs them by objective.advantage.reward_weights; set that to "
                f"{list(weights.values())}, a number for each component in the order of the names"
            )


def _check_optimizer(training: TrainingSettings, dtype: torch.dtype, *, has_critic: bool) -> list[str]:
    make_configs(training.optimizer, training.ddp, dtype=dtype)
    notes = [] if "lr" in training.optimizer else ["training.optimizer.lr is not set: the learning rate is 1e-6"]
    if has_critic:
        fields = critic_optimizer(training)
        make_configs(fields, training.ddp, dtype=dtype, section="critic.optimizer")
        if "lr" not in training.critic.optimizer:
            notes.append(f"training.critic.optimizer.lr is not set: the critic's learning rate is {fields['lr']:g}, 10 times the policy's")
    return notes


def _check_found(path: Path) -> None:
    data_paths(path)


def _check_tokens(path: Path, max_prompt_tokens: int, sampling: SamplingSettings, evaluation: EvalSettings) -> None:
    check = partial(check_tokens, read_model_spec(path), path=path, max_prompt_tokens=max_prompt_tokens)
    check(sampling=sampling)
    for name, one in evaluation.sets.items():
        check(sampling=one.sampling.over(sampling), name=f"eval.sets.{name}.sampling", biased=one.sampling.logit_bias or ())


def _check_rows(data: DataSettings, evaluation: EvalSettings, model: Path, reward: RewardSettings | None, *, seed: int) -> list[str]:
    """Check every row of the data files, and the reward functions on first rows; None is for supervised training."""
    prompts, left_out = RunPrompts.read(model, data, sets=evaluation.sets, seed=seed, supervised=reward is None), None
    if reward is not None and reward.function is not None:
        with RewardRunner(reward, num_workers=reward_workers()) as runner:
            runner.find_form()
            left_out = asyncio.run(check_gold(prompts, reward, score=runner.score, sets=evaluation.sets))
            for prompt in prompts.probes:
                runner.probe(prompt)
    for name, one in evaluation.sets.items():
        if reward is not None and one.reward is not None:
            own = one.reward.of(reward)
            with RewardRunner(own, num_workers=reward_workers()) as runner:
                runner.probe(prompts.held_out[name][0])
                asyncio.run(check_held_out(name, prompts.files[name].labelled(), own, score=runner.score))
    return [*prompts.notes, *([] if left_out is None else [left_out])]


def _check_rollout(rollout: RolloutSettings, model: Path, *, directory: Path, replays: bool) -> None:
    planned_model(model, directory=directory, sglang=rollout.sglang)
    with warnings.catch_warnings():
        # SGLang imports torchvision, whose image part is not used and cannot load next to a CPU build of torch.
        warnings.filterwarnings("ignore", message="Failed to load image Python extension")
        # Seconds of imports when arguments were given, nothing when there are none.
        validate_server_args(rollout.sglang)
        check_tensor_parallel(rollout.sglang, read_config(model), origin=str(model / "config.json"))
        check_environment(os.environ)
        if replays:
            check_records_routing()
    load_rollout(rollout)
    if rollout.filter is not None:
        require(rollout.filter.function, "filter", rollout.filter.args)


def _check_own_rollout(
    rollout: RolloutSettings, model: Path, data: DataSettings, *, seed: int, need_experts: bool, must_reward: bool
) -> list[str]:
    """Try the user's own rollout on the first row with a scripted engine and the model's tokenizer.

    Note an environment's renderer, and an end without the reward that it must give.
    """
    tokenizer = load_tokenizer(model)
    if not data.sources:
        (row,) = OwnRows(settings=data, seed=seed, need_response=False).first(1)
    else:
        row = read_first_row(data.sources[0], settings=data)
    trial = RolloutTrial(rollout, tokenizer=tokenizer, model_type=model_type(model), need_experts=need_experts, row=row)
    trial.run()
    trial.check_trained()
    trial.check_masked()
    if not rollout.is_hosted:
        return []
    chosen = choose_renderer(tokenizer, model_type=model_type(model), name=rollout.renderer)
    name = "rollout.environment" if rollout.agent is None else "rollout.agent"
    lacks = must_reward and trial.has_unrewarded_end
    unrewarded = [f"{name} ended a trial without a reward, and reward.function is null: give one, or set it"] if lacks else []
    return [f"{name} takes the renderer {chosen.name}: {chosen.note}", *unrewarded]


def _check_reward(reward: RewardSettings) -> None:
    if reward.function is not None:
        load(reward.function, kind="reward", args=reward.args)


def _check_placement(target: Target, topology: TopologySettings, *, num_nodes: int | None) -> list[str]:
    placement = target.placement()
    if placement is None:
        return []
    if num_nodes is not None and num_nodes > len(placement.nodes):
        raise UserError(_idle_nodes(placement, asked=num_nodes))
    return crossing_notes(placement, tp=topology.tp)


def crossing_notes(placement: Placement, *, tp: int) -> list[str]:
    """Return a sentence for tensor parallel groups that no node holds whole: every layer then waits for the network."""
    spans = placement.spans(tp)
    if tp == 1 or max(spans) == 1:
        return []
    crossing = sum(count for nodes, count in spans.items() if nodes > 1)
    return [
        f"{crossing} of {spans.total()} tensor parallel groups of tp {tp} ranks lie on {max(spans)} nodes of "
        f"{placement.nodes[0].slots} {placement.needs.unit}s, so that every layer waits for the network; choose a tp that divides "
        f"{placement.nodes[0].slots}, and more pp or cp instead"
    ]


def _idle_nodes(placement: Placement, *, asked: int) -> str:
    """Return the error text for idle nodes, with ranks and engines that fill all or most nodes."""
    needs, filled = placement.needs, len(placement.nodes)
    factor = max(1, asked // filled)
    fix = f"set runtime.cluster.num_nodes to {filled}"
    if factor > 1:
        engines = f" rollout.num_engines={factor * needs.num_engines}" if needs.num_engines else ""
        fix += f", or fill {factor * filled} with training.topology.num_ranks={factor * needs.num_ranks}{engines}"
        if factor * filled != asked:
            fix += f" runtime.cluster.num_nodes={factor * filled}, as multiples of {filled} nodes can be filled"
    return f"runtime.cluster.num_nodes is {asked}, but the run fills {filled}: {asked - filled} would stay idle; {fix}"


def _check_disk(run: RunSettings, model: Path, *, has_critic: bool) -> list[str]:
    checkpoint_bytes = _num_parameters(model) * (OPTIMIZER_BYTES + 4) * (2 if has_critic else 1)
    return check_disk(run.directory, checkpoint_bytes=checkpoint_bytes, keep=run.keep_checkpoints)


def _check_cpu_memory(model: ModelSettings, training: TrainingSettings, objective: Objective, *, num_engines: int) -> list[str]:
    teacher = model.teacher if objective.distillation_coef else None
    asked = _num_parameters(teacher) if teacher is not None and teacher.is_dir() else 0
    sizes = {"parameters": _num_parameters(model.path), "teacher_parameters": asked, "available": available_memory_bytes()}
    return check_cpu_memory(training, objective, num_engines=num_engines, **sizes)


def _num_parameters(model: Path) -> int:
    return sum(prod(shape) for _, shape in tensor_shapes(read_model_spec(model)))


def check_disk(directory: Path, *, checkpoint_bytes: int, keep: int) -> list[str]:
    """Refuse a disk without room for one checkpoint; note one without room for `keep` and one in progress."""
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


def check_cpu_memory(
    training: TrainingSettings, objective: Objective, *, num_engines: int, parameters: int, teacher_parameters: int, available: int
) -> list[str]:
    """A note when weights, gradients, optimizers, reference, teacher and the processes themselves take more bytes than are available."""
    topology = training.topology
    model_copies = topology.num_ranks // (topology.tp * topology.pp)
    reference = 4 if training.keeps_reference(objective) else 0
    per_parameter = (OPTIMIZER_BYTES + 4 + 4) * (2 if objective.has_critic else 1) + reference
    # A teacher keeps a copy of its own while answering, too.
    models = model_copies * (parameters * per_parameter + teacher_parameters * (4 + 4))
    needed = topology.num_ranks * RANK_BYTES + num_engines * (ENGINE_BYTES + 4 * parameters) + models
    if needed <= available:
        return []
    return [
        f"{counted(topology.num_ranks, 'rank')} and {counted(num_engines, 'engine')} take at least {sized(needed)} of memory, "
        f"{sized(available)} are available; fewer ranks or engines, or a smaller model, avoid that the system ends one of them"
    ]
