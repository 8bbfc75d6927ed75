"""The loss of one micro-batch on one rank: an additive share of the optimizer step's loss.

Legend: T tokens of this rank's part of the micro-batch, S its sequences.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron_rl.algorithms.aggregation import LossInputs, Metrics, Sequences, SequenceSum, bounded_exp, identity, token_weights
from megatron_rl.algorithms.coefficients import Coefficients
from megatron_rl.algorithms.kl import kl_estimate, kl_metrics
from megatron_rl.algorithms.objective import Objective
from megatron_rl.algorithms.off_policy import OffPolicyTerms
from megatron_rl.algorithms.policy_loss import PolicyTerms
from megatron_rl.algorithms.selection import StepStatistics, top_entropy_mask

Weigh = Callable[..., Tensor]
"""`token_weights` of the step: (sequences, dtype=..) -> weights [T]; by other counts where these are given."""


@dataclass(frozen=True, slots=True, eq=False)
class LossOutput:
    """This rank's share of the step's `loss`, a scalar, and `metrics`, (sum, weight) pairs: both add up over shares.

    `clipped` [T]: tokens that the policy loss clipped; None of a loss that clips none.
    """

    loss: Tensor
    metrics: Metrics
    clipped: Tensor | None = None


def compute_loss(
    objective: Objective,
    inputs: LossInputs,
    *,
    num_tokens: int,
    num_trajectories: int,
    coefficients: Coefficients | None = None,
    sequence_sum: SequenceSum = identity,
    statistics: StepStatistics | None = None,
) -> LossOutput:
    """Return this rank's share of policy loss + KL coefficient x KL - entropy coefficient x entropy.

    `num_tokens` and `num_trajectories` count trainable tokens, and trajectories with at least one, in
    the whole optimizer step: none give loss 0 and metric `empty_step`. `sequence_sum` adds over cp
    ranks, each with equally many calls. Raises ValueError for missing tensors or `statistics` of
    the step, and without `coefficients` that a controller moves.
    """
    if objective.needs_step_statistics and statistics is None:
        raise ValueError("compute_loss got no statistics, which this objective needs; make them once per step with step_statistics")
    coefficients, statistics = coefficients or Coefficients.fixed(objective), statistics or StepStatistics()
    sequences = inputs.sequences(sequence_sum)
    terms = objective.policy_loss.terms(inputs, sequences)
    weigh = partial(
        token_weights, aggregation=objective.aggregation, max_response_length=objective.max_response_length,
        num_tokens=num_tokens, num_trajectories=num_trajectories,
    )  # fmt: skip
    top = top_entropy_mask(statistics.entropy_threshold, inputs, sequences)
    policy, metrics, clipped = _policy_term(objective, inputs, terms, weigh, statistics, top)
    total = policy
    if objective.kl is not None or inputs.ref_log_probs is not None:
        penalty, raw = _kl_term(objective, inputs, terms, weigh)
        metrics |= raw
        total = total + coefficients.kl_loss * penalty if objective.kl is not None else total
    has_bonus = objective.entropy is not None and objective.entropy.has_bonus
    if has_bonus or inputs.entropy is not None:
        seen = num_tokens if statistics.entropy_tokens is None else statistics.entropy_tokens
        bonus, measured = _entropy_term(objective, inputs, sequences, weigh, top, seen)
        metrics |= measured
        total = total - coefficients.entropy * bonus if has_bonus else total
    if objective.kl is not None or has_bonus:
        # Weighted by tokens: the pairs of all shares then divide to the step's unscaled policy loss.
        metrics["policy_loss"] = (policy.detach().double() * num_tokens, sequences.count.double())
    if num_tokens == 0:
        metrics["empty_step"] = (torch.ones_like(policy.detach()), torch.ones_like(policy.detach()))
    return LossOutput(total, metrics, clipped)


def _entropy_term(
    objective: Objective, inputs: LossInputs, sequences: Sequences, weigh: Weigh, top: Tensor | None, count: int
) -> tuple[Tensor, Metrics]:
    """Return the mean entropy as the bonus has it, over `count` tokens or as `weigh` says, of `top` [T] if given."""
    entropy = used = inputs.present("entropy", sequences)
    metrics = {"entropy": sequences.mean_pair(entropy)}
    if inputs.varentropy is not None:
        metrics["varentropy"] = sequences.mean_pair(sequences.masked(inputs.varentropy))
    if top is not None:
        used = torch.where(top, entropy, 0.0)
        metrics["top_entropy"] = (used.detach().sum().double(), torch.count_nonzero(top & sequences.mask).double())
    if objective.entropy is not None and objective.entropy.mode == "matched":
        return (used * weigh(sequences, dtype=entropy.dtype)).sum(), metrics
    return used.sum() / max(count, 1), metrics


def _policy_term(
    objective: Objective, inputs: LossInputs, terms: PolicyTerms, weigh: Weigh, statistics: StepStatistics, top: Tensor | None
) -> tuple[Tensor, Metrics, Tensor | None]:
    """Return the weighted policy loss over this rank's tokens, or over `top` [T] if given, and the clipped tokens [T]."""
    loss, sequences, correction = objective.policy_loss, terms.sequences, None
    if objective.off_policy is not None:
        correction = objective.off_policy.terms(terms, inputs.present("rollout_log_probs", sequences).detach())
        if loss.weighs_off_policy:
            terms = dataclasses.replace(terms, log_off_policy=objective.off_policy.log_weights(correction, sequences))
    per_token = loss.losses(terms, statistics.policy_loss)
    metrics = {name: sequences.mean_pair(event) for name, event in per_token.events.items()}
    hits = [event for name, event in per_token.events.items() if "clip" in name]
    clipped = torch.stack(hits).any(dim=0) if hits else None
    if loss.trains_by_rewards:
        metrics |= _ratio_metrics(inputs, terms)
    if correction is None or statistics.policy_tokens is None:
        weights = weigh(sequences, dtype=per_token.losses.dtype)
    else:
        weights = _weights_of_kept(inputs, sequences, correction, weigh, statistics, dtype=per_token.losses.dtype)
    weighted = sequences.masked(per_token.losses) * weights
    if top is not None:
        weighted = torch.where(top, weighted, 0.0)
    if correction is not None:
        metrics |= correction.metrics(sequences)
        weighted = weighted if loss.weighs_off_policy else weighted * correction.weight
        weighted = torch.where(correction.kept, weighted, 0.0)
    return weighted.sum(), metrics, clipped


