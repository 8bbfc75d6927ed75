"""The description of a family of models, and the keys of `config.json` known for all of them.

`family_table` has one description for each family. No other module asks for a family's name.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_rl.models.model_spec import USUAL_NAMES, Activation, TensorNames

# Keys of config.json without an effect on the function computed by the network.
IGNORED_KEYS = frozenset(
    [
        *("architectures", "model_type", "auto_map", "_name_or_path", "transformers_version", "transformers.js_config"),
        *("unsloth_fixed", "unsloth_version", "dtype", "torch_dtype", "torchscript", "use_bfloat16", "pretraining_tp"),
        *("_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "chunk_size_feed_forward"),
        *("tokenizer_class", "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
        *("add_cross_attention", "is_decoder", "tie_encoder_decoder", "pruned_heads", "tf_legacy_loss"),
        *("finetuning_task", "id2label", "label2id", "problem_type", "task_specific_params"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "use_cache"),
        *("attention_dropout", "gradient_checkpointing", "initializer_range", "router_aux_loss_coef"),
    ]
)
# Keys with an effect on the function. Only the value here is supported, also meant by an absent
# key.
FIXED_KEYS: Mapping[str, Any] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "is_encoder_decoder": False,
    "mlp_bias": False,
    # From Qwen2's vision relatives; also in its distilled models.
    "use_mrope": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
# Keys read for every family.
READ_KEYS = frozenset(
    [
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "rms_norm_eps", "tie_word_embeddings"),
        *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "partial_rotary_factor"),
        *("rope_parameters", "rope_scaling", "rope_theta", "quantization_config"),
        *("layer_types", "max_window_layers", "sliding_window", "use_sliding_window"),
    ]
)
MOE_KEYS = frozenset(["moe_intermediate_size", "norm_topk_prob", "num_experts", "num_experts_per_tok", "num_local_experts"])
# From families with sigmoid scores in the router. Losses of pre-training and the expert parallelism
# of another program say nothing here.
SIGMOID_ROUTER_KEYS = frozenset(
    [
        *("first_k_dense_replace", "n_group", "n_routed_experts", "n_shared_experts", "routed_scaling_factor", "topk_group"),
        *("aux_loss_alpha", "seq_aux", "ep_size"),
    ]
)
SIGMOID_ROUTER_FIXED_KEYS: Mapping[str, Any] = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
# Layers of multi-token prediction behind the last one propose tokens for speculative decoding. The
# policy is the same without such layers.
MTP_KEYS = frozenset(["num_mtp_layers", "num_nextn_predict_layers"])
# `qk_head_dim` is the sum of two of the others.
MLA_KEYS = frozenset(
    ["kv_lora_rank", "q_lora_rank", "qk_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "rope_interleave", "v_head_dim"]
)

Proof = Literal["sync", "quantised source", "tp", "pp", "cp", "ep"]
DENSE_LAYOUTS: frozenset[Proof] = frozenset(["tp", "pp", "cp"])
MIXTURE_LAYOUTS: frozenset[Proof] = DENSE_LAYOUTS | {"ep"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The differences of one architecture from the others.

    An absent key of config.json has the value of transformers' class `config_class`, by default the
    architecture's.

    `proved` lists features shown by tests beyond one rank equal to transformers: sizes of layouts,
    weights sent to a real engine, quantised files. `not_synced` gives, for a family without "sync",
    the obstacle to a real engine on a machine without a GPU. `ignored` are keys of config.json
    found in this family alone and without effect on the computed function, `fixed` the keys with
    one supported value. A field with the name of one of `ModelSpec` or `MoeSpec` has its meaning.

    Attention: `qkv_bias` and `qk_norm` None take the values of `attention_bias` and `use_qk_norm`
    in config.json. All channels of a head are rotated under any file unless `partly_rotated`; with
    `scaled_by_default` a file without either spelling has a rope scaling; `rotary_interleaved`
    pairs channels (2i, 2i + 1). Scores are divided by the root of the value at `query_scalar_key`,
    if any, else by the root of the channels of a head. A `scaled_embedding` is multiplied by
    sqrt(hidden size).

    `windows`: "never", "switched" on by `use_sliding_window`, or, for a `sliding_window` other than
    null, "everywhere" or "given" by `layer_types`. `window_theta_key` has the base of the window
    layers' own rotary embedding, if any.

    Experts: `router` is the scoring of experts, None without experts; `expert_width_key` has the
    width of an expert; `normalize_top_k` None reads `norm_topk_prob`. `activation_limit_key` has
    the limit of a clamped activation.
    """

    architecture: str
    config_class: str | None = None
    proved: frozenset[Proof] = frozenset()
    not_synced: str | None = None
    ignored: frozenset[str] = frozenset()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    names: TensorNames = USUAL_NAMES
    activation: Activation = "silu"
    activation_limit_key: str | None = None
    linear_bias: bool = False
    zero_centered_norms: bool = False
    scaled_embedding: bool = False
    qkv_bias: bool | None = False
    qk_norm: bool | None = False
    qk_norm_over_heads: bool = False
    partly_rotated: bool = False
    scaled_by_default: bool = False
    rotary_interleaved: bool = False
    windows: Literal["never", "switched", "given", "everywhere"] = "never"
    window_theta_key: str | None = None
    query_scalar_key: str | None = None
    attention_sinks: bool = False
    mla: bool = False
    router: Literal["softmax", "sigmoid"] | None = None
    expert_width_key: str = "moe_intermediate_size"
    normalize_top_k: bool | None = None
    shared_gate: bool = False

    def absent(self, values: Mapping[str, Any], key: str) -> Any:
        """Return transformers' value of the absent `key` beside the sizes in `values`."""
        # The import takes a second, for torchvision. Most published files have every key.
        import transformers

        config_class = getattr(transformers, self.config_class or self.architecture.replace("ForCausalLM", "Config"))
        defaults = {field.name: field.default for field in dataclasses.fields(config_class)}
        if key == "head_dim":
            return defaults.get(key) or values["hidden_size"] // values["num_attention_heads"]
        if key == "num_key_value_heads":
            return defaults[key] or values["num_attention_heads"]
        given = {name: values[name] for name in ("num_hidden_layers", "sliding_window_pattern") if values.get(name) is not None}
        return vars(config_class(**given)).get(key)

    @property
    def fixed_keys(self) -> dict[str, Any]:
        """Return the keys of config.json with one supported value."""
        fixed = {key: value for key, value in FIXED_KEYS.items() if key != "attention_bias" or self.qkv_bias is not None}
        fixed["hidden_act"] = self.activation
        return fixed | (dict(SIGMOID_ROUTER_FIXED_KEYS) if self.router == "sigmoid" else {}) | dict(self.fixed)

    @property
    def known_keys(self) -> frozenset[str]:
        """Return all accounted keys of config.json."""
        conditional = (
            (self.qkv_bias is None, {"attention_bias"}),
            (self.qk_norm is None, {"use_qk_norm"}),
            (self.router is not None, MOE_KEYS),
            (self.router == "sigmoid", SIGMOID_ROUTER_KEYS | MTP_KEYS),
            (self.shared_gate, {"shared_expert_intermediate_size"}),
            (self.mla, MLA_KEYS),
        )
        own = {key for key in (self.window_theta_key, self.query_scalar_key, self.activation_limit_key) if key is not None}
        known = IGNORED_KEYS | READ_KEYS | self.fixed_keys.keys() | self.ignored | own
        return known.union(*(keys for present, keys in conditional if present))
