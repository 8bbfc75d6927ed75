"""Attention in megatron-core's configuration."""

from typing import Any, Literal

from megatron_rl.models.model_spec import MlaSpec, ModelSpec

Attention = Literal["torch", "transformer_engine"]
Capability = tuple[int, int]
"""CUDA's compute capability of a GPU, (9, 0) for Hopper."""


def has_fused_attention(capability: Capability, *, qk: int, v: int) -> bool:
    """Return whether cuDNN trains packed sequences on such a GPU, with heads of `qk` channels of queries and keys and `v` of values.

    As TransformerEngine 2.18 answers with cuDNN 9.24 (`nvte_get_fused_attn_backend`).
    """
    if capability < (9, 0) or qk % 8 or v % 8:
        return False
    return max(qk, v) <= (256 if capability < (10, 0) else 128) or (qk, v) == (192, 128)


def lacking_in_transformer_engine(spec: ModelSpec, *, cp: int, capability: Capability, fused: bool) -> str | None:
    """Return the reason, with the fix, when Transformer Engine cannot compute `spec` on such a GPU.

    The result is None when Transformer Engine can. `fused` is cuDNN's attention.
    """
    # This project's latent attention rotates and scales itself.
    unusual = (
        {}
        if spec.mla is not None
        else {
            "norms behind attention and MLP": spec.names.has_output_norms,
            "a norm over all heads": spec.qk_norm_over_heads,
            "norms around 1, or another scale of embeddings or scores": spec.zero_centered_norms or spec.softmax_scale is not None,
            "a rotary embedding of its own for layers with a window": spec.window_rotary is not None,
            "rotated pairs of neighbouring channels": spec.rotary.interleaved,
            "attention sinks": spec.attention_sinks,
            "frequencies that follow from the length of the sequence": spec.rotary.kind == "longrope",
            "YaRN on a part of the channels": spec.rotary.attention_factor != 1.0 and spec.rotary_dim < spec.head_dim,
        }
    )
    for what, present in unusual.items():
        if present:
            return f"the checkpoint has {what}, not with Transformer Engine; set model.attention=torch"
    if spec.sliding_window is not None and cp > 1:
        return (
            f"the checkpoint has sliding windows and training.topology.cp is {cp}, which Transformer Engine does not compute for packed "
            "sequences; set model.attention=torch, or cp to 1"
        )
    qk, v = spec.head_dim if spec.mla is None else spec.mla.qk_head_dim, spec.value_dim
    if fused and not has_fused_attention(capability, qk=qk, v=v):
        return (
            f"Transformer Engine's fused attention does not train packed sequences with heads of {qk} (queries, keys) and {v} channels "
            f"(values) on a GPU of compute capability {capability[0]}.{capability[1]}; set model.attention=torch, or "
            "model.megatron.attention_backend=flash where flash-attn is installed"
        )
    return None


def attention_fields(spec: ModelSpec, *, attention: Attention) -> dict[str, Any]:
    """Return the fields of megatron-core's TransformerConfig defining attention.

    For latent attention, the fields are those of MLATransformerConfig.
    """
    values: dict[str, Any] = {
        "num_attention_heads": spec.num_heads,
        "num_query_groups": spec.num_kv_heads,
        "kv_channels": spec.head_dim,
        "add_qkv_bias": spec.qkv_bias,
        # Of single heads: see AttentionWithNormsOverHeads.
        "qk_layernorm": (spec.qk_norm and not spec.qk_norm_over_heads) or spec.mla is not None,
        "attention_dropout": 0.0,
        "softmax_scale": spec.softmax_scale,
        "softmax_type": "learnable" if spec.attention_sinks else "vanilla",
        "window_size": None,
        "rotary_interleaved": False,
        "no_rope_freq": None,
        "qk_l2_norm": False,
        "attention_output_gate": False,
        "apply_query_key_layer_scaling": False,
        "multi_latent_attention": spec.mla is not None,
    }
    if spec.mla is not None:
        return values | _latent_fields(spec.mla, spec)
    return values | (_transformer_engine_fields(spec) if attention == "transformer_engine" else {})


def _latent_fields(mla: MlaSpec, spec: ModelSpec) -> dict[str, Any]:
    return {
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.qk_nope_head_dim,
        "qk_pos_emb_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        # Rotation is this project's. Only the softmax scale of megatron's rotation is used, computed from
        # the last two fields.
        "rope_type": "rope",
        "apply_rope_fusion": False,
        "rotary_scaling_factor": spec.rotary.factor,
        "mscale_all_dim": spec.rotary.mscale_all_dim,
    }


def _transformer_engine_fields(spec: ModelSpec) -> dict[str, Any]:
    """There megatron rotates, without YaRN's factor on cosine and sine, and the windows are Transformer Engine's."""
    values: dict[str, Any] = {}
    if spec.rotary.attention_factor != 1.0:
        # Queries and keys are each scaled by the factor, so scores are scaled by its square.
        values["softmax_scale"] = spec.rotary.attention_factor**2 / spec.head_dim**0.5
    if spec.sliding_window is not None:
        values["window_size"] = (spec.sliding_window - 1, 0)
        values["window_attn_skip_freq"] = [int(layer in spec.sliding_layers) for layer in range(spec.num_layers)]
    return values
