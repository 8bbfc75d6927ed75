"""The choice between torch's attention and Transformer Engine's."""

from collections.abc import Mapping
from typing import Any, Literal

from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.errors import UserError
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.upstream_fields import checked_fields
from megatron_rl.system.device import chosen_backends

Attention = Literal["torch", "transformer_engine"]
Capability = tuple[int, int]
"""CUDA's compute capability of a GPU, (9, 0) for Hopper."""
DEFAULT_BACKEND = AttnBackend.fused
"""Transformer Engine's attention where model.megatron.attention_backend names none: cuDNN's, which comes with torch."""


def transformer_engine_here() -> bool:
    """Return true when Transformer Engine is installed; a plan may be for another machine."""
    return chosen_backends()["transformer-engine"] != "not installed"


def resolve_attention(
    choice: Literal["auto", "torch", "transformer_engine"],
    spec: ModelSpec,
    *,
    overrides: Mapping[str, Any],
    cp: int,
    capability: Capability | None,
    installed: bool | None = None,
) -> Attention:
    """Return the attention for the setting `model.attention` on GPUs of this capability.

    A capability of None is a CPU. `overrides` are the fields of `model.megatron`; `installed` is
    about Transformer Engine, by default on this machine. Raises UserError when Transformer Engine
    is requested, by name or by `attention_backend`, and is not installed or does not compute
    `spec`.
    """
    if installed is None:
        installed = transformer_engine_here()
    if choice == "torch" or (choice == "auto" and (capability is None or not installed)):
        return "torch"
    if not installed:
        raise UserError("model.attention is transformer_engine, which is not installed; install it or set model.attention=torch")
    fused = chosen_backend(overrides) is AttnBackend.fused
    lacking = None if capability is None else lacking_in_transformer_engine(spec, cp=cp, capability=capability, fused=fused)
    if lacking is None:
        return "transformer_engine"
    if choice == "auto" and "attention_backend" not in overrides:
        return "torch"
    raise UserError(lacking)


def chosen_backend(overrides: Mapping[str, Any]) -> AttnBackend:
    """Return Transformer Engine's attention chosen by `overrides`, the fields of `model.megatron`."""
    given = {name: value for name, value in overrides.items() if name == "attention_backend"}
    return checked_fields("model.megatron", given, TransformerConfig).get("attention_backend", DEFAULT_BACKEND)


def attention_name(attention: Attention, overrides: Mapping[str, Any]) -> str:
    """Return the attention's name for people; `overrides` are the fields of `model.megatron`."""
    return "torch" if attention == "torch" else f"transformer_engine, {chosen_backend(overrides).name}"


def has_fused_attention(capability: Capability, *, qk: int, v: int) -> bool:
    """Return whether cuDNN trains packed sequences on such a GPU, with heads of `qk` channels of queries and keys and `v` of values.

    As TransformerEngine 2.18 answers with cuDNN 9.24 (`nvte_get_fused_attn_backend`).
    """
    if capability < (9, 0) or qk % 8 or v % 8:
        return False
    return max(qk, v) <= (256 if capability < (10, 0) else 128) or (qk, v) == (192, 128)


def lacking_in_transformer_engine(spec: ModelSpec, *, cp: int, capability: Capability, fused: bool) -> str | None:
    """Return the reason and the fix when Transformer Engine cannot compute `spec`, else None."""
    # This project's latent attention rotates and scales itself.
    unusual = (
        {}
        if spec.mla is not None
        else {
            "norms behind attention and MLP": bool(spec.names.attention_output_norm or spec.names.mlp_output_norm),
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
