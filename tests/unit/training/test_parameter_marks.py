"""Marks that decide which ranks count a parameter's gradient, against the layout in the weight table."""

import pytest
import torch

from megatron_rl.config.settings import TopologySettings
from megatron_rl.models.build import build_model
from megatron_rl.models.hf_weights import global_parameters
from megatron_rl.models.megatron_config import transformer_config
from megatron_rl.models.read_spec import read_model_spec
from megatron_rl.training.trained_model import mark_parameters

REPLICATED = "decoder.layers.0.self_attention.linear_kv_down_proj.weight"
EXPERT = "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight"
SPLIT = "decoder.layers.0.self_attention.linear_proj.weight"


@pytest.fixture
def built(tiny_model, one_rank):
    spec = read_model_spec(tiny_model(family="deepseek_v3"))
    config = transformer_config(spec, topology=TopologySettings(), dtype=torch.float32, overrides={})
    return build_model(spec, config, attention="torch"), spec


def test_the_marks_follow_the_layout_whatever_upstream_set(built):
    chunks, spec = built
    parameters = global_parameters(chunks)
    # As megatron-core 0.16 leaves the one, and Transformer Engine 2.18 the other.
    vars(parameters[REPLICATED])["tensor_model_parallel"] = True
    del vars(parameters[EXPERT])["tensor_model_parallel"]
    mark_parameters(chunks, spec)
    marks = {name: vars(parameters[name])["tensor_model_parallel"] for name in (REPLICATED, EXPERT, SPLIT)}
    assert marks == {REPLICATED: False, EXPERT: True, SPLIT: True}


@pytest.mark.parametrize(
    ("name", "mark", "value", "message"),
    [
        (REPLICATED, "sequence_parallel", True, "kv_down_proj.weight is replicated with sequence parallelism False, but its mark"),
        (SPLIT, "sequence_parallel", True, "linear_proj.weight is columns with sequence parallelism False, but its mark"),
        (SPLIT, "allreduce", False, "linear_proj.weight is not of an expert, but its mark allreduce is False"),
        (EXPERT, "allreduce", False, "linear_fc1.weight is of an expert, but its mark allreduce is False"),
    ],
)
def test_a_gradient_summed_over_wrong_ranks_stops_the_start(built, name, mark, value, message):
    chunks, spec = built
    vars(global_parameters(chunks)[name])[mark] = value
    with pytest.raises(AssertionError, match=message):
        mark_parameters(chunks, spec)


def test_a_parameter_without_a_row_in_the_table_stops_the_start(built):
    chunks, spec = built
    chunks[0].decoder.register_parameter("surprise", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(AssertionError, match=r"no row for decoder\.surprise"):
        mark_parameters(chunks, spec)
