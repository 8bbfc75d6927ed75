"""Hugging Face configuration to Megatron model: architecture, layers, attention, weights."""

from megatron_rl.device import import_megatron

# Before any module here does it: megatron-core warns five times about optional packages when it is imported.
import_megatron()
