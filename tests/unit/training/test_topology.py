"""Topologies that fit, and the arithmetic shown for those that do not."""

import pytest

from megatron_rl.config.settings import TopologySettings
from megatron_rl.errors import UserError
from megatron_rl.training.topology import Topology


def test_data_parallel_size_follows_and_is_printed() -> None:
    topology = Topology.of(TopologySettings(num_ranks=8, tp=2, pp=2))
    assert topology.dp == 2
    assert str(topology) == "8 ranks = tp 2 × pp 2 × cp 1 × dp 2"
    assert str(Topology.of(TopologySettings(num_ranks=4, tp=2, pp=2, vpp=2, sequence_parallel=True))).endswith("(vpp 2, sequence parallel)")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_ranks": 6, "tp": 4}, r"6 ranks = tp 4 × pp 1 × cp 1 × dp 1\.5, .* multiple of 4"),
        ({"num_ranks": 4, "tp": 2, "ep": 4}, r"4 ranks = etp 2 × ep 4 × pp 1 × expert dp 0\.5"),
        ({"num_ranks": 1, "vpp": 2}, "vpp is 2 with pp 1"),
        ({"num_ranks": 1, "sequence_parallel": True}, "tp 1"),
    ],
)
def test_sizes_that_do_not_fit_each_other_are_refused_with_the_arithmetic(settings: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Topology.of(TopologySettings.model_validate(settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_ranks": 8, "pp": 2, "vpp": 2}, r"num_layers 6 is not divisible by pp·vpp 4.*\[1, 2, 3, 6\]"),
        ({"num_ranks": 4, "tp": 4}, r"2 KV groups are not divisible by tp 4.*\[1, 2\]"),
    ],
)
def test_models_that_cannot_be_divided_are_refused(settings: dict[str, int], message: str) -> None:
    topology = Topology.of(TopologySettings.model_validate(settings))
    with pytest.raises(UserError, match=message):
        topology.check_model(num_layers=6, num_heads=4, num_kv_groups=2, ffn_size=24)
