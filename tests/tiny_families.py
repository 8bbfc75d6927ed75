"""Keys of config.json of a tiny model of every family, with every feature of the family."""

from collections.abc import Mapping
from typing import Any

from megatron_rl.doctor.tiny_models import FAMILIES as TRIED
from megatron_rl.doctor.tiny_models import SIGMOID_EXPERTS

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    **TRIED,
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "glm4_moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        **SIGMOID_EXPERTS,
    },
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 48},
    "ministral": {"architectures": ["MinistralForCausalLM"], "model_type": "ministral", "sliding_window": 48},
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 48,
        "router_jitter_noise": 0.0,
    },
    "qwen2_moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
        "norm_topk_prob": False,
    },
    "phi3": {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "partial_rotary_factor": 0.75, "sliding_window": 70},
    "glm": {"architectures": ["GlmForCausalLM"], "model_type": "glm", "attention_bias": True},
    "glm4": {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "attention_bias": True},
    "olmo3": {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "rope_theta": 500000.0,
        "sliding_window": 6,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 24,
        "sliding_window": 6,
        "sliding_window_pattern": 2,
        "rope_local_base_freq": 100.0,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 48,
        "sliding_window": 6,
        # Small, so that some inputs are cut off.
        "swiglu_limit": 0.5,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
        "tie_word_embeddings": False,
    },
    "olmo2": {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"},
}
