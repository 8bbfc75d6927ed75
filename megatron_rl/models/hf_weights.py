"""Hugging Face tensors of the Megatron model in the order of `weight_table`, and global names."""

import itertools
import math
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_rl.models.build import PolicyModel
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.weight_table import Rule, Sharding, as_stored, join, rules, split
from megatron_rl.system.files import runs_of_bytes

SENT_BYTES = 256 * 2**20
"""The most that one message carries of tensors that one rank has."""
# The number of one of a rank's experts in a parameter's name, in a separate module or in Transformer Engine's module of all.
_LOCAL_EXPERT = re.compile(r"(?<=\.experts\.local_experts\.)\d+|(?<=\.experts\.linear_fc[12]\.weight)\d+")


def export_hf_weights(chunks: Sequence[PolicyModel], spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """Yield every Hugging Face tensor of the model as (name, whole tensor on this rank's device).

    Tensors have the parameters' dtype. Collective over tensor, expert and pipeline parallel ranks:
    each iterates to the end and gets the same names in the same order. A tensor can be a view of a
    live parameter: copy tensors to be kept beyond the next optimizer step.
    """
    return as_stored(_exported(chunks, spec))


def _exported(chunks: Sequence[PolicyModel], spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the table; tensors of experts may be parts of a tensor in a file."""
    parameters = global_parameters(chunks)
    for together in _sent_together(spec, _owners(parameters), dtype=chunks[0].config.params_dtype):
        held = [(rule, parameters[name]) for rule in together.rules if (name := held_name(rule, parameters)) in parameters]
        assert len(held) in (0, len(together.rules)), f"this rank has only a part of what is sent with {together.rules[0].megatron}"
        tensors = [tensor for rule, parameter in held for tensor in _gathered(rule, parameter.detach(), spec)]
        if together.group is not None:
            tensors = _from_owner(together, tensors)
        yield from zip((name for rule in together.rules for name in rule.hugging_face), tensors, strict=True)


def global_parameters(chunks: Sequence[PolicyModel]) -> dict[str, Tensor]:
    """Return parameters and expert biases; names count layers and experts over all ranks."""
    named: dict[str, Tensor] = {}
    for chunk in chunks:
        num_local_experts = (chunk.config.num_moe_experts or 0) // chunk.config.expert_model_parallel_size
        first_expert = num_local_experts * parallel_state.get_expert_model_parallel_rank()
        offsets = {index: layer.layer_number - 1 for index, layer in enumerate(chunk.decoder.layers)}
        for name, tensor in (*chunk.named_parameters(), *expert_biases(chunk)):
            if name.startswith("decoder.layers."):
                _, _, index, rest = name.split(".", 3)
                name = f"decoder.layers.{offsets[int(index)]}.{_with_global_expert(rest, first_expert)}"
            named[name] = tensor
    return named


def expert_biases(module: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield names in `module` and values [experts] float32 of the routers' biases."""
    return ((name, buffer) for name, buffer in module.named_buffers() if name.endswith(".router.expert_bias"))


def _with_global_expert(name: str, first_expert: int) -> str:
    return _LOCAL_EXPERT.sub(lambda match: str(first_expert + int(match[0])), name)


def tensor_ranks(rule: Rule) -> dist.ProcessGroup:
    """Return the tensor parallel ranks that split the parameter of `rule`, for experts or for everything else."""
    of_expert, of_rest = parallel_state.get_expert_tensor_parallel_group, parallel_state.get_tensor_model_parallel_group
    return of_expert() if rule.of_expert else of_rest()


_Owners: TypeAlias = "dict[bool, tuple[dist.ProcessGroup | None, Mapping[str, int]]]"
"""By `Rule.of_expert`: the group of ranks that have different parameters, None without, and the global rank of each name."""


def _owners(parameters: Mapping[str, Tensor]) -> _Owners:
    """Exchange the names in `parameters`. Collective over expert and pipeline parallel ranks."""
    stages = parallel_state.get_pipeline_model_parallel_group()
    owners: _Owners = dict.fromkeys((False, True), (stages, _holders(list(parameters), stages)) if stages.size() > 1 else (None, {}))
    if parallel_state.get_expert_model_parallel_world_size() > 1:
        # This group is made of all stages' ranks, which together have all experts. A stage's own pipeline
        # group is only a part.
        group = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
        owners[True] = group, _holders(list(parameters), group)
    return owners


def _holders(held: list[str], group: dist.ProcessGroup) -> dict[str, int]:
    """Return the first global rank of `group` with each name."""
    ranks = dist.get_process_group_ranks(group)
    names: list[list[str]] = [[] for _ in ranks]
    dist.all_gather_object(names, held, group=group)
    return {name: rank for rank, some in zip(reversed(ranks), reversed(names), strict=True) for name in some}


def held_name(rule: Rule, names: Container[str]) -> str:
    """Return the name of the parameter of `rule` among `names`, torch's or Transformer Engine's."""
    if rule.transformer_engine is not None and rule.transformer_engine in names:
        return rule.transformer_engine
    return rule.megatron


def _gathered(rule: Rule, local: Tensor, spec: ModelSpec) -> list[Tensor]:
    """Return the Hugging Face tensors of a parameter from the parts of all tensor parallel ranks."""
    shards, ranks = [local], tensor_ranks(rule)
    if ranks.size() > 1 and rule.sharding is not Sharding.REPLICATED:
        shards = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(ranks.size())]
        dist.all_gather(shards, local.contiguous(), group=ranks)
    return split(rule.sharding, join(rule.sharding, shards), spec)


@dataclass(frozen=True, slots=True)
class _Sent:
    """Consecutive rules that rank `owner` sends to `group`, None where every rank has them."""

    rules: list[Rule]
    group: dist.ProcessGroup | None
    owner: int | None
    dtype: torch.dtype


def _sent_together(spec: ModelSpec, owners: _Owners, *, dtype: torch.dtype) -> Iterator[_Sent]:
    """Yield the rules in order, grouped by message, as a mixture has thousands of small experts."""

    def sender(rule: Rule) -> tuple[dist.ProcessGroup | None, int | None, torch.dtype]:
        group, holders = owners[rule.of_expert]
        return group, None if group is None else holders[held_name(rule, holders)], torch.float32 if rule.float32 else dtype

    exported = (rule for rule in rules(spec) if rule.exported)
    for (group, owner, sent_dtype), consecutive in itertools.groupby(exported, sender):
        for message in runs_of_bytes(consecutive, partial(_num_bytes, dtype=sent_dtype), max_bytes=0 if group is None else SENT_BYTES):
            yield _Sent(message, group, owner, sent_dtype)


def _num_bytes(rule: Rule, *, dtype: torch.dtype) -> int:
    return dtype.itemsize * sum(math.prod(tensor.shape) for tensor in rule.tensors)


def _from_owner(together: _Sent, tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors on all ranks; a rank without them passes an empty list."""
    shapes = [tensor.shape for rule in together.rules for tensor in rule.tensors]
    if not tensors:
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
        flat = torch.empty(sum(map(math.prod, shapes)), dtype=together.dtype, device=device)
    else:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]) if len(tensors) > 1 else tensors[0].contiguous().view(-1)
    dist.broadcast(flat, together.owner, group=together.group)
    return [part.view(shape) for part, shape in zip(flat.split([math.prod(shape) for shape in shapes]), shapes, strict=True)]
