"""Which tokens a step chooses, against loops over the trainable ones."""

from typing import Any

import numpy as np
import pytest
import torch
from step_emulation import Step, rank_inputs, trivial_layout

from megatron_rl.algorithms.aggregation import LossInputs, Sequences, identity
from megatron_rl.algorithms.covariance_losses import ClipCov, KlCov
from megatron_rl.algorithms.objective import Objective
from megatron_rl.algorithms.selection import quantile, step_statistics, top_entropy_mask

LENGTHS = [5, 1, 19, 3, 17]
LOW, HIGH = -0.05, 0.3


@pytest.fixture
def step(make_step: Any) -> Step:
    return make_step(LENGTHS, seed=4, masked_rows=(1,))


def inputs_of(step: Step) -> tuple[LossInputs, Sequences]:
    inputs, _ = rank_inputs(step, step.tokens, range(len(step.lengths)), trivial_layout(len(step.lengths)), 0)
    return inputs, Sequences(inputs.sequence_index, inputs.loss_mask, inputs.sequence_tokens, identity)


def chosen(objective: Objective, step: Step, *, seed: int = 0) -> set[int]:
    inputs, sequences = inputs_of(step)
    statistics = step_statistics(objective, [inputs], num_tokens=int(step.loss_mask.sum()), seed=seed)
    loss = objective.policy_loss
    assert isinstance(loss, ClipCov | KlCov)
    return set(loss.chosen(loss.terms(inputs, sequences), statistics.policy_loss).nonzero()[:, 0].tolist())


def covariances(step: Step) -> dict[int, float]:
    """Of each trainable token."""
    trained = step.loss_mask.nonzero()[:, 0].tolist()
    log_probs, advantages = step.tokens["log_probs"].numpy(), step.tokens["advantages"].numpy()
    means = advantages[trained].mean(), log_probs[trained].mean()
    return {token: (advantages[token] - means[0]) * (log_probs[token] - means[1]) for token in trained}


def test_clip_cov_takes_trained_unclipped_tokens_in_its_bounds(step: Step) -> None:
    expected, clipped = set(), set()
    for token, value in covariances(step).items():
        ratio = np.exp(float(step.tokens["log_probs"][token] - step.tokens["old_log_probs"][token]))
        if ratio > 1.3 if step.tokens["advantages"][token] > 0 else ratio < 0.9:
            clipped.add(token)
        if LOW < value < HIGH:
            expected.add(token)
    assert expected & clipped and clipped - expected and expected - clipped, "each rule decides about some token"
    settings = {"kind": "clip_cov", "low": 0.1, "high": 0.3, "covariance_low": LOW, "covariance_high": HIGH}
    expected -= clipped
    assert chosen(Objective.of(policy_loss={**settings, "fraction": 0.99}), step) == expected
    for seed in range(3):
        some = chosen(Objective.of(policy_loss={**settings, "fraction": 0.15}), step, seed=seed)
        assert some < expected and len(some) == int(0.15 * len(covariances(step))) > 1


def test_kl_cov_takes_the_largest_covariances(step: Step) -> None:
    values = covariances(step)
    count = int(0.3 * len(values))
    largest = sorted(values, key=values.__getitem__)[-count:]
    assert chosen(Objective.of(policy_loss={"kind": "kl_cov", "fraction": 0.3}), step) == set(largest) and count > 1


def test_the_entropy_threshold_is_the_quantile_of_trained_tokens(step: Step) -> None:
    inputs, sequences = inputs_of(step)
    trained = inputs.loss_mask.numpy()
    entropies = step.tokens["entropy"].numpy()
    objective = Objective.of(top_entropy_fraction=0.37)
    statistics = step_statistics(objective, [inputs], num_tokens=int(trained.sum()))
    threshold = np.quantile(entropies[trained], 1 - 0.37)
    assert statistics.entropy_threshold == pytest.approx(threshold, rel=1e-14)
    assert statistics.entropy_tokens == (entropies[trained] >= threshold).sum()
    mask = top_entropy_mask(threshold, inputs, sequences)
    assert torch.equal(mask[inputs.loss_mask], torch.from_numpy(entropies[trained] >= threshold))


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5, 0.97, 1.0])
def test_quantiles_are_numpys(count: int, fraction: float) -> None:
    values = np.random.default_rng(count).normal(size=count)
    assert quantile(torch.from_numpy(values), fraction) == pytest.approx(np.quantile(values, fraction), rel=1e-12)
