"""Trajectories of one to three sequences: denominators count each once, whatever the layout, against loops in float64."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from step_emulation import Layout, Step, random_layouts, run_step, trivial_layout

from megatron_rl.algorithms.aggregation import Aggregation, LossInputs
from megatron_rl.algorithms.objective import Objective
from megatron_rl.algorithms.off_policy import OffPolicy

LENGTHS = (5, 3, 9, 4, 4, 6, 2, 7)
TRAJECTORIES = (3, 0, 0, 3, 1, 2, 3, 2)
MASKED = (3, 4)
"""Of a trajectory with other sequences, and of one that has no trainable token."""
LAYOUTS = [trivial_layout(len(LENGTHS)), *random_layouts(len(LENGTHS), count=3, seed=3)]
REJECTING = OffPolicy(mode="mask", low=0.8, high=1.2, keep_rejected_in_denominator=False)


@pytest.fixture
def step(make_step) -> Step:
    return replace(make_step(LENGTHS, seed=5, masked_rows=MASKED), trajectories=TRAJECTORIES)


def length_of(aggregation: str) -> int | None:
    """The constant of the one aggregation that has one."""
    return 11 if aggregation == "sequence_mean_token_sum_norm" else None


def owners(values: Sequence[int]) -> list[int]:
    """`values` of sequences at each of their tokens."""
    return [value for value, length in zip(values, LENGTHS, strict=True) for _ in range(length)]


def weights(aggregation: str, mask: list[bool], *, trajectories: Sequence[int] = TRAJECTORIES) -> list[float]:
    """Weight of each token: B counts trajectories with a token in `mask`, n_j those of the token's trajectory."""
    sizes: dict[int, int] = {}
    for owner, kept in zip(owners(trajectories), mask, strict=True):
        if kept:
            sizes[owner] = sizes.get(owner, 0) + 1
    num_tokens, num_trajectories = sum(sizes.values()), len(sizes)
    made = []
    for owner, kept in zip(owners(trajectories), mask, strict=True):
        size = sizes.get(owner, 1)
        weight = {
            "token_mean": 1 / num_tokens,
            "sequence_mean_token_mean": 1 / (num_trajectories * size),
            "sequence_mean_token_sum": 1 / num_trajectories,
            "sequence_mean_token_sum_norm": 1 / (num_trajectories * 11),
            "token_sum": 1.0,
        }[aggregation]
        made.append(weight if kept else 0.0)
    return made


@pytest.mark.parametrize("aggregation", Aggregation.__args__)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_means_count_a_trajectory_once(step: Step, aggregation: str, layout: Layout) -> None:
    objective = Objective.of(policy_loss="gpg", aggregation=aggregation, max_response_length=length_of(aggregation))
    expected = weights(aggregation, step.loss_mask.tolist())
    assert weights("sequence_mean_token_mean", step.loss_mask.tolist(), trajectories=range(8)) != expected
    result = run_step(objective, step, layout)
    values, gains = step.tokens["log_probs"].tolist(), step.tokens["advantages"].tolist()
    loss = sum(-weight * gain * value for weight, gain, value in zip(expected, gains, values, strict=True))
    assert result.loss == pytest.approx(loss, rel=1e-12)
    gradient = torch.tensor([-weight * gain for weight, gain in zip(expected, gains, strict=True)], dtype=torch.float64)
    torch.testing.assert_close(result.gradients["log_probs"], gradient, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rejected_tokens_leave_their_trajectory_s_denominators(step: Step, aggregation: str, layout: Layout) -> None:
    """One trajectory has nothing left, and no longer counts."""
    gap = (step.tokens["old_log_probs"] - step.tokens["rollout_log_probs"]).clone()
    gap[torch.tensor(owners(TRAJECTORIES)) == 0] = 2.0
    tokens = {**step.tokens, "rollout_log_probs": step.tokens["old_log_probs"] - gap}
    step = replace(step, tokens=tokens)
    kept = [bool(trained) and 0.8 <= math.exp(far) <= 1.2 for trained, far in zip(step.loss_mask, gap.tolist(), strict=True)]
    left = {owner for owner, keep in zip(owners(TRAJECTORIES), kept, strict=True) if keep}
    assert left == {2, 3}
    objective = Objective.of(policy_loss="gpg", aggregation=aggregation, off_policy=REJECTING)
    result = run_step(objective, step, layout)
    ratio = [math.exp(far) for far in gap.tolist()]
    parts = zip(weights(aggregation, kept), ratio, tokens["advantages"].tolist(), tokens["log_probs"].tolist(), strict=True)
    assert result.loss == pytest.approx(sum(-weight * far * gain * value for weight, far, gain, value in parts), rel=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ratios_are_of_sequences_and_mean_kl_of_trajectories(step: Step, layout: Layout) -> None:
    objective = Objective.of(policy_loss={"ratio_level": "sequence", "low": None, "high": None}, kl={"coef": 0.1, "control": {}})
    step = replace(step, tokens={name: tensor for name, tensor in step.tokens.items() if name != "kl_mask"})
    result = run_step(objective, step, layout)
    mask, share = step.loss_mask.tolist(), weights("sequence_mean_token_mean", step.loss_mask.tolist())
    new, old, gains, reference = (step.tokens[name].tolist() for name in ("log_probs", "old_log_probs", "advantages", "ref_log_probs"))
    policy, kl, start = 0.0, 0.0, 0
    for length in LENGTHS:
        trained = [token for token in range(start, start + length) if mask[token]]
        start += length
        for token in trained:
            ratio = math.exp(sum(new[each] - old[each] for each in trained) / len(trained))
            gap = reference[token] - new[token]
            policy -= share[token] * ratio * gains[token]
            kl += share[token] * (math.exp(gap) - gap - 1)
    assert result.loss == pytest.approx(policy + 0.1 * kl, rel=1e-12)
    assert result.metrics["kl_per_sequence"] == pytest.approx(kl, rel=1e-12)


@pytest.mark.parametrize("aggregation", Aggregation.__args__)
@pytest.mark.parametrize("correction", [None, REJECTING])
def test_with_one_sequence_each_every_number_is_unchanged(step: Step, aggregation: str, correction) -> None:
    if correction is not None and aggregation == "token_sum":
        correction = replace(correction, keep_rejected_in_denominator=True)
    objective = Objective.of(
        aggregation=aggregation, max_response_length=length_of(aggregation), off_policy=correction, kl={"coef": 0.1, "control": {}}
    )
    alone, named = replace(step, trajectories=None), replace(step, trajectories=(7, 2, 90, 4, 1, 0, 3, 5))
    for layout in LAYOUTS:
        want, got = run_step(objective, alone, layout), run_step(objective, named, layout)
        assert got.loss == want.loss and got.metrics == want.metrics
        assert all(torch.equal(gradient, want.gradients[name]) for name, gradient in got.gradients.items())


def test_half_of_what_is_known_of_trajectories_is_refused() -> None:
    given = {"loss_mask": torch.ones(2, dtype=torch.bool), "sequence_index": torch.zeros(2), "sequence_tokens": torch.tensor([2])}
    with pytest.raises(ValueError, match="has one of trajectory_ids and trajectory_tokens, needs both"):
        LossInputs(**given, trajectory_ids=torch.tensor([0]))
    with pytest.raises(ValueError, match=r"LossInputs.trajectory_tokens has shape \(2,\), needs that of sequence_tokens \(1,\)"):
        LossInputs(**given, trajectory_ids=torch.tensor([0]), trajectory_tokens=torch.tensor([2, 3]))
