"""DeepSeek-V3 and R1: latent attention, sigmoid router with a bias and groups of experts, shared experts, dense first layers."""

from megatron_rl.models.families.family import MIXTURE_LAYOUTS, Family

FAMILY = Family(architecture="DeepseekV3ForCausalLM", proved=MIXTURE_LAYOUTS | {"sync", "quantised source"}, mla=True, router="sigmoid")
