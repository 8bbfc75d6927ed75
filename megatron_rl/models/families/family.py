"""What describes a family of models. Each file beside this one fills it in for one; no other module asks for a family's name."""

from dataclasses import dataclass
from typing import Any, Literal

from megatron_rl.models.families.config_keys import (
    FIXED_KEYS,
    IGNORED_KEYS,
    MLA_KEYS,
    MOE_KEYS,
    MTP_KEYS,
    READ_KEYS,
    SIGMOID_ROUTER_FIXED_KEYS,
    SIGMOID_ROUTER_KEYS,
)


@dataclass(frozen=True, slots=True)
class Family:
    """What sets one architecture apart. `default_head_dim` None means hidden size / heads where config.json gives none.

    `default_rotary_fraction` is the rotated fraction of a head where config.json gives none; None says that all of it is rotated always.
    `sliding_window` says that config.json can give layers a window, `mla` that attention is latent. `qkv_bias` and `qk_norm` None mean
    that `attention_bias` and `use_qk_norm` in config.json say so. `router` is how a mixture of experts scores them, None without experts.
    `default_norm_epsilon` is what transformers takes for this family where config.json gives none.
    """

    architecture: str
    qkv_bias: bool | None = False
    qk_norm: bool | None = False
    default_head_dim: int | None = None
    router: Literal["softmax", "sigmoid"] | None = None
    default_rotary_fraction: float | None = None
    sliding_window: bool = False
    mla: bool = False
    default_norm_epsilon: float = 1e-6

    @property
    def fixed_keys(self) -> dict[str, Any]:
        """Keys of config.json of which only one value is supported."""
        fixed = {key: value for key, value in FIXED_KEYS.items() if key != "attention_bias" or self.qkv_bias is not None}
        return fixed | (dict(SIGMOID_ROUTER_FIXED_KEYS) if self.router == "sigmoid" else {})

    @property
    def known_keys(self) -> frozenset[str]:
        """Keys of config.json that are accounted for."""
        known = IGNORED_KEYS | READ_KEYS | self.fixed_keys.keys()
        if self.qkv_bias is None:
            known |= {"attention_bias"}
        if self.qk_norm is None:
            known |= {"use_qk_norm"}
        if self.router is not None:
            known |= MOE_KEYS
        if self.router == "sigmoid":
            known |= SIGMOID_ROUTER_KEYS | MTP_KEYS
        return known | (MLA_KEYS if self.mla else frozenset())
