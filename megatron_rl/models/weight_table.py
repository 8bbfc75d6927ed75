"""The table of Hugging Face tensors and shapes for each of Megatron's parameters.

`rules` is the table: one rule for each parameter, read from the architecture alone, with the split
over tensor parallel ranks. The tensor functions below `rules` go two steps each way, exact inverses
of one another: Hugging Face tensors -> `combine` -> whole parameter -> `shard` -> local parameter,
and local parameters of all ranks -> `join` -> whole parameter -> `split` -> Hugging Face tensors.

Files of some families have all experts of a layer in one tensor, a stack. Here an expert's part of
it has a name of its own: the name of the stack with the expert's number inside, such as
`...experts.3.down_proj_bias` for `...experts.down_proj_bias`. Tensors of single experts in other
families end in `.weight`.
"""

import enum
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_rl.models.experts.moe_spec import MoeSpec
from megatron_rl.models.model_spec import USUAL_NAMES, MlaSpec, ModelSpec


class Sharding(enum.Enum):
    """The way from a rule's tensors to a Megatron parameter, and its split over ranks."""

    REPLICATED = "replicated"  # One tensor, the same on every rank.
    VOCABULARY = "vocabulary"  # One tensor, rows padded to the padded vocabulary and split.
    ROWS = "rows"  # One tensor, split along its first dimension (column-parallel linear).
    COLUMNS = "columns"  # One tensor, split along its last dimension (row-parallel linear).
    TRANSPOSED_COLUMNS = "transposed_columns"  # The transpose of one tensor, split along its last dimension.
    QKV = "qkv"  # Query, key, value stacked per group as [q...q, k, v]; split by groups.
    STACKED_QKV = "stacked_qkv"  # The same parameter from one tensor with all queries above all keys above all values.
    GATE_UP = "gate_up"  # Gate above up; each half is split.
    STACKED_GATE_UP = "stacked_gate_up"  # The same parameter from one tensor with gate above up.
    # The same parameter from one tensor whose columns are those of gate and up in turns: the transpose of the weight, or a bias.
    ALTERNATE_GATE_UP = "alternate_gate_up"


_GATE_UP = (Sharding.GATE_UP, Sharding.STACKED_GATE_UP, Sharding.ALTERNATE_GATE_UP)
_COLUMNS = (Sharding.COLUMNS, Sharding.TRANSPOSED_COLUMNS)
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_PART = re.compile(r"(.+\.experts)\.\d+\.((?:gate_up|down)_proj(?:_bias)?)")
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class HfTensor:
    """A tensor of a Hugging Face checkpoint by name, with the whole shape without padding."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """One Megatron parameter by its global name, with its Hugging Face tensors in order.

    `transformer_engine` is the name in the Transformer Engine layer spec when different. `exported`
    is False for a second copy of an exported parameter (the output layer of a pipelined model with
    tied embeddings). `of_expert` marks parameters of single experts: one expert parallel rank has
    each, split over expert tensor parallel ranks. `float32` marks parameters of this dtype under
    any dtype of the model.
    """

    megatron: str
    tensors: tuple[HfTensor, ...]
    sharding: Sharding
    transformer_engine: str | None = None
    exported: bool = True
    of_expert: bool = False
    float32: bool = False

    @property
    def hugging_face(self) -> tuple[str, ...]:
        """Names of the Hugging Face tensors."""
        return tuple(tensor.name for tensor in self.tensors)


def part_name(stack: str, expert: int) -> str:
    """Return the name of one expert's part of the tensor `stack`."""
    module, _, own = stack.rpartition(".")
    return f"{module}.{expert}.{own}"


def stored_name(name: str) -> str:
    """Return the name of the tensor in the files that holds `name`: of its stack, if any."""
    part = _PART.fullmatch(name)
    return name if part is None else f"{part[1]}.{part[2]}"


