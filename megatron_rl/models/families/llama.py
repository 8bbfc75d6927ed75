"""Llama 2 and 3: what the other families are described against."""

from megatron_rl.models.families.family import DENSE_LAYOUTS, Family

FAMILY = Family(
    architecture="LlamaForCausalLM",
    proved=DENSE_LAYOUTS | {"sync"},
    # SmolLM2's files have them.
    ignored=frozenset(["is_llama_config"]),
    fixed={"rope_interleaved": False},
)
