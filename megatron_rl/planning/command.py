"""`megatron-rl plan`: settings and a model from the command line, and the printed plans."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_rl.config.checks import contradictions
from megatron_rl.config.decided import with_values
from megatron_rl.config.gpus import Gpu, find_gpu
from megatron_rl.config.load import Words, load_settings
from megatron_rl.config.messages import joined_error
from megatron_rl.config.settings import RolloutSettings, Settings
from megatron_rl.config.yaml_text import format_value
from megatron_rl.engines.server_args import validate_server_args
from megatron_rl.errors import UserError, counted
from megatron_rl.models.config_json import read_object
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.read_spec import parse_model_spec, read_model_spec
from megatron_rl.planning.records import RunPlan
from megatron_rl.planning.run_plan import on_gpu, plan_engine, plan_run, planned_attention
from megatron_rl.planning.search import best_layouts, remedy
from megatron_rl.system.device import local_device
from megatron_rl.training.model_check import check_model, check_tokens
from megatron_rl.training.trained_model import model_dtype

_SETTINGS_SUFFIXES = (".yaml", ".yml")
_SIZES = ("tp", "pp", "cp", "ep", "etp")


def print_plans(words: Words, *, gpu: str, num_gpus: int | None, topology: Mapping[str, object]) -> bool:
    """Print the plans of `plans` for GPUs of the type `gpu`; return True when all fit."""
    kind = find_gpu(gpu)
    with _progress() as say:
        answers = list(plans(words, gpu=kind, num_gpus=num_gpus, topology=topology, say=say))
    for overrides, plan, advice in answers:
        print("\n".join([overrides, *(line.rstrip() for line in plan.lines()), *([advice] if advice else []), ""]), flush=True)
    return all(plan.fits for _, plan, _ in answers)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that prints the awaited work: one line on a terminal, else a line each."""
    if not sys.stderr.isatty():
        yield lambda words: print(f"megatron-rl: {words}", file=sys.stderr, flush=True)
        return
    with Console(stderr=True).status("reading the model") as status:
        yield status.update


def split_model(words: Words) -> tuple[Path | None, Words]:
    """Return the model, the file of `words` unless that is YAML, and the words of the settings; None takes theirs."""
    if words.config is not None and words.config.suffix not in _SETTINGS_SUFFIXES:
        return words.config, Words(None, words.overrides)
    if words.config is None and not any(override.startswith("model.path=") for override in words.overrides):
        raise UserError("plan was given no model; give a Hugging Face directory, its config.json, or a settings file with model.path")
    return None, words


def plans(
    words: Words, *, gpu: Gpu, num_gpus: int | None, topology: Mapping[str, object], say: Callable[[str], None] = lambda words: None
) -> Iterator[tuple[str, RunPlan, str | None]]:
    """Yield the plan of the given layout, or plans of the best layouts, with overrides for a run.

    `topology` are the given parts of training.topology, by name; `num_gpus` alone asks for layouts.
    A plan of a given layout that does not fit comes with the overrides that would make the plan
    fit. `say` gets the name of the layout under construction. Raises UserError, also when no layout
    fits.
    """
    model, words = split_model(words)
    bare = words.config is None
    settings = load_settings(words.config, [*_overrides(model, words, topology)], on_gpus=False if bare else None)
    if settings.rollout.sglang:
        validate_server_args(settings.rollout.sglang)
    spec = read_spec(model or settings.model.path)
    if bare:
        settings = with_values(settings, {"rollout.sglang": _engine_size(settings.rollout, spec, gpu, longest=settings.longest_sequence)})
    shared = [settings]
    if num_gpus is not None:
        divided = shares(settings.rollout, num_gpus=num_gpus, supervised=settings.supervised, colocated=settings.runtime.colocate)
        names = ("training.topology.num_ranks", "rollout.num_engines")
        shared = [with_values(settings, dict(zip(names, share, strict=True))) for share in divided]
    given = num_gpus is None or bool(topology)
    chosen = _first_divided(shared, num_gpus=num_gpus) if given else settings
    # What `train --check --config-only` refuses.
    attention = planned_attention(chosen.model, spec, gpu, cp=chosen.training.topology.cp)
    dtype = model_dtype(on_gpu(chosen.model, attention), local_device())
    check_model(chosen.model, chosen.training, spec, dtype=dtype, attention=attention)
    if not chosen.supervised:
        prompt, sampling = chosen.data.max_prompt_tokens, chosen.rollout.sampling
        check_tokens(spec, path=chosen.model.path, max_prompt_tokens=prompt, sampling=sampling)
    if not given:
        for number, (one, plan) in enumerate(_best(shared, spec, gpu=gpu, say=say), start=1):
            yield f"{number}. {_as_overrides(one, bare=bare)}", plan, None
        return
    say("building a rank of each pipeline stage")
    plan = plan_run(chosen, spec, gpu=gpu, num_nodes=None)
    say("trying what would make it fit" if plan.peak > gpu.memory_bytes else "built")
    yield _as_overrides(chosen, bare=bare), plan, remedy(chosen, spec, gpu=gpu) if plan.peak > gpu.memory_bytes else None


