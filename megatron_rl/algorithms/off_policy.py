"""Correction for samples drawn from another policy than the proximal one: w = pi_old / pi_rollout.

Truncation (TIS): Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training". Masking: IcePop,
MIS. The off-policy sequence mask: DeepSeek-V3.2, section 3.1. Decoupled PPO (AReaL, arXiv 2505.24298): pi_old is the proximal policy.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.algorithms.objective import OffPolicyCorrection
from megatron_rl.algorithms.sequences import Sequences, bounded_exp


@dataclass(frozen=True, slots=True, eq=False)
class OffPolicyTerms:
    """Constants of the policy term: `weight` [T], 0 where rejected; `kept` [T] bool; `bounded` [T] bool, truncated or masked by a bound."""

    weight: Tensor
    kept: Tensor
    bounded: Tensor


def importance_ratio(sequences: Sequences, old_log_probs: Tensor, rollout_log_probs: Tensor, level: str) -> Tensor:
    """pi_old / pi_rollout [T] per token, as product over the sequence, or as its geometric mean; log-ratios are cut to +-20."""
    log_ratio = old_log_probs - rollout_log_probs
    if level == "sequence":
        log_ratio = sequences.expand(sequences.sum(log_ratio))
    elif level == "geometric":
        log_ratio = sequences.expand(sequences.mean(log_ratio))
    return bounded_exp(log_ratio)


def off_policy_terms(
    correction: OffPolicyCorrection,
    *,
    sequences: Sequences,
    log_probs: Tensor,
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    advantages: Tensor,
) -> OffPolicyTerms:
    """What `correction` makes of each token; all tensors [T] masked with zeros, results without gradient.

    `log_probs` of the current policy decide the off-policy sequence mask only.
    """
    with torch.no_grad():
        kept = sequences.mask
        bounded = torch.zeros_like(kept)
        weight = torch.ones_like(old_log_probs)
        if correction.mode != "none":
            ratio = importance_ratio(sequences, old_log_probs, rollout_log_probs, correction.level)
            low = 0.0 if correction.low is None else correction.low
            high = math.inf if correction.high is None else correction.high
            bounded = kept & ((ratio < low) | (ratio > high))
            weight = ratio.clamp(low, high)
            kept = kept & ~bounded if correction.mode == "mask" else kept
        if correction.veto is not None:
            extreme = (old_log_probs - rollout_log_probs < math.log(correction.veto)).to(weight.dtype)
            kept = kept & (sequences.expand(sequences.sum(extreme)) == 0)
        if correction.opsm is not None:
            drift = sequences.expand(sequences.mean(rollout_log_probs - log_probs))
            kept = kept & ((advantages >= 0) | (drift <= correction.opsm))
        return OffPolicyTerms(weight=torch.where(kept, weight, 0.0), kept=kept, bounded=bounded)
