"""How Hugging Face tensors make one Megatron parameter and how tensor parallel ranks split it. Pure tensor functions.

Two steps each way, which are exact inverses of one another: Hugging Face tensors -> `combine` -> whole parameter -> `shard` ->
local parameter, and local parameters of all ranks -> `join` -> whole parameter -> `split` -> Hugging Face tensors.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl.models.attention.spec import MlaSpec
from megatron_rl.models.spec import ModelSpec
from megatron_rl.models.weight_rules import Layout, Rule


def combine(layout: Layout, tensors: Sequence[Tensor], spec: ModelSpec, *, tp: int) -> Tensor:
    """One whole Megatron parameter [rows, columns] or [rows] from its Hugging Face tensors.

    Vocabulary rows are padded with zeros to a multiple of `tp`.
    """
    if layout is Layout.QKV:
        groups = [tensor.unflatten(0, (spec.num_kv_heads, -1)) for tensor in tensors]
        return torch.cat(groups, dim=1).flatten(0, 1)
    if layout is Layout.GATE_UP:
        return torch.cat(list(tensors))
    (tensor,) = tensors
    if layout is Layout.VOCABULARY:
        padding = spec.padded_vocab_size(tp) - len(tensor)
        return torch.nn.functional.pad(tensor, (0, 0, 0, padding)) if padding else tensor
    return tensor


def split(layout: Layout, whole: Tensor, spec: ModelSpec) -> list[Tensor]:
    """The Hugging Face tensors in one whole Megatron parameter [rows, columns] or [rows]; padding rows of a vocabulary are dropped."""
    if layout is Layout.QKV:
        per_group = (spec.num_heads // spec.num_kv_heads * spec.head_dim, spec.head_dim, spec.head_dim)
        return [part.flatten(0, 1) for part in whole.unflatten(0, (spec.num_kv_heads, -1)).split(per_group, dim=1)]
    if layout is Layout.GATE_UP:
        return list(whole.chunk(2))
    return [whole[: spec.vocab_size]] if layout is Layout.VOCABULARY else [whole]


def shard(layout: Layout, whole: Tensor, *, tp_rank: int, tp: int) -> Tensor:
    """The part of a whole parameter [rows, columns] or [rows] that tensor parallel rank `tp_rank` holds."""
    if layout is Layout.REPLICATED:
        return whole
    if layout is Layout.COLUMNS:
        return whole.chunk(tp, dim=-1)[tp_rank]
    if layout is Layout.GATE_UP:
        return torch.cat([half.chunk(tp)[tp_rank] for half in whole.chunk(2)])
    return whole.chunk(tp)[tp_rank]


def join(layout: Layout, shards: Sequence[Tensor]) -> Tensor:
    """The whole parameter [rows, columns] or [rows] from the parts of all tensor parallel ranks, in rank order."""
    if len(shards) == 1 or layout is Layout.REPLICATED:
        return shards[0]
    if layout is Layout.COLUMNS:
        return torch.cat(list(shards), dim=-1)
    if layout is Layout.GATE_UP:
        return torch.cat([half for index in range(2) for half in (part.chunk(2)[index] for part in shards)])
    return torch.cat(list(shards))


def hugging_face_shapes(rule: Rule, spec: ModelSpec) -> list[tuple[int, ...]]:
    """Shapes of the Hugging Face tensors of a rule, in its order."""
    hidden, name = spec.hidden_size, rule.megatron
    if spec.mla is not None and ".self_attention." in name:
        return [_latent_shape(name.split(".")[-2], spec, spec.mla)]
    if rule.layout is Layout.VOCABULARY:
        return [(spec.vocab_size, hidden)]
    if rule.layout is Layout.QKV:
        rows = (spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim)
        return [(row,) if name.endswith(".bias") else (row, hidden) for row in rows]
    width = _ffn_width(rule, spec)
    if rule.layout is Layout.GATE_UP:
        return [(width, hidden)] * 2
    if rule.layout is Layout.COLUMNS:
        return [(hidden, spec.num_heads * spec.value_dim if "linear_proj" in name else width)]
    if name.endswith(("q_layernorm.weight", "k_layernorm.weight")):
        return [(spec.head_dim,)]
    if spec.moe is not None and ".router." in name:
        return [(spec.moe.num_experts, hidden) if name.endswith("weight") else (spec.moe.num_experts,)]
    return [(hidden,)]


def _ffn_width(rule: Rule, spec: ModelSpec) -> int:
    if spec.moe is not None and rule.of_expert:
        return spec.moe.ffn_hidden_size
    return spec.moe.shared_ffn_hidden_size if spec.moe is not None and ".shared_experts." in rule.megatron else spec.ffn_hidden_size


def _latent_shape(module: str, spec: ModelSpec, mla: MlaSpec) -> tuple[int, ...]:
    hidden, heads = spec.hidden_size, spec.num_heads
    shapes = {
        "linear_q_proj": (heads * mla.qk_head_dim, hidden),
        "linear_kv_down_proj": (mla.kv_lora_rank + mla.qk_rope_head_dim, hidden),
        "kv_layernorm": (mla.kv_lora_rank,),
        "linear_kv_up_proj": (heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank),
        "linear_proj": (hidden, heads * mla.v_head_dim),
    }
    if mla.q_lora_rank is not None:
        shapes |= {
            "linear_q_down_proj": (mla.q_lora_rank, hidden),
            "q_layernorm": (mla.q_lora_rank,),
            "linear_q_up_proj": (heads * mla.qk_head_dim, mla.q_lora_rank),
        }
    return shapes[module]
