"""Operations, bytes and messages of a step against loops and numbers worked out by hand; tests/trainer counts what a real step computes."""

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_rl.config.settings import Settings
from megatron_rl.planning.step_time import Flops, ModelSize, Rates, Step, causal_pairs
from megatron_rl.training.topology import Topology

LENGTHS = np.array([1, 5, 17, 4])
DENSE = SimpleNamespace(num_layers=3, hidden_size=8, vocab_size=11, num_heads=4, num_kv_heads=2, head_dim=5, value_dim=3)
DENSE.moe, DENSE.ffn_hidden_size, DENSE.sliding_layers, DENSE.sliding_window = None, 7, (), None
MOE = SimpleNamespace(**vars(DENSE) | {"moe": SimpleNamespace(num_experts_per_token=2, ffn_hidden_size=6, shared_ffn_hidden_size=9)})
RATES = Rates(products=2.0, attention=3.0, memory=5.0, node=7.0, network=11.0)
SINGLE = Topology(num_ranks=1, tp=1, pp=1, vpp=1, cp=1, dp=1, ep=1, etp=1, sequence_parallel=False)


def size_of(spec: Any, *, experts: int = 0) -> ModelSize:
    return ModelSize(spec, dense=1000, experts=experts, multiplied=70.5)


def step_of(spec: Any = DENSE, *, experts: int = 0, **fields: Any) -> Step:
    size = size_of(spec, experts=experts)
    options = {"topology": SINGLE, "num_tokens": int(LENGTHS.sum()), "num_micro_batches": 2, **fields}
    return Step(size, Flops.of(size, LENGTHS, num_targets=20), **options)


@pytest.mark.parametrize("window", [None, 1, 4, 5, 100])
def test_pairs_are_those_of_a_loop(window: int | None) -> None:
    visible = sum(max(0, query - key) < (window or math.inf) for length in LENGTHS for query in range(length) for key in range(query + 1))
    assert causal_pairs(LENGTHS, window=window) == visible


def test_a_forward_pass_is_two_operations_per_weight_and_pair() -> None:
    found = Flops.of(size_of(DENSE), LENGTHS, num_targets=20)
    pairs = causal_pairs(LENGTHS)
    # Scores have the 5 channels of a key, sums the 3 of a value.
    assert found == Flops(layers=2 * 70.5 * 27, attention=3 * pairs * 4 * (2 * 5 + 2 * 3), head=2 * 20 * 11 * 8)
    assert Flops.of(size_of(DENSE), LENGTHS).head == 2 * 27 * 11 * 8
    windowed = SimpleNamespace(**vars(DENSE) | {"sliding_layers": (0, 2), "sliding_window": 4})
    seen = pairs + 2 * causal_pairs(LENGTHS, window=4)
    assert Flops.of(size_of(windowed), LENGTHS).attention == seen * 4 * 16


@pytest.mark.parametrize(
    ("recompute", "products", "scores"), [(None, 3 * 100 + 4 * 7, 35), ("selective", 3 * 100 + 4 * 7, 45), ("full", 4 * 100 + 4 * 7, 45)]
)
def test_what_is_recomputed_takes_another_forward_pass(recompute: str | None, products: float, scores: float) -> None:
    flops = Flops(layers=100, attention=10, head=7)
    assert (flops.products(recompute=recompute), flops.scores(recompute=recompute)) == (products, scores)


def test_sizes_of_known_models(model_spec: Callable[[str], Any]) -> None:
    """Qwen3-4B, whose head is its embedding, and Qwen3-30B-A3B with its published 30.5 B parameters; a token meets 8 of 128 experts."""
    dense, mixture = (ModelSize.of(model_spec(name)) for name in ("Qwen3-4B", "Qwen3-30B-A3B"))
    width = 32 * 128
    layer = 2560 * (2 * width + 2 * 8 * 128 + 3 * 9728)
    assert (dense.multiplied, dense.experts) == (36 * layer, 0)
    assert dense.dense == 36 * layer + 151936 * 2560 + 36 * (2 * 2560 + 2 * 128) + 2560
    expert = 3 * 2048 * 768
    assert mixture.experts == 48 * 128 * expert
    assert mixture.multiplied == 48 * (2048 * (2 * width + 2 * 4 * 128 + 128) + 8 * expert)
    assert round((mixture.dense + mixture.experts) / 1e9, 1) == 30.5


def test_numbers_that_a_token_leaves_in_a_layer() -> None:
    attention = 4 * 8 + 2 * (4 + 2 * 2) * 5 + 2 * 4 * 3
    assert size_of(DENSE).kept == attention + 3 * 7
    assert size_of(MOE).kept == attention + 2 * (5 * 8 + 3 * 6) + 3 * 9


@pytest.mark.parametrize(("recompute", "times"), [(None, 5), ("selective", 5), ("full", 7)])
def test_bytes_of_activations(recompute: str | None, times: int) -> None:
    kept = size_of(DENSE).kept
    expected = 2 * (times * 27 * 3 * kept + 3 * 20 * 11)
    assert step_of(recompute=recompute).activation_bytes() == expected
    assert step_of(recompute=recompute, itemsize=4, topology=replace(SINGLE, num_ranks=4, dp=4)).activation_bytes() == 2 * expected / 4


