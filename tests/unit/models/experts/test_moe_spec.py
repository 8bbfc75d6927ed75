"""Experts read from config.json, megatron-core's fields for them, and layouts that cannot hold them."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import transformers

from megatron_rl.config.settings import TopologySettings
from megatron_rl.errors import UserError
from megatron_rl.models.experts.moe_fields import check_expert_layout
from megatron_rl.models.experts.moe_spec import MoeSpec
from megatron_rl.models.megatron_config import transformer_config
from megatron_rl.models.read_spec import parse_model_spec, read_model_spec

COMMON = {
    "vocab_size": 32,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "intermediate_size": 96,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
GPT_OSS = json.loads((Path(__file__).parents[3] / "data" / "configs" / "gpt-oss-120b.json").read_text(encoding="utf-8"))
QWEN3 = {**COMMON, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "decoder_sparse_step": 1, "mlp_only_layers": []}
GLM = {
    **COMMON,
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "use_qk_norm": True,
    "partial_rotary_factor": 0.5,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
}


def spec_of(config=GLM, **changes):
    return parse_model_spec(config | changes, origin="config.json")


def moe_of(config=GLM, **changes):
    moe = spec_of(config, **changes).moe
    assert moe is not None
    return moe


def config_of(spec, overrides=None, *, attention="torch", **topology):
    return transformer_config(
        spec,
        topology=TopologySettings(**topology),
        dtype=torch.float32 if attention == "torch" else torch.bfloat16,
        overrides=overrides or {},
        attention=attention,
    )


def test_qwen3():
    assert moe_of(QWEN3) == MoeSpec(8, 2, 24, normalize_top_k=False)
    assert moe_of(QWEN3, norm_topk_prob=True).normalize_top_k
    assert moe_of({key: value for key, value in QWEN3.items() if key != "num_experts"}, num_local_experts=6).num_experts == 6


def test_glm():
    spec = spec_of()
    assert spec.moe == MoeSpec(8, 4, 24, True, 1, 48, "sigmoid", True, 4, 2, 2.5)
    assert (spec.qkv_bias, spec.qk_norm, spec.rotary_dim, spec.num_mtp_layers) == (True, True, 8, 1)
    assert [spec.moe.is_dense(layer) for layer in range(4)] == [True, False, False, False]
    plain = spec_of(attention_bias=False, use_qk_norm=False, n_shared_experts=0, n_group=1, topk_group=1)
    assert (plain.qkv_bias, plain.qk_norm, plain.moe.shared_ffn_hidden_size, plain.moe.num_groups) == (False, False, 0, None)


def test_a_model_whose_layers_are_all_dense_has_no_experts():
    spec = spec_of(first_k_dense_replace=4)
    assert spec.moe is None
    assert config_of(spec).num_moe_experts is None


def test_both_spellings_of_the_number_of_mtp_layers_count():
    assert spec_of(num_nextn_predict_layers=None, num_mtp_layers=2).num_mtp_layers == 2
    assert spec_of(num_nextn_predict_layers=0).num_mtp_layers == 0


@pytest.mark.parametrize("name", ("Glm4Moe", "DeepseekV3"))
def test_every_key_that_transformers_writes_is_accounted_for(name, tmp_path):
    config = getattr(transformers, f"{name}Config")()
    config.architectures = [f"{name}ForCausalLM"]
    config.save_pretrained(tmp_path)
    spec = read_model_spec(tmp_path)
    assert spec.moe is not None
    assert (spec.moe.num_experts, spec.moe.num_dense_layers) == (config.n_routed_experts, config.first_k_dense_replace)
    assert spec.num_mtp_layers == 1


def test_fields_reach_megatron():
    config = config_of(spec_of())
    assert config.moe_layer_freq == [0, 1, 1, 1]
    assert (config.num_moe_experts, config.moe_ffn_hidden_size, config.moe_shared_expert_intermediate_size) == (8, 24, 48)
    assert (config.moe_router_topk, config.moe_router_num_groups, config.moe_router_group_topk) == (4, 4, 2)
    assert (config.moe_router_score_function, config.moe_router_topk_scaling_factor) == ("sigmoid", 2.5)
    assert (config.moe_router_enable_expert_bias, config.moe_router_bias_update_rate, config.moe_router_dtype) == (True, 0.0, "fp32")
    assert (config.moe_token_dispatcher_type, config.moe_grouped_gemm, config.moe_aux_loss_coeff) == ("alltoall", False, 0.0)
    softmax = config_of(spec_of(QWEN3), {"moe_token_dispatcher_type": "allgather"}, num_ranks=2, ep=2)
    assert (softmax.moe_router_pre_softmax, softmax.moe_router_enable_expert_bias, softmax.moe_layer_freq) == (True, False, [1, 1, 1, 1])
    assert (softmax.moe_token_dispatcher_type, softmax.expert_model_parallel_size) == ("allgather", 2)
    assert config_of(spec_of(QWEN3), attention="transformer_engine").moe_grouped_gemm


@pytest.mark.parametrize(
    ("overrides", "message"),
    (
        ({"num_moe_experts": 4}, "num_moe_experts is 4, but the checkpoint needs 8"),
        ({"moe_router_topk_scaling_factor": 1.0}, r"is 1\.0, but the checkpoint needs 2\.5"),
        ({"moe_grouped_gemm": True}, "moe_grouped_gemm is True, but the trainer"),
        ({"moe_expert_capacity_factor": 1.0}, r"moe_expert_capacity_factor is 1\.0, which makes a token's experts depend on the other"),
        ({"moe_router_force_load_balancing": True}, "but the checkpoint needs False"),
    ),
)
def test_overrides_that_cannot_be_are_refused(overrides, message):
    with pytest.raises(UserError, match=message):
        config_of(spec_of(), overrides)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    (
        (QWEN3, {"num_experts": None}, "has num_experts = None, needs a positive integer"),
        (QWEN3, {"decoder_sparse_step": 2}, "sets decoder_sparse_step to 2, only 1 is supported"),
        (QWEN3, {"mlp_only_layers": [0]}, r"sets mlp_only_layers to \[0\]"),
        (QWEN3, {"attention_bias": True}, "sets attention_bias to True"),
        (QWEN3, {"n_group": 2}, "has the key n_group = 2, whose effect on Qwen3MoeForCausalLM is not known"),
        (QWEN3, {"num_experts_per_tok": 9}, "takes 9 of 8 experts"),
        (QWEN3, {"num_experts_per_tok": 1, "norm_topk_prob": True}, "num_experts_per_tok 1 .* needs 2 or more: .* use another model"),
        (GPT_OSS, {"num_experts_per_tok": 1}, "num_experts_per_tok 1 .* needs 2 or more: .* use another model"),
        (GLM, {"n_shared_experts": None}, "has n_shared_experts = None, needs an integer >= 0"),
        (GLM, {"first_k_dense_replace": True}, "has first_k_dense_replace = True"),
        (GLM, {"scoring_func": "softmax"}, "sets scoring_func to 'softmax', only 'sigmoid'"),
        (GLM, {"topk_method": "greedy"}, "sets topk_method to 'greedy', only 'noaux_tc'"),
        (GLM, {"moe_layer_freq": 2}, "sets moe_layer_freq to 2"),
        (GLM, {"norm_topk_prob": False}, "norm_topk_prob False with 4 experts per token"),
        (GLM, {"n_group": 3}, "8 experts in 3 groups"),
        (GLM, {"topk_group": 5}, "takes experts from 5 of 4 groups"),
        *(
            (GLM, {key: "false"}, f"has {key} = 'false', needs true or false")
            for key in ("attention_bias", "use_qk_norm", "norm_topk_prob")
        ),
        (QWEN3, {"norm_topk_prob": "false"}, "has norm_topk_prob = 'false', needs true or false"),
        *((GLM, {"num_nextn_predict_layers": value}, f"= {value!r}, needs an integer >= 0") for value in ("one", -1, 1.0, True)),
        *((GLM, {"routed_scaling_factor": value}, f"= {value!r}, needs a positive number") for value in ("2.5", 0, -1, None)),
        (GLM, {"partial_rotary_factor": 0.01}, "rotates 0 of 16 channels"),
        (GLM, {"n_group": None}, "has n_group = None, needs a positive integer"),
        (GLM, {"topk_group": "2"}, "has topk_group = '2', needs a positive integer"),
        (GLM, {"num_experts_per_tok": 6}, "compare groups by their best 3, the model compares them by their best 2"),
    ),
)
def test_what_is_not_supported_is_refused(config, changes, message):
    with pytest.raises(UserError, match=message):
        spec_of(config, **changes)


@pytest.mark.parametrize(
    ("topology", "message"),
    (
        ({"num_ranks": 6, "ep": 3}, r"ep is 3, but 8 experts / 3 ranks is not a whole number; choose ep among \[1, 2\]"),
        ({"num_ranks": 12, "pp": 2, "ep": 3, "etp": 2}, r"ep is 3, .* choose ep among \[1\]"),
        ({"num_ranks": 16, "ep": 16}, "8 experts / 16 ranks"),
        ({"num_ranks": 10, "ep": 2, "etp": 5}, "the 24 columns of an expert / 5 ranks is not a whole number"),
        ({"num_ranks": 5, "tp": 5, "etp": 5, "sequence_parallel": True}, "the 24 columns of an expert / 5 ranks"),
        ({"num_ranks": 2, "tp": 2}, "tp is 2 without sequence parallelism, but experts"),
        ({"num_ranks": 2, "tp": 2, "etp": 1, "sequence_parallel": True}, "etp is 1 with tp 2 and ep 1, but megatron-core sums"),
    ),
)
def test_layouts_that_cannot_hold_the_experts_are_refused(topology, message):
    with pytest.raises(UserError, match=message):
        config_of(spec_of(), **topology)


def test_shared_experts_are_divided_by_tp():
    moe = dataclasses.replace(moe_of(), shared_ffn_hidden_size=25)
    with pytest.raises(UserError, match="the 25 columns of the shared experts / 2 ranks"):
        check_expert_layout(moe, TopologySettings(num_ranks=2, tp=2, sequence_parallel=True))
