"""Hugging Face tensors to parameters and back, split over tensor parallel ranks."""

import dataclasses
import math

import pytest
import torch

from megatron_rl.models.attention.rotary import RotarySpec
from megatron_rl.models.experts.moe_spec import MoeSpec
from megatron_rl.models.hf_weights import _with_global_expert
from megatron_rl.models.model_spec import ModelSpec, TensorNames
from megatron_rl.models.weight_table import (
    Rule,
    Sharding,
    combine,
    fill,
    join,
    parameter_shape,
    rules,
    shard,
    split,
    stored_name,
    tensor_shapes,
)

SPEC = ModelSpec(
    architecture="Qwen2ForCausalLM",
    vocab_size=33,
    hidden_size=16,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    head_dim=6,
    ffn_hidden_size=20,
    norm_epsilon=1e-6,
    tie_embeddings=False,
    qkv_bias=True,
    qk_norm=True,
    max_position_embeddings=64,
    rotary=RotarySpec(theta=10000.0, frequencies=(1.0,)),
)


MOE = MoeSpec(3, 2, 8, True, num_dense_layers=1, shared_ffn_hidden_size=12, score_function="sigmoid", expert_bias=True)
EXPERTS = dataclasses.replace(SPEC, moe=MOE)
STACKED = dataclasses.replace(
    SPEC,
    moe=MoeSpec(3, 2, 8, True),
    linear_bias=True,
    attention_sinks=True,
    names=TensorNames(router="router", stacked_experts=True),
)


def tensors_of(rule: Rule) -> list[torch.Tensor]:
    return [torch.randn(tensor.shape) for tensor in rule.tensors]


@pytest.mark.parametrize("spec", (SPEC, EXPERTS, STACKED), ids=("dense", "experts", "stacked experts"))
@pytest.mark.parametrize("tp", (1, 2, 4))
def test_every_parameter_survives_the_round_trip(tp, spec):
    for rule in rules(spec):
        tensors = tensors_of(rule)
        whole = combine(rule.sharding, tensors, SPEC, tp=tp)
        assert rule.sharding is Sharding.VOCABULARY or parameter_shape(rule) == tuple(whole.shape)
        shards = [shard(rule.sharding, whole, tp_rank=rank, tp=tp) for rank in range(tp)]
        assert rule.sharding is Sharding.REPLICATED or sum(part.numel() for part in shards) == whole.numel()
        for rank, part in enumerate(shards):
            parameter = torch.full(part.shape, math.nan)
            fill(parameter, rule.sharding, tensors, SPEC, tp_rank=rank, tp=tp)
            assert torch.equal(parameter, part), rule.megatron
        back = split(rule.sharding, join(rule.sharding, shards), SPEC)
        assert all(torch.equal(one, other) for one, other in zip(tensors, back, strict=True)), rule.megatron


def test_qkv_is_stacked_per_group():
    rule = next(rule for rule in rules(SPEC) if rule.sharding is Sharding.QKV and rule.megatron.endswith("weight"))
    query, key, value = tensors_of(rule)
    whole = combine(rule.sharding, [query, key, value], SPEC, tp=1)
    assert torch.equal(whole[:24], torch.cat([query[:12], key[:6], value[:6]]))
    second_rank = shard(rule.sharding, whole, tp_rank=1, tp=4)
    assert torch.equal(second_rank, torch.cat([query[12:24], key[6:12], value[6:12]]))


def test_gate_and_up_are_sharded_half_by_half():
    rule = next(rule for rule in rules(SPEC) if rule.sharding is Sharding.GATE_UP)
    gate, up = tensors_of(rule)
    second_rank = shard(rule.sharding, combine(rule.sharding, [gate, up], SPEC, tp=2), tp_rank=1, tp=2)
    assert torch.equal(second_rank, torch.cat([gate[10:], up[10:]]))


