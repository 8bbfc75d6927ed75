"""Ministral: Mistral with a window in the layers that config.json names, in all where it names none."""

import dataclasses

from megatron_rl.models.families import mistral
from megatron_rl.models.families.family import DENSE_LAYOUTS

FAMILY = dataclasses.replace(
    mistral.FAMILY,
    architecture="MinistralForCausalLM",
    proved=DENSE_LAYOUTS,
    not_synced="no test yet; it has no model of its own and is run by that of transformers",
    windows="given",
)
