"""Topologies that fit, and the arithmetic shown for those that do not."""

import dataclasses

import pytest
import torch
from megatron.core.parallel_state import RankGenerator

from megatron_rl.config.settings import TopologySettings
from megatron_rl.errors import UserError
from megatron_rl.models.megatron_config import transformer_config
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.read_spec import parse_model_spec
from megatron_rl.training.topology import Topology

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "intermediate_size": 96,
}


def model(**sizes: int) -> ModelSpec:
    return dataclasses.replace(parse_model_spec({**QWEN3, "num_hidden_layers": 1}, origin="config.json"), **sizes)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_ranks": 8, "tp": 2, "pp": 2},
        {"num_ranks": 8, "tp": 2, "cp": 2},
        {"num_ranks": 8, "ep": 2},
        {"num_ranks": 16, "tp": 4, "pp": 2, "ep": 2, "etp": 1, "sequence_parallel": True},
        {"num_ranks": 16, "tp": 2, "cp": 2, "ep": 4, "etp": 2, "sequence_parallel": True},
        {"num_ranks": 12, "tp": 2, "ep": 3, "etp": 1, "sequence_parallel": True},
    ],
    ids=str,
)
def test_who_gathers_for_a_rank_is_who_megatron_groups_with_it(settings: dict[str, int]) -> None:
    """Directly or by way of others: a rank that is missing would be waited for, one too many gathers a copy for nobody."""
    topology = Topology.of(TopologySettings.model_validate(settings))
    sizes = {"pp": topology.pp, "order": "tp-cp-ep-dp-pp"}
    dense = RankGenerator(tp=topology.tp, ep=1, dp=topology.dp, cp=topology.cp, **sizes)
    expert = RankGenerator(tp=topology.etp, ep=topology.ep, dp=topology.expert_dp, cp=1, **sizes)
    together = [{rank} for rank in range(topology.num_ranks)]
    for group in (*dense.get_ranks("tp-pp"), *expert.get_ranks("tp-ep-pp")):
        joined = set.union(*(together[rank] for rank in group))
        for rank in joined:
            together[rank] = joined
    for rank in range(topology.num_ranks):
        for receiver in range(topology.num_ranks):
            assert topology.gathers_for([receiver], rank=rank) == (receiver in together[rank])
    assert not topology.gathers_for([], rank=0)
    assert topology.gathers_for(range(topology.num_ranks), rank=0)


def test_data_parallel_size_follows_and_is_printed() -> None:
    topology = Topology.of(TopologySettings(num_ranks=8, tp=2, pp=2))
    assert topology.dp == 2
    assert str(topology) == "8 ranks = tp 2 × pp 2 × cp 1 × dp 2"
    assert str(Topology.of(TopologySettings())) == "1 rank = tp 1 × pp 1 × cp 1 × dp 1"
    assert str(Topology.of(TopologySettings(num_ranks=4, tp=2, pp=2, vpp=2, sequence_parallel=True))).endswith("(vpp 2, sequence parallel)")


def test_experts_divide_the_same_ranks_and_stages_are_adjacent() -> None:
    topology = Topology.of(TopologySettings(num_ranks=24, tp=4, pp=3, ep=4, etp=1, sequence_parallel=True))
    assert (topology.dp, topology.expert_dp) == (2, 2)
    assert Topology.of(TopologySettings(num_ranks=24, tp=4, pp=3, sequence_parallel=True)).expert_dp == 2
    assert Topology.of(TopologySettings(num_ranks=24, tp=2, pp=3, ep=4, etp=2, sequence_parallel=True)).expert_dp == 1
    assert [topology.first_rank(stage) for stage in range(3)] == [0, 8, 16]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_ranks": 6, "tp": 4}, "6 ranks cannot be divided by tp 4 × pp 1 × cp 1 = 4, .*num_ranks to 4 or 8"),
        ({"num_ranks": 4, "tp": 2, "ep": 4}, "4 ranks cannot be divided by etp 2 × ep 4 × pp 1 = 8"),
        ({"num_ranks": 1, "vpp": 2}, "vpp is 2 with pp 1"),
        ({"num_ranks": 1, "sequence_parallel": True}, "tp 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_arithmetic(settings: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Topology.of(TopologySettings.model_validate(settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"num_ranks": 8, "pp": 2, "vpp": 2},
            r"num_layers 6 is not divisible by pp·vpp 4.*\[1, 2, 3, 6\], or set model\.megatron\.num_layers_in_last_pipeline_stage 2$",
        ),
        ({"num_ranks": 5, "tp": 5}, r"12 attention heads are not divisible by tp 5.*\[1, 2, 3, 4, 6, 12\]"),
        ({"num_ranks": 3, "tp": 3}, r"2 KV groups are neither a multiple nor a divisor of tp 3; choose tp among \[1, 2, 4, 6, 12\]"),
    ],
)
def test_models_that_cannot_be_divided_are_refused(settings: dict[str, int], message: str) -> None:
    topology = Topology.of(TopologySettings.model_validate(settings))
    with pytest.raises(UserError, match=message):
        topology.check_model(model(num_layers=6, num_heads=12, num_kv_heads=2, ffn_hidden_size=24), {})


