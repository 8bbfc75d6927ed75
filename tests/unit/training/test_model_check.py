"""What a model forbids a run, by its config.json alone."""

import dataclasses
from pathlib import Path

import pytest

from megatron_rl.config.settings import SamplingSettings, TopologySettings
from megatron_rl.errors import UserError
from megatron_rl.models.read_spec import parse_model_spec
from megatron_rl.training.model_check import check_layout, check_tokens
from megatron_rl.training.topology import Topology

OLMO2 = {
    "architectures": ["Olmo2ForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
}


def topology(**sizes):
    return Topology.of(TopologySettings.model_validate(sizes))


def test_a_norm_over_all_heads_needs_a_kv_head_on_every_rank():
    spec = parse_model_spec(OLMO2, origin="config.json")
    check_layout(topology(num_ranks=2, tp=2), spec, {})
    with pytest.raises(UserError, match="tp 4 ranks would share 2 key-value heads, over all of which Olmo2ForCausalLM has one norm"):
        check_layout(topology(num_ranks=4, tp=4), spec, {})
    check_layout(topology(num_ranks=4, tp=4), dataclasses.replace(spec, qk_norm_over_heads=False), {})


def test_experts_with_biases_are_whole(model_spec):
    spec = model_spec("gpt-oss-120b")
    sizes = {"num_ranks": 4, "tp": 2, "ep": 2, "sequence_parallel": True}
    check_layout(topology(**sizes, etp=1), spec, {})
    with pytest.raises(UserError, match=r"etp is 2, but megatron-core keeps experts with biases, .* set training\.topology\.etp to 1"):
        check_layout(topology(**sizes), spec, {})


def test_contexts_that_the_engine_rotates_differently_fail(model_spec):
    spec = model_spec("Phi-4-mini-instruct")

    def check(response):
        check_tokens(spec, path=Path("unused"), max_prompt_tokens=1024, sampling=SamplingSettings(max_response_tokens=response))

    check(3072)
    with pytest.raises(UserError, match=r"1024 \+ .*max_response_tokens 3073 = 4097 tokens, more than the 4096 \(original_max_"):
        check(3073)
