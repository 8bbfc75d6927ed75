"""Optimizer state as boxes of whole tensors, readable under any layout and kind of optimizer.

A parameter's main weights and moments have the names and shapes of the parameter itself, with a prefix. The
distributed optimizer holds a range of each flattened parameter: a few boxes side by side of a tensor of several
dimensions, namely a part of a row, whole rows, a part of a row. So every rank writes and reads its own memory,
and nothing is gathered. Upstream gathers all states of a buffer on every data-parallel rank, at offsets shifted
by padding, and cannot read the state of another kind of optimizer.

Main weights identical to the model's own parameters (fp32) are stored once, as the model's; see `from_main_weights`.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer import ChainedOptimizer, DistributedOptimizer, MegatronOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor

_MAIN = "param"
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """This rank's state of the model's `parameter` in the optimizer `owner`, by name, flattened from `start` on.

    `replicated`: every data-parallel rank holds the same elements.
    """

    parameter: Tensor
    start: int
    tensors: Mapping[str, Tensor]
    replicated: bool
    owner: MegatronOptimizer


def parts_of(optimizer: MegatronOptimizer) -> Sequence[MegatronOptimizer]:
    """Return the optimizers inside: under expert parallelism one for experts and one for all else."""
    parts: Sequence[MegatronOptimizer] = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    # A rank may lack one kind of parameters, and then has no optimizer for this kind.
    return [part for part in parts if part.optimizer is not None]


def _counters(part: MegatronOptimizer) -> Collection[dict[str, Any]]:
    """Return the owners of a `step`, the number of updates: each parameter in torch's Adam, each group in a fused one."""
    return part.optimizer.state.values() if isinstance(part.optimizer, torch.optim.Adam) else part.param_groups


def num_updates(optimizer: MegatronOptimizer) -> int | None:
    """Return the number of updates made by `optimizer`, None on a rank without parameters."""
    return max((int(owner.get("step", 0)) for part in parts_of(optimizer) for owner in _counters(part)), default=None)


def set_num_updates(optimizer: MegatronOptimizer, number: int) -> None:
    """Let `optimizer` continue as after `number` updates."""
    for part in parts_of(optimizer):
        for owner in _counters(part):
            # A tensor for each parameter: megatron-core would share one, which the update of every parameter then advances.
            owner["step"] = torch.tensor(float(number)) if isinstance(part.optimizer, torch.optim.Adam) else number


def _held(optimizer: MegatronOptimizer) -> Iterator[_Held]:
    for part in parts_of(optimizer):
        # Fused optimizers make their moments in the first step.
        part.init_state_fn(part.optimizer, part.config)
        if isinstance(part, DistributedOptimizer):
            for parameter in part.model_param_group_index_map:
                start = part._get_model_param_range_map(parameter)["param"].start
                yield _Held(parameter, start, part._get_main_param_and_optimizer_states(parameter), replicated=False, owner=part)
        else:
            for parameter, main in _main_weights(part):
                yield _Held(parameter, 0, {_MAIN: main, **part.optimizer.state[main]}, replicated=True, owner=part)


