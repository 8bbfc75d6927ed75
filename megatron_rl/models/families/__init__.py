"""The supported families of models, one file each, by the architecture that `config.json` names."""

from collections.abc import Mapping

from megatron_rl.models.families import deepseek_v3, glm4_moe, llama, qwen2, qwen3, qwen3_moe
from megatron_rl.models.families.family import Family

FAMILIES: Mapping[str, Family] = {
    module.FAMILY.architecture: module.FAMILY for module in (qwen3, qwen2, llama, qwen3_moe, glm4_moe, deepseek_v3)
}
