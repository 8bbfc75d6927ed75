"""Which parameters of a mixture of experts patterns over Hugging Face names freeze."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.config.settings import TopologySettings
from megatron_rl.errors import UserError
from megatron_rl.models.build import PolicyModel, build_model
from megatron_rl.models.freezing import freeze, frozen_rules
from megatron_rl.models.megatron_config import transformer_config
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.read_spec import read_model_spec


def build(path: Path, **overrides: Any) -> tuple[ModelSpec, list[PolicyModel]]:
    spec = read_model_spec(path)
    config = transformer_config(spec, topology=TopologySettings(), dtype=torch.float32, overrides=overrides)
    return spec, build_model(spec, config, attention="torch")


def frozen_of(chunks: list[PolicyModel]) -> set[str]:
    return {name for name, parameter in chunks[0].named_parameters() if not parameter.requires_grad}


def test_routers_and_single_experts_can_be_frozen(one_rank: None, tiny_model: Callable[..., Path]) -> None:
    spec, chunks = build(tiny_model(family="qwen3_moe"))
    freeze(chunks, spec, ["*.mlp.gate.weight"])
    assert frozen_of(chunks) == {f"decoder.layers.{layer}.mlp.router.weight" for layer in range(2)}
    freeze(chunks, spec, ["model.layers.1.mlp.experts.2.*"])
    assert frozen_of(chunks) >= {f"decoder.layers.1.mlp.experts.local_experts.2.linear_fc{number}.weight" for number in (1, 2)}


def test_a_bias_that_moves_by_itself_cannot_be_frozen(one_rank: None, tiny_model: Callable[..., Path]) -> None:
    path, patterns = tiny_model(family="deepseek_v3"), ["*.mlp.gate.*"]
    spec, chunks = build(path, moe_router_bias_update_rate=0.01)
    with pytest.raises(UserError, match=r"e_score_correction_bias, but model\.megatron\.moe_router_bias_update_rate 0\.01 moves it"):
        freeze(chunks, spec, patterns)
    spec, chunks = build(path, moe_router_bias_update_rate=0.0)
    freeze(chunks, spec, patterns)
    assert all(name.endswith("mlp.router.weight") for name in frozen_of(chunks)) and frozen_of(chunks)


def test_a_stack_of_experts_is_frozen_by_its_name_in_the_files(tiny_model: Callable[..., Path]) -> None:
    spec = read_model_spec(tiny_model(family="gpt_oss"))
    found = frozen_rules(spec, ["*.1.mlp.experts.down_proj"])
    assert [rule.megatron for rule in found] == [
        f"decoder.layers.1.mlp.experts.local_experts.{expert}.linear_fc2.weight" for expert in range(4)
    ]
