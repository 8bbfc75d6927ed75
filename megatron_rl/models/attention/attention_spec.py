"""Attention in `config.json`: latent attention, and layers that see a sliding window."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron_rl.errors import UserError
from megatron_rl.models.config_json import boolean, count, names, positive_int


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


Windows = Literal["never", "switched", "given", "everywhere"]


def parse_sliding_window(
    config: Mapping[str, Any], origin: str, *, num_layers: int, windows: Windows, default: int | None = None, pattern: int | None = None
) -> tuple[int | None, tuple[int, ...]]:
    """Tokens that a layer with a window sees, the querying one included, and the layers that have it, counted from 0.

    `windows` is how the family says that there are any: "switched" on by `use_sliding_window`, or "given" by `sliding_window` itself, whose
    value is `default` where the key is absent; "everywhere" is the same for a family that has it in all layers or in none. `layer_types`
    names the layers where it is given. Otherwise they start at `max_window_layers` in the first case; in the second they are all, or all
    but every `pattern`-th.

    Raises UserError for layer types that are not known or that the family does not have, for windows in a family that has "never" any, and
    for values of the wrong type, also where no layer uses them.
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
