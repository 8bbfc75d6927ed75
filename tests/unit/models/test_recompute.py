"""Recomputed activations: the same gradients bit for bit, by every variant of megatron's own fields, and something is recomputed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl.checkpoints.stored_weights import load_hf_weights
from megatron_rl.config.settings import TopologySettings
from megatron_rl.errors import UserError
from megatron_rl.models.build import PolicyModel, build_model, forward_selected
from megatron_rl.models.megatron_config import transformer_config
from megatron_rl.models.packed_sequences import packed_sequences
from megatron_rl.models.read_spec import read_model_spec

LENGTHS = (9, 10, 1, 80, 3)
LAYERS = 3
FULL = {"recompute_granularity": "full"}
# Overrides, the module that is watched, how often it runs in a forward and a backward of three layers.
VARIANTS: dict[str, tuple[dict[str, Any], str, int]] = {
    "none": ({}, "self_attention.core_attention", 3),
    "full, uniform": ({**FULL, "recompute_method": "uniform", "recompute_num_layers": 1}, "self_attention.core_attention", 6),
    "full, uniform by three": ({**FULL, "recompute_method": "uniform", "recompute_num_layers": 3}, "self_attention.core_attention", 6),
    "full, block": ({**FULL, "recompute_method": "block", "recompute_num_layers": 2}, "self_attention.core_attention", 5),
    "core_attn": ({"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}, "self_attention.core_attention", 6),
    "mlp": ({"recompute_granularity": "selective", "recompute_modules": ["mlp"]}, "mlp.linear_fc1", 6),
    "both": ({"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}, "self_attention.core_attention", 6),
}
MIXTURES = {
    "moe": ({"recompute_granularity": "selective", "recompute_modules": ["moe"]}, "mlp.router", 6),
    "full, moe": ({**FULL, "recompute_method": "uniform", "recompute_num_layers": 1}, "mlp.router", 6),
}


def build(path: Path, overrides: dict[str, Any]) -> PolicyModel:
    spec = read_model_spec(path)
    config = transformer_config(spec, topology=TopologySettings(), dtype=torch.float32, overrides=overrides)
    (model,) = chunks = build_model(spec, config, attention="torch")
    load_hf_weights(chunks, spec, path)
    return model.train()


def gradients(path: Path, overrides: dict[str, Any], watched: str) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients of the log-probs at a few positions, and how often the `watched` module of all layers ran."""
    model, runs = build(path, overrides), []
    for layer in model.decoder.layers:
        layer.get_submodule(watched).register_forward_hook(lambda *_: runs.append(1))
    packed = packed_sequences(np.concatenate([[0], np.cumsum(LENGTHS)]))
    input_ids = torch.randint(1, 32, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([0, 5, 30, 70, 98, 102])
    hidden = forward_selected(model, input_ids, packed.positions[None], packed, positions)
    statistics = model.token_statistics(hidden, targets=input_ids[0, positions - 1], temperature=1.0, vocab_size=32)
    statistics.log_prob.sum().backward()
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad
    return found, len(runs)


def assert_recomputed(path: Path, variants: dict[str, tuple[dict[str, Any], str, int]]) -> None:
    want, _ = gradients(path, {}, "mlp")
    assert all(gradient.any() for name, gradient in want.items() if "expert" not in name)
    for name, (overrides, watched, runs) in variants.items():
        got, seen = gradients(path, overrides, watched)
        assert seen == runs, f"{name}: {watched} ran {seen} times"
        for parameter, gradient in want.items():
            assert torch.equal(got[parameter], gradient), f"{name}: {parameter}"


def test_every_variant_gives_the_same_gradients(one_rank: None, tiny_model: Callable[..., Path]) -> None:
    assert_recomputed(tiny_model(layers=LAYERS), VARIANTS)


def test_experts_that_are_recomputed_give_the_same_gradients(one_rank: None, tiny_model: Callable[..., Path]) -> None:
    assert_recomputed(tiny_model(layers=LAYERS, family="qwen3_moe"), MIXTURES)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"recompute_granularity": "selective", "recompute_modules": ["attention"]}, "Invalid choices for recompute_modules"),
        ({"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}, "only supported with moe_grouped_gemm"),
        ({"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}, "with Transformer Engine only"),
        (FULL, "recompute_method"),
        ({**FULL, "recompute_method": "uniform", "recompute_num_layers": 2}, r"stage 0 has 3 layers, which are not divisible by it"),
    ],
)
def test_what_cannot_be_recomputed_is_refused(
    tiny_model: Callable[..., Path], overrides: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_rl.models.attention.attention_choice.chosen_backends", lambda: {"transformer-engine": "not installed"})
    spec = read_model_spec(tiny_model(layers=LAYERS))
    with pytest.raises(UserError, match=message):
        transformer_config(spec, topology=TopologySettings(), dtype=torch.float32, overrides=overrides)