def as_stored(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield `tensors`, of any shape, with consecutive parts of a stack as one tensor."""
    for name, parts, stacked in _stored(tensors):
        yield name, torch.stack(parts) if stacked else parts[0]


def _stored(tensors: Iterable[tuple[str, Value]]) -> Iterator[tuple[str, list[Value], bool]]:
    """Yield each name in the files, the values of its consecutive parts, and true for a stack."""
    for name, members in itertools.groupby(tensors, key=lambda member: stored_name(member[0])):
        parts = list(members)
        yield name, [value for _, value in parts], parts[0][0] != name


def tensor_shapes(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and whole shape of every tensor of a Hugging Face directory, in export order, from the model's architecture alone."""
    tensors = ((tensor.name, tensor.shape) for rule in rules(spec) if rule.exported for tensor in rule.tensors)
    return ((name, (len(parts), *parts[0]) if stacked else parts[0]) for name, parts, stacked in _stored(tensors))


def tensor_names(spec: ModelSpec) -> set[str]:
    """Return the names of the Hugging Face tensors, or parts of a tensor, of all rules."""
    return {tensor.name for rule in rules(spec) for tensor in rule.tensors}


def of_mtp(name: str, spec: ModelSpec) -> bool:
    """Return true for a tensor of the multi-token prediction layers, which only engines use and nothing here could train."""
    layer = _LAYER.match(name)
    return layer is not None and spec.num_layers <= int(layer[1]) < spec.num_layers + spec.num_mtp_layers


def rules(spec: ModelSpec) -> Iterator[Rule]:
    """Every parameter of the model, first to last, layers counted from 0 over the whole model."""
    embedding, whole = "model.embed_tokens.weight", (spec.vocab_size, spec.hidden_size)
    yield _one("embedding.word_embeddings.weight", embedding, *whole, sharding=Sharding.VOCABULARY)
    for layer in range(spec.num_layers):
        megatron, hugging_face = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        yield from _attention_rules(spec, megatron, hugging_face)
        if spec.moe is None or spec.moe.is_dense(layer):
            yield from _mlp_rules(spec, megatron, hugging_face)
        else:
            yield from _moe_rules(spec, spec.moe, megatron, hugging_face)
    yield _one("decoder.final_layernorm.weight", "model.norm.weight", spec.hidden_size)
    head = embedding if spec.tie_embeddings else "lm_head.weight"
    yield _one("output_layer.weight", head, *whole, sharding=Sharding.VOCABULARY, exported=not spec.tie_embeddings)


def _one(megatron: str, hugging_face: str, *shape: int, sharding: Sharding = Sharding.REPLICATED, **marks: Any) -> Rule:
    """Return the rule of a parameter from one tensor."""
    return Rule(megatron, (HfTensor(hugging_face, shape),), sharding, **marks)


def _attention_rules(spec: ModelSpec, megatron: str, hugging_face: str) -> Iterator[Rule]:
    attention, original, hidden, names = f"{megatron}self_attention.", f"{hugging_face}self_attn.", spec.hidden_size, spec.names
    # Transformer Engine fuses the norm into the next projection. Latent attention has two projections
    # there, so its norm is separate.
    fused = None if spec.mla is not None else f"{attention}linear_qkv.layer_norm_weight"
    if names.attention_input_norm is not None:
        before = f"{hugging_face}{names.attention_input_norm}.weight"
        yield _one(f"{megatron}input_layernorm.weight", before, hidden, transformer_engine=fused)
    if spec.mla is None:
        yield from _grouped_query_rules(spec, attention, original)
    else:
        yield from _latent_rules(spec, spec.mla, attention, original)
    width = spec.num_heads * spec.value_dim
    yield _one(f"{attention}linear_proj.weight", f"{original}o_proj.weight", hidden, width, sharding=Sharding.COLUMNS)
    if spec.linear_bias:
        yield _one(f"{attention}linear_proj.bias", f"{original}o_proj.bias", hidden)
    if spec.attention_sinks:
        yield _one(f"{attention}core_attention.softmax_offset", f"{original}sinks", spec.num_heads, sharding=Sharding.ROWS)
    if names.attention_output_norm is not None:
        yield _one(f"{attention}linear_proj.output_layernorm.weight", f"{hugging_face}{names.attention_output_norm}.weight", hidden)


def _qkv_rows(spec: ModelSpec) -> tuple[int, int, int]:
    return spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim


def _grouped_query_rules(spec: ModelSpec, megatron: str, hugging_face: str) -> Iterator[Rule]:
    rows, hidden = dict(zip("qkv", _qkv_rows(spec), strict=True)), spec.hidden_size
    if spec.names.qkv is None:
        weights = tuple(HfTensor(f"{hugging_face}{name}_proj.weight", (rows[name], hidden)) for name in "qkv")
        yield Rule(f"{megatron}linear_qkv.weight", weights, Sharding.QKV)
    else:
        stacked = f"{hugging_face}{spec.names.qkv}.weight"
        yield _one(f"{megatron}linear_qkv.weight", stacked, sum(rows.values()), hidden, sharding=Sharding.STACKED_QKV)
    if spec.qkv_bias:
        biases = tuple(HfTensor(f"{hugging_face}{name}_proj.bias", (rows[name],)) for name in "qkv")
        yield Rule(f"{megatron}linear_qkv.bias", biases, Sharding.QKV)
    for name in "qk" if spec.qk_norm else "":
        width, sharding = (rows[name], Sharding.ROWS) if spec.qk_norm_over_heads else (spec.head_dim, Sharding.REPLICATED)
        yield _one(f"{megatron}{name}_layernorm.weight", f"{hugging_face}{name}_norm.weight", width, sharding=sharding)


def _latent_rules(spec: ModelSpec, mla: MlaSpec, megatron: str, hugging_face: str) -> Iterator[Rule]:
    query_rows, hidden = spec.num_heads * mla.qk_head_dim, spec.hidden_size
    # Rows of the down projection: the latent, then the rotary part of the keys. The rotary part has no
    # latent.
    key_value = "kv", "kv_a_proj_with_mqa", mla.kv_lora_rank + mla.qk_rope_head_dim, mla.kv_lora_rank
    latents = [(*key_value, spec.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim))]
    if mla.q_lora_rank is None:
        yield _one(f"{megatron}linear_q_proj.weight", f"{hugging_face}q_proj.weight", query_rows, hidden, sharding=Sharding.ROWS)
    else:
        latents.insert(0, ("q", "q_a_proj", mla.q_lora_rank, mla.q_lora_rank, query_rows))
    for name, down, down_rows, rank, up_rows in latents:
        linear = f"{megatron}linear_{name}_"
        yield _one(f"{linear}down_proj.weight", f"{hugging_face}{down}.weight", down_rows, hidden)
        # Transformer Engine fuses the norm into the up projection.
        norm, fused = f"{hugging_face}{name}_a_layernorm.weight", f"{linear}up_proj.layer_norm_weight"
        yield _one(f"{megatron}{name}_layernorm.weight", norm, rank, transformer_engine=fused)
        yield _one(f"{linear}up_proj.weight", f"{hugging_face}{name}_b_proj.weight", up_rows, rank, sharding=Sharding.ROWS)


