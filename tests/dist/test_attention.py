"""Variants of attention under layouts: YaRN, windows, fewer key-value heads than tensor parallel ranks; and uneven pipeline stages."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from layout_table import BASE, Layout
from parity_runs import run_and_compare

QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
MODELS: dict[str, dict[str, Any]] = {
    "yarn and windows": {
        "layers": 3,
        "rope_scaling": YARN,
        "use_sliding_window": True,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "one key-value head": {"layers": 3, "num_key_value_heads": 1, "tied": False},
    "one key-value head, biases": {**QWEN2, "layers": 3, "num_key_value_heads": 1, "tied": False},
    "two key-value heads": {"layers": 3, "hidden": 128, "num_attention_heads": 8, "num_key_value_heads": 2},
    "six layers": {"layers": 6},
    "half-rotated heads": {"family": "glm4_moe", "layers": 3},
}
UNEVEN = {"num_layers_in_first_pipeline_stage": 2, "num_layers_in_last_pipeline_stage": 1}
LAYOUTS: dict[str, Layout] = {
    BASE: Layout(),
    "tp2": Layout(2, {"tp": 2}),
    "tp2 sp": Layout(2, {"tp": 2, "sequence_parallel": True}),
    "cp2": Layout(2, {"cp": 2}),
    "pp2 as 2 and 1": Layout(2, {"pp": 2}, megatron=UNEVEN),
    "pp2 as 1 and 2": Layout(2, {"pp": 2}, megatron={"num_layers_in_first_pipeline_stage": 1}),
    "pp2 vpp2 as 4 and 2": Layout(2, {"pp": 2, "vpp": 2}, megatron={"num_layers_in_last_pipeline_stage": 2}),
    "pp2 vpp2 by a layout": Layout(2, {"pp": 2, "vpp": 2}, megatron={"pipeline_model_parallel_layout": "Et|t*2|t*2|tL"}),
    "tp4": Layout(4, {"tp": 4}),
    "tp4 sp": Layout(4, {"tp": 4, "sequence_parallel": True}),
    "cp4": Layout(4, {"cp": 4}),
    "pp3 as 1, 4, 1": Layout(3, {"pp": 3}, megatron={"num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 1}),
}
GATE = [
    *(("yarn and windows", name) for name in ("tp2 sp", "cp2", "pp2 as 2 and 1")),
    ("one key-value head", "tp2"),
    ("one key-value head, biases", "tp2 sp"),
    ("six layers", "pp2 vpp2 as 4 and 2"),
]
WIDE = [
    ("yarn and windows", "tp2"),
    ("one key-value head", "tp2 sp"),
    ("one key-value head", "pp2 as 1 and 2"),
    ("six layers", "pp2 vpp2 by a layout"),
    ("six layers", "pp3 as 1, 4, 1"),
    *((model, name) for model in ("one key-value head", "two key-value heads") for name in ("tp4", "tp4 sp")),
    ("yarn and windows", "cp4"),
    *(("half-rotated heads", name) for name in ("tp2 sp", "cp2", "cp4")),
]


@pytest.mark.timeout(300)
def test_two_rank_layouts(run_ranks: Callable[..., list[Any]], tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    run_and_compare(run_ranks, tiny_model, tmp_path, models=MODELS, layouts=LAYOUTS, cases=GATE, num_ranks=2)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_ranks", (2, 3, 4))
def test_more_layouts(run_ranks: Callable[..., list[Any]], tiny_model: Callable[..., Path], tmp_path: Path, num_ranks: int) -> None:
    cases = [case for case in WIDE if LAYOUTS[case[1]].num_ranks == num_ranks]
    run_and_compare(run_ranks, tiny_model, tmp_path, models=MODELS, layouts=LAYOUTS, cases=cases, num_ranks=num_ranks)