def check_stages(num_layers: int, *, pp: int, vpp: int = 1, **megatron: object) -> None:
    topology = Topology.of(TopologySettings(num_ranks=pp, pp=pp, vpp=vpp))
    topology.check_model(model(num_layers=num_layers, num_heads=4, num_kv_heads=4, ffn_hidden_size=16), megatron)


def ends(first: object, last: object) -> dict[str, object]:
    return {"num_layers_in_first_pipeline_stage": first, "num_layers_in_last_pipeline_stage": last}


@pytest.mark.parametrize(
    ("num_layers", "pp", "vpp", "first", "last"),
    [
        *((61, 2, 1, 31, 30), (61, 8, 1, 7, 6), (61, 16, 1, 3, 2)),
        *((94, 4, 1, 23, 23), (94, 8, 1, 11, 11), (94, 16, 1, 5, 5), (94, 4, 2, 24, 22)),
        *((46, 4, 1, 11, 11), (46, 8, 1, 5, 5), (92, 8, 1, 10, 10), (92, 16, 1, 4, 4)),
    ],
)
def test_numbers_of_layers_that_are_suggested_fit(num_layers: int, pp: int, vpp: int, first: int, last: int) -> None:
    with pytest.raises(UserError, match=rf"first_pipeline_stage {first} and num_layers_in_last_pipeline_stage {last}$"):
        check_stages(num_layers, pp=pp, vpp=vpp)
    check_stages(num_layers, pp=pp, vpp=vpp, **ends(first, last))
    topology = TopologySettings(num_ranks=pp, pp=pp, vpp=vpp)
    spec = parse_model_spec({**QWEN3, "num_hidden_layers": num_layers}, origin="config.json")
    transformer_config(spec, topology=topology, dtype=torch.float32, overrides=ends(first, last))


@pytest.mark.parametrize(
    ("num_layers", "pp", "vpp", "megatron", "message"),
    [
        (61, 4, 1, ends(16, 14), r"61 - 16 \(num_layers_in_first_pipeline_stage\) - 14 \(.*\) = 31 layers for the 2 other pipeline stages"),
        (61, 4, 1, ends(None, 14), "= 47 layers for the 3 other pipeline stages"),
        (6, 2, 1, ends(4, 1), "= 1 layers for the 0 other pipeline stages"),
        (6, 2, 2, ends(3, None), "the same multiple of vpp 2"),
        (6, 2, 2, ends(4, 2), "both set, but with pp 2 and vpp 2 megatron-core takes one of them; remove num_layers_in_first"),
        (3, 1, 1, ends(2, 1), "= 0 layers for the 0 other pipeline stages"),
        (6, 2, 1, ends("4", 2), "num_layers_in_first_pipeline_stage is '4', needs a number of layers"),
        (6, 2, 1, ends(6, 0), "at least one layer"),
        (5, 2, 1, {"account_for_loss_in_pipeline_split": True}, "account_for_loss_in_pipeline_split is set, which is not supported"),
        (3, 8, 1, {}, "no numbers fit 3 layers, pp 8 and vpp 1"),
        (61, 4, 2, {}, "no numbers fit 61 layers, pp 4 and vpp 2"),
    ],
)
def test_stages_that_cannot_be_are_refused(num_layers: int, pp: int, vpp: int, megatron: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_stages(num_layers, pp=pp, vpp=vpp, **megatron)


def test_a_layout_of_stages_is_left_to_megatron() -> None:
    layout = {"pipeline_model_parallel_layout": "Et*2|t*1L"}
    check_stages(3, pp=2, **layout)
    spec = parse_model_spec({**QWEN3, "num_hidden_layers": 3}, origin="config.json")
    transformer_config(spec, topology=TopologySettings(num_ranks=2, pp=2), dtype=torch.float32, overrides=layout)
    with pytest.raises(UserError, match=r"megatron-core refuses .*must match num_layers 3"):
        transformer_config(
            spec,
            topology=TopologySettings(num_ranks=2, pp=2),
            dtype=torch.float32,
            overrides={"pipeline_model_parallel_layout": "Et*2|t*2L"},
        )
    with pytest.raises(UserError, match=r"layout has 2 virtual stages .* vpp is 1; set training\.topology\.vpp to 2"):
        transformer_config(
            spec,
            topology=TopologySettings(num_ranks=2, pp=2),
            dtype=torch.float32,
            overrides={"pipeline_model_parallel_layout": "Et|t|t|L"},
        )
