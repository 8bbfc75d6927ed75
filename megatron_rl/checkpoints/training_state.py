"""Checkpoints of the training state in megatron-core's distributed format, to be loaded under any layout.

The format contains pickles; see `checkpoints/pickles.py`.
"""

import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from torch import distributed
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.utils import _DistWrapper

from megatron_rl.checkpoints import manifest
from megatron_rl.checkpoints.optimizer_shards import OptimizerTarget, from_main_weights, has_optimizer, num_updates, sharded_optimizer
from megatron_rl.checkpoints.pickles import read_metadata, reading_records_only
from megatron_rl.errors import DamagedCheckpointError, UserError
from megatron_rl.models.build import TrainedModel, complete_parameters
from megatron_rl.system.files import MANIFEST

POLICY = "policy"
"""Name of the model whose weights have no prefix in a checkpoint."""
HYPERPARAMETERS = ("lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad")
"""Fields of megatron-core's OptimizerConfig whose values a checkpoint remembers, to say which of them have changed."""
_MODEL_METADATA = {"non_homogeneous_layers": True}
"""Each layer has its own names: stacked, all of them would need an optimizer state, which frozen ones do not have."""


@contextmanager
def without_torch_notices() -> Iterator[None]:
    """Hide torch's deprecation notices: megatron-core's format uses deprecated parts at every call."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(load_state_dict|ShardedTensor|deprecat).*", category=FutureWarning)
        yield


def all_ranks() -> _DistWrapper:
    """Return torch's collectives of functions: when one fails on a rank, all ranks raise; see `ordinary_errors`."""
    return _DistWrapper(None, use_dist=True, coordinator_rank=0)


@contextmanager
def ordinary_errors() -> Iterator[None]:
    """Raise the first rank's own error instead of CheckpointException, which is no Exception and no handler catches."""
    try:
        yield
    except CheckpointException as error:
        cause = _cause(error)
        raise (cause if isinstance(cause, Exception) else RuntimeError(str(error))) from error


def _cause(error: CheckpointException) -> BaseException:
    return next(iter(error.failures.values()))[0]


def check_on_ranks(check: Callable[..., Any]) -> list[Any]:
    """Return `check(share=(rank, ranks))` of each rank; the first one's error is raised on every rank. Collective."""
    share = distributed.get_rank(), distributed.get_world_size()
    with ordinary_errors():
        found: list[Any] = all_ranks().all_gather("check", lambda: check(share=share))
    return found


def _chunk_key(index: int, count: int) -> str:
    return "model" if count == 1 else f"model{index}"


def _prefix(name: str) -> str:
    """Return the prefix of a model's tensor names: models of one architecture would share one set of names."""
    return "" if name == POLICY else f"{name}."


def _model_state(model: TrainedModel) -> dict[str, Any]:
    """Return megatron's sharded state of the model without its optimizer."""
    return {
        _chunk_key(index, len(model.chunks)): chunk.module.sharded_state_dict(metadata=dict(_MODEL_METADATA))
        for index, chunk in enumerate(model.chunks)
    }


def _rng_object() -> ShardedObject:
    """Return the states of this rank's random generators, one of as many as ranks."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return ShardedObject("rng", state, (distributed.get_world_size(),), (distributed.get_rank(),), replica_id=0)


def _set_rng_state(state: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


@contextmanager
def complete(models: Mapping[str, TrainedModel]) -> Iterator[None]:
    """Hold the whole parameters of all models."""
    with ExitStack() as stack:
        for model in models.values():
            stack.enter_context(complete_parameters(model.chunks))
        yield


def _progress(model: TrainedModel) -> dict[str, Any]:
    """Return a checkpoint's facts about a model besides tensors: numbers of steps, and settings open to change."""
    updates = num_updates(model.optimizer)
    return {
        "scheduler_steps": model.scheduler.num_steps,
        "optimizer_steps": model.scheduler.num_steps if updates is None else updates,
        "hyperparameters": _hyperparameters(model),
    }


def _hyperparameters(model: TrainedModel) -> dict[str, float]:
    config = model.optimizer.config
    return {name: float(vars(config)[name] or 0.0) for name in HYPERPARAMETERS}


def state_to_save(models: Mapping[str, TrainedModel], *, counters: Mapping[str, Any]) -> dict[str, Any]:
    """Return megatron's sharded state with everything that `load` needs, the `POLICY` among the models."""
    state: dict[str, Any] = {name: _model_state(model) for name, model in models.items()}
    for name, model in models.items():
        state[name]["optimizer"] = dict(enumerate(sharded_optimizer(model.optimizer, state[name])))
        add_prefix_for_sharding(state[name], _prefix(name))
    progress = {"num_ranks": distributed.get_world_size(), "models": {name: _progress(model) for name, model in models.items()}}
    return state | {"rng": _rng_object(), "counters": dict(counters), "progress": progress}


