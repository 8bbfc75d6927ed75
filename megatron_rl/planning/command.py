"""`megatron-rl plan`: what the command line gives, as settings and a model, and the plan or the layouts that are printed."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.config.load import load_settings
from megatron_rl.config.overrides import Words
from megatron_rl.config.settings import Settings
from megatron_rl.device import quiet_megatron_imports
from megatron_rl.errors import UserError
from megatron_rl.planning.engine import plan_engine
from megatron_rl.planning.gpus import Gpu
from megatron_rl.planning.records import RunPlan
from megatron_rl.rollout.server_args import validate_server_args

with quiet_megatron_imports():
    from megatron_rl.models.reading import parse_model_spec, read_model_spec
    from megatron_rl.models.spec import ModelSpec
    from megatron_rl.planning.plan import plan_run
    from megatron_rl.planning.search import best_layouts

_SETTINGS_SUFFIXES = (".yaml", ".yml")


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


def plans(request: Request) -> Iterator[tuple[str, RunPlan]]:
    """The plan of the layout that was given, or those of the best layouts, each below the overrides that make a run of it.

    Raises UserError, also when no layout fits.
    """
    bare = request.words.config is None
    settings = load_settings(request.words.config, [*_overrides(request, bare=bare)])
    if settings.rollout.sglang:
        validate_server_args(settings.rollout.sglang)
    spec = read_spec(request.model or settings.model.path)
    if bare and not any(override.startswith("runtime.num_gpus_per_engine=") for override in request.words.overrides):
        settings = _with_engine_size(settings, spec, request.gpu)
    if request.num_gpus is None or request.topology:
        yield _as_overrides(settings, bare=bare), plan_run(settings, spec, gpu=request.gpu, num_nodes=None)
        return
    for place, (chosen, plan) in enumerate(best_layouts(settings, spec, gpu=request.gpu, num_gpus=request.num_gpus), start=1):
        yield f"{place}. {_as_overrides(chosen, bare=bare)}", plan


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
    layout = dict(request.topology)
    if request.num_gpus is not None:
        layout["num_ranks"] = request.num_gpus
    yield from (f"training.topology.{name}={json.dumps(value)}" for name, value in layout.items())


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
    if bare:
        words += [f"training.optimizer.{name}={json.dumps(value)}" for name, value in settings.training.optimizer.items()]
        words.append(f"runtime.num_gpus_per_engine={settings.runtime.num_gpus_per_engine}")
    return " ".join(words)
