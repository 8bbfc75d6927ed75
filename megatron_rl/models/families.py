"""The supported model families as tables: which `config.json` keys are accounted for, and how parameters map to Megatron's.

Everything family-specific is here; no other module asks for a family's name.
"""

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_rl.models.spec import ModelSpec

# Keys of config.json that say nothing about the function the network computes.
IGNORED_KEYS = frozenset(
    [
        "_name_or_path",
        "_attn_implementation",
        "add_cross_attention",
        "architectures",
        "attn_implementation",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "decoder_start_token_id",
        "dtype",
        "eos_token_id",
        "finetuning_task",
        "id2label",
        "initializer_range",
        "label2id",
        "max_window_layers",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "router_aux_loss_coef",
        "sep_token_id",
        "task_specific_params",
        "tokenizer_class",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "use_bfloat16",
        "use_cache",
        "is_decoder",
        "sliding_window",
        "attention_dropout",
        "model_type",
    ]
)
# Keys that change the function; only the value here is supported. An absent key means that value.
FIXED_KEYS: Mapping[str, Any] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "is_encoder_decoder": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "use_sliding_window": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
# Keys that ModelSpec reads.
READ_KEYS = frozenset(
    [
        "head_dim",
        "hidden_size",
        "intermediate_size",
        "layer_types",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "tie_word_embeddings",
        "vocab_size",
    ]
)
MOE_KEYS = frozenset(["moe_intermediate_size", "norm_topk_prob", "num_experts", "num_experts_per_tok", "num_local_experts"])


@dataclass(frozen=True, slots=True)
class Family:
    """What sets one architecture apart. `default_head_dim` None means hidden size / heads where config.json gives none."""

    architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False
    default_head_dim: int | None = None
    moe: bool = False


FAMILIES: Mapping[str, Family] = {
    family.architecture: family
    for family in (
        Family("Qwen3ForCausalLM", qk_norm=True, default_head_dim=128),
        Family("Qwen2ForCausalLM", qkv_bias=True),
        Family("LlamaForCausalLM"),
        Family("Qwen3MoeForCausalLM", qk_norm=True, moe=True),
    )
}


class Layout(enum.Enum):
    """How the Hugging Face tensors of a rule make one Megatron parameter, and how tensor parallel ranks split it."""

    REPLICATED = "replicated"
    """One tensor, the same on every rank."""
    VOCABULARY = "vocabulary"
    """One tensor, rows padded to the padded vocabulary and split."""
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
    parameter that is a second copy of an exported one (the output layer of a pipelined model with tied embeddings).
    """

    megatron: str
    hugging_face: tuple[str, ...]
    layout: Layout
    transformer_engine: str | None = None
    exported: bool = True


def rules(spec: "ModelSpec") -> Iterator[Rule]:
    """Every parameter of the model, first to last, layers counted from 0 over the whole model."""
    yield Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), Layout.VOCABULARY)
    for layer in range(spec.num_layers):
        yield from _attention_rules(spec, f"decoder.layers.{layer}.", f"model.layers.{layer}.")
        yield from (_moe_rules if spec.moe else _mlp_rules)(spec, f"decoder.layers.{layer}.", f"model.layers.{layer}.")
    yield Rule("decoder.final_layernorm.weight", ("model.norm.weight",), Layout.REPLICATED)
    head = "model.embed_tokens.weight" if spec.tie_embeddings else "lm_head.weight"
    yield Rule("output_layer.weight", (head,), Layout.VOCABULARY, exported=not spec.tie_embeddings)


def _attention_rules(spec: "ModelSpec", megatron: str, hugging_face: str) -> Iterator[Rule]:
    attention, projections = f"{megatron}self_attention.", tuple(f"{hugging_face}self_attn.{name}_proj" for name in "qkv")
    yield Rule(
        f"{megatron}input_layernorm.weight",
        (f"{hugging_face}input_layernorm.weight",),
        Layout.REPLICATED,
        f"{attention}linear_qkv.layer_norm_weight",
    )
    yield Rule(f"{attention}linear_qkv.weight", tuple(f"{name}.weight" for name in projections), Layout.QKV)
    if spec.qkv_bias:
        yield Rule(f"{attention}linear_qkv.bias", tuple(f"{name}.bias" for name in projections), Layout.QKV)
    if spec.qk_norm:
        for name in "qk":
            yield Rule(f"{attention}{name}_layernorm.weight", (f"{hugging_face}self_attn.{name}_norm.weight",), Layout.REPLICATED)
    yield Rule(f"{attention}linear_proj.weight", (f"{hugging_face}self_attn.o_proj.weight",), Layout.COLUMNS)


def _mlp_rules(spec: "ModelSpec", megatron: str, hugging_face: str) -> Iterator[Rule]:
    yield Rule(
        f"{megatron}pre_mlp_layernorm.weight",
        (f"{hugging_face}post_attention_layernorm.weight",),
        Layout.REPLICATED,
        f"{megatron}mlp.linear_fc1.layer_norm_weight",
    )
    yield from _gated_rules(f"{megatron}mlp.", f"{hugging_face}mlp.")


def _moe_rules(spec: "ModelSpec", megatron: str, hugging_face: str) -> Iterator[Rule]:
    assert spec.moe is not None, "only models with experts have these rules"
    yield Rule(f"{megatron}pre_mlp_layernorm.weight", (f"{hugging_face}post_attention_layernorm.weight",), Layout.REPLICATED)
    yield Rule(f"{megatron}mlp.router.weight", (f"{hugging_face}mlp.gate.weight",), Layout.REPLICATED)
    for expert in range(spec.moe.num_experts):
        yield from _gated_rules(f"{megatron}mlp.experts.local_experts.{expert}.", f"{hugging_face}mlp.experts.{expert}.")


def _gated_rules(megatron: str, hugging_face: str) -> Iterator[Rule]:
    gate_up = (f"{hugging_face}gate_proj.weight", f"{hugging_face}up_proj.weight")
    yield Rule(f"{megatron}linear_fc1.weight", gate_up, Layout.GATE_UP)
    yield Rule(f"{megatron}linear_fc2.weight", (f"{hugging_face}down_proj.weight",), Layout.COLUMNS)
