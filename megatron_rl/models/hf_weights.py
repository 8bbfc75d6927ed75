"""Weights between Hugging Face directories and the Megatron model, by `weight_table`.

One parameter at a time, in the order of the table on every rank. Nothing family-specific is here.
"""

import math
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_rl.errors import UserError, counted
from megatron_rl.models.build import PolicyModel
from megatron_rl.models.expert_stacks import stored_tensors
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.stored_weights import NamedTensors, open_weights
from megatron_rl.models.weight_table import Rule, Sharding, fill, join, of_mtp, rules, split, tensor_names

# Tensors that some checkpoints carry and that are recomputed here.
_RECOMPUTED_SUFFIXES = ("rotary_emb.inv_freq",)
SENT_BYTES = 256 * 2**20
"""The most that one message carries of tensors that one rank has."""
# The number of one of a rank's experts in a parameter's name, in a separate module or in Transformer Engine's module of all.
_LOCAL_EXPERT = re.compile(r"(?<=\.experts\.local_experts\.)\d+|(?<=\.experts\.linear_fc[12]\.weight)\d+")


def load_hf_weights(chunks: Sequence[PolicyModel], spec: ModelSpec, path: Path) -> None:
    """Fill this rank's chunks from the weights of the model directory `path`, casting to the parameters' dtype.

    Padded vocabulary rows become zero. Raises UserError when there are no weights, and for a tensor that is missing,
    has another shape than config.json says, or is not known.
    """
    with open_weights(path, spec) as weights:
        load_weights(chunks, spec, weights)


def load_weights(chunks: Sequence[PolicyModel], spec: ModelSpec, checkpoint: NamedTensors) -> None:
    """Fill this rank's chunks from the tensors of `checkpoint`; see `load_hf_weights`."""
    parameters = global_parameters(chunks)
    check_names(checkpoint, spec)
    with torch.no_grad():
        for rule in rules(spec):
            parameter = parameters.pop(held_name(rule, parameters), None)
            if parameter is None:
                continue
            ranks = _TensorRanks.of(rule)
            load_parameter(parameter, rule, spec, checkpoint, tp_rank=ranks.rank, tp=ranks.size)
    assert not parameters, f"no table row loads {next(iter(parameters))}"


def load_parameter(parameter: Tensor, rule: Rule, spec: ModelSpec, checkpoint: NamedTensors, *, tp_rank: int, tp: int) -> None:
    """Fill `parameter`, of any shape, what rank `tp_rank` of `tp` has of the one of `rule`, from `checkpoint`; see `load_hf_weights`."""
    tensors = [checkpoint.read(tensor.name, tensor.shape) for tensor in rule.tensors]
    fill(parameter, rule.sharding, tensors, spec, tp_rank=tp_rank, tp=tp)