def _mlp_rules(spec: ModelSpec, megatron: str, hugging_face: str) -> Iterator[Rule]:
    names, hidden = spec.names, spec.hidden_size
    if names.mlp_input_norm is not None:
        before, fused = f"{hugging_face}{names.mlp_input_norm}.weight", f"{megatron}mlp.linear_fc1.layer_norm_weight"
        yield _one(f"{megatron}pre_mlp_layernorm.weight", before, hidden, transformer_engine=fused)
    yield from _gated_rules(f"{megatron}mlp.", f"{hugging_face}mlp.", hidden=hidden, width=spec.ffn_hidden_size, stacked=names.gate_up)
    if names.mlp_output_norm is not None:
        yield _one(f"{megatron}mlp.linear_fc2.output_layernorm.weight", f"{hugging_face}{names.mlp_output_norm}.weight", hidden)


def _moe_rules(spec: ModelSpec, moe: MoeSpec, megatron: str, hugging_face: str) -> Iterator[Rule]:
    names, hidden = spec.names, spec.hidden_size
    yield _one(f"{megatron}pre_mlp_layernorm.weight", f"{hugging_face}{names.mlp_input_norm}.weight", hidden)
    mixture, own = f"{hugging_face}{names.mixture}.", f"{megatron}mlp."
    router = f"{mixture}{names.router}."
    yield _one(f"{own}router.weight", f"{router}weight", moe.num_experts, hidden)
    if spec.linear_bias:
        yield _one(f"{own}router.bias", f"{router}bias", moe.num_experts)
    if moe.expert_bias:
        yield _one(f"{own}router.expert_bias", f"{router}e_score_correction_bias", moe.num_experts, float32=True)
    shared = f"{mixture}{names.shared_experts}"
    if moe.shared_ffn_hidden_size:
        yield from _gated_rules(f"{own}shared_experts.", f"{shared}.", hidden=hidden, width=moe.shared_ffn_hidden_size)
    if moe.shared_gate:
        yield _one(f"{own}shared_experts.gate_weight", f"{shared}_gate.weight", 1, hidden)
    if names.stacked_experts:
        yield from _stacked_expert_rules(moe, f"{own}experts.local_experts.", f"{mixture}experts.", hidden, bias=spec.linear_bias)
        return
    for expert in range(moe.num_experts):
        single, original = f"{own}experts.local_experts.{expert}.", f"{mixture}experts.{expert}."
        grouped = f"{own}experts.", expert
        yield from _gated_rules(single, original, hidden=hidden, width=moe.ffn_hidden_size, expert=grouped, projections=names.expert)


