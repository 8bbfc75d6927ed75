"""Ministral: Mistral with a window in the layers that config.json names, in all where it names none."""

import dataclasses

from megatron_rl.models.families import mistral
from megatron_rl.models.families.family import DENSE_LAYOUTS

FAMILY = dataclasses.replace(
    mistral.FAMILY,
    architecture="MinistralForCausalLM",
    # SGLang has no model of its own for it and runs that of transformers.
    proved=DENSE_LAYOUTS | {"sync"},
    windows="given",
)
