"""The Megatron side of a run: topology, passes, optimizer, checkpoints, and Trainer."""

from megatron_rl.system.device import quiet_megatron_imports

# Every module of this room imports megatron-core; the first import decides whether its missing-kernel warnings are printed.
with quiet_megatron_imports():
    import megatron.core.dist_checkpointing
    import megatron.core.models.gpt
    import megatron.core.optimizer  # noqa: F401
