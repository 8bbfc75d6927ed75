"""Checkpoints of the training state, in megatron-core's distributed format: they load under another layout, too.

A checkpoint directory is there as a whole or not at all. That format has pickles in it; see `checkpoint_pickles` for how they are read.
"""

import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from torch import Tensor, distributed
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint import CheckpointException

from megatron_rl.errors import UserError
from megatron_rl.files import commit_partial, disk_errors, partial_path, start_partial
from megatron_rl.models.hf_files import save_hf
from megatron_rl.training.checkpoint_pickles import reading_records_only
from megatron_rl.training.gathered_states import states_at_padded_offsets
from megatron_rl.training.trained_model import TrainedModel, complete_parameters

POLICY = "policy"
"""Name of the model whose weights have no prefix in a checkpoint."""
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
_MODEL_METADATA = {"non_homogeneous_layers": True}
"""Each layer has its own names: stacked, all of them would need an optimizer state, which frozen ones do not have."""
_FIXED_IN_GROUPS = ("params", "step")


class InProcessSave(TorchDistSaveShardedStrategy):
    """megatron-core's format written by torch's own writer, in this process.

    Upstream's writer forks a process for every file and keeps a manager process for the results, which would outlive a rank
    that is killed.
    """

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path) -> None:
        """Write this rank's shards. Collective."""
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        with disk_errors(Path(checkpoint_dir)), _ordinary_errors():
            torch_checkpoint.save(
                mcore_to_pyt_state_dict(state, False),
                storage_writer=torch_checkpoint.FileSystemWriter(checkpoint_dir, sync_files=True),
                planner=MCoreSavePlanner(dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False),
            )


@contextmanager
def _ordinary_errors() -> Iterator[None]:
    """Raise torch's CheckpointException, which is no subclass of Exception and so would not be handled, as a RuntimeError."""
    try:
        yield
    except CheckpointException as error:
        raise RuntimeError(str(error)) from error


@contextmanager
def _without_torch_notices() -> Iterator[None]:
    """megatron-core's format rests on parts of torch that announce their retirement at every call."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(load_state_dict|ShardedTensor|deprecat).*", category=FutureWarning)
        yield


def _nothing() -> None:
    """What the other ranks do while rank 0 works alone."""


def on_rank_zero(function: Callable[[Path], object], path: Path, *, meanwhile: Callable[[], None] = _nothing) -> None:
    """Run `function(path)` on rank 0 and `meanwhile()` on the others; a UserError of rank 0 is raised on every rank. Collective."""
    message: list[str | None] = [None]
    if distributed.get_rank() == 0:
        try:
            function(path)
        except UserError as error:
            message[0] = str(error)
    else:
        meanwhile()
    distributed.broadcast_object_list(message, src=0)
    if message[0] is not None:
        raise UserError(message[0])


def save_weights(directory: Path, weights: Iterator[tuple[str, Tensor]], *, source: Path, max_shard_bytes: int, durable: bool) -> None:
    """Write `weights`, gathered one by one on all ranks, as a Hugging Face directory with the other files of `source`, on rank 0.

    See `hf_files.save_hf` for `max_shard_bytes` and `durable`.

    Collective. Raises UserError, on every rank, when the directory cannot be written.
    """

    def take_the_rest() -> None:
        """Take part in gathering the tensors that are left, without keeping them."""
        for _ in weights:
            pass

    def write(path: Path) -> None:
        try:
            save_hf(path, weights, source=source, max_shard_bytes=max_shard_bytes, durable=durable)
        finally:
            take_the_rest()

    on_rank_zero(write, directory, meanwhile=take_the_rest)


def _rng_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    return state | {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else state


def _set_rng_state(state: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _chunk_key(index: int, count: int) -> str:
    return "model" if count == 1 else f"model{index}"


def _sharded_state(name: str, model: TrainedModel, *, is_loading: bool) -> dict[str, Any]:
    """What megatron shards of the model `name`: weights and optimizer."""
    state: dict[str, Any] = {
        _chunk_key(index, len(model.chunks)): chunk.module.sharded_state_dict(metadata=dict(_MODEL_METADATA))
        for index, chunk in enumerate(model.chunks)
    }
    weights = state if len(model.chunks) > 1 else state["model"]
    with states_at_padded_offsets(model.optimizer):
        state["optimizer"] = model.optimizer.sharded_state_dict(dict(weights), is_loading=is_loading, metadata=dict(_METADATA))
    if name != POLICY:
        # Models of one architecture have one set of names between them.
        add_prefix_for_sharding(state, f"{name}.")
    return state


def _sharded_states(models: Mapping[str, TrainedModel], *, is_loading: bool, with_rng: bool) -> dict[str, Any]:
    """What megatron shards of all models, whose parameters are complete, and one random generator state for each rank."""
    state: dict[str, Any] = {name: _sharded_state(name, model, is_loading=is_loading) for name, model in models.items()}
    if with_rng:
        rank, world = distributed.get_rank(), distributed.get_world_size()
        state["rng"] = ShardedObject("rng", _rng_state(), (world,), (rank,), replica_id=0)
    return state


@contextmanager
def _complete(models: Mapping[str, TrainedModel]) -> Iterator[None]:
    with ExitStack() as stack:
        for model in models.values():
            stack.enter_context(complete_parameters(model.chunks))
        yield


def _progress(model: TrainedModel) -> dict[str, Any]:
    """What stands in a checkpoint about a model besides its state."""
    return {
        "scheduler_steps": model.scheduler.num_steps,
        "distributed_optimizer": model.optimizer.config.use_distributed_optimizer,
        "expert_parallel": model.chunks[0].config.expert_model_parallel_size > 1,
    }


def _param_groups(state: Mapping[Any, Any]) -> Iterator[dict[str, Any]]:
    """The parameter groups in a loaded optimizer state, of one optimizer or of a chain, in the order of the optimizer's own."""
    for key, value in state.items():
        if key == "param_groups":
            yield from value
        elif isinstance(value, dict) and key not in ("state", "param_state"):
            yield from _param_groups(value)


