"""What a run needs of its GPUs, from a model's config.json alone: real Megatron ranks are built on torch's meta device.

`plan_run` plans the layout of given settings; `best_layouts` looks for layouts of a number of GPUs.
"""

from megatron_rl.planning.gpus import GPUS, Gpu, find_gpu
from megatron_rl.planning.plan import plan_run
from megatron_rl.planning.records import EngineMemory, RunPlan, StageMemory
from megatron_rl.planning.search import best_layouts

__all__ = ["GPUS", "EngineMemory", "Gpu", "RunPlan", "StageMemory", "best_layouts", "find_gpu", "plan_run"]
