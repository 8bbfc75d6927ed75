"""How Megatron's parameters come from the tensors of a Hugging Face checkpoint: one rule for each, read from the architecture."""

import enum
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_rl.models.attention.spec import MlaSpec
from megatron_rl.models.spec import ModelSpec


class Layout(enum.Enum):
    """How the Hugging Face tensors of a rule make one Megatron parameter, and how tensor parallel ranks split it."""

    REPLICATED = "replicated"
    """One tensor, the same on every rank."""
    VOCABULARY = "vocabulary"
    """One tensor, rows padded to the padded vocabulary and split."""
    ROWS = "rows"
    """One tensor, split along its first dimension (column-parallel linear)."""
    COLUMNS = "columns"
    """One tensor, split along its last dimension (row-parallel linear)."""
    QKV = "qkv"
    """Query, key, value stacked per group as [q...q, k, v]; split by groups."""
    GATE_UP = "gate_up"
    """Gate above up; each half is split."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One Megatron parameter by its global name and the Hugging Face tensors in it.

    `transformer_engine` is its name in the Transformer Engine layer spec where that differs. `exported` is False for a
    parameter that is a second copy of an exported one (the output layer of a pipelined model with tied embeddings). `of_expert` marks
    parameters of single experts: one expert parallel rank has each, and expert tensor parallel ranks split it. `float32` marks what has
    that dtype whatever the model's.
    """

    megatron: str
    hugging_face: tuple[str, ...]
    layout: Layout
    transformer_engine: str | None = None
    exported: bool = True
    of_expert: bool = False
    float32: bool = False


def rules(spec: ModelSpec) -> Iterator[Rule]:
    """Every parameter of the model, first to last, layers counted from 0 over the whole model."""
    yield Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), Layout.VOCABULARY)
    for layer in range(spec.num_layers):
        yield from _attention_rules(spec, f"decoder.layers.{layer}.", f"model.layers.{layer}.")
        dense = spec.moe is None or spec.moe.is_dense(layer)
        yield from (_mlp_rules if dense else _moe_rules)(spec, f"decoder.layers.{layer}.", f"model.layers.{layer}.")
    yield Rule("decoder.final_layernorm.weight", ("model.norm.weight",), Layout.REPLICATED)
    head = "model.embed_tokens.weight" if spec.tie_embeddings else "lm_head.weight"
    yield Rule("output_layer.weight", (head,), Layout.VOCABULARY, exported=not spec.tie_embeddings)


def _attention_rules(spec: ModelSpec, megatron: str, hugging_face: str) -> Iterator[Rule]:
    attention, projections = f"{megatron}self_attention.", tuple(f"{hugging_face}self_attn.{name}_proj" for name in "qkv")
    input_norm = (f"{hugging_face}input_layernorm.weight",)
    if spec.mla is not None:
        yield Rule(f"{megatron}input_layernorm.weight", input_norm, Layout.REPLICATED)
        yield from _latent_rules(spec.mla, attention, f"{hugging_face}self_attn.")
        return
    yield Rule(f"{megatron}input_layernorm.weight", input_norm, Layout.REPLICATED, f"{attention}linear_qkv.layer_norm_weight")
    yield Rule(f"{attention}linear_qkv.weight", tuple(f"{name}.weight" for name in projections), Layout.QKV)
    if spec.qkv_bias:
        yield Rule(f"{attention}linear_qkv.bias", tuple(f"{name}.bias" for name in projections), Layout.QKV)
    if spec.qk_norm:
        for name in "qk":
            yield Rule(f"{attention}{name}_layernorm.weight", (f"{hugging_face}self_attn.{name}_norm.weight",), Layout.REPLICATED)
    yield Rule(f"{attention}linear_proj.weight", (f"{hugging_face}self_attn.o_proj.weight",), Layout.COLUMNS)


def _latent_rules(mla: MlaSpec, megatron: str, hugging_face: str) -> Iterator[Rule]:
    if mla.q_lora_rank is None:
        yield Rule(f"{megatron}linear_q_proj.weight", (f"{hugging_face}q_proj.weight",), Layout.ROWS)
    else:
        yield from _latent_pair(f"{megatron}linear_q_", f"{megatron}q_layernorm", f"{hugging_face}q_", f"{hugging_face}q_a_proj")
    yield from _latent_pair(f"{megatron}linear_kv_", f"{megatron}kv_layernorm", f"{hugging_face}kv_", f"{hugging_face}kv_a_proj_with_mqa")
    yield Rule(f"{megatron}linear_proj.weight", (f"{hugging_face}o_proj.weight",), Layout.COLUMNS)


def _latent_pair(linear: str, norm: str, hugging_face: str, down: str) -> Iterator[Rule]:
    """Down projection, norm and up projection of one latent; the norm is fused into the up projection by Transformer Engine."""
    fused = f"{linear}up_proj.layer_norm_weight"
    yield Rule(f"{linear}down_proj.weight", (f"{down}.weight",), Layout.REPLICATED)
    yield Rule(f"{norm}.weight", (f"{hugging_face}a_layernorm.weight",), Layout.REPLICATED, fused)
    yield Rule(f"{linear}up_proj.weight", (f"{hugging_face}b_proj.weight",), Layout.ROWS)


def _mlp_rules(spec: ModelSpec, megatron: str, hugging_face: str) -> Iterator[Rule]:
    yield Rule(
        f"{megatron}pre_mlp_layernorm.weight",
        (f"{hugging_face}post_attention_layernorm.weight",),
        Layout.REPLICATED,
        f"{megatron}mlp.linear_fc1.layer_norm_weight",
    )
    yield from _gated_rules(f"{megatron}mlp.", f"{hugging_face}mlp.")


def _moe_rules(spec: ModelSpec, megatron: str, hugging_face: str) -> Iterator[Rule]:
    assert spec.moe is not None, "only models with experts have these rules"
    yield Rule(f"{megatron}pre_mlp_layernorm.weight", (f"{hugging_face}post_attention_layernorm.weight",), Layout.REPLICATED)
    yield Rule(f"{megatron}mlp.router.weight", (f"{hugging_face}mlp.gate.weight",), Layout.REPLICATED)
    if spec.moe.expert_bias:
        bias = (f"{hugging_face}mlp.gate.e_score_correction_bias",)
        yield Rule(f"{megatron}mlp.router.expert_bias", bias, Layout.REPLICATED, float32=True)
    if spec.moe.shared_ffn_hidden_size:
        yield from _gated_rules(f"{megatron}mlp.shared_experts.", f"{hugging_face}mlp.shared_experts.")
    for expert in range(spec.moe.num_experts):
        # Transformer Engine has all experts of a rank in one module.
        grouped = {f"linear_{name}.weight": f"{megatron}mlp.experts.linear_{name}.weight{expert}" for name in ("fc1", "fc2")}
        own = f"{megatron}mlp.experts.local_experts.{expert}."
        for rule in _gated_rules(own, f"{hugging_face}mlp.experts.{expert}."):
            yield replace(rule, transformer_engine=grouped[rule.megatron.removeprefix(own)], of_expert=True)


def _gated_rules(megatron: str, hugging_face: str) -> Iterator[Rule]:
    gate_up = (f"{hugging_face}gate_proj.weight", f"{hugging_face}up_proj.weight")
    yield Rule(f"{megatron}linear_fc1.weight", gate_up, Layout.GATE_UP)
    yield Rule(f"{megatron}linear_fc2.weight", (f"{hugging_face}down_proj.weight",), Layout.COLUMNS)
