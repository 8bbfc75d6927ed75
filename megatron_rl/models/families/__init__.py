"""The supported families of models, one file each, by the architecture that `config.json` names."""

from collections.abc import Mapping

from megatron_rl.models.families import (
    deepseek_v3,
    glm,
    glm4,
    glm4_moe,
    llama,
    mistral,
    mixtral,
    olmo2,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
)
from megatron_rl.models.families.family import Family

_MODULES = (qwen3, qwen2, llama, mistral, phi3, glm, glm4, olmo2, qwen3_moe, qwen2_moe, mixtral, glm4_moe, deepseek_v3)
FAMILIES: Mapping[str, Family] = {module.FAMILY.architecture: module.FAMILY for module in _MODULES}
