"""Mistral 7B and its successors: Llama with a sliding window in every layer unless it is null."""

from megatron_rl.models.families.family import DENSE_LAYOUTS, Family

FAMILY = Family(architecture="MistralForCausalLM", proved=DENSE_LAYOUTS | {"sync"}, windows="everywhere")
