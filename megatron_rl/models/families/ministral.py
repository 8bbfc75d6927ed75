"""Ministral: Mistral with a window in the layers named by config.json, by default in all."""

import dataclasses

from megatron_rl.models.families import mistral
from megatron_rl.models.families.family import DENSE_LAYOUTS

FAMILY = dataclasses.replace(
    mistral.FAMILY,
    architecture="MinistralForCausalLM",
    # SGLang has no Ministral model of its own and runs transformers' model.
    proved=DENSE_LAYOUTS | {"sync"},
    windows="given",
)
