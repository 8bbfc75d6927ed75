"""Llama 2 and 3: the reference for the descriptions of the other families."""

from megatron_rl.models.families.family import DENSE_LAYOUTS, Family

FAMILY = Family(
    architecture="LlamaForCausalLM",
    proved=DENSE_LAYOUTS | {"sync"},
    # A key in SmolLM2's files.
    ignored=frozenset(["is_llama_config"]),
    fixed={"rope_interleaved": False},
)
