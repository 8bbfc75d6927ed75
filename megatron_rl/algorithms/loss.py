"""The loss of one micro-batch on one rank: an additive share of the optimizer step's loss.

Legend: T tokens of this rank's part of the micro-batch, S its sequences; N trainable tokens and B sequences of the whole step.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.algorithms import policy_loss as losses
from megatron_rl.algorithms.aggregation import token_weights
from megatron_rl.algorithms.coefficients import Coefficients
from megatron_rl.algorithms.inputs import LossInputs, off_policy_of, policy_terms, present
from megatron_rl.algorithms.kl import kl_estimate
from megatron_rl.algorithms.loss_metrics import Metrics, correction_metrics, kl_metrics, mean_pair, ratio_metrics
from megatron_rl.algorithms.objective import Objective, OffPolicyCorrection
from megatron_rl.algorithms.off_policy import OffPolicyTerms
from megatron_rl.algorithms.selection import StepStatistics, covariance_selection, top_entropy_mask
from megatron_rl.algorithms.sequences import Sequences, SequenceSum, identity


@dataclass(frozen=True, slots=True, eq=False)
class LossOutput:
    """`loss`, a scalar: summed over micro-batches and over dp and cp ranks it is the step's loss. `metrics`: (sum, weight) pairs
    of detached scalars that add up the same way; a metric's value is sum / weight.
    """  # fmt: skip

    loss: Tensor
    metrics: Metrics


def compute_loss(
    objective: Objective,
    inputs: LossInputs,
    *,
    num_tokens: int,
    num_sequences: int,
    coefficients: Coefficients | None = None,
    sequence_sum: SequenceSum = identity,
    statistics: StepStatistics | None = None,
) -> LossOutput:
    """This rank's share of policy loss + kl_loss x KL - entropy coefficient x entropy.

    `num_tokens` and `num_sequences` count trainable tokens, and sequences with at least one, in the whole optimizer step; where
    `inputs` have trajectories of several sequences, `num_sequences` counts trajectories. The `coefficients` are the step's, the
    objective's own when None. `sequence_sum` adds per-sequence partial sums over context-parallel ranks, differentiably; every rank
    calls it equally often. `statistics` from `step_statistics` is needed when `objective.needs_step_statistics`. A step without
    trainable tokens gives loss 0, zero gradients and metric `empty_step`.

    Raises ValueError when a tensor, the statistics, or coefficients that a controller moves are missing. No argument is modified.

    Example: `examples/library/objective_alone.py`; in short, for one micro-batch that is the whole step,
    `compute_loss(objective, inputs, num_tokens=n, num_sequences=b).loss.backward()`
    """
    coefficients = coefficients or Coefficients.fixed(objective)
    sequences = inputs.sequences(sequence_sum)
    if objective.needs_step_statistics and statistics is None:
        raise ValueError("compute_loss got no statistics, which this objective needs; make them once per step with step_statistics")
    step = _Step(objective, num_tokens, num_sequences, statistics or StepStatistics())
    terms = policy_terms(objective, inputs, sequences)
    correction = off_policy_of(objective, inputs, terms)
    policy, metrics = _policy_term(step, inputs, terms, correction)
    total = policy
    if objective.kl_loss_coef or (inputs.ref_log_probs is not None and inputs.log_probs is not None):
        penalty, raw = _kl_term(step, inputs, terms)
        metrics |= raw
        total = total + coefficients.kl_loss * penalty if objective.kl_loss_coef else total
    if objective.has_entropy_bonus or inputs.entropy is not None:
        bonus, raw = _entropy_term(step, inputs, sequences)
        metrics |= raw
        total = total - coefficients.entropy * bonus if objective.has_entropy_bonus else total
    if objective.kl_loss_coef or objective.has_entropy_bonus:
        # Weighted by its tokens, so that the pairs of all shares divide to the step's unscaled policy loss.
        metrics["policy_loss"] = (policy.detach().double() * num_tokens, sequences.count.double())
    if num_tokens == 0:
        metrics["empty_step"] = (torch.ones_like(policy.detach()), torch.ones_like(policy.detach()))
    return LossOutput(total, metrics)


@dataclass(frozen=True, slots=True)
class _Step:
    """What all micro-batches of the step share."""

    objective: Objective
    num_tokens: int
    num_sequences: int
    statistics: StepStatistics

    def weights(self, sequences: Sequences, dtype: torch.dtype) -> Tensor:
        return self._weights(sequences, self.num_tokens, self.num_sequences, dtype)

    def policy_weights(
        self, sequences: Sequences, correction: OffPolicyTerms | None, dtype: torch.dtype, *, trajectory_ids: Tensor | None
    ) -> Tensor:
        """Weights of the policy term: those of all terms, unless rejected tokens are to leave the denominators."""
        statistics = self.statistics
        if correction is None or statistics.policy_tokens is None or statistics.policy_trajectories is None:
            return self.weights(sequences, dtype)
        left = sequences.sum(correction.kept.to(dtype))
        of_trajectory = None if trajectory_ids is None or statistics.kept_tokens is None else statistics.kept_tokens.of(trajectory_ids)
        kept = Sequences(sequences.index, correction.kept, left, sequences.sequence_sum, of_trajectory)
        return self._weights(kept, statistics.policy_tokens, statistics.policy_trajectories, dtype)

    def _weights(self, sequences: Sequences, num_tokens: int, num_sequences: int, dtype: torch.dtype) -> Tensor:
        return token_weights(
            sequences, aggregation=self.objective.aggregation, num_tokens=num_tokens, num_sequences=num_sequences,
            max_response_length=self.objective.max_response_length, dtype=dtype,
        )  # fmt: skip


def _policy_term(step: _Step, inputs: LossInputs, terms: losses.PolicyTerms, correction: OffPolicyTerms | None) -> tuple[Tensor, Metrics]:
    objective, sequences = step.objective, terms.sequences
    per_token = _per_token_losses(step, inputs, terms, correction)
    weights = step.policy_weights(sequences, correction, per_token.losses.dtype, trajectory_ids=inputs.trajectory_ids)
    metrics = {name: mean_pair(event, sequences) for name, event in per_token.events.items()}
    metrics |= ratio_metrics(objective, inputs, terms)
    weighted = sequences.masked(per_token.losses) * weights
    top = top_entropy_mask(objective, step.statistics, inputs, sequences)
    if top is not None:
        weighted = torch.where(top, weighted, 0.0)
    if correction is not None:
        metrics |= correction_metrics(sequences, correction)
        # vespo has the correction inside its sequence weight.
        weighted = weighted if objective.policy_loss == "vespo" else weighted * correction.weight
        weighted = torch.where(correction.kept, weighted, 0.0)
    return weighted.sum(), metrics


def _per_token_losses(
    step: _Step, inputs: LossInputs, terms: losses.PolicyTerms, correction: OffPolicyTerms | None
) -> losses.PolicyLossTerms:
    objective = step.objective
    if objective.policy_loss in ("clip_cov", "kl_cov"):
        selected = covariance_selection(objective, step.statistics, inputs, terms)
        return (losses.clip_cov if objective.policy_loss == "clip_cov" else losses.kl_cov)(objective, terms, selected)
    if objective.policy_loss == "vespo" and correction is not None:
        terms = _with_off_policy(objective.off_policy_correction, terms, correction)
    return losses.find_policy_loss(objective)(objective=objective, terms=terms)


def _with_off_policy(setting: OffPolicyCorrection | None, terms: losses.PolicyTerms, correction: OffPolicyTerms) -> losses.PolicyTerms:
    """`terms` with the log of each sequence's off-policy weight: a product over its tokens, or the one weight all of them carry."""
    sequences = terms.sequences
    log_weight = torch.where(correction.kept & (correction.weight > 0), correction.weight, 1.0).log()
    per_token = setting is None or setting.level == "token"
    log_off_policy = sequences.sum(log_weight) if per_token else sequences.mean(log_weight)
    return losses.PolicyTerms(
        terms.log_probs, terms.old_log_probs, terms.log_ratio, terms.advantages, sequences, log_off_policy, terms.ref_log_probs
    )


