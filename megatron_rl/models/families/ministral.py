"""Ministral: Mistral with a window in the layers that config.json names, in all where it names none."""

import dataclasses

from megatron_rl.models.families import mistral

FAMILY = dataclasses.replace(mistral.FAMILY, architecture="MinistralForCausalLM", windows="given")
