"""The shipped config.json numbers describe the models that they name."""

from collections.abc import Callable
from math import prod
from typing import Any

import pytest

from megatron_rl.models.weight_table import tensor_shapes

# Published totals in 1e9, without the layers of multi-token prediction. GLM-4.5's 355 lies between the totals without and with its one
# such layer of 4.0.
TOTALS = {
    "Qwen3-4B": 4.02,
    "Qwen3-8B": 8.19,
    "Qwen3-30B-A3B": 30.53,
    "Qwen3-235B-A22B": 235.09,
    "GLM-4.5-Air": 106.85,
    "GLM-4.5": 352.80,
    "DeepSeek-V3": 671.03,
}


@pytest.mark.parametrize("name", TOTALS)
def test_parameters_add_up_to_the_published_total(model_spec: Callable[[str], Any], name: str) -> None:
    total = sum(prod(shape) for _, shape in tensor_shapes(model_spec(name)))
    assert total / 1e9 == pytest.approx(TOTALS[name], abs=0.005)
