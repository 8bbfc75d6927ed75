"""Files that models are published with: what config.json says of them is read, and what would compute something else is refused.

Of each only what matters here: keys that are the same everywhere stand in `SHARED`, and those of tokens and of dtypes are left out.
Not every file was at hand: those of Qwen2.5, Mistral, GLM-4, Qwen2-MoE and others are written down from what is known of them.
"""

import pytest

from megatron_rl.errors import UserError
from megatron_rl.models.read_spec import parse_model_spec

SHARED = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "bos_token_id": 1,
    "eos_token_id": [1, 2],
}
LLAMA3 = {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "beta_fast": 32.0, "beta_slow": 1.0}
UNEVEN = {"max_window_layers": 28, "rope_scaling": None, "use_sliding_window": False}


def sizes(hidden, ffn, layers, heads, kv_heads, vocab, length, *, theta, eps, tied=False, **others):
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": length,
        "rope_theta": theta,
        "rms_norm_eps": eps,
        **({} if tied is None else {"tie_word_embeddings": tied}),
        **others,
    }


SMOLLM2 = {"is_llama_config": True, "rope_interleaved": False, "rope_scaling": None, "pretraining_tp": 1, "mlp_bias": False}
QWEN3_CODER = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.0,
    "head_dim": 128,
    "qkv_bias": False,
    "shared_expert_intermediate_size": 0,
    "use_qk_norm": True,
    "sliding_window": None,
    **UNEVEN,
}
QWEN2_MOE = {
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 2560,
    "norm_topk_prob": False,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 20480,
    "sliding_window": 131072,
    **UNEVEN,
}
MOONLIGHT = {
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "num_experts_per_tok": 6,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "routed_scaling_factor": 2.446,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
}
GLM = {"attention_bias": True, "head_dim": 128, "partial_rotary_factor": 0.5}
GEMMA3 = {
    "attn_logit_softcapping": None,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_act": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
}
PHI = {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "rope_scaling": None}
# Name: architecture, keys, and of what is read: rotary kind and base, channels of a head, fraction rotated, window, layers with it, tied.
PUBLISHED = {
    "Qwen2.5-7B-Instruct": (
        "Qwen2",
        sizes(3584, 18944, 28, 28, 4, 152064, 32768, theta=1e6, eps=1e-6, sliding_window=131072, **UNEVEN),
        ("default", 1e6, 128, 1.0, None, 0, False),
    ),
    "Qwen2.5-Math-1.5B": (
        "Qwen2",
        sizes(1536, 8960, 28, 12, 2, 151936, 4096, theta=1e4, eps=1e-6, tied=True, sliding_window=4096, use_mrope=False, **UNEVEN),
        ("default", 1e4, 128, 1.0, None, 0, True),
    ),
    "Qwen3-Coder-30B-A3B-Instruct": (
        "Qwen3Moe",
        sizes(2048, 5472, 48, 32, 4, 151936, 262144, theta=1e7, eps=1e-6, **QWEN3_CODER),
        ("default", 1e7, 128, 1.0, None, 0, False),
    ),
    "Llama-3.2-1B-Instruct, copied by Unsloth": (
        "Llama",
        sizes(2048, 8192, 16, 32, 8, 128256, 131072, theta=5e5, eps=1e-5, tied=True, head_dim=64, rope_scaling=LLAMA3)
        | {"unsloth_fixed": True, "unsloth_version": "2025.1.1", "mlp_bias": False},
        ("llama3", 5e5, 64, 1.0, None, 0, True),
    ),
    "SmolLM2-135M-Instruct": (
        "Llama",
        sizes(576, 1536, 30, 9, 3, 49152, 8192, theta=1e5, eps=1e-5, tied=True, **SMOLLM2)
        | {"transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}}},
        ("default", 1e5, 64, 1.0, None, 0, True),
    ),
    "Mistral-7B-v0.1": (
        "Mistral",
        sizes(4096, 14336, 32, 32, 8, 32000, 32768, theta=1e4, eps=1e-5, sliding_window=4096),
        ("default", 1e4, 128, 1.0, 4096, 32, False),
    ),
    "Mistral-Nemo-Instruct-2407": (
        "Mistral",
        sizes(5120, 14336, 40, 32, 8, 131072, 131072, theta=1e6, eps=1e-5, sliding_window=None, head_dim=128),
        ("default", 1e6, 128, 1.0, None, 0, False),
    ),
    "Mixtral-8x7B-v0.1": (
        "Mixtral",
        sizes(4096, 14336, 32, 32, 8, 32000, 32768, theta=1e6, eps=1e-5, sliding_window=None)
        | {"num_experts_per_tok": 2, "num_local_experts": 8, "output_router_logits": False, "router_aux_loss_coef": 0.02},
        ("default", 1e6, 128, 1.0, None, 0, False),
    ),
    "GLM-4-9B-0414": (
        "Glm4",
        sizes(4096, 13696, 40, 32, 2, 151552, 32768, theta=1e4, eps=1e-5, **GLM),
        ("default", 1e4, 128, 0.5, None, 0, False),
    ),
    "glm-4-9b-chat-hf": (
        "Glm",
        sizes(4096, 13696, 40, 32, 2, 151552, 131072, theta=1e4, eps=1.5625e-7, **GLM),
        ("default", 1e4, 128, 0.5, None, 0, False),
    ),
    "Qwen2-57B-A14B-Instruct": (
        "Qwen2Moe",
        sizes(3584, 18944, 28, 28, 4, 151936, 32768, theta=1e6, eps=1e-6, **QWEN2_MOE),
        ("default", 1e6, 128, 1.0, None, 0, False),
    ),
    "OLMo-2-1124-7B": (
        "Olmo2",
        sizes(4096, 11008, 32, 32, 32, 100352, 4096, theta=5e5, eps=1e-6, attention_bias=False, rope_scaling=None),
        ("default", 5e5, 128, 1.0, None, 0, False),
    ),
    "Olmo-3-7B-Think": (
        "Olmo3",
        sizes(4096, 11008, 32, 32, 32, 100278, 65536, theta=5e5, eps=1e-6, sliding_window=4096)
        | {
            "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
            "rope_scaling": YARN | {"attention_factor": 1.2079441541679836},
        },
        ("yarn", 5e5, 128, 1.0, 4096, 24, False),
    ),
    "Phi-3-mini-4k-instruct": (
        "Phi3",
        sizes(3072, 8192, 32, 32, 32, 32064, 4096, theta=1e4, eps=1e-5, sliding_window=2047, **PHI, original_max_position_embeddings=4096),
        ("default", 1e4, 96, 1.0, 2047, 32, False),
    ),
    "phi-4": (
        "Phi3",
        sizes(5120, 17920, 40, 40, 10, 100352, 16384, theta=25e4, eps=1e-5, sliding_window=None, **PHI)
        | {"original_max_position_embeddings": 16384},
        ("default", 25e4, 128, 1.0, None, 0, False),
    ),
    "gemma-3-1b-it": (
        "Gemma3",
        sizes(1152, 6912, 26, 4, 1, 262144, 32768, theta=1000000, eps=1e-6, tied=None) | GEMMA3,
        ("default", 1e6, 256, 1.0, 512, 22, True),
    ),
    "Moonlight-16B-A3B": (
        "DeepseekV3",
        sizes(2048, 11264, 27, 16, 16, 163840, 8192, theta=5e4, eps=1e-5, **MOONLIGHT),
        ("default", 5e4, 192, 1.0, None, 0, False),
    ),
}
YARN_OF_R1 = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "attn_factor": 0.8782488562869419}
R1_0528_QWEN3_8B = sizes(4096, 12288, 36, 32, 8, 151936, 131072, theta=1e6, eps=1e-6, head_dim=128, rope_scaling=YARN_OF_R1)


