"""Attention in `config.json` and in megatron-core's configuration: latent attention, and layers that see a sliding window."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from megatron_rl.errors import UserError
from megatron_rl.models.config_json import positive_int

if TYPE_CHECKING:
    from megatron_rl.models.spec import ModelSpec

Attention = Literal["torch", "transformer_engine"]


@dataclass(frozen=True, slots=True)
class MlaSpec:
    """Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434, 2.1): widths of the latents and of one head, in channels.

    `q_lora_rank` None means that queries have no latent. Queries and keys have `qk_nope_head_dim` channels without and
    `qk_rope_head_dim` with rotary embedding; the latter are shared by all key heads.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def qk_head_dim(self) -> int:
        """Channels of a query and of a key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


def parse_mla(config: Mapping[str, Any], origin: str) -> MlaSpec:
    """The latent attention of a config.json. Raises UserError, naming `origin`, for sizes that are missing or not positive integers."""
    return MlaSpec(
        q_lora_rank=None if config.get("q_lora_rank") is None else positive_int(config, "q_lora_rank", origin),
        kv_lora_rank=positive_int(config, "kv_lora_rank", origin),
        qk_nope_head_dim=positive_int(config, "qk_nope_head_dim", origin),
        qk_rope_head_dim=positive_int(config, "qk_rope_head_dim", origin),
        v_head_dim=positive_int(config, "v_head_dim", origin),
    )


def parse_sliding_window(config: Mapping[str, Any], origin: str, *, num_layers: int, supported: bool) -> tuple[int | None, tuple[int, ...]]:
    """Tokens that a layer with a window sees, the querying one included, and the layers that have it, counted from 0.

    `layer_types` names them where it is given, otherwise they start at `max_window_layers`. Raises UserError for layer types that are
    not known, and for windows in a family where they are not `supported`.
    """
    kinds = config.get("layer_types") or ()
    strange = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if strange:
        raise UserError(f"{origin} has layers of type {', '.join(strange)}, supported are full_attention and sliding_attention")
    if kinds and len(kinds) != num_layers:
        raise UserError(f"{origin} has {len(kinds)} layer_types for {num_layers} layers, needs one for each; correct the file")
    if not config.get("use_sliding_window"):
        if "sliding_attention" in kinds:
            raise UserError(f"{origin} has layers of type sliding_attention without use_sliding_window; set it, or remove layer_types")
        return None, ()
    if not supported:
        raise UserError(f"{origin} sets use_sliding_window to True, which is not supported in this family; use another model")
    # The default of Qwen2 and Qwen3 in transformers.
    first = config.get("max_window_layers", 28)
    layers = [layer for layer in range(num_layers) if (kinds[layer] == "sliding_attention" if kinds else layer >= first)]
    return (positive_int(config, "sliding_window", origin), tuple(layers)) if layers else (None, ())


def attention_fields(spec: "ModelSpec", *, attention: Attention, cp: int) -> dict[str, Any]:
    """The fields of megatron-core's TransformerConfig (MLATransformerConfig for latent attention) that say what attention computes.

    Raises UserError for what Transformer Engine's attention does not compute.
    """
    values: dict[str, Any] = {
        "num_attention_heads": spec.num_heads,
        "num_query_groups": spec.num_kv_heads,
        "kv_channels": spec.head_dim,
        "add_qkv_bias": spec.qkv_bias,
        "qk_layernorm": spec.qk_norm or spec.mla is not None,
        "attention_dropout": 0.0,
        "softmax_scale": None,
        "softmax_type": "vanilla",
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


def _latent_fields(mla: MlaSpec, spec: "ModelSpec") -> dict[str, Any]:
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


def _transformer_engine_fields(spec: "ModelSpec", cp: int) -> dict[str, Any]:
    """There megatron rotates, without YaRN's factor on cosine and sine, and the windows are Transformer Engine's."""
    values: dict[str, Any] = {}
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