def _kl_term(step: _Step, inputs: LossInputs, terms: losses.PolicyTerms) -> tuple[Tensor, Metrics]:
    """The KL to the reference through the policy's aggregation; tokens outside `kl_mask` stay in its denominators and its metrics."""
    objective, sequences = step.objective, terms.sequences
    reference = present(inputs.ref_log_probs, "ref_log_probs", sequences).detach()
    metrics = kl_metrics(objective, terms.log_probs, reference, sequences)
    per_token = kl_estimate(terms.log_probs, reference=reference, estimator=objective.kl_estimator)
    if objective.kl_unbiased and objective.trains_by_rewards:
        per_token = per_token * losses.bounded_exp(terms.log_probs - terms.old_log_probs)
    weighted = per_token * step.weights(sequences, per_token.dtype)
    if inputs.kl_mask is not None:
        weighted = torch.where(inputs.kl_mask, weighted, 0.0)
    return weighted.sum(), metrics


def _entropy_term(step: _Step, inputs: LossInputs, sequences: Sequences) -> tuple[Tensor, Metrics]:
    """The bonus before its coefficient: mean entropy of the tokens that the policy term trains on, or the matched aggregate."""
    entropy = present(inputs.entropy, "entropy", sequences)
    metrics = {"entropy": mean_pair(entropy, sequences)}
    if inputs.varentropy is not None:
        metrics["varentropy"] = mean_pair(sequences.masked(inputs.varentropy), sequences)
    used, total = entropy, step.num_tokens
    top = top_entropy_mask(step.objective, step.statistics, inputs, sequences)
    if top is not None and step.statistics.entropy_tokens is not None:
        used, total = torch.where(top, entropy, 0.0), step.statistics.entropy_tokens
        metrics["top_entropy"] = (used.detach().sum().double(), torch.count_nonzero(top & sequences.mask).double())
    if step.objective.entropy_mode == "matched":
        return (used * step.weights(sequences, entropy.dtype)).sum(), metrics
    return used.sum() / max(total, 1), metrics
