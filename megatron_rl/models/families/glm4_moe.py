"""GLM-4.5 and GLM-4.5-Air: sigmoid router with a bias, shared experts, dense first layers, half of the channels rotated."""

from megatron_rl.models.families.family import MIXTURE_LAYOUTS, Family

FAMILY = Family(
    architecture="Glm4MoeForCausalLM",
    proved=MIXTURE_LAYOUTS | {"sync", "quantised source"},
    qkv_bias=None,
    qk_norm=None,
    router="sigmoid",
    partly_rotated=True,
)
