"""Qwen3-MoE: Qwen3 with experts in every layer, chosen by softmax scores."""

from megatron_rl.models.families.family import Family

FAMILY = Family(architecture="Qwen3MoeForCausalLM", qk_norm=True, router="softmax")
