"""Checkpoints of the training state, in megatron-core's distributed format: they load under another layout, too.

A checkpoint directory is there as a whole or not at all. That format has pickles in it; see `checkpoint_pickles` for how they are read.
"""

import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
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

from megatron_rl.errors import DamagedCheckpointError, UserError
from megatron_rl.files import MANIFEST, commit_partial, disk_errors, partial_path, start_partial
from megatron_rl.models.checkpoint_manifest import check_manifest, write_manifest
from megatron_rl.models.checkpoint_pickles import reading_records_only
from megatron_rl.training.checkpoint_reader import load_what_is_apart, reading_in_place, without_merges
from megatron_rl.training.checkpoint_writer import TwoHalves
from megatron_rl.training.host_copies import HostCopies
from megatron_rl.training.optimizer_shards import OptimizerTarget, from_main_weights, has_optimizer, parts_of, sharded_optimizer
from megatron_rl.training.rank_zero import check_on_ranks, on_rank_zero
from megatron_rl.training.trained_model import TrainedModel, complete_parameters

POLICY = "policy"
"""Name of the model whose weights have no prefix in a checkpoint."""
HYPERPARAMETERS = ("lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad")
"""Fields of megatron-core's OptimizerConfig whose values a checkpoint remembers, to say which of them have changed."""
_MODEL_METADATA = {"non_homogeneous_layers": True}
"""Each layer has its own names: stacked, all of them would need an optimizer state, which frozen ones do not have."""


@contextmanager
def _without_torch_notices() -> Iterator[None]:
    """megatron-core's format rests on parts of torch that announce their retirement at every call."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(load_state_dict|ShardedTensor|deprecat).*", category=FutureWarning)
        yield


def _rng_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    return state | {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else state


def _set_rng_state(state: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _chunk_key(index: int, count: int) -> str:
    return "model" if count == 1 else f"model{index}"


def _prefix(name: str) -> str:
    """What stands before the names of a model's tensors: models of one architecture have one set of names between them."""
    return "" if name == POLICY else f"{name}."


def _model_state(model: TrainedModel) -> dict[str, Any]:
    """What megatron shards of the model without its optimizer."""
    return {
        _chunk_key(index, len(model.chunks)): chunk.module.sharded_state_dict(metadata=dict(_MODEL_METADATA))
        for index, chunk in enumerate(model.chunks)
    }


def _written_state(name: str, model: TrainedModel) -> dict[str, Any]:
    """The weights and the optimizer of the model `name`, to be written."""
    state = _model_state(model)
    state["optimizer"] = dict(enumerate(sharded_optimizer(model.optimizer, state)))
    add_prefix_for_sharding(state, _prefix(name))
    return state


def _rng_object() -> ShardedObject:
    """One random generator state for each rank."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    return ShardedObject("rng", _rng_state(), (world,), (rank,), replica_id=0)


@contextmanager
def _complete(models: Mapping[str, TrainedModel]) -> Iterator[None]:
    with ExitStack() as stack:
        for model in models.values():
            stack.enter_context(complete_parameters(model.chunks))
        yield


def _progress(model: TrainedModel) -> dict[str, Any]:
    """What stands in a checkpoint about a model besides its tensors: numbers of steps, and what a user may set otherwise."""
    groups = [group for part in parts_of(model.optimizer) for group in part.param_groups]
    return {
        "scheduler_steps": model.scheduler.num_steps,
        "optimizer_steps": max((int(group.get("step", 0)) for group in groups), default=model.scheduler.num_steps),
        "hyperparameters": _hyperparameters(model),
    }


def _hyperparameters(model: TrainedModel) -> dict[str, float]:
    config = model.optimizer.config
    return {name: float(vars(config)[name] or 0.0) for name in HYPERPARAMETERS}


class Saving:
    """A checkpoint that is being written. `finish` has to be called by all ranks, before the next one begins."""

    def __init__(
        self, directory: Path, models: Mapping[str, TrainedModel], *, counters: Mapping[str, Any], stage: HostCopies | None
    ) -> None:
        """Take hold of everything that `load` continues from, with `counters`, plain numbers and strings that all ranks agree on.

        `models` by their names, among them the `POLICY`. With `stage` what is written are copies in its memory, so that the models may
        change after `wait_for_copies`; else after `finish`. Collective. Raises UserError when the directory cannot be written.
        """
        self._directory = directory
        on_rank_zero(start_partial, directory)
        self._writer = TwoHalves(stage=stage)
        with _complete(models), _without_torch_notices(), disk_errors(directory):
            state: dict[str, Any] = {name: _written_state(name, model) for name, model in models.items()}
            state["rng"] = _rng_object()
            state["counters"] = dict(counters)
            state["progress"] = {
                "num_ranks": distributed.get_world_size(),
                "models": {name: _progress(model) for name, model in models.items()},
            }
            # torch's planner looks whether the boxes of all ranks fill their tensors; megatron-core's own look knows regular grids alone.
            dist_checkpointing.save(state, str(partial_path(directory)), sharded_strategy=self._writer, validate_access_integrity=False)

    def wait_for_copies(self) -> None:
        """Return when this rank reads its models no more, or has failed to, which `finish` tells. Not collective."""
        self._writer.wait_for_copies()

    @property
    def is_written(self) -> bool:
        """Whether `finish` would find this rank's files written. Not collective."""
        return self._writer.is_written

    def finish(self) -> None:
        """Wait for the files of all ranks; the directory then has its name. Collective. Raises UserError when it could not be written."""
        self._writer.finish()
        on_rank_zero(self._commit, self._directory)

    def _commit(self, directory: Path) -> None:
        with disk_errors(directory):
            write_manifest(partial_path(directory), num_parts=distributed.get_world_size())
        commit_partial(directory)


