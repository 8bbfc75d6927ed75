"""The description of a family of models.

Each file beside this one describes one family. No other module asks for a family's name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_rl.models.attention.attention_spec import Windows
from megatron_rl.models.families.config_keys import (
    FIXED_KEYS,
    GENERATION_KEYS,
    IGNORED_KEYS,
    MLA_KEYS,
    MOE_KEYS,
    MTP_KEYS,
    READ_KEYS,
    SIGMOID_ROUTER_FIXED_KEYS,
    SIGMOID_ROUTER_KEYS,
)
from megatron_rl.models.model_spec import Activation
from megatron_rl.models.tensor_names import USUAL_NAMES, TensorNames

Proof = Literal["sync", "quantised source", "tp", "pp", "cp", "ep"]
DENSE_LAYOUTS: frozenset[Proof] = frozenset(["tp", "pp", "cp"])
MIXTURE_LAYOUTS: frozenset[Proof] = DENSE_LAYOUTS | {"ep"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The differences of one architecture from the others.

    `default_...` is the value taken by transformers for this family when config.json gives none.

    `proved` lists features shown by tests beyond one rank equal to transformers: sizes of layouts,
    weights sent to a real engine, quantised files. `not_synced` gives, for a family without "sync",
    the obstacle to a real engine on a machine without a GPU. `ignored` are keys of config.json
    found in this family alone and without effect on the computed function, `fixed` the keys with
    one supported value. `names` are the names of tensors. `activation` is the MLP's; the key of its
    limit, if any, is `activation_limit_key`. `zero_centered_norms` multiply by 1 + weight; a
    `scaled_embedding` is multiplied by sqrt(hidden size). With `linear_bias` every linear layer but
    the head has a bias.

    Attention: `qkv_bias` and `qk_norm` None take the values of `attention_bias` and `use_qk_norm`
    in config.json; `qk_norm_over_heads` is one norm over the channels of all heads.
    `default_head_dim` None means hidden size / heads. `default_rotary_fraction` None means that all
    of a head is always rotated; `default_rope_scaling` is for a file without either spelling;
    `rotary_interleaved` pairs channels (2i, 2i + 1). `default_original_length` stands for an absent
    `original_max_position_embeddings` in a family with this key beside the scaling. Scores are
    divided by the root of the value at `query_scalar_key`; None divides by the root of the channels
    of a head. `attention_sinks` are learned logits, one for each head, in every softmax. `mla` is
    latent attention.

    `windows`: "never", "switched" on by `use_sliding_window`, or, for a `sliding_window` other than
    null, "everywhere" or "given"; `default_window` stands for an absent key. "Given" windows are in
    the layers named by `layer_types`; without this key, in all but every n-th layer, n being at
    `window_pattern_key` or `default_window_pattern`. `window_theta_key` has the base of the window
    layers' own rotary embedding, if any.

    Experts: `router` is the scoring of experts, None without experts; `expert_width_key` has the
    width of an expert; `normalize_top_k` None reads `norm_topk_prob`; with `shared_gate` a gate
    weighs the shared expert.
    """

    architecture: str
    proved: frozenset[Proof] = frozenset()
    not_synced: str | None = None
    ignored: frozenset[str] = frozenset()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    names: TensorNames = USUAL_NAMES
    default_norm_epsilon: float = 1e-6
    default_tied: bool = False
    activation: Activation = "silu"
    activation_limit_key: str | None = None
    default_activation_limit: float | None = None
    linear_bias: bool = False
    zero_centered_norms: bool = False
    scaled_embedding: bool = False
    qkv_bias: bool | None = False
    default_attention_bias: bool = False
    qk_norm: bool | None = False
    qk_norm_over_heads: bool = False
    default_head_dim: int | None = None
    default_rope_theta: float = 10000.0
    default_rotary_fraction: float | None = None
    default_rope_scaling: Mapping[str, Any] | None = None
    default_original_length: int | None = None
    rotary_interleaved: bool = False
    windows: Windows = "never"
    default_window: int | None = None
    default_window_pattern: int | None = None
    window_pattern_key: str | None = None
    window_theta_key: str | None = None
    default_window_theta: float = 10000.0
    query_scalar_key: str | None = None
    attention_sinks: bool = False
    mla: bool = False
    router: Literal["softmax", "sigmoid"] | None = None
    expert_width_key: str = "moe_intermediate_size"
    normalize_top_k: bool | None = None
    shared_gate: bool = False

    @property
    def fixed_keys(self) -> dict[str, Any]:
        """Return the keys of config.json with one supported value."""
        fixed = {key: value for key, value in FIXED_KEYS.items() if key != "attention_bias" or self.qkv_bias is not None}
        fixed["hidden_act"] = self.activation
        return fixed | (dict(SIGMOID_ROUTER_FIXED_KEYS) if self.router == "sigmoid" else {}) | dict(self.fixed)

    @property
    def known_keys(self) -> frozenset[str]:
        """Return all accounted keys of config.json."""
        known = IGNORED_KEYS | GENERATION_KEYS | READ_KEYS | self.fixed_keys.keys() | self.ignored
        if self.qkv_bias is None:
            known |= {"attention_bias"}
        own = (self.window_theta_key, self.window_pattern_key, self.query_scalar_key, self.activation_limit_key)
        known |= {key for key in own if key is not None}
        if self.qk_norm is None:
            known |= {"use_qk_norm"}
        if self.router is not None:
            known |= MOE_KEYS
        if self.router == "sigmoid":
            known |= SIGMOID_ROUTER_KEYS | MTP_KEYS
        if self.shared_gate:
            known |= {"shared_expert_intermediate_size"}
        return known | (MLA_KEYS if self.mla else frozenset())