def _stacked_expert_rules(moe: MoeSpec, megatron: str, hugging_face: str, hidden: int, *, bias: bool) -> Iterator[Rule]:
    """Yield the parameters of experts in stacks: all parts of one tensor, then the next."""
    width = moe.ffn_hidden_size
    parts = [
        ("linear_fc1.weight", "gate_up_proj", (hidden, 2 * width), Sharding.ALTERNATE_GATE_UP),
        ("linear_fc1.bias", "gate_up_proj_bias", (2 * width,), Sharding.ALTERNATE_GATE_UP),
        ("linear_fc2.weight", "down_proj", (width, hidden), Sharding.TRANSPOSED_COLUMNS),
        ("linear_fc2.bias", "down_proj_bias", (hidden,), Sharding.REPLICATED),
    ]
    for own, stack, shape, sharding in parts:
        for expert in range(moe.num_experts) if bias or own.endswith(".weight") else ():
            part = part_name(f"{hugging_face}{stack}", expert)
            yield _one(f"{megatron}{expert}.{own}", part, *shape, sharding=sharding, of_expert=True)


def _gated_rules(
    megatron: str,
    hugging_face: str,
    *,
    hidden: int,
    width: int,
    stacked: str | None = None,
    projections: tuple[str, str, str] = USUAL_NAMES.expert,
    expert: tuple[str, int] | None = None,
) -> Iterator[Rule]:
    """Yield the parameters of a gated MLP; `expert` is Transformer Engine's module, number."""
    gate_up = tuple(HfTensor(f"{hugging_face}{name}.weight", (width, hidden)) for name in projections[:2])
    down = HfTensor(f"{hugging_face}{projections[2]}.weight", (hidden, width))
    sharding = Sharding.GATE_UP
    if stacked is not None:
        gate_up, sharding = (HfTensor(f"{hugging_face}{stacked}.weight", (2 * width, hidden)),), Sharding.STACKED_GATE_UP
    for name, tensors, how in (("linear_fc1", gate_up, sharding), ("linear_fc2", (down,), Sharding.COLUMNS)):
        grouped = None if expert is None else f"{expert[0]}{name}.weight{expert[1]}"
        yield Rule(f"{megatron}{name}.weight", tensors, how, grouped, of_expert=expert is not None)


def combine(sharding: Sharding, tensors: Sequence[Tensor], spec: ModelSpec, *, tp: int) -> Tensor:
    """Return a whole parameter [rows, columns] or [rows], the vocabulary padded for `tp`."""
    if sharding is Sharding.STACKED_QKV:
        return combine(Sharding.QKV, tensors[0].split(_qkv_rows(spec)), spec, tp=tp)
    if sharding is Sharding.QKV:
        groups = [tensor.unflatten(0, (spec.num_kv_heads, -1)) for tensor in tensors]
        return torch.cat(groups, dim=1).flatten(0, 1)
    if sharding is Sharding.GATE_UP:
        return torch.cat(list(tensors))
    (tensor,) = tensors
    if sharding is Sharding.ALTERNATE_GATE_UP:
        alternate = tensor.T if tensor.dim() == 2 else tensor
        return torch.cat((alternate[0::2], alternate[1::2]))
    if sharding is Sharding.TRANSPOSED_COLUMNS:
        return tensor.T
    if sharding is Sharding.VOCABULARY:
        padding = spec.padded_vocab_size(tp) - len(tensor)
        return torch.nn.functional.pad(tensor, (0, 0, 0, padding)) if padding else tensor
    return tensor