def load(
    directory: Path, models: Mapping[str, TrainedModel], *, weights_only: bool = False, checked: bool = False
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Continue from a checkpoint, under any layout, kind of optimizer or precision. Collective.

    Returns the checkpoint's counters, and a sentence for each changed hyperparameter (learning rate, weight
    decay, betas): these stay at the current settings. Models of the checkpoint outside `models` are left alone.
    With `weights_only` the optimizer starts anew from the checkpoint's weights. Nothing is read from a checkpoint
    with files different from its manifest. `checked`: `check_files` has been called for every share of the files.
    Raises UserError when there is no checkpoint, or one without one of the models or the optimizer's state.
    """
    if not checked:
        check_on_ranks(partial(check_files, directory))
    # Read now as well: torch reports a failure at this file without the cause.
    read_metadata(directory)
    with reading_records_only(directory):
        return _load(directory, models, weights_only=weights_only)


def check_files(directory: Path, *, share: tuple[int, int]) -> None:
    """Raise DamagedCheckpointError when a file of `share` (index, number) has changed."""
    missing = [name for name in ("metadata.json", ".metadata", MANIFEST) if not (directory / name).is_file()]
    if missing:
        raise DamagedCheckpointError(f"{directory} is not a complete checkpoint: it has no {missing[0]}; copy it again from where it came")
    manifest.check(directory, "state", share=share)


def _load(directory: Path, models: Mapping[str, TrainedModel], *, weights_only: bool) -> tuple[dict[str, Any], tuple[str, ...]]:
    progress = dist_checkpointing.load_common_state_dict(str(directory)).get("progress")
    if progress is None:
        raise UserError(
            f"{directory} holds converted weights, without the state of a run; turn them into a Hugging Face directory with megatron-rl "
            "convert, and start a new run with that as model.path"
        )
    for name in models:
        if name not in progress["models"]:
            raise UserError(
                f"checkpoint {directory} has no {name}, which the objective needs; resume a run that trained one, or start a new run from "
                "the policy's weights"
            )
    same_ranks = progress["num_ranks"] == distributed.get_world_size()
    with complete(models), without_torch_notices():
        keys = dist_checkpointing.load_tensors_metadata(str(directory))
        weights: dict[str, Any] = {"rng": _rng_object()} if same_ranks else {}
        optimizers, shards = {}, {}
        for name, model in models.items():
            own, state = {key.removeprefix(_prefix(name)) for key in keys if key.startswith(_prefix(name))}, _model_state(model)
            if not weights_only and not has_optimizer(own):
                raise UserError(
                    f"checkpoint {directory} has the weights of {name} alone, without the optimizer's state; give --weights-only to go on "
                    "with a new optimizer, or resume from another one"
                )
            optimizers[name] = OptimizerTarget(model.optimizer, state, keys=own, main_only=weights_only)
            weights[name], shards[name] = from_main_weights(state, own), dict(enumerate(optimizers[name].shards))
            add_prefix_for_sharding([weights[name], shards[name]], _prefix(name))
        state = _read(directory, weights)
        # Apart, because main weights can come from the model's tensors under the same names.
        _read(directory, {"optimizers": shards})
        for name, model in models.items():
            for index, chunk in enumerate(model.chunks):
                chunk.module.load_state_dict(state[name][_chunk_key(index, len(model.chunks))])
            saved = progress["models"][name]
            optimizers[name].finish(step=0 if weights_only else saved["optimizer_steps"])
            model.scheduler.num_steps = 0
            model.scheduler.step(saved["scheduler_steps"])
    if same_ranks:
        _set_rng_state(state["rng"])
    changes = [change for name, model in models.items() for change in _changes(name, model, progress["models"][name]["hyperparameters"])]
    return state["counters"], tuple(changes)


def _changes(name: str, model: TrainedModel, saved: Mapping[str, float]) -> Iterator[str]:
    section = "training.optimizer" if name == POLICY else f"training.{name}.optimizer"
    for field, value in _hyperparameters(model).items():
        if value != saved[field]:
            yield f"{section}.{field} is {value:g} from now on, was {saved[field]:g} in the checkpoint"


def _read(directory: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """Fill `wanted` from the checkpoint and return `wanted` with the non-tensor values. Collective."""
    try:
        state: dict[str, Any] = dist_checkpointing.load(wanted, str(directory), validate_access_integrity=False)
    except (CheckpointingException, CheckpointException) as error:
        # torch gathers the errors of all ranks into one, with their tracebacks.
        cause = _cause(error) if isinstance(error, CheckpointException) else error
        if isinstance(cause, pickle.UnpicklingError):
            raise cause from error
        raise UserError(f"checkpoint {directory} is not one of this model ({cause}); resume with the model it was made from") from error
    return state
