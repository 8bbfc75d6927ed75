"""Everything on disk: Hugging Face and Megatron directories, a run's checkpoints, and the state machine of a save."""

from megatron_rl.system.device import import_megatron

# A process that enters megatron-core from here, such as a rank, otherwise imports the compiler with it: 2 s of CPU time.
import_megatron()
