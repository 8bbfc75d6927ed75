"""Qwen2 and Qwen2.5: biases on queries, keys and values, sliding windows where config.json switches them on."""

from megatron_rl.models.families.family import DENSE_LAYOUTS, Family

FAMILY = Family(architecture="Qwen2ForCausalLM", proved=DENSE_LAYOUTS | {"sync"}, qkv_bias=True, windows="switched")