def test_stacked_experts_are_taken_apart_and_stacked_again():
    shapes = dict(tensor_shapes(STACKED))
    experts = {name.removeprefix("model.layers.1.mlp."): shape for name, shape in shapes.items() if name.startswith("model.layers.1.mlp.")}
    assert experts == {
        "router.weight": (3, 16),
        "router.bias": (3,),
        "experts.gate_up_proj": (3, 16, 16),
        "experts.gate_up_proj_bias": (3, 16),
        "experts.down_proj": (3, 8, 16),
        "experts.down_proj_bias": (3, 16),
    }
    by_name = {rule.megatron: rule for rule in rules(STACKED)}
    first = by_name["decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight"]
    assert first.hugging_face == ("model.layers.1.mlp.experts.2.gate_up_proj",) and first.of_expert
    # Gate and up are in turns in the columns of the file; the second of two ranks has the second half of each.
    stored = torch.arange(16 * 16.0).view(16, 16)
    second = shard(first.sharding, combine(first.sharding, [stored], STACKED, tp=2), tp_rank=1, tp=2)
    assert torch.equal(second, torch.cat([stored[:, 0::2].T[4:], stored[:, 1::2].T[4:]]))
    bias = by_name["decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.bias"]
    assert torch.equal(combine(bias.sharding, [stored[0]], STACKED, tp=1), torch.cat([stored[0, 0::2], stored[0, 1::2]]))
    down = by_name["decoder.layers.1.mlp.experts.local_experts.2.linear_fc2.weight"]
    assert torch.equal(shard(down.sharding, combine(down.sharding, [stored[:8]], STACKED, tp=2), tp_rank=1, tp=2), stored[4:8].T)
    parts = [(name, shape) for rule in rules(STACKED) for name, shape in ((tensor.name, tensor.shape) for tensor in rule.tensors)]
    assert [stored_name(name) for name, _ in parts if ".1.mlp.experts." in name][:4] == ["model.layers.1.mlp.experts.gate_up_proj"] * 3 + [
        "model.layers.1.mlp.experts.gate_up_proj_bias"
    ]


def test_vocabulary_padding_is_zero_and_as_small_as_tp_allows():
    rule = next(rules(SPEC))
    (embedding,) = tensors_of(rule)
    whole = combine(rule.sharding, [embedding], SPEC, tp=4)
    assert whole.shape == (36, 16)
    assert not whole[33:].any()


def test_tied_embeddings_load_twice_and_export_once():
    names = [(rule.megatron, rule.hugging_face, rule.exported) for rule in rules(dataclasses.replace(SPEC, tie_embeddings=True))]
    assert names[0] == ("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), True)
    assert names[-1] == ("output_layer.weight", ("model.embed_tokens.weight",), False)


def test_a_dense_layer_comes_before_layers_of_experts():
    shapes = dict(tensor_shapes(EXPERTS))
    assert shapes["model.layers.0.mlp.down_proj.weight"] == (16, 20)
    assert "model.layers.0.mlp.gate.weight" not in shapes
    assert shapes["model.layers.1.mlp.gate.weight"] == (3, 16)
    assert shapes["model.layers.1.mlp.gate.e_score_correction_bias"] == (3,)
    assert shapes["model.layers.1.mlp.shared_experts.up_proj.weight"] == (12, 16)
    assert shapes["model.layers.1.mlp.experts.2.down_proj.weight"] == (16, 8)
    assert "model.layers.1.mlp.experts.3.down_proj.weight" not in shapes


def test_only_single_experts_are_split_like_experts():
    marked = [rule for rule in rules(EXPERTS) if rule.of_expert]
    assert len(marked) == 2 * 3
    assert all(".experts." in rule.megatron for rule in marked)
    assert marked[-1].megatron == "decoder.layers.1.mlp.experts.local_experts.2.linear_fc2.weight"
    assert marked[-1].transformer_engine == "decoder.layers.1.mlp.experts.linear_fc2.weight2"
    assert [rule.megatron for rule in rules(EXPERTS) if rule.float32] == ["decoder.layers.1.mlp.router.expert_bias"]


def test_local_experts_are_counted_over_all_ranks():
    assert _with_global_expert("mlp.experts.local_experts.1.linear_fc1.weight", 4) == "mlp.experts.local_experts.5.linear_fc1.weight"
    assert _with_global_expert("mlp.experts.linear_fc2.weight13", 4) == "mlp.experts.linear_fc2.weight17"
    for name in ("mlp.shared_experts.linear_fc1.weight", "mlp.linear_fc1.weight", "mlp.router.weight"):
        assert _with_global_expert(name, 4) == name
