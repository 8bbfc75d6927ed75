"""Keys of `config.json` shared by several families: ignored, read, or with one supported value."""

from collections.abc import Mapping
from typing import Any

# Keys of config.json without an effect on the function computed by the network.
IGNORED_KEYS = frozenset(
    [
        "_name_or_path",
        "_attn_implementation",
        "_attn_implementation_autoset",
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
        "gradient_checkpointing",
        "id2label",
        "initializer_range",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "pruned_heads",
        "return_dict",
        "router_aux_loss_coef",
        "sep_token_id",
        "task_specific_params",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "tokenizer_class",
        "torch_dtype",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        "use_cache",
        "is_decoder",
        "attention_dropout",
        "model_type",
    ]
)
# Keys about generation, written here by transformers 4.
GENERATION_KEYS = frozenset(
    [
        "bad_words_ids",
        "begin_suppress_tokens",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "length_penalty",
        "max_length",
        "min_length",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_scores",
        "prefix",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict_in_generate",
        "suppress_tokens",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
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
# Keys read by ModelSpec.
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
# From families with sigmoid scores in the router. Losses of pre-training and the expert parallelism
# of another program say nothing here.
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
# Layers of multi-token prediction behind the last one propose tokens for speculative decoding. The
# policy is the same without such layers.
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