def _weights_of_kept(
    inputs: LossInputs, sequences: Sequences, correction: OffPolicyTerms, weigh: Weigh, statistics: StepStatistics, *, dtype: torch.dtype
) -> Tensor:
    """Return the weights [T] of the policy term where rejected tokens leave the denominators."""
    left = sequences.sum(correction.kept.to(dtype))
    ids, kept_tokens = inputs.trajectory_ids, statistics.kept_tokens
    of_trajectory = None if ids is None or kept_tokens is None else kept_tokens.of(ids)
    kept = Sequences(sequences.index, correction.kept, left, sequences.sequence_sum, of_trajectory)
    return weigh(kept, dtype=dtype, num_tokens=statistics.policy_tokens, num_trajectories=statistics.policy_trajectories)


def _ratio_metrics(inputs: LossInputs, terms: PolicyTerms) -> Metrics:
    """Return the distances from the policy to the one before the step, and from there to the generator."""
    sequences = terms.sequences
    metrics = {
        "policy_kl": sequences.mean_pair(terms.old_log_probs - terms.log_probs.detach()),
        "ratio_mean": sequences.mean_pair(bounded_exp(terms.log_ratio.detach())),
    }
    if inputs.rollout_log_probs is not None:
        difference = terms.old_log_probs - sequences.masked(inputs.rollout_log_probs.detach())
        weight = bounded_exp(difference)
        metrics["log_prob_diff"] = sequences.mean_pair(difference.abs())
        metrics["rollout_ratio_mean"] = sequences.mean_pair(weight)
        metrics["rollout_ratio_square"] = sequences.mean_pair(weight.square())
    return metrics


def _kl_term(objective: Objective, inputs: LossInputs, terms: PolicyTerms, weigh: Weigh) -> tuple[Tensor, Metrics]:
    """Return the KL to the reference through the policy's aggregation; `kl_mask` leaves denominators and metrics alone."""
    kl, either, sequences = objective.kl, objective.kl or objective.kl_reward, terms.sequences
    steered = None if either is None or either.control is None else either.estimator
    reference = inputs.present("ref_log_probs", sequences).detach()
    metrics = kl_metrics(terms.log_probs, reference, sequences, steered=steered)
    if kl is None:
        return torch.zeros_like(reference).sum(), metrics
    per_token = kl_estimate(terms.log_probs, reference=reference, estimator=kl.estimator)
    if kl.unbiased:
        per_token = per_token * bounded_exp(terms.log_probs - terms.old_log_probs)
    weighted = per_token * weigh(sequences, dtype=per_token.dtype)
    if inputs.kl_mask is not None:
        weighted = torch.where(inputs.kl_mask, weighted, 0.0)
    return weighted.sum(), metrics