def save(directory: Path, models: Mapping[str, TrainedModel], *, counters: Mapping[str, Any]) -> None:
    """Write everything that `load` continues from, with `counters`, plain numbers and strings that all ranks agree on.

    `models` by their names, among them the `POLICY`. Collective. Raises UserError when the directory cannot be written.
    """
    on_rank_zero(start_partial, directory)
    with _complete(models), _without_torch_notices():
        state = _sharded_states(models, is_loading=False, with_rng=True)
    state["counters"] = dict(counters)
    state["progress"] = {
        "num_ranks": distributed.get_world_size(),
        "models": {name: _progress(model) for name, model in models.items()},
    }
    strategy = InProcessSave("torch_dist", 1)
    with _without_torch_notices():
        dist_checkpointing.save(state, str(partial_path(directory)), sharded_strategy=strategy, content_metadata=dict(_METADATA))
    distributed.barrier()
    on_rank_zero(commit_partial, directory)


def load(directory: Path, models: Mapping[str, TrainedModel]) -> dict[str, Any]:
    """Continue from a checkpoint of `save`, under this or another layout; its counters are returned.

    Hyperparameters (learning rate, weight decay, betas) stay those of the current settings. Models of the checkpoint that are not
    among `models` are left alone. Collective. Raises UserError when there is no checkpoint, or not one of these models.
    """
    missing = [name for name in ("metadata.json", ".metadata") if not (directory / name).is_file()]
    if missing:
        raise UserError(f"{directory} is not a complete checkpoint: it has no {missing[0]}; resume from another one")
    with reading_records_only(directory):
        return _load(directory, models)


def _load(directory: Path, models: Mapping[str, TrainedModel]) -> dict[str, Any]:
    progress = dist_checkpointing.load_common_state_dict(str(directory))["progress"]
    for name, model in models.items():
        _check_progress(directory, name, model, progress["models"].get(name))
    same_ranks = progress["num_ranks"] == distributed.get_world_size()
    with _complete(models), _without_torch_notices():
        wanted = _sharded_states(models, is_loading=True, with_rng=same_ranks)
        try:
            state = dist_checkpointing.load(wanted, str(directory))
        except (CheckpointingException, CheckpointException) as error:
            # torch gathers the errors of all ranks into one, with their tracebacks.
            cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
            if isinstance(cause, pickle.UnpicklingError):
                raise cause from error
            raise UserError(f"checkpoint {directory} is not one of this model ({cause}); resume with the model it was made from") from error
        for name, model in models.items():
            _restore(model, state[name], scheduler_steps=progress["models"][name]["scheduler_steps"])
    if same_ranks:
        _set_rng_state(state["rng"])
    counters: dict[str, Any] = state["counters"]
    return counters


def _check_progress(directory: Path, name: str, model: TrainedModel, saved: Mapping[str, Any] | None) -> None:
    """Raise UserError when the checkpoint lacks the model `name`, or has another kind of optimizer for it."""
    if saved is None:
        raise UserError(
            f"checkpoint {directory} has no {name}, which the objective needs; resume a run that trained one, or start a new run from "
            "the policy's weights"
        )
    distributed_optimizer = model.optimizer.config.use_distributed_optimizer
    if saved["distributed_optimizer"] != distributed_optimizer:
        raise UserError(
            f"checkpoint {directory} has use_distributed_optimizer {saved['distributed_optimizer']}, the settings have "
            f"{distributed_optimizer}; set training.optimizer.use_distributed_optimizer as the checkpoint has it"
        )
    ep = model.chunks[0].config.expert_model_parallel_size
    if saved["expert_parallel"] != (ep > 1):
        # Under expert parallelism megatron-core has an optimizer for experts and one for the rest, otherwise one for all.
        needed = "2 or more" if saved["expert_parallel"] else "1"
        raise UserError(
            f"checkpoint {directory} was saved {'with' if saved['expert_parallel'] else 'without'} expert parallelism, the settings have "
            f"training.topology.ep {ep}, and the optimizer's state cannot move between the two; set training.topology.ep to {needed}, or "
            "start a new run from the policy's weights"
        )


def _restore(model: TrainedModel, state: dict[str, Any], *, scheduler_steps: int) -> None:
    """Put a loaded state into the model, its optimizer and its schedule."""
    current = [{name: value for name, value in group.items() if name not in _FIXED_IN_GROUPS} for group in model.optimizer.param_groups]
    for index, chunk in enumerate(model.chunks):
        chunk.module.load_state_dict(state[_chunk_key(index, len(model.chunks))])
    # megatron-core 0.18 and later recognise a group by its hyperparameters, so these have to be the current ones already.
    for saved, hyperparameters in zip(_param_groups(state["optimizer"]), current, strict=True):
        saved.update(hyperparameters)
    model.optimizer.load_state_dict(state["optimizer"])
    model.scheduler.num_steps = 0
    model.scheduler.step(scheduler_steps)