def _main_weights(part: MegatronOptimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (the model's parameter, the optimizer's main weights) of a non-distributed optimizer."""
    if isinstance(part, Float16OptimizerWithFloat16Params):
        yield from zip(chain(*part.float16_groups), chain(*part.fp32_from_float16_groups), strict=True)
        own = part.fp32_from_fp32_groups
    else:
        own = [group["params"] for group in part.param_groups]
    yield from ((parameter, parameter) for parameter in chain(*own))


def boxes(shape: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    """Yield (offset, size) of boxes that cover, in order, elements `start` to `stop` of a row-major tensor of `shape`."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield (start,)[: len(shape)], (stop - start,)[: len(shape)]
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    # The rest of a row, whole rows, the begin of a row; or the middle of one.
    for begin, end in pairwise((start, first * row, last * row, stop) if first <= last else (start, stop)):
        index = begin // row
        if begin < end and begin % row == end % row == 0:
            yield (index, *(0 for _ in shape[1:])), ((end - begin) // row, *shape[1:])
            continue
        for offset, size in boxes(shape[1:], begin - index * row, end - index * row):
            yield (index, *offset), (1, *size)


def _pieces(sharded: ShardedTensor | ShardedTensorFactory) -> Sequence[ShardedTensor]:
    """Return the stored shards of a parameter: a gated layer has two in one parameter."""
    return sharded.build() if isinstance(sharded, ShardedTensorFactory) else [sharded]


def _boxes_of(held: _Held, tensor: Tensor, sharded: ShardedTensor | ShardedTensorFactory, key_prefix: str) -> Iterator[ShardedTensor]:
    """Split the elements `tensor` of `held` into boxes of the parameter's stored tensors, in the same memory."""
    flat, whole = tensor.detach().view(-1), held.parameter
    for piece in _pieces(sharded):
        first = piece.data.storage_offset() - whole.storage_offset()
        assert piece.data.is_contiguous(), f"{piece.key} is stored in an order of its own"
        start, stop = max(held.start, first), min(held.start + len(flat), first + piece.data.numel())
        replica = (piece.replica_id,) if isinstance(piece.replica_id, int) else piece.replica_id
        is_main = not any(replica if held.replicated else replica[:-1])
        shape, position = (*(1 for _ in range(piece.prepend_axis_num)), *piece.local_shape), start - held.start
        for offset, size in boxes(shape, start - first, stop - first):
            data = flat[position : position + math.prod(size)].view(size)
            position += data.numel()
            yield ShardedTensor(
                key=f"{key_prefix}{piece.key}",
                data=data,
                dtype=data.dtype,
                local_shape=size,
                global_shape=piece.global_shape,
                global_offset=tuple(whole + own for whole, own in zip(piece.global_offset, offset, strict=True)),
                axis_fragmentations=None,
                replica_id=0 if is_main else 1,
                allow_shape_mismatch=piece.allow_shape_mismatch,
            )


def _sharded_parameters(model_state: Mapping[str, Any]) -> dict[Tensor, ShardedTensor | ShardedTensorFactory]:
    """Return the entries of a model's sharded state by their parameters."""
    entries = (entry for entry in nested_values(model_state) if isinstance(entry, ShardedTensor | ShardedTensorFactory))
    return {entry.data: entry for entry in entries}


def _key(name: str) -> str:
    return f"optimizer.state.{name}."


def sharded_optimizer(optimizer: MegatronOptimizer, model_state: Mapping[str, Any]) -> list[ShardedTensor]:
    """Return this rank's optimizer state for writing, without copies, by the sharded `model_state` of its model."""
    parameters = _sharded_parameters(model_state)
    result: list[ShardedTensor] = []
    for held in _held(optimizer):
        for name, tensor in _stored(held):
            result += _boxes_of(held, tensor, parameters[held.parameter], _key(name))
    return result


def _stored(held: _Held) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a checkpoint beyond the model's own."""
    for name, tensor in held.tensors.items():
        shared = name == _MAIN and tensor.untyped_storage().data_ptr() == held.parameter.untyped_storage().data_ptr()
        if name != "step" and not shared:
            yield name, tensor


def has_optimizer(keys: Collection[str]) -> bool:
    """Return true when a checkpoint with the tensors `keys` has the optimizer's moments."""
    return any(key.startswith(_key("exp_avg")) for key in keys)


class OptimizerTarget:
    """This rank's optimizer state: `shards` to be read from a checkpoint with the tensors `keys`; then call `finish`.

    Moments and main weights may have been stored in another precision. Main weights missing from the checkpoint
    of an fp32 model come from the model's weights.
    """

    def __init__(
        self, optimizer: MegatronOptimizer, model_state: Mapping[str, Any], *, keys: Collection[str], main_only: bool = False
    ) -> None:
        """With `main_only`, leave the moments out: moments stay as in a new optimizer."""
        parameters = _sharded_parameters(model_state)
        self._held = list(_held(optimizer))
        self._optimizer = optimizer
        self.shards: list[ShardedTensor] = []
        for held in self._held:
            for name, tensor in _stored(held):
                if main_only and name != _MAIN:
                    continue
                shards = list(_boxes_of(held, tensor, parameters[held.parameter], _key(name)))
                if name == _MAIN:
                    plain = _boxes_of(held, tensor, parameters[held.parameter], "")
                    shards = [own if own.key in keys else other for own, other in zip(shards, plain, strict=True)]
                self.shards += shards

    def finish(self, *, step: int) -> None:
        """Make the optimizer continue from the loaded state after `step` steps."""
        for held in self._held:
            if held.owner.config.use_precision_aware_optimizer:
                # This optimizer scales its states, so the loaded tensors are copies.
                held.owner._set_main_param_and_optimizer_states(held.parameter, held.tensors)
        set_num_updates(self._optimizer, step)


def from_main_weights(model_state: Any, keys: Collection[str]) -> Any:
    """Return `model_state` with fp32 parameters read from main weights, which a model of another dtype has saved."""
    if isinstance(model_state, dict):
        return {name: from_main_weights(entry, keys) for name, entry in model_state.items()}
    if isinstance(model_state, ShardedTensor | ShardedTensorFactory):
        pieces = _pieces(model_state)
        if model_state.data.dtype is torch.float32 and all(_key(_MAIN) + piece.key in keys for piece in pieces):
            return replace(model_state, key=_key(_MAIN) + model_state.key)
    return model_state
