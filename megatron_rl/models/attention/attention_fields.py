"""Attention in megatron-core's configuration."""

from typing import Any, Literal

from megatron_rl.errors import UserError
from megatron_rl.models.attention.attention_spec import MlaSpec
from megatron_rl.models.model_spec import ModelSpec

Attention = Literal["torch", "transformer_engine"]


def attention_fields(spec: ModelSpec, *, attention: Attention, cp: int) -> dict[str, Any]:
    """The fields of megatron-core's TransformerConfig (MLATransformerConfig for latent attention) that say what attention computes.

    Raises UserError for what Transformer Engine's attention does not compute.
    """
    values: dict[str, Any] = {
        "num_attention_heads": spec.num_heads,
        "num_query_groups": spec.num_kv_heads,
        "kv_channels": spec.head_dim,
        "add_qkv_bias": spec.qkv_bias,
        # It makes megatron-core sum the gradients of these norms over tensor parallel ranks, of which a norm over all heads is split.
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
    return values | (_transformer_engine_fields(spec, cp) if attention == "transformer_engine" else {})


def _latent_fields(mla: MlaSpec, spec: ModelSpec) -> dict[str, Any]:
    return {
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.qk_nope_head_dim,
        "qk_pos_emb_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        # Rotation is this project's; of megatron's own only the softmax scale is used, which comes from the last two fields.
        "rope_type": "rope",
        "apply_rope_fusion": False,
        "rotary_scaling_factor": spec.rotary.factor,
        "mscale_all_dim": spec.rotary.mscale_all_dim,
    }


def _transformer_engine_fields(spec: ModelSpec, cp: int) -> dict[str, Any]:
    """There megatron rotates, without YaRN's factor on cosine and sine, and the windows are Transformer Engine's."""
    values: dict[str, Any] = {}
    unusual = {
        "norms behind attention and MLP": spec.names.has_output_norms,
        "a norm over all heads": spec.qk_norm_over_heads,
        "norms around 1, or another scale of embeddings or scores": spec.zero_centered_norms or spec.softmax_scale is not None,
        "a rotary embedding of its own for layers with a window": spec.window_rotary is not None,
        "rotated pairs of neighbouring channels": spec.rotary.interleaved,
        "attention sinks": spec.attention_sinks,
        "frequencies that follow from the length of the sequence": spec.rotary.kind == "longrope",
    }
    for what, needed in unusual.items():
        if needed:
            raise UserError(f"the checkpoint has {what}, not with Transformer Engine; set model.attention=torch")
    if spec.rotary.attention_factor != 1.0:
        if spec.rotary_fraction < 1:
            raise UserError("the checkpoint has YaRN on a part of the channels, not with Transformer Engine; set model.attention=torch")
        # Queries and keys are each scaled by the factor, so scores are scaled by its square.
        values["softmax_scale"] = spec.rotary.attention_factor**2 / spec.head_dim**0.5
    if spec.sliding_window is not None:
        if cp > 1:
            raise UserError(
                f"the checkpoint has sliding windows and training.topology.cp is {cp}, which Transformer Engine does not compute for "
                "packed sequences; set model.attention=torch, or cp to 1"
            )
        values["window_size"] = (spec.sliding_window - 1, 0)
        values["window_attn_skip_freq"] = [int(layer in spec.sliding_layers) for layer in range(spec.num_layers)]
    return values
