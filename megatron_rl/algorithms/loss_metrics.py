"""What the loss reports of each micro-batch, as (sum, weight) pairs of detached scalars that add up over micro-batches and ranks."""

import torch
from torch import Tensor

from megatron_rl.algorithms.inputs import LossInputs
from megatron_rl.algorithms.kl import kl_estimate
from megatron_rl.algorithms.objective import Objective
from megatron_rl.algorithms.off_policy import OffPolicyTerms, importance_ratio
from megatron_rl.algorithms.policy_terms import PolicyTerms
from megatron_rl.algorithms.sequences import Sequences, bounded_exp

Metrics = dict[str, tuple[Tensor, Tensor]]


def mean_pair(values: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
    """(sum, count) over this rank's trainable tokens of `values` [T], numbers or bools."""
    if values.dtype == torch.bool:
        return torch.count_nonzero(values & sequences.mask).double(), sequences.count.double()
    return values.detach().masked_fill(sequences.excluded, 0.0).sum().double(), sequences.count.double()


def ratio_metrics(objective: Objective, inputs: LossInputs, terms: PolicyTerms) -> Metrics:
    """How far the policy is from the one before the step, and that one from the generator; or a critic's means."""
    sequences = terms.sequences
    if terms.values is not None and terms.returns is not None:
        return {"value_mean": mean_pair(terms.values, sequences), "return_mean": mean_pair(terms.returns, sequences)}
    if not objective.trains_by_rewards:
        return {}
    metrics = {
        "policy_kl": mean_pair(terms.old_log_probs - terms.log_probs.detach(), sequences),
        "ratio_mean": mean_pair(bounded_exp(terms.log_ratio.detach()), sequences),
    }
    if inputs.rollout_log_probs is not None:
        rollout = sequences.masked(inputs.rollout_log_probs.detach())
        weight = importance_ratio(sequences, terms.old_log_probs, rollout, "token")
        metrics["log_prob_diff"] = mean_pair((terms.old_log_probs - rollout).abs(), sequences)
        metrics["rollout_ratio_mean"] = mean_pair(weight, sequences)
        metrics["rollout_ratio_square"] = mean_pair(weight.square(), sequences)
    return metrics


def correction_metrics(sequences: Sequences, correction: OffPolicyTerms) -> Metrics:
    """What the off-policy correction did."""
    return {
        "off_policy_weight_mean": mean_pair(correction.weight, sequences),
        "off_policy_weight_square": mean_pair(correction.weight.square(), sequences),
        "off_policy_bounded_fraction": mean_pair(correction.bounded, sequences),
        "off_policy_rejected_fraction": mean_pair(~correction.kept, sequences),
    }


def kl_metrics(objective: Objective, log_probs: Tensor, reference: Tensor, sequences: Sequences) -> Metrics:
    """Raw estimates of the KL between `log_probs` and `reference` [T] over all trainable tokens, whatever the loss leaves out."""
    raw = log_probs.detach()
    metrics = {f"kl_{name}": mean_pair(kl_estimate(raw, reference=reference, estimator=name), sequences) for name in ("k1", "k2", "k3")}
    if objective.kl_control is not None:
        # Each token counts 1 / n_i, so that the weights of a trajectory add up to 1 wherever its tokens are.
        share = sequences.expand(1.0 / sequences.mean_divisor.to(raw.dtype)).masked_fill(sequences.excluded, 0.0)
        # The KL that the adaptive coefficient stands before.
        estimator = objective.kl_reward_estimator if objective.kl_reward_coef else objective.kl_estimator
        per_token = kl_estimate(raw, reference=reference, estimator=estimator)
        metrics["kl_per_sequence"] = ((per_token * share).sum().double(), share.sum().double())
    return metrics