def save(directory: Path, models: Mapping[str, TrainedModel], *, counters: Mapping[str, Any]) -> None:
    """Write everything that `load` continues from; see `Saving`. Collective. Raises UserError when the directory cannot be written."""
    Saving(directory, models, counters=counters, stage=None).finish()


@dataclass(frozen=True, slots=True)
class Loaded:
    """The `counters` of a checkpoint, and a sentence for each hyperparameter that was another when it was saved."""

    counters: dict[str, Any]
    changes: tuple[str, ...]


def load(directory: Path, models: Mapping[str, TrainedModel], *, weights_only: bool = False, checked: bool = False) -> Loaded:
    """Continue from a checkpoint of `save`, under this or another layout, with this or another kind of optimizer or precision.

    Hyperparameters (learning rate, weight decay, betas) stay those of the current settings. Models of the checkpoint that are not
    among `models` are left alone. With `weights_only` the optimizer starts anew from the checkpoint's weights. Nothing is read from a
    checkpoint whose files are not those of its manifest; `checked` says that `check_files` has been called for every share of them.
    Collective. Raises UserError when there is no checkpoint, not one of these models, or one without the optimizer's state.
    """
    if not checked:
        check_on_ranks(partial(check_files, directory))
    with reading_records_only(directory):
        return _load(directory, models, weights_only=weights_only)


def check_files(directory: Path, *, share: int, num_shares: int) -> None:
    """Raise DamagedCheckpointError when a file of this `share` is not the one that was saved."""
    missing = [name for name in ("metadata.json", ".metadata", MANIFEST) if not (directory / name).is_file()]
    if missing:
        raise DamagedCheckpointError(f"{directory} is not a complete checkpoint: it has no {missing[0]}; copy it again from where it came")
    check_manifest(directory, share=share, num_shares=num_shares)


def _load(directory: Path, models: Mapping[str, TrainedModel], *, weights_only: bool) -> Loaded:
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
    with _complete(models), _without_torch_notices():
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
            weights[name], shards[name] = without_merges(from_main_weights(state, own)), dict(enumerate(optimizers[name].shards))
            add_prefix_for_sharding([weights[name], shards[name]], _prefix(name))
        state = _read(directory, weights)
        # Apart, because main weights can come from the model's tensors under the same names.
        _read(directory, {"optimizers": shards})
        for name, model in models.items():
            for index, chunk in enumerate(model.chunks):
                load_what_is_apart(chunk.module, state[name][_chunk_key(index, len(model.chunks))])
            saved = progress["models"][name]
            optimizers[name].finish(step=0 if weights_only else saved["optimizer_steps"])
            model.scheduler.num_steps = 0
            model.scheduler.step(saved["scheduler_steps"])
    if same_ranks:
        _set_rng_state(state["rng"])
    changes = [change for name, model in models.items() for change in _changes(name, model, progress["models"][name]["hyperparameters"])]
    return Loaded(state["counters"], tuple(changes))


def _changes(name: str, model: TrainedModel, saved: Mapping[str, float]) -> Iterator[str]:
    section = "training.optimizer" if name == POLICY else f"training.{name}.optimizer"
    for field, value in _hyperparameters(model).items():
        if value != saved[field]:
            yield f"{section}.{field} is {value:g} from now on, was {saved[field]:g} in the checkpoint"


def _read(directory: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """Fill what is `wanted` from the checkpoint; it is returned with what the checkpoint has besides tensors. Collective."""
    try:
        with reading_in_place():
            state: dict[str, Any] = dist_checkpointing.load(wanted, str(directory), validate_access_integrity=False)
    except (CheckpointingException, CheckpointException) as error:
        # torch gathers the errors of all ranks into one, with their tracebacks.
        cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        if isinstance(cause, pickle.UnpicklingError):
            raise cause from error
        raise UserError(f"checkpoint {directory} is not one of this model ({cause}); resume with the model it was made from") from error
    return state
