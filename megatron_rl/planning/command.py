"""`megatron-rl plan`: what the command line gives, as settings and a model, and the plan or the layouts that are printed."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from megatron_rl.config.checks import contradictions
from megatron_rl.config.load import load_settings
from megatron_rl.config.messages import joined_error
from megatron_rl.config.overrides import Words
from megatron_rl.config.settings import Settings
from megatron_rl.device import local_device, quiet_megatron_imports
from megatron_rl.errors import UserError, counted
from megatron_rl.planning.engine_memory import plan_engine
from megatron_rl.planning.gpus import Gpu
from megatron_rl.planning.records import RunPlan
from megatron_rl.rollout.server_args import validate_server_args

with quiet_megatron_imports():
    from megatron_rl.models.attention.attention_fields import Attention
    from megatron_rl.models.model_spec import ModelSpec
    from megatron_rl.models.read_spec import parse_model_spec, read_model_spec
    from megatron_rl.planning.levers import remedy
    from megatron_rl.planning.run_plan import on_gpu, plan_run
    from megatron_rl.planning.search import best_layouts
    from megatron_rl.training.model_check import check_model
    from megatron_rl.training.trained_model import model_dtype

_SETTINGS_SUFFIXES = (".yaml", ".yml")
_SIZES = ("tp", "pp", "cp", "ep", "etp")


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked: the model's directory or config.json (None: that of the settings), the words of the settings, the GPUs.

    `topology` are the parts of training.topology that were given, by their names; `num_gpus` alone asks for layouts.
    """

    model: Path | None
    words: Words
    gpu: Gpu
    num_gpus: int | None
    topology: Mapping[str, object]


def parse_request(words: Words, *, gpu: Gpu, num_gpus: int | None, topology: Mapping[str, object]) -> Request:
    """Tell the model from a settings file: the file of `words` is the model unless it is YAML."""
    given = words.config
    if given is not None and given.suffix not in _SETTINGS_SUFFIXES:
        return Request(given, Words(None, words.overrides), gpu, num_gpus, topology)
    if given is None and not any(override.startswith("model.path=") for override in words.overrides):
        raise UserError("plan was given no model; give a Hugging Face directory, its config.json, or a settings file with model.path")
    return Request(None, words, gpu, num_gpus, topology)


def plans(request: Request, *, say: Callable[[str], None] = lambda words: None) -> Iterator[tuple[str, RunPlan, str | None]]:
    """The plan of the layout that was given, or those of the best layouts, each with the overrides that make a run of it.

    A plan of a given layout that does not fit comes with the overrides that would make it fit. `say` gets what is being built.
    Raises UserError, also when no layout fits.
    """
    bare = request.words.config is None
    settings = load_settings(request.words.config, [*_overrides(request, bare=bare)])
    if settings.rollout.sglang:
        validate_server_args(settings.rollout.sglang)
    spec = read_spec(request.model or settings.model.path)
    if bare and not any(override.startswith("runtime.num_gpus_per_engine=") for override in request.words.overrides):
        settings = _with_engine_size(settings, spec, request.gpu)
    shared = [settings] if request.num_gpus is None else list(shares(settings, num_gpus=request.num_gpus))
    if request.num_gpus is None or request.topology:
        chosen = _first_divided(shared, num_gpus=request.num_gpus)
        _check(chosen, spec)
        say("building a rank of each pipeline stage")
        plan = plan_run(chosen, spec, gpu=request.gpu, num_nodes=None)
        say("trying what would make it fit" if plan.peak > request.gpu.memory_bytes else "built")
        advice = remedy(chosen, spec, gpu=request.gpu) if plan.peak > request.gpu.memory_bytes else None
        yield _as_overrides(chosen, bare=bare), plan, advice
        return
    _check(settings, spec)
    for number, (chosen, plan) in enumerate(_best(shared, spec, gpu=request.gpu, say=say), start=1):
        yield f"{number}. {_as_overrides(chosen, bare=bare)}", plan, None


