"""Qwen2 and Qwen2.5: biases on queries, keys and values, and optional sliding windows."""

from megatron_rl.models.families.family import DENSE_LAYOUTS, Family

FAMILY = Family(architecture="Qwen2ForCausalLM", proved=DENSE_LAYOUTS | {"sync"}, qkv_bias=True, windows="switched")