def read(family, keys):
    return parse_model_spec(SHARED | {"architectures": [f"{family}ForCausalLM"]} | keys, origin="config.json")


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_a_published_file_says_is_read(name):
    family, keys, expected = PUBLISHED[name]
    spec = read(family, keys)
    rotary = spec.rotary
    assert (spec.num_layers, spec.norm_epsilon) == (keys["num_hidden_layers"], keys["rms_norm_eps"])
    assert expected == (
        rotary.kind,
        rotary.theta,
        spec.head_dim,
        spec.rotary_dim / (spec.head_dim if spec.mla is None else spec.mla.qk_rope_head_dim),
        spec.sliding_window,
        len(spec.sliding_layers),
        spec.tie_embeddings,
    )


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    (
        ("Qwen3-Coder-30B-A3B-Instruct", {"qkv_bias": True}, "sets qkv_bias to True, only False"),
        ("Qwen3-Coder-30B-A3B-Instruct", {"shared_expert_intermediate_size": 768}, "sets shared_expert_intermediate_size to 768, only 0"),
        ("Qwen3-Coder-30B-A3B-Instruct", {"use_qk_norm": False}, "sets use_qk_norm to False, only True"),
        ("SmolLM2-135M-Instruct", {"rope_interleaved": True}, "sets rope_interleaved to True, only False"),
        ("Mixtral-8x7B-v0.1", {"router_jitter_noise": 0.1}, "sets router_jitter_noise to 0.1, only 0.0"),
        ("gemma-3-1b-it", {"final_logit_softcapping": 30.0}, "sets final_logit_softcapping to 30.0, only None"),
        # Qwen2.5-7B-Instruct-1M: positions beyond a chunk are turned in another way.
        ("Qwen2.5-7B-Instruct", {"dual_chunk_attention_config": {"chunk_size": 262144}}, "has the key dual_chunk_attention_config"),
        (
            "gemma-3-1b-it",
            {"architectures": ["Gemma3ForConditionalGeneration"]},
            "only text is trained: save the text model as Gemma3ForCausalLM first",
        ),
    ),
)
def test_what_would_compute_something_else_is_refused(name, changes, message):
    family, keys, _ = PUBLISHED[name]
    with pytest.raises(UserError, match=message):
        read(family, keys | changes)


def test_a_factor_that_only_engines_read_needs_both_spellings():
    words = (
        r"has attn_factor = 0\.878249, with which engines multiply cosine and sine by 1, and transformers, .* by 1\.13863; add attention_fa"
    )
    with pytest.raises(UserError, match=words):
        read("Qwen3", R1_0528_QWEN3_8B)
    both = read("Qwen3", R1_0528_QWEN3_8B | {"rope_scaling": YARN_OF_R1 | {"attention_factor": 1.0}}).rotary
    assert (both.kind, both.factor, both.attention_factor) == ("yarn", 4.0, 1.0)
    with pytest.raises(UserError, match=r"by 1, and transformers, .* by 1\.2;"):
        read("Qwen3", R1_0528_QWEN3_8B | {"rope_scaling": YARN_OF_R1 | {"attention_factor": 1.2}})