def shares(settings: Settings, *, num_gpus: int) -> Iterator[Settings]:
    """The settings with `num_gpus` GPUs divided between Megatron ranks and engines, the usual share first.

    Colocated engines take all of them, supervised training has none. Otherwise engines get a half, a quarter, three quarters, or one
    engine's: generation takes as long as training where responses are long, and a share that holds the trainer goes before speed.
    Raises UserError when there is no room for one rank beside one engine.
    """
    size = settings.runtime.num_gpus_per_engine
    if settings.supervised:
        yield _divided(settings, num_ranks=num_gpus, num_engines=settings.rollout.num_engines)
        return
    if settings.runtime.colocate:
        if num_gpus % size:
            raise UserError(
                f"{counted(num_gpus, 'GPU')} cannot be divided by engines of {size}; set runtime.num_gpus_per_engine to a divisor"
            )
        yield _divided(settings, num_ranks=num_gpus, num_engines=num_gpus // size)
        return
    if num_gpus <= size:
        raise UserError(
            f"{counted(num_gpus, 'GPU')} cannot hold a Megatron rank beside an engine of {counted(size, 'GPU')}; use more GPUs, or let "
            "them take turns with runtime.colocate=true"
        )
    counts = [max(1, num_gpus * quarters // 4 // size) for quarters in (2, 1, 3)]
    for engines in dict.fromkeys([*counts, 1]):
        if engines * size < num_gpus:
            yield _divided(settings, num_ranks=num_gpus - engines * size, num_engines=engines)


def _divided(settings: Settings, *, num_ranks: int, num_engines: int) -> Settings:
    topology = settings.training.topology.model_copy(update={"num_ranks": num_ranks})
    return settings.model_copy(
        update={
            "training": settings.training.model_copy(update={"topology": topology}),
            "rollout": settings.rollout.model_copy(update={"num_engines": num_engines}),
        }
    )


def _first_divided(shared: Sequence[Settings], *, num_gpus: int | None) -> Settings:
    """The first of these whose ranks its own layout divides. Raises UserError, with the first one's arithmetic, when there is none."""
    wrong = [contradictions(one) for one in shared]
    for one, sentences in zip(shared, wrong, strict=True):
        if not sentences:
            return one
    raise joined_error(wrong[0], origin="settings" if num_gpus is None else f"{counted(num_gpus, 'GPU')}, engines among them")


def _best(shared: Sequence[Settings], spec: ModelSpec, *, gpu: Gpu, say: Callable[[str], None]) -> list[tuple[Settings, RunPlan]]:
    """The best layouts of the first share that has any. Raises UserError of the share with the most ranks when none has."""
    refused: dict[int, UserError] = {}
    most = max(one.training.topology.num_ranks for one in shared)
    for one in shared:
        num_ranks = one.training.topology.num_ranks
        try:
            return best_layouts(one, spec, gpu=gpu, num_gpus=num_ranks, advise=num_ranks == most, say=say)
        except UserError as error:
            refused[num_ranks] = error
    raise refused[most]


def _check(settings: Settings, spec: ModelSpec) -> None:
    """What `train --check --config-only` refuses of a model. Raises UserError."""
    attention: Attention = "transformer_engine" if settings.model.attention == "auto" else settings.model.attention
    check_model(settings, spec, dtype=model_dtype(on_gpu(settings).model, local_device()), attention=attention)


def read_spec(path: Path) -> ModelSpec:
    """The architecture of a Hugging Face directory or of a config.json alone. Raises UserError."""
    if path.is_dir():
        return read_model_spec(path)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); give a Hugging Face directory or its config.json") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); give a Hugging Face directory or its config.json") from error
    if not isinstance(config, dict):
        raise UserError(f"{path} holds a {type(config).__name__}, needs the JSON object of a config.json; give another file")
    return parse_model_spec(config, origin=str(path))


def _overrides(request: Request, *, bare: bool) -> Iterator[str]:
    """What a plan without a settings file needs, what the user overrides, and the layout."""
    if bare:
        yield from ("run.directory=.", "data.train=.", "training.optimizer.use_distributed_optimizer=true")
    if request.model is not None:
        yield f"model.path={json.dumps(str(request.model))}"
    yield from request.words.overrides
    yield from (f"training.topology.{name}={json.dumps(value)}" for name, value in request.topology.items())
    if bare and request.topology and "num_ranks" not in " ".join(request.words.overrides):
        # The ranks are counted when the GPUs are divided; until then any number that the layout divides.
        sizes = [size for name, size in request.topology.items() if name in _SIZES and isinstance(size, int)]
        yield f"training.topology.num_ranks={prod([int(size) for size in sizes])}"


def _with_engine_size(settings: Settings, spec: ModelSpec, gpu: Gpu) -> Settings:
    """Engines of the fewest GPUs of a node that hold the model and four of the longest sequences; of a whole node when none does."""
    for num_gpus in (size for size in (1, 2, 4, 8, 16) if size <= gpu.per_node):
        sized = settings.model_copy(update={"runtime": settings.runtime.model_copy(update={"num_gpus_per_engine": num_gpus})})
        engine = plan_engine(sized, spec, gpu, shared_with=0)
        if engine.cache_tokens >= 4 * engine.longest_sequence:
            break
    return sized


def _as_overrides(settings: Settings, *, bare: bool) -> str:
    """The layout as it is written behind `megatron-rl train run.yaml`, with what was assumed for a plan without a settings file."""
    topology = settings.training.topology.model_dump(exclude_defaults=True)
    words = [f"training.topology.{name}={json.dumps(value)}" for name, value in topology.items() if value is not None]
    recompute = {name: value for name, value in settings.model.megatron.items() if name.startswith("recompute_")}
    words += [f"model.megatron.{name}={value}" for name, value in recompute.items()]
    if not settings.supervised:
        words.append(f"rollout.num_engines={settings.rollout.num_engines}")
    if bare:
        words += [f"training.optimizer.{name}={json.dumps(value)}" for name, value in settings.training.optimizer.items()]
        words.append(f"runtime.num_gpus_per_engine={settings.runtime.num_gpus_per_engine}")
    return " ".join(words)
