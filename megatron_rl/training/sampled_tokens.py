"""Metrics of trained tokens as they were sampled: agreement with engines, candidates, quadrants of entropy-aware sampling.

Each is a (sum, weight) pair over the N trainable tokens of a micro-batch.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_rl.algorithms.aggregation import LossInputs, Metrics
from megatron_rl.algorithms.entropy_aware import QUADRANTS, EntropyAware
from megatron_rl.algorithms.log_prob import TokenStatistics
from megatron_rl.algorithms.rounding_limits import Expected
from megatron_rl.training.advantages import TokenData
from megatron_rl.training.micro_batch import MicroBatch

CLIPPED = "log_prob_diff_clipped"
"""The metric of the tokens that are expected to agree."""
LARGEST = "log_prob_diff_max"
"""The largest of their differences: a maximum, no mean."""


def sampled_metrics(
    inputs: LossInputs, micro_batch: MicroBatch, data: TokenData, expected: Expected | None, *, current: TokenStatistics
) -> Metrics:
    """Return the metrics, with `current` statistics of the policy; those of agreement need rollout log-probs."""
    pairs = _of_candidates(micro_batch, current)
    assert inputs.old_log_probs is not None, "loss_inputs gives them"
    if inputs.rollout_log_probs is not None:
        pairs |= _agreement(inputs.rollout_log_probs, inputs.old_log_probs, micro_batch, data, expected)
        if expected is not None and expected.entropy is not None:
            pairs |= _quadrants(expected.entropy, current, inputs.old_log_probs - inputs.rollout_log_probs)
    if data.teacher_log_probs is not None:
        to_teacher = inputs.old_log_probs - micro_batch.pick(data.teacher_log_probs)
        pairs["teacher_kl"] = (to_teacher.sum(), torch.ones_like(to_teacher).sum())
    return pairs


def _agreement(rollout: Tensor, old: Tensor, micro_batch: MicroBatch, data: TokenData, expected: Expected | None) -> Metrics:
    """Return mean |engine - trainer| log-prob of engine tokens; clipped, outliers and largest of those `expected` to agree."""
    versions = micro_batch.pick(data.weight_versions)
    trainer = old if data.drawn_log_probs is None else micro_batch.pick(data.drawn_log_probs)
    difference = (rollout - trainer).abs()
    pairs = {"log_prob_diff": (torch.where(versions >= 0, difference, 0.0).sum(), (versions >= 0).sum())}
    if expected is not None:
        fresh, limits = versions == expected.version, expected.limits
        if data.replayed is not None:
            # Elsewhere the trainer chose the experts, beyond these limits.
            fresh &= micro_batch.pick(data.replayed)
        pairs[CLIPPED] = (torch.where(fresh, difference.clamp(max=limits.outlier), 0.0).sum(), fresh.sum())
        pairs["log_prob_outliers"] = ((fresh & ~(difference <= limits.outlier)).sum(), fresh.sum())
        # A micro-batch may be without a token.
        pairs[LARGEST] = (pad(torch.where(fresh, difference, 0.0), (0, 1)).amax(), fresh.sum())
    return pairs


def _quadrants(entropy: EntropyAware, current: TokenStatistics, log_ratio: Tensor) -> Metrics:
    """Return the share of each quadrant by the `current` policy, and the mean log pi_old - log q of the draw."""
    assert current.entropy is not None and current.varentropy is not None, "a step computes entropies"
    places, one = entropy.places(current.entropy, current.varentropy), torch.ones_like(log_ratio).sum()
    shares = {f"quadrant_{name}": ((places == place).sum(), one) for place, name in enumerate(QUADRANTS)}
    return {**shares, "draw_log_ratio": (log_ratio.sum(), one)}


def _of_candidates(micro_batch: MicroBatch, current: TokenStatistics) -> Metrics:
    """Return the mean entropy over the vocabulary, number of candidates, and share of tokens with one candidate, where recorded."""
    if micro_batch.candidates is None:
        return {}
    assert current.full_entropy is not None, "a step computes entropies"
    counts, one = micro_batch.candidates.counts, torch.ones_like(micro_batch.targets)
    sums = {"full_entropy": current.full_entropy, "candidates": counts, "lone_candidate": counts == 1}
    return {name: (values.sum(), one.sum()) for name, values in sums.items()}
