"""Qwen3: norms on queries and keys, and optional sliding windows."""

from megatron_rl.models.families.family import DENSE_LAYOUTS, Family

FAMILY = Family(
    architecture="Qwen3ForCausalLM",
    proved=DENSE_LAYOUTS | {"sync", "quantised source"},
    qk_norm=True,
    windows="switched",
)
