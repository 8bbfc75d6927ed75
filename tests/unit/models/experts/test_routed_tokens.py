"""What routers are told of tokens, and what is counted of them, by hand."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_rl.models.experts.moe_fields import num_mixture_layers
from megatron_rl.models.experts.routed_tokens import RoutedTokens, RouterStep
from megatron_rl.models.experts.router import _Record


def test_each_tensor_parallel_rank_gets_its_own_tokens() -> None:
    experts = torch.arange(24).reshape(2, 6, 2)
    tokens = RoutedTokens(
        sequence_index=torch.tensor([0, 0, 1, 1, 2, -1]),
        sequence_lengths=torch.tensor([2, 2, 1]),
        counted=torch.tensor([True, False, True]),
        experts=experts,
        recorded=torch.tensor([True, False, True, True, False, False]),
    )
    for rank, start in enumerate((0, 2, 4)):
        part = tokens.part(rank, 2)
        assert part.sequence_index.tolist() == tokens.sequence_index.tolist()[start : start + 2]
        assert part.experts is not None and torch.equal(part.experts, experts[:, start : start + 2])
        assert part.recorded is not None and tokens.recorded is not None
        assert part.recorded.tolist() == tokens.recorded.tolist()[start : start + 2]
        assert torch.equal(part.sequence_lengths, tokens.sequence_lengths) and torch.equal(part.counted, tokens.counted)
    assert tokens.part(0, 6) is tokens


def test_calls_of_a_layer_add_up_and_layers_stay_apart() -> None:
    losses = {"num_sequences": 3, "num_tokens": 9, "balance_coef": 0.5, "z_coef": 0.1}
    step = RouterStep(**losses, num_layers=2, num_experts=3, device=torch.device("cpu"))
    for layer, load, *counts in ((0, (1, 2, 3), 3, 2, 1), (1, (6, 0, 0), 1, 1, 5), (0, (0, 4, 0), 2, 1, 1)):
        replayed, changed, reordered = map(torch.tensor, counts)
        step.count(layer, load=torch.tensor(load), replayed=replayed, changed=changed, reordered=reordered)
    probabilities = torch.ones(2, 3, requires_grad=True)
    attached = probabilities
    for layer, balance, z_loss in ((0, 1.0, None), (1, 3.0, 7.0), (0, 0.5, 2.0)):
        shares = {"balance": torch.tensor(balance), "z_loss": None if z_loss is None else torch.tensor(z_loss)}
        attached = step.attach(attached, layer=layer, **shares)
    assert torch.equal(attached, probabilities)
    report = step.reduce(torch.clone)
    assert report.load.tolist() == [[1, 6, 3], [6, 0, 0]]
    assert (report.replayed, report.changed, report.reordered) == (6, 4, 7)
    assert (report.balance_loss, report.z_loss) == ((1.5 + 3.0) / 2, (2.0 + 7.0) / 2)
    assert step.reduce(torch.clone).load.tolist() == report.load.tolist(), "reading changes nothing"


def test_a_record_of_the_same_experts_keeps_the_routers_order() -> None:
    """Another order is counted alone: it says that the engine's weights of the experts were others."""
    scores = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).repeat(5, 1)
    experts = torch.tensor([[[0, 1], [1, 0], [2, 0], [0, 2], [1, 0]]], dtype=torch.uint8)
    recorded = torch.tensor([True, True, True, True, False])
    tokens = RoutedTokens(torch.zeros(5), torch.tensor([5]), torch.ones(1), experts, recorded)
    record = _Record(tokens, 0)
    weights, chosen = record.get_replay_topk(scores, 2, None, None, lambda scores, topk, **_: scores.topk(topk))
    assert chosen.tolist() == [[0, 1], [0, 1], [2, 0], [0, 2], [0, 1]]
    assert torch.equal(weights, scores.gather(1, chosen))
    assert record.changed.tolist() == [False, False, True, True, False] and record.reordered.tolist() == [False, True, False, False, False]


@pytest.mark.parametrize(
    ("pattern", "before", "count"),
    [(1, None, 5), (2, None, 3), (2, 2, 1), (2, 3, 2), (3, 4, 2), ([0, 1, 1, 0, 1], None, 3), ([0, 1, 1, 0, 1], 2, 1)],
)
def test_layers_with_experts_are_counted(pattern: Any, before: int | None, count: int) -> None:
    """megatron-core's pattern n gives experts to layers 0, n, 2n, .."""
    config: Any = SimpleNamespace(num_layers=5, num_moe_experts=4, moe_layer_freq=pattern)
    assert num_mixture_layers(config, before=before) == count
