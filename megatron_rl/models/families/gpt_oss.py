"""gpt-oss: attention sinks, windows in every other layer, YaRN, and experts of a clamped SwiGLU with biases, as is every linear layer."""

from megatron_rl.models.families.family import MIXTURE_LAYOUTS, Family
from megatron_rl.models.model_spec import TensorNames

FAMILY = Family(
    architecture="GptOssForCausalLM",
    proved=MIXTURE_LAYOUTS | {"quantised source", "sync"},
    qkv_bias=True,
    linear_bias=True,
    attention_sinks=True,
    scaled_by_default=True,
    windows="given",
    router="softmax",
    expert_width_key="intermediate_size",
    normalize_top_k=True,
    activation="clamped_swiglu",
    activation_limit_key="swiglu_limit",
    # Repetitions of num_experts_per_tok and of the length before YaRN.
    ignored=frozenset(["experts_per_token", "initial_context_length"]),
    fixed={"attention_bias": True, "hidden_act": "silu", "swiglu_alpha": 1.702},
    names=TensorNames(router="router", stacked_experts=True),
)
