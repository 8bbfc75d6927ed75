"""The supported model families as a table: what their checkpoints have, and which `config.json` keys are accounted for.

Everything family-specific is here; no other module asks for a family's name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

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
        "max_window_layers",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "partial_rotary_factor",
        "quantization_config",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "sliding_window",
        "tie_word_embeddings",
        "use_sliding_window",
        "vocab_size",
    ]
)
MOE_KEYS = frozenset(["moe_intermediate_size", "norm_topk_prob", "num_experts", "num_experts_per_tok", "num_local_experts"])
# Of families whose router takes sigmoid scores. Losses of pre-training and the expert parallelism of another program say nothing here.
SIGMOID_ROUTER_KEYS = frozenset(
    [
        "aux_loss_alpha",
        "ep_size",
        "first_k_dense_replace",
        "n_group",
        "n_routed_experts",
        "n_shared_experts",
        "routed_scaling_factor",
        "seq_aux",
        "topk_group",
    ]
)
SIGMOID_ROUTER_FIXED_KEYS: Mapping[str, Any] = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
# Layers of multi-token prediction behind the last one propose tokens for speculative decoding; the policy is the same without them.
MTP_KEYS = frozenset(["num_mtp_layers", "num_nextn_predict_layers"])
# `qk_head_dim` is the sum of two of the others.
MLA_KEYS = frozenset(
    [
        "kv_lora_rank",
        "q_lora_rank",
        "qk_head_dim",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "rope_interleave",
        "v_head_dim",
    ]
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


FAMILIES: Mapping[str, Family] = {
    family.architecture: family
    for family in (
        Family("Qwen3ForCausalLM", qk_norm=True, default_head_dim=128, sliding_window=True),
        Family("Qwen2ForCausalLM", qkv_bias=True, sliding_window=True),
        Family("LlamaForCausalLM"),
        Family("Qwen3MoeForCausalLM", qk_norm=True, router="softmax"),
        Family("Glm4MoeForCausalLM", qkv_bias=None, qk_norm=None, router="sigmoid", default_rotary_fraction=0.5, default_norm_epsilon=1e-5),
        Family("DeepseekV3ForCausalLM", mla=True, router="sigmoid"),
    )
}
