"""Hugging Face tensors to parameters and back, split over tensor parallel ranks."""

import dataclasses

import pytest
import torch

from megatron_rl.models.families import Layout, Rule, rules
from megatron_rl.models.layouts import combine, hugging_face_shapes, join, shard, split
from megatron_rl.models.spec import ModelSpec, RotarySpec

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
    rotary=RotarySpec(theta=10000.0),
)


def tensors_of(rule: Rule) -> list[torch.Tensor]:
    return [torch.randn(shape) for shape in hugging_face_shapes(rule, SPEC)]


@pytest.mark.parametrize("tp", (1, 2, 4))
def test_every_parameter_survives_the_round_trip(tp):
    for rule in rules(SPEC):
        tensors = tensors_of(rule)
        whole = combine(rule.layout, tensors, SPEC, tp=tp)
        shards = [shard(rule.layout, whole, tp_rank=rank, tp=tp) for rank in range(tp)]
        assert rule.layout is Layout.REPLICATED or sum(part.numel() for part in shards) == whole.numel()
        back = split(rule.layout, join(rule.layout, shards), SPEC)
        assert all(torch.equal(one, other) for one, other in zip(tensors, back, strict=True)), rule.megatron


def test_qkv_is_stacked_per_group():
    rule = next(rule for rule in rules(SPEC) if rule.layout is Layout.QKV and rule.megatron.endswith("weight"))
    query, key, value = tensors_of(rule)
    whole = combine(rule.layout, [query, key, value], SPEC, tp=1)
    assert torch.equal(whole[:24], torch.cat([query[:12], key[:6], value[:6]]))
    second_rank = shard(rule.layout, whole, tp_rank=1, tp=4)
    assert torch.equal(second_rank, torch.cat([query[12:24], key[6:12], value[6:12]]))


def test_gate_and_up_are_sharded_half_by_half():
    rule = next(rule for rule in rules(SPEC) if rule.layout is Layout.GATE_UP)
    gate, up = tensors_of(rule)
    second_rank = shard(rule.layout, combine(rule.layout, [gate, up], SPEC, tp=2), tp_rank=1, tp=2)
    assert torch.equal(second_rank, torch.cat([gate[10:], up[10:]]))


def test_vocabulary_padding_is_zero_and_as_small_as_tp_allows():
    rule = next(rules(SPEC))
    (embedding,) = tensors_of(rule)
    whole = combine(rule.layout, [embedding], SPEC, tp=4)
    assert whole.shape == (36, 16)
    assert not whole[33:].any()


def test_tied_embeddings_load_twice_and_export_once():
    names = [(rule.megatron, rule.hugging_face, rule.exported) for rule in rules(dataclasses.replace(SPEC, tie_embeddings=True))]
    assert names[0] == ("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), True)
    assert names[-1] == ("output_layer.weight", ("model.embed_tokens.weight",), False)