def fill(parameter: Tensor, sharding: Sharding, tensors: Sequence[Tensor], spec: ModelSpec, *, tp_rank: int, tp: int) -> None:
    """Fill contiguous `parameter` [rows, columns] or [rows]; a large whole is never made."""
    if sharding is Sharding.GATE_UP:
        for part, tensor in zip(parameter.chunk(2), tensors, strict=True):
            part.copy_(tensor.chunk(tp)[tp_rank])
    elif sharding is Sharding.QKV and spec.num_kv_heads % tp == 0:
        groups = [tensor.unflatten(0, (spec.num_kv_heads, -1)).chunk(tp)[tp_rank] for tensor in tensors]
        parts = parameter.unflatten(0, (len(groups[0]), -1)).split([group.shape[1] for group in groups], dim=1)
        for part, group in zip(parts, groups, strict=True):
            part.copy_(group)
    else:
        local = shard(sharding, combine(sharding, tensors, spec, tp=tp), tp_rank=tp_rank, tp=tp)
        assert local.shape == parameter.shape, f"the table gives {tuple(local.shape)}, the model has {tuple(parameter.shape)}"
        parameter.copy_(local)


def parameter_shape(rule: Rule) -> tuple[int, ...]:
    """Return the whole shape, without padding, of the Megatron parameter of `rule`."""
    rows, *rest = rule.tensors[0].shape
    if rule.sharding in (Sharding.QKV, Sharding.GATE_UP):
        return (sum(tensor.shape[0] for tensor in rule.tensors), *rest)
    return (*rest, rows) if rule.sharding in (Sharding.TRANSPOSED_COLUMNS, Sharding.ALTERNATE_GATE_UP) else (rows, *rest)


def split(sharding: Sharding, whole: Tensor, spec: ModelSpec) -> list[Tensor]:
    """Return the unpadded tensors in a whole parameter [rows, columns] or [rows]."""
    if sharding is Sharding.STACKED_QKV:
        return [torch.cat(split(Sharding.QKV, whole, spec))]
    if sharding is Sharding.QKV:
        per_group = (spec.num_heads // spec.num_kv_heads * spec.head_dim, spec.head_dim, spec.head_dim)
        return [part.flatten(0, 1) for part in whole.unflatten(0, (spec.num_kv_heads, -1)).split(per_group, dim=1)]
    if sharding is Sharding.GATE_UP:
        return list(whole.chunk(2))
    if sharding is Sharding.ALTERNATE_GATE_UP:
        alternate = torch.stack(whole.chunk(2), dim=1).flatten(0, 1)
        return [alternate.T.contiguous() if alternate.dim() == 2 else alternate]
    if sharding is Sharding.TRANSPOSED_COLUMNS:
        return [whole.T.contiguous()]
    return [whole[: spec.vocab_size]] if sharding is Sharding.VOCABULARY else [whole]


def shard(sharding: Sharding, whole: Tensor, *, tp_rank: int, tp: int) -> Tensor:
    """Return the part of a whole parameter [rows, columns] or [rows] held by rank `tp_rank`."""
    if sharding is Sharding.REPLICATED or tp == 1:
        return whole
    if sharding in _COLUMNS:
        return whole.chunk(tp, dim=-1)[tp_rank]
    if sharding in _GATE_UP:
        return torch.cat([half.chunk(tp)[tp_rank] for half in whole.chunk(2)])
    return whole.chunk(tp)[tp_rank]


def join(sharding: Sharding, shards: Sequence[Tensor]) -> Tensor:
    """Return the whole parameter [rows, columns] or [rows] from parts in rank order."""
    if len(shards) == 1 or sharding is Sharding.REPLICATED:
        return shards[0]
    if sharding in _COLUMNS:
        return torch.cat(list(shards), dim=-1)
    if sharding in _GATE_UP:
        return torch.cat([half for index in range(2) for half in (part.chunk(2)[index] for part in shards)])
    return torch.cat(list(shards))
