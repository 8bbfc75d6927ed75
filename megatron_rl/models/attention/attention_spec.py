"""Attention in `config.json`: latent attention, and layers with a sliding window."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron_rl.errors import UserError
from megatron_rl.models.config_json import boolean, count, names, positive_int


@dataclass(frozen=True, slots=True)
class MlaSpec:
    """Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434, 2.1).

    Sizes are widths of the latents and of one head, in channels. `q_lora_rank` None means queries
    without a latent. Queries and keys have `qk_nope_head_dim` channels without and
    `qk_rope_head_dim` with rotary embedding; all key heads share the channels with rotary
    embedding.
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
    """Return the latent attention of a config.json.

    Raises UserError, naming `origin`, for sizes missing or not positive integers.
    """
    return MlaSpec(
        q_lora_rank=None if config.get("q_lora_rank") is None else positive_int(config, "q_lora_rank", origin),
        kv_lora_rank=positive_int(config, "kv_lora_rank", origin),
        qk_nope_head_dim=positive_int(config, "qk_nope_head_dim", origin),
        qk_rope_head_dim=positive_int(config, "qk_rope_head_dim", origin),
        v_head_dim=positive_int(config, "v_head_dim", origin),
    )


Windows = Literal["never", "switched", "given", "everywhere"]


def parse_sliding_window(
    config: Mapping[str, Any], origin: str, *, num_layers: int, windows: Windows, default: int | None = None, pattern: int | None = None
) -> tuple[int | None, tuple[int, ...]]:
    """Return the window in tokens, the querying one included, and the layers with a window.

    Layers are counted from 0. `windows` is the family's way to declare windows: "switched" on by
    `use_sliding_window`, or "given" by `sliding_window` itself, with the value `default` when the
    key is absent; "everywhere" is like "given" for a family with windows in all layers or in none.
    `layer_types`, when given, names the layers. Otherwise windows start at layer
    `max_window_layers` for "switched"; for "given" all layers have a window, or all but every
    `pattern`-th.

    Raises UserError for layer types unknown or foreign to the family, for windows in a family of
    "never", and for values of the wrong type, also when no layer uses the value.
    """
    kinds = names(config, "layer_types", origin)
    strange = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if strange:
        raise UserError(f"{origin} has layers of type {', '.join(strange)}, supported are full_attention and sliding_attention")
    if kinds and len(kinds) != num_layers:
        raise UserError(f"{origin} has {len(kinds)} layer_types for {num_layers} layers, needs one for each; correct the file")
    if windows in ("given", "everywhere"):
        if config.get("sliding_window", default) is None:
            return None, ()
        if windows == "everywhere" and "full_attention" in kinds:
            raise UserError(
                f"{origin} has a sliding_window and layers of type full_attention, but this family has its window in every layer whatever "
                "layer_types says; remove layer_types, or set sliding_window to null"
            )
        kinds = kinds or [
            "sliding_attention" if pattern is None or (layer + 1) % pattern else "full_attention" for layer in range(num_layers)
        ]
        layers = [layer for layer in range(num_layers) if kinds[layer] == "sliding_attention"]
        window = positive_int(config, "sliding_window", origin, default=default)
        return (window, tuple(layers)) if layers else (None, ())
    if not boolean(config, "use_sliding_window", origin):
        if "sliding_attention" in kinds:
            raise UserError(f"{origin} has layers of type sliding_attention without use_sliding_window; set it, or remove layer_types")
        return None, ()
    if windows == "never":
        raise UserError(f"{origin} sets use_sliding_window to True, which is not supported in this family; use another model")
    # The default of Qwen2 and Qwen3 in transformers.
    first = count(config, "max_window_layers", origin, default=28)
    layers = [layer for layer in range(num_layers) if (kinds[layer] == "sliding_attention" if kinds else layer >= first)]
    if not layers and config.get("sliding_window") is None:
        return None, ()
    window = positive_int(config, "sliding_window", origin)
    return (window, tuple(layers)) if layers else (None, ())
