"""RL post-training for large language models; the names below are for other programs.

Names are imported at first use: `import megatron_rl` itself loads neither torch nor Megatron-Core
nor Ray. Examples are in `examples/library`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_rl.algorithms.advantage import group_advantages
    from megatron_rl.algorithms.aggregation import LossInputs
    from megatron_rl.algorithms.head_statistics import token_statistics
    from megatron_rl.algorithms.loss import LossOutput, compute_loss
    from megatron_rl.algorithms.objective import Objective
    from megatron_rl.config.settings import ModelSettings, TopologySettings, TrainingSettings
    from megatron_rl.data.batch import batch_from_sequences
    from megatron_rl.errors import UserError
    from megatron_rl.plugins.environment import Environment, Reply, ToolError
    from megatron_rl.rollout.renderers import between_turns
    from megatron_rl.training.joining import Meeting
    from megatron_rl.training.trainer import Trainer
    from megatron_rl.types import TrainBatch

_MODULES = {
    "Environment": "megatron_rl.plugins.environment",
    "LossInputs": "megatron_rl.algorithms.aggregation",
    "LossOutput": "megatron_rl.algorithms.loss",
    "Meeting": "megatron_rl.training.joining",
    "ModelSettings": "megatron_rl.config.settings",
    "Objective": "megatron_rl.algorithms.objective",
    "Reply": "megatron_rl.plugins.environment",
    "ToolError": "megatron_rl.plugins.environment",
    "TopologySettings": "megatron_rl.config.settings",
    "TrainBatch": "megatron_rl.types",
    "Trainer": "megatron_rl.training.trainer",
    "TrainingSettings": "megatron_rl.config.settings",
    "UserError": "megatron_rl.errors",
    "batch_from_sequences": "megatron_rl.data.batch",
    "between_turns": "megatron_rl.rollout.renderers",
    "compute_loss": "megatron_rl.algorithms.loss",
    "group_advantages": "megatron_rl.algorithms.advantage",
    "token_statistics": "megatron_rl.algorithms.head_statistics",
}
__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