def test_bytes_of_the_state() -> None:
    """Zeros 4; of a micro-batch the sum read and written 8, a bf16 gradient 2; norm 4, scaling 8, gradient 4, weight 8, moments 16."""
    assert step_of().state_bytes() == 1000 * (4 + 2 * (8 + 2) + 4 + 8 + 4 + 8 + 16 + 2)
    assert step_of(itemsize=4).state_bytes() == 1000 * (4 + 2 * (8 + 4) + 4 + 8 + 4 + 8 + 16)
    four = Topology(num_ranks=16, tp=2, pp=2, vpp=1, cp=2, dp=2, ep=2, etp=1, sequence_parallel=True)
    layout = {"topology": four, "experts": 640, "num_micro_batches": 1}
    # 1000 / (2 x 2) that 4 ranks have alike, and 640 / (1 x 2 x 2) that 16 / (1 x 2 x 2) have.
    assert step_of(MOE, **layout).state_bytes() == (250 + 160) * (14 + 42)
    assert step_of(MOE, **layout, distributed_optimizer=True).state_bytes() == (250 + 160) * 14 + (250 / 4 + 160 / 4) * 42


@pytest.mark.parametrize(("recompute", "passes"), [(None, 2), ("full", 3)])
def test_messages_of_each_kind_of_parallelism(recompute: str | None, passes: int) -> None:
    two = {"num_ranks": 2, "tp": 1, "cp": 1, "dp": 1}
    here = 2 * 27 * 3

    def sent(spec: Any = DENSE, *, experts: int = 0, split: bool = False, **layout: int) -> list[float]:
        topology = replace(SINGLE, **layout)
        step = step_of(spec, experts=experts, topology=topology, recompute=recompute, distributed_optimizer=split)
        return [num_bytes for num_bytes, _ in step.messages()]

    assert sent() == [0, 0, 0, 0]
    # Each of two ranks sends the half of H that it has, four times a pass and layer.
    assert sent(**two | {"tp": 2}) == [passes * here * 4 * 8 / 2, 0, 0, 0]
    assert sent(**two | {"cp": 2}) == [0, (passes + 1) * here / 2 * 2 * (5 + 3), 1000 * 8 / 2, 0]
    assert sent(num_ranks=4, dp=4) == [0, 0, 1000 * 8 * 3 / 4, 0]
    assert sent(num_ranks=4, dp=4, split=True) == [0, 0, 1000 * 6 * 3 / 4, 0]
    # Two experts' H to the other rank and back; experts of 2 x 2 ranks have 2 copies.
    mixture = sent(MOE, experts=640, num_ranks=4, dp=4, ep=2)
    assert mixture == [0, 0, passes * here / 4 * 2 * 2 * 8 / 2, 1000 * 8 * 3 / 4, 320 * 8 / 2]


def test_messages_beyond_a_node_go_over_the_network() -> None:
    topology = Topology(num_ranks=8, tp=2, pp=1, vpp=1, cp=2, dp=2, ep=1, etp=1, sequence_parallel=True)
    for per_node, near in ((8, [True, True, True, True]), (4, [True, True, False, False]), (2, [True, False, False, False])):
        step = step_of(topology=topology, per_node=per_node)
        assert [inside for _, inside in step.messages()] == near
        seconds = sum(sent / (7.0 if inside else 11.0) for sent, inside in step.messages())
        assert step.parts(RATES)["messages"] == pytest.approx(seconds)


def test_parts_are_divided_by_rates_and_stretched_by_pipelines() -> None:
    step = step_of(topology=replace(SINGLE, num_ranks=6, pp=3, dp=2), num_micro_batches=4)
    flops, stretched = step.flops, 1 + 2 / 4
    assert step.parts(RATES) == pytest.approx(
        {
            "products": (3 * flops.layers + 4 * flops.head) / 6 / 2 * stretched,
            "attention": 3.5 * flops.attention / 6 / 3 * stretched,
            "activations": step.activation_bytes() / 5 * stretched,
            "optimizer": step.state_bytes() / 5,
            "messages": (1000 / 3) * 8 / 2 / 7,
        }
    )


def test_a_step_of_settings_has_sequences_of_the_greatest_length(
    model_spec: Callable[[str], Any], run_settings: Callable[..., Settings]
) -> None:
    settings = run_settings(num_ranks=8, tp=2)
    size = ModelSize.of(model_spec("Qwen3-8B"))
    step = Step.of(settings.training, size, recompute="selective", longest=8192, num_sequences=512, per_node=4)
    assert step.flops == Flops.of(size, np.full(512, 8192))
    assert (step.num_tokens, step.num_micro_batches, step.recompute, step.per_node) == (512 * 8192, 512 // 4 // 2, "selective", 4)
    assert step.distributed_optimizer and step.itemsize == 2 and step.topology == Topology.of(settings.training.topology)
