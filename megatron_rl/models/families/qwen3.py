"""Qwen3: norms on queries and keys, heads of 128 channels, and optional sliding windows.

config.json switches the windows on.
"""

from megatron_rl.models.families.family import DENSE_LAYOUTS, Family

FAMILY = Family(
    architecture="Qwen3ForCausalLM",
    proved=DENSE_LAYOUTS | {"sync", "quantised source"},
    qk_norm=True,
    windows="switched",
)
