"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts in every layer and a shared expert behind a gate."""

from megatron_rl.models.families.family import MIXTURE_LAYOUTS, Family
from megatron_rl.models.model_spec import TensorNames

FAMILY = Family(
    architecture="Qwen2MoeForCausalLM",
    proved=MIXTURE_LAYOUTS | {"sync"},
    qkv_bias=True,
    router="softmax",
    shared_gate=True,
    fixed={"qkv_bias": True},
    names=TensorNames(shared_experts="shared_expert"),
)
