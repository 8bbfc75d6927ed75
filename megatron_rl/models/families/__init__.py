"""The supported families of models, one file each, by the architecture name in `config.json`."""

from collections.abc import Mapping

from megatron_rl.models.families import (
    deepseek_v3,
    gemma3,
    glm,
    glm4,
    glm4_moe,
    gpt_oss,
    llama,
    ministral,
    mistral,
    mixtral,
    olmo2,
    olmo3,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
)
from megatron_rl.models.families.family import Family

_MODULES = (
    qwen3,
    qwen2,
    llama,
    mistral,
    ministral,
    phi3,
    glm,
    glm4,
    olmo2,
    olmo3,
    gemma3,
    qwen3_moe,
    qwen2_moe,
    mixtral,
    glm4_moe,
    gpt_oss,
    deepseek_v3,
)
FAMILIES: Mapping[str, Family] = {module.FAMILY.architecture: module.FAMILY for module in _MODULES}

_GATED_DELTA_NET = (
    "gated delta nets of megatron-core take packed sequences from release 0.18 on, by flash-linear-attention's GPU kernels alone, and "
    "none is built here yet"
)
REFUSED: Mapping[str, str] = {
    "Gemma2ForCausalLM": "attention here has no softcap on scores",
    "Gemma3ForConditionalGeneration": "only text is trained: save the text model as Gemma3ForCausalLM first, as the README beside the "
    "families shows",
    "Qwen3NextForCausalLM": _GATED_DELTA_NET,
    "Qwen3_5ForCausalLM": _GATED_DELTA_NET,
    "Qwen3_5MoeForCausalLM": _GATED_DELTA_NET,
    "DeepseekV32ForCausalLM": "attention here is not sparse",
}
"""Architectures that are asked for and cannot be trained, and why."""
