"""Hugging Face configuration to Megatron model: architecture, layers, attention, weights."""

from megatron_rl.system.device import import_megatron

# Import megatron-core here first: its import warns five times about optional packages.
import_megatron()
