"""Latent attention on one rank: gradients against transformers, with every kind of recompute, and what it replaces of megatron-core's."""

import itertools

import numpy as np
import pytest
import torch
import transformers

from megatron_rl.checkpoints.stored_weights import load_hf_weights
from megatron_rl.config.settings import TopologySettings
from megatron_rl.models.attention.latent import LatentAttention, ReplicatedLinear
from megatron_rl.models.build import build_model
from megatron_rl.models.hf_weights import export_hf_weights
from megatron_rl.models.megatron_config import transformer_config
from megatron_rl.models.packed_sequences import packed_sequences
from megatron_rl.models.read_spec import read_model_spec

LENGTHS = (9, 1, 80, 3, 12)
YARN = {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 32, "mscale": 0.707, "mscale_all_dim": 1.0}
MODELS = {
    "yarn": {"rope_scaling": YARN},
    "no query latent, halves rotated": {"q_lora_rank": None, "rope_interleave": False},
    "llama3 scaling": {
        "rope_parameters": {
            **{"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            "original_max_position_embeddings": 32,
        }
    },
}
RECOMPUTED = {
    "nothing": {},
    "layers": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "up projections": {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]},
    "core attention": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "up projections and core attention": {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj", "core_attn"]},
}


def build(path, **overrides):
    spec = read_model_spec(path)
    config = transformer_config(spec, topology=TopologySettings(), dtype=torch.float32, overrides=overrides)
    chunks = build_model(spec, config, attention="torch")
    load_hf_weights(chunks, spec, path)
    return spec, chunks


def inputs():
    """Token ids [1, T], and weights [T, 32] of the logits in the loss."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, 32, (1, sum(LENGTHS)), generator=generator), torch.randn(sum(LENGTHS), 32, generator=generator)


def gradients(path, **overrides):
    spec, chunks = build(path, **overrides)
    input_ids, weights = inputs()
    packed = packed_sequences(np.concatenate([[0], np.cumsum(LENGTHS)]))
    logits = chunks[0].train()(input_ids, packed.positions[None], None, packed_seq_params=packed)
    (logits[0].log_softmax(-1) * weights).sum().backward()
    for parameter in chunks[0].parameters():
        parameter.data = parameter.grad
    return dict(export_hf_weights(chunks, spec))


@pytest.mark.parametrize("model", MODELS)
def test_gradients_equal_transformers(model, tiny_model, one_rank):
    path = tiny_model(family="deepseek_v3", first_k_dense_replace=2, pad_token_id=None, **MODELS[model])
    reference = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    input_ids, weights = inputs()
    for start, stop in itertools.pairwise(np.concatenate([[0], np.cumsum(LENGTHS)])):
        (reference(input_ids[:, start:stop]).logits[0].log_softmax(-1) * weights[start:stop].double()).sum().backward()
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    got = gradients(path)
    assert got.keys() == expected.keys()
    for name, gradient in got.items():
        scale = expected[name].abs().max()
        torch.testing.assert_close(gradient.double() / scale, expected[name] / scale, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("recomputed", list(RECOMPUTED)[1:])
def test_recompute_gives_the_same_gradients(recomputed, tiny_model, one_rank):
    path = tiny_model(family="deepseek_v3", rope_scaling=YARN)
    expected = gradients(path)
    for name, gradient in gradients(path, **RECOMPUTED[recomputed]).items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-6 * float(expected[name].abs().max()), msg=name)


def test_down_projections_are_replicated(tiny_model, one_rank):
    _, (model,) = build(tiny_model(family="deepseek_v3"))
    layers = [module for module in model.modules() if isinstance(module, LatentAttention)]
    assert len(layers) == 2
    for layer in layers:
        assert isinstance(layer.linear_q_down_proj, ReplicatedLinear) and isinstance(layer.linear_kv_down_proj, ReplicatedLinear)
        assert not layer.linear_kv_down_proj.weight.sequence_parallel
        assert layer.q_layernorm.weight.average_gradients_across_tp_domain, "else megatron sums it over tensor parallel ranks, by its name"


def test_the_softmax_scale_is_yarns(tiny_model, one_rank):
    path = tiny_model(family="deepseek_v3", rope_scaling=YARN)
    _, (model,) = build(path)
    (layer, _) = [module for module in model.modules() if isinstance(module, LatentAttention)]
    reference = transformers.AutoModelForCausalLM.from_pretrained(path).model.layers[0].self_attn
    assert layer.core_attention.scale == pytest.approx(reference.scaling, rel=1e-12)
