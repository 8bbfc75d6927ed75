"""Qwen3-MoE: Qwen3 with experts in every layer, chosen by softmax scores."""

from megatron_rl.models.families.family import MIXTURE_LAYOUTS, Family

FAMILY = Family(
    architecture="Qwen3MoeForCausalLM",
    proved=MIXTURE_LAYOUTS | {"sync", "quantised source"},
    qk_norm=True,
    router="softmax",
    # Qwen3-Coder's files have keys about features of other families, absent from this one.
    fixed={"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True},
)