def shares(rollout: RolloutSettings, *, num_gpus: int, supervised: bool, colocated: bool) -> list[tuple[int, int]]:
    """Return numbers of ranks and engines that share `num_gpus` GPUs, usual share first.

    Colocated engines take all GPUs, supervised training has no engine. Otherwise engines get a
    half, a quarter, three quarters, or one engine's GPUs. Generation takes as long as training
    where responses are long, and room for the trainer goes before speed. Raises UserError without
    room for one rank beside one engine.
    """
    size = rollout.ranks_per_engine
    if supervised:
        return [(num_gpus, rollout.num_engines)]
    if colocated:
        if num_gpus % size:
            raise UserError(f"{counted(num_gpus, 'GPU')} cannot be divided by engines of {size}; set rollout.sglang.tp_size to a divisor")
        return [(num_gpus, num_gpus // size)]
    if num_gpus <= size:
        raise UserError(
            f"{counted(num_gpus, 'GPU')} cannot hold a Megatron rank beside an engine of {counted(size, 'GPU')}; use more GPUs, or let "
            "them take turns with runtime.colocate=true"
        )
    counts = dict.fromkeys([*(max(1, num_gpus * quarters // 4 // size) for quarters in (2, 1, 3)), 1])
    return [(num_gpus - engines * size, engines) for engines in counts if engines * size < num_gpus]


def _first_divided(shared: Sequence[Settings], *, num_gpus: int | None) -> Settings:
    """Return the first settings without a contradiction. Raises UserError of the first ones without such."""
    wrong = [contradictions(one) for one in shared]
    for one, sentences in zip(shared, wrong, strict=True):
        if not sentences:
            return one
    raise joined_error(wrong[0], origin="settings" if num_gpus is None else f"{counted(num_gpus, 'GPU')}, engines among them")


def _best(shared: Sequence[Settings], spec: ModelSpec, *, gpu: Gpu, say: Callable[[str], None]) -> list[tuple[Settings, RunPlan]]:
    """Return the best layouts of the first share with any. Raises UserError of the share with the most ranks."""
    refused: dict[int, UserError] = {}
    most = max(one.training.topology.num_ranks for one in shared)
    for one in shared:
        num_ranks = one.training.topology.num_ranks
        try:
            return best_layouts(one, spec, gpu=gpu, num_gpus=num_ranks, advise=num_ranks == most, say=say)
        except UserError as error:
            refused[num_ranks] = error
    raise refused[most]


def read_spec(path: Path) -> ModelSpec:
    """Return the architecture of a Hugging Face directory or of a config.json. Raises UserError."""
    if path.is_dir():
        return read_model_spec(path)
    return parse_model_spec(read_object(path, fix="give a Hugging Face directory or its config.json"), origin=str(path))


def _overrides(model: Path | None, words: Words, topology: Mapping[str, object]) -> Iterator[str]:
    """Yield overrides: a plan's needs without a settings file, the user's, and the layout."""
    bare = words.config is None
    if bare:
        yield from ("run.directory=.", "data.train=.", "training.optimizer.use_distributed_optimizer=true")
    if model is not None:
        yield f"model.path={json.dumps(str(model))}"
    yield from words.overrides
    yield from (f"training.topology.{name}={json.dumps(value)}" for name, value in topology.items())
    if bare and topology and "num_ranks" not in " ".join(words.overrides):
        # Ranks are counted when the GPUs are divided; until then any number divisible by the layout serves.
        yield f"training.topology.num_ranks={prod(size for name, size in topology.items() if name in _SIZES and isinstance(size, int))}"


def _engine_size(rollout: RolloutSettings, spec: ModelSpec, gpu: Gpu, *, longest: int) -> dict[str, Any]:
    """Return SGLang's arguments with the fewest GPUs that hold the model and four of the longest sequences, and their nodes.

    Given ones stay. More GPUs than a node has share out the heads evenly; where no number of them is enough, a node's stay.
    """
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64) if size <= gpu.per_node or spec.num_heads % size == 0]
    for size in [rollout.ranks_per_engine] if "tp_size" in rollout.sglang else sizes:
        engine = plan_engine(with_values(rollout, {"sglang.tp_size": size}), spec, gpu, longest=longest, shared_with=0)
        if engine.cache_tokens >= 4 * engine.longest_sequence:
            break
    else:
        size = rollout.sglang.get("tp_size", max(size for size in sizes if size <= gpu.per_node))
    nodes = -(-size // gpu.per_node)
    return ({"nnodes": nodes} if nodes > 1 else {}) | {"tp_size": size} | rollout.sglang


def _as_overrides(settings: Settings, *, bare: bool) -> str:
    """Return the layout as overrides for a run, without a settings file with the assumptions of the plan."""
    training, rollout = settings.training, settings.rollout
    topology = training.topology.model_dump(exclude_defaults=True)
    words = {f"training.topology.{name}": value for name, value in topology.items() if value is not None}
    recompute = {name: value for name, value in settings.model.megatron.items() if name.startswith("recompute_")}
    # Written in any case, because a run decides about recompute where nothing is written.
    words |= {f"model.megatron.{name}": value for name, value in (recompute or {"recompute_granularity": None}).items()}
    if not bare and not any("use_distributed_optimizer" in fields for fields in (training.optimizer, training.ddp)):
        words["training.optimizer.use_distributed_optimizer"] = False
    if not settings.supervised:
        words["rollout.num_engines"] = rollout.num_engines
    if bare:
        words |= {f"training.optimizer.{name}": value for name, value in training.optimizer.items()}
        words |= {f"rollout.sglang.{name}": rollout.sglang[name] for name in ("tp_size", "nnodes") if name in rollout.sglang}
    return " ".join(f"{path}={format_value(value)}" for path, value in words.items())
