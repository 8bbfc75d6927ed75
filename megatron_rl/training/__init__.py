"""The Megatron side of a run: topology, passes, optimizer, checkpoints, and Trainer."""

from megatron_rl.system.device import import_megatron

# Every module of this room imports megatron-core; the first import decides whether its missing-kernel warnings are printed.
import_megatron()
