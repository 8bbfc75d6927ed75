"""Checkpoints of the training state, in megatron-core's distributed format: they load under another layout, too.

A checkpoint directory is there as a whole or not at all. `common.pt` in it is a pickle, as that format has it: load checkpoints
only from places that you trust.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import distributed
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint import CheckpointException

from megatron_rl.errors import UserError
from megatron_rl.files import commit_partial, partial_path, start_partial
from megatron_rl.training.reference import complete_parameters

_METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
_FIXED_IN_GROUPS = ("params", "step")


class InProcessSave(TorchDistSaveShardedStrategy):
    """megatron-core's format written by torch's own writer, in this process.

    Upstream's writer forks a process for every file and keeps a manager process for the results, which would outlive a rank
    that is killed.
    """

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path) -> None:
        """Write this rank's shards. Collective."""
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        torch_checkpoint.save(
            mcore_to_pyt_state_dict(state, False),
            storage_writer=torch_checkpoint.FileSystemWriter(checkpoint_dir, sync_files=True),
            planner=MCoreSavePlanner(dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False),
        )


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


def _rng_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    return state | {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else state


def _set_rng_state(state: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _is_distributed(optimizer: MegatronOptimizer) -> bool:
    return optimizer.config.use_distributed_optimizer


def _chunk_key(index: int, count: int) -> str:
    return "model" if count == 1 else f"model{index}"


def _sharded_state(
    model: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer, *, is_loading: bool, with_rng: bool
) -> dict[str, Any]:
    """What megatron shards: weights, optimizer, and one random generator state for each rank."""
    state: dict[str, Any] = {_chunk_key(index, len(model)): chunk.module.sharded_state_dict() for index, chunk in enumerate(model)}
    weights = state if len(model) > 1 else state["model"]
    state["optimizer"] = optimizer.sharded_state_dict(dict(weights), is_loading=is_loading, metadata=dict(_METADATA))
    if with_rng:
        rank, world = distributed.get_rank(), distributed.get_world_size()
        state["rng"] = ShardedObject("rng", _rng_state(), (world,), (rank,), replica_id=0)
    return state


def _param_groups(state: Mapping[Any, Any]) -> Iterator[dict[str, Any]]:
    """The parameter groups in a loaded optimizer state, of one optimizer or of a chain, in the order of the optimizer's own."""
    for key, value in state.items():
        if key == "param_groups":
            yield from value
        elif isinstance(value, dict) and key not in ("state", "param_state"):
            yield from _param_groups(value)


def save(
    directory: Path,
    *,
    model: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    counters: Mapping[str, Any],
) -> None:
    """Write everything that `load` continues from, with `counters`, plain numbers and strings that all ranks agree on.

    Collective. Raises UserError when the directory cannot be written.
    """
    on_rank_zero(start_partial, directory)
    with complete_parameters(model), _without_torch_notices():
        state = _sharded_state(model, optimizer, is_loading=False, with_rng=True)
    state["counters"] = dict(counters)
    state["progress"] = {
        "num_ranks": distributed.get_world_size(),
        "scheduler_steps": scheduler.num_steps,
        "distributed_optimizer": _is_distributed(optimizer),
    }
    strategy = InProcessSave("torch_dist", 1)
    with _without_torch_notices():
        dist_checkpointing.save(state, str(partial_path(directory)), sharded_strategy=strategy, content_metadata=dict(_METADATA))
    distributed.barrier()
    on_rank_zero(commit_partial, directory)


def load(
    directory: Path, *, model: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer, scheduler: OptimizerParamScheduler
) -> dict[str, Any]:
    """Continue from a checkpoint of `save`, under this or another layout; its counters are returned.

    Hyperparameters (learning rate, weight decay, betas) stay those of the present settings. Collective. Raises UserError when
    there is no checkpoint.
    """
    if not (directory / "metadata.json").is_file():
        raise UserError(f"{directory} is not a complete checkpoint: it has no metadata.json; resume from another one")
    progress = dist_checkpointing.load_common_state_dict(str(directory))["progress"]
    if progress["distributed_optimizer"] != _is_distributed(optimizer):
        raise UserError(
            f"checkpoint {directory} has use_distributed_optimizer {progress['distributed_optimizer']}, the settings have "
            f"{_is_distributed(optimizer)}; set training.optimizer.use_distributed_optimizer as the checkpoint has it"
        )
    same_ranks = progress["num_ranks"] == distributed.get_world_size()
    present = [{name: value for name, value in group.items() if name not in _FIXED_IN_GROUPS} for group in optimizer.param_groups]
    with complete_parameters(model), _without_torch_notices():
        wanted = _sharded_state(model, optimizer, is_loading=True, with_rng=same_ranks)
        try:
            state = dist_checkpointing.load(wanted, str(directory))
        except (CheckpointingException, CheckpointException) as error:
            # torch gathers the errors of all ranks into one, with their tracebacks.
            cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
            raise UserError(f"checkpoint {directory} is not one of this model ({cause}); resume with the model it was made from") from error
        for index, chunk in enumerate(model):
            chunk.module.load_state_dict(state[_chunk_key(index, len(model))])
        # megatron-core 0.18 and later recognise a group by its hyperparameters, so these have to be the present ones already.
        for saved, hyperparameters in zip(_param_groups(state["optimizer"]), present, strict=True):
            saved.update(hyperparameters)
        optimizer.load_state_dict(state["optimizer"])
    scheduler.num_steps = 0
    scheduler.step(progress["scheduler_steps"])
    if same_ranks:
        _set_rng_state(state["rng"])
    counters: dict[str, Any] = state["counters"]
    return counters