def export_hf_weights(chunks: Sequence[PolicyModel], spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """Every Hugging Face tensor of the model as (name, whole tensor on this rank's device, in the parameters' dtype).

    Collective over tensor, expert and pipeline parallel ranks: each iterates to the end and gets the same names in the same order. A
    tensor can be a view of a live parameter: copy what is kept beyond the next optimizer step.
    """
    for name, parts, stacked in stored_tensors(_exported(chunks, spec)):
        yield name, torch.stack(parts) if stacked else parts[0]


def _exported(chunks: Sequence[PolicyModel], spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the table, of which those of experts may be parts of what a file has."""
    parameters = global_parameters(chunks)
    owners = _Owners(parameters)
    exported = (rule for rule in rules(spec) if rule.exported)
    for together in _sent_together(exported, owners, dtype=chunks[0].config.params_dtype):
        held = [(rule, parameters[name]) for rule in together.rules if (name := held_name(rule, parameters)) in parameters]
        assert len(held) in (0, len(together.rules)), f"this rank has only a part of what is sent with {together.rules[0].megatron}"
        tensors = [tensor for rule, parameter in held for tensor in _gathered(rule, parameter.detach(), spec)]
        if together.group is not None:
            tensors = _from_owner(together, tensors)
        yield from zip((name for rule in together.rules for name in rule.hugging_face), tensors, strict=True)


def global_parameters(chunks: Sequence[PolicyModel]) -> dict[str, Tensor]:
    """This rank's parameters, and the routers' expert biases, by their names in the whole model.

    Layers are counted from 0 over all pipeline stages, the experts of a layer from 0 over all expert parallel ranks.
    """
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
    """Names in `module` and values [experts] float32 of its routers' biases, which are buffers."""
    return ((name, buffer) for name, buffer in module.named_buffers() if name.endswith(".router.expert_bias"))


def _with_global_expert(name: str, first_expert: int) -> str:
    return _LOCAL_EXPERT.sub(lambda match: str(first_expert + int(match[0])), name)


@dataclass(frozen=True, slots=True)
class _TensorRanks:
    """The tensor parallel ranks, of experts or of everything else, that split a parameter, and this one among them."""

    group: dist.ProcessGroup
    rank: int
    size: int

    @classmethod
    def of(cls, rule: Rule) -> "_TensorRanks":
        of_expert, of_rest = parallel_state.get_expert_tensor_parallel_group, parallel_state.get_tensor_model_parallel_group
        group = of_expert() if rule.of_expert else of_rest()
        return cls(group, group.rank(), group.size())


class _Owners:
    """Which global rank has a parameter that not all have: a pipeline stage's, or an expert parallel rank's."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        """Exchange the names in `parameters`. Collective over expert and pipeline parallel ranks."""
        stages = parallel_state.get_pipeline_model_parallel_group()
        self._dense: tuple[dist.ProcessGroup | None, Mapping[str, int]] = (None, {})
        if stages.size() > 1:
            self._dense = (stages, _holders(list(parameters), stages))
        self._expert = self._dense
        if parallel_state.get_expert_model_parallel_world_size() > 1:
            # The ranks of all stages that have all experts between them, a stage's own pipeline group being a part of it.
            group = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
            self._expert = (group, _holders(list(parameters), group))

    def of(self, rule: Rule) -> tuple[dist.ProcessGroup | None, Mapping[str, int]]:
        """The group over which the parameter of `rule` is sent, None where every rank has it, and who has which name in that group."""
        return self._expert if rule.of_expert else self._dense


def _holders(held: list[str], group: dist.ProcessGroup) -> dict[str, int]:
    """The first global rank of `group` that has each name."""
    ranks = dist.get_process_group_ranks(group)
    names: list[list[str]] = [[] for _ in ranks]
    dist.all_gather_object(names, held, group=group)
    return {name: rank for rank, some in zip(reversed(ranks), reversed(names), strict=True) for name in some}


def check_names(checkpoint: NamedTensors, spec: ModelSpec) -> None:
    """Raise UserError for a tensor of the model that is missing, and for one that is neither the model's nor may be left out."""
    expected, stored = tensor_names(spec), checkpoint.names()
    check_complete(checkpoint, spec)
    if spec.tie_embeddings and "lm_head.weight" in stored:
        shape = (spec.vocab_size, spec.hidden_size)
        if not torch.equal(checkpoint.read("lm_head.weight", shape), checkpoint.read("model.embed_tokens.weight", shape)):
            raise UserError(
                f"config.json in {checkpoint.path} ties the embeddings, but lm_head.weight differs from model.embed_tokens.weight; "
                "set tie_word_embeddings to false there"
            )
    extra = sorted(name for name in stored - expected if not may_be_left_out(name, spec))
    if extra:
        raise UserError(
            f"{checkpoint.path} has {counted(len(extra), 'tensor')} that {spec.architecture} does not, the first is {extra[0]}; use the "
            "config.json that belongs to these weights"
        )


def check_complete(checkpoint: NamedTensors, spec: ModelSpec) -> None:
    """Raise UserError for a tensor of the model that is missing."""
    missing = sorted(tensor_names(spec) - checkpoint.names())
    if missing:
        raise UserError(
            f"{checkpoint.path} lacks {counted(len(missing), 'tensor')} that its config.json asks for, the first is {missing[0]}; use the "
            "config.json that belongs to these weights"
        )


def may_be_left_out(name: str, spec: ModelSpec) -> bool:
    """Whether a tensor of the files may go into no parameter: recomputed here, of multi-token prediction, or a head that is tied."""
    tied = spec.tie_embeddings and name == "lm_head.weight"
    return tied or of_mtp(name, spec) or name.endswith(_RECOMPUTED_SUFFIXES)


def held_name(rule: Rule, names: Container[str]) -> str:
    """The name of the parameter of `rule` in a model that has `names`, of torch's layers or of Transformer Engine's."""
    if rule.transformer_engine is not None and rule.transformer_engine in names:
        return rule.transformer_engine
    return rule.megatron


def _gathered(rule: Rule, local: Tensor, spec: ModelSpec) -> list[Tensor]:
    """The Hugging Face tensors of a parameter of which each tensor parallel rank holds a part."""
    shards, ranks = [local], _TensorRanks.of(rule)
    if ranks.size > 1 and rule.sharding is not Sharding.REPLICATED:
        shards = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(ranks.size)]
        dist.all_gather(shards, local.contiguous(), group=ranks.group)
    return split(rule.sharding, join(rule.sharding, shards), spec)


@dataclass(frozen=True, slots=True)
class _Sent:
    """Consecutive rules whose tensors, of one `dtype`, the global rank `owner` sends to `group`; None where every rank has them."""

    rules: list[Rule]
    group: dist.ProcessGroup | None
    owner: int | None
    dtype: torch.dtype

    def takes(self, rule: Rule, other: "_Sent") -> bool:
        """Whether `rule`, alone `other`, goes with these."""
        if self.group is None or (self.group, self.owner, self.dtype) != (other.group, other.owner, other.dtype):
            return False
        return _num_bytes([*self.rules, rule], self.dtype) <= SENT_BYTES


def _num_bytes(together: Sequence[Rule], dtype: torch.dtype) -> int:
    return dtype.itemsize * sum(math.prod(tensor.shape) for rule in together for tensor in rule.tensors)


def _sent_together(exported: Iterator[Rule], owners: _Owners, *, dtype: torch.dtype) -> Iterator[_Sent]:
    """The rules in their order, those that one message can carry together: a mixture has thousands of experts, each a few MiB large."""
    waiting: _Sent | None = None
    for rule in exported:
        group, holders = owners.of(rule)
        owner = None if group is None else holders[held_name(rule, holders)]
        alone = _Sent([rule], group, owner, torch.float32 if rule.float32 else dtype)
        if waiting is not None and waiting.takes(rule, alone):
            waiting.rules.append(rule)
            continue
        if waiting is not None:
            yield waiting
        waiting = alone
    if waiting is not None:
        yield waiting


def _from_owner(together: _Sent, tensors: list[Tensor]) -> list[Tensor]:
    """The tensors of rules that are sent together, on all of their group; a rank that has none of them gives none."""
    shapes = [tensor.shape for rule in together.rules for tensor in rule.tensors]
    if not tensors:
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
        flat = torch.empty(sum(map(math.prod, shapes)), dtype=together.dtype, device=device)
    else:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]) if len(tensors) > 1 else tensors[0].contiguous().view(-1)
    dist.broadcast(flat, together.owner, group=together.group)
    return [part.view(shape) for part, shape in zip(flat.split([math.prod(shape) for shape in shapes]), shapes, strict=True)]
