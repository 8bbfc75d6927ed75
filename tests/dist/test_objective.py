"""The objective itself over real collectives: two gloo ranks, as context-parallel and as data-parallel ones, against one rank."""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from step_emulation import Layout, Step, rank_inputs, rank_share, run_step, trivial_layout
from torch import Tensor, distributed
from vector_format import neutral_objective

from megatron_rl.algorithms.aggregation import Aggregation
from megatron_rl.algorithms.objective import PRESETS, Objective
from megatron_rl.algorithms.return_advantage import ValueLoss
from megatron_rl.system.device import local_device
from megatron_rl.training.collectives import sum_sequences

LENGTHS = (5, 1, 8, 3, 1, 6)
TOLERANCE = 1e-12
CORRECTIONS = (
    None,
    {"mode": "truncate", "high": 1.1},
    {"mode": "mask", "low": 0.7, "high": 1.3, "keep_rejected_in_denominator": False},
    {"mode": "truncate", "level": "sequence", "high": 1.5, "veto": 0.4, "opsm": 0.05},
)
ENTROPIES: tuple[dict[str, Any], ...] = (
    {},
    {"entropy_coef": 0.02},
    {"entropy_coef": 0.02, "entropy_mode": "matched"},
    {"entropy_coef": 0.02, "top_entropy_fraction": 0.4},
)
# One sequence after the other, one of them without a trainable token, and a micro-batch without any sequence.
LAYOUTS = {
    "cp2": Layout(ranks=(((4, 0), (5, 3), (2, 1)),), cp=2, pad=2, padding=math.nan),
    "dp2": Layout(ranks=(((4, 0), (5,)), ((2, 3, 1), ())), pad=1, padding=math.inf),
}


def variants(presets: Sequence[str]) -> list[Objective | ValueLoss]:
    """Every preset x aggregation, these presets x correction x entropy mode, and the losses of no preset."""
    made: list[dict[str, Any]] = [
        {"preset": preset, "aggregation": aggregation, "max_response_length": 9, "kl_loss_coef": 0.1}
        for preset, aggregation in itertools.product(PRESETS, Aggregation.__args__)
    ]
    for preset, correction, entropy in itertools.product(presets, CORRECTIONS, ENTROPIES):
        made.append({"preset": preset, "max_response_length": 9, "off_policy_correction": correction, **entropy})
    made += [
        {"policy_loss": loss, **({"low": -1.0, "fraction": 0.3} if loss == "clip_cov" else {})}
        for loss in ("clip_cov", "kl_cov", "gpg", "sft", "value")
    ]
    return [neutral_objective(**config) for config in made]


def make_step() -> Step:
    """A float64 step with holes in the mask, its fourth sequence fully masked, where a rank has its tensors."""
    generator = torch.Generator().manual_seed(5)
    total = sum(LENGTHS)

    def normal() -> Tensor:
        return torch.randn(total, generator=generator, dtype=torch.float64)

    mask = torch.rand(total, generator=generator) >= 0.3
    mask[14:17] = False
    log_probs = {name: -normal().abs() - 0.1 for name in ("log_probs", "old_log_probs", "rollout_log_probs", "ref_log_probs")}
    others = {name: normal() for name in ("advantages", "values", "old_values", "returns")}
    entropy = {name: normal().abs() for name in ("entropy", "varentropy")}
    tokens = {**log_probs, **others, **entropy, "token_keys": torch.arange(total)}
    device = local_device().torch_device
    return Step(lengths=LENGTHS, loss_mask=mask.to(device), tokens={name: tensor.to(device) for name, tensor in tokens.items()})


def gather(values: Tensor) -> Tensor:
    parts: list[Tensor] = [torch.empty(0)] * distributed.get_world_size()
    distributed.all_gather_object(parts, values)
    return torch.cat(parts)


def summed(value: Tensor) -> Tensor:
    total = value.clone()
    distributed.all_reduce(total)
    return total


def check_variant(objective: Objective | ValueLoss, step: Step, layout: Layout, rank: int) -> None:
    """This rank's share of the step, added up over both ranks, is the step of one rank."""
    leaves = {name: tensor.clone().requires_grad_(name in ("log_probs", "entropy", "values")) for name, tensor in step.tokens.items()}
    dp_rank, cp_rank = (0, rank) if layout.cp == 2 else (rank, 0)
    micro_batches = [rank_inputs(step, leaves, rows, layout, cp_rank) for rows in layout.ranks[dp_rank]]
    sequence_sum: Callable[[Tensor], Tensor] = partial(sum_sequences, group=distributed.group.WORLD) if layout.cp == 2 else torch.clone
    share, _ = rank_share(objective, step, micro_batches, None, sequence_sum, gather, 0)
    if share.requires_grad:
        share.backward()
    want = run_step(objective, step, trivial_layout(len(LENGTHS)))
    torch.testing.assert_close(float(summed(share.detach())), want.loss, rtol=TOLERANCE, atol=TOLERANCE)
    for name, gradient in want.gradients.items():
        leaf = leaves[name]
        got = summed(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
        torch.testing.assert_close(got, gradient, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda text, name=name: f"{objective} {name}: {text}")


def objective_ranks(rank: int, world_size: int, init_method: str, presets: Sequence[str]) -> int:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    step, made = make_step(), variants(presets)
    for objective, layout in itertools.product(made, LAYOUTS.values()):
        check_variant(objective, step, layout, rank)
    distributed.destroy_process_group()
    return len(made)


@pytest.mark.parametrize(
    "presets", [pytest.param(("grpo", "gspo"), id="gate"), pytest.param(tuple(PRESETS), id="all", marks=pytest.mark.slow)]
)
def test_choices_of_the_objective_are_equal_over_gloo(run_ranks: Callable[..., list[int]], presets: Sequence[str]) -> None:
    assert run_ranks(objective_ranks, 2, presets, timeout_s=240) == [len(variants(presets))] * 2
