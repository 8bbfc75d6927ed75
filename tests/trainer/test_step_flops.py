"""The products that `plan` counts for a step against those that torch counts in a real one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.flop_counter import FlopCounterMode

from megatron_rl.config.decided import FULL_RECOMPUTE
from megatron_rl.data.batch import batch_from_sequences
from megatron_rl.models.read_spec import read_model_spec
from megatron_rl.planning.step_time import Flops, ModelSize
from megatron_rl.training.trainer import Trainer


@pytest.mark.parametrize(
    ("family", "megatron"),
    [("qwen3", {}), ("qwen3", FULL_RECOMPUTE), ("deepseek_v3", {}), ("gpt_oss", {})],
    ids=["dense", "full recompute", "latent attention and experts", "biases and experts"],
)
def test_a_step_computes_the_products_that_are_counted(
    make_trainer: Callable[..., Trainer], tiny_model: Callable[..., Path], family: str, megatron: dict[str, Any]
) -> None:
    """Sequences of 3, 9 and 5 tokens, of which 7 are trained on. Attention on a CPU computes rectangles, so it is left out."""
    model = tiny_model(family=family, layers=2)
    batch = batch_from_sequences(prompts=[[2, 3], [4] * 5, [5, 6, 7]], responses=[[8], [9, 8, 7, 6], [5, 4]])
    trainer = make_trainer(model, {"policy_loss": "sft", "aggregation": "token_mean"}, megatron=megatron)
    with FlopCounterMode(display=False) as counter:
        trainer.train(batch)
    found = {str(operation): count for operation, count in counter.get_flop_counts()["Global"].items()}
    flops = Flops.of(ModelSize.of(read_model_spec(model)), np.array([3, 9, 5]), num_targets=7)
    assert found["aten.mm"] + found.get("aten.addmm", 0) == flops.products(recompute=megatron.get("recompute_granularity"))
