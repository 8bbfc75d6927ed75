"""gpt-oss: attention sinks, windows in every other layer, YaRN, and experts of a clamped SwiGLU with biases, as is every linear layer."""

from megatron_rl.models.families.family import MIXTURE_LAYOUTS, Family
from megatron_rl.models.tensor_names import TensorNames

FAMILY = Family(
    architecture="GptOssForCausalLM",
    proved=MIXTURE_LAYOUTS | {"quantised source", "sync"},
    default_norm_epsilon=1e-5,
    default_head_dim=64,
    qkv_bias=True,
    linear_bias=True,
    attention_sinks=True,
    default_rope_theta=150000.0,
    default_rope_scaling={
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    windows="given",
    default_window=128,
    default_window_pattern=2,
    router="softmax",
    expert_width_key="intermediate_size",
    normalize_top_k=True,
    activation="clamped_swiglu",
    activation_limit_key="swiglu_limit",
    default_activation_limit=7.0,
    # Repetitions of num_experts_per_tok and of the length before YaRN.
    ignored=frozenset(["experts_per_token", "initial_context_length"]),
    fixed={"attention_bias": True, "hidden_act": "silu", "swiglu_alpha": 1.702},
    names=TensorNames(router="router", stacked_experts=True),
)
