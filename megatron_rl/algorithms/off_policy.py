"""Correction for samples drawn from another policy than the proximal one: w = pi_old / pi_rollout.

Truncation (TIS): Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training". Masking: IcePop,
MIS. The off-policy sequence mask: DeepSeek-V3.2, section 3.1. Decoupled PPO (AReaL, arXiv 2505.24298): pi_old is the proximal policy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from megatron_rl.algorithms.aggregation import Metrics, Sequences, bounded_exp
from megatron_rl.algorithms.choices import Choice, check_fields, doc
from megatron_rl.algorithms.lazy_torch import Tensor, torch
from megatron_rl.algorithms.policy_loss import PolicyTerms


@dataclass(frozen=True, slots=True, eq=False)
class OffPolicyTerms:
    """Constants of the policy term: `weight` [T], 0 where rejected; `kept` [T]; `bounded` [T], beyond a bound."""

    weight: Tensor
    kept: Tensor
    bounded: Tensor

    def metrics(self, sequences: Sequences) -> Metrics:
        """Return how far the correction went."""
        return {
            "off_policy_weight_mean": sequences.mean_pair(self.weight),
            "off_policy_weight_square": sequences.mean_pair(self.weight.square()),
            "off_policy_bounded_fraction": sequences.mean_pair(self.bounded),
            "off_policy_rejected_fraction": sequences.mean_pair(~self.kept),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicy(Choice):
    """Correction of the gap between the generating and the proximal policy: w = pi_old / pi_rollout.

    `truncate` is TIS (Yao et al. 2025), `mask` IcePop / MIS, `veto` and `opsm` drop whole sequences
    (OPSM: DeepSeek-V3.2). Only the policy term is weighted, never KL or entropy.
    """

    mode: Literal["none", "truncate", "mask"] = doc(
        "none leaves the weights at 1; truncate clamps w to [low, high]; mask zeroes w outside.", "none"
    )
    level: Literal["token", "sequence", "geometric"] = doc("Ratio per token, product over the sequence, or its geometric mean.", "token")
    low: float | None = doc("Lower bound of w; no bound when not set.", None, ge=0)
    high: float | None = doc("Upper bound of w; no bound when not set.", None, gt=0)
    veto: float | None = doc("Drop a sequence when any of its tokens has a ratio below this.", None, gt=0, lt=1)
    opsm: float | None = doc(
        "Off-policy sequence mask: drop tokens with negative advantage in sequences whose mean log(pi_rollout / pi) exceeds this.", None
    )
    keep_rejected_in_denominator: bool = doc("Whether rejected tokens still count in the denominators of the policy term.", True)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.mode == "none" and (self.low is not None or self.high is not None or self.level != "token"):
            raise ValueError("OffPolicy has bounds or a level but mode 'none', needs mode 'truncate' or 'mask'")
        if self.mode == "none" and self.veto is None and self.opsm is None:
            raise ValueError("OffPolicy corrects nothing, needs a mode, a veto or an opsm threshold; leave it out to switch it off")
        if self.mode != "none" and self.low is None and self.high is None:
            raise ValueError(f"OffPolicy with mode {self.mode!r} has no bound, needs low or high")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"OffPolicy.low {self.low} is above high {self.high}, needs low <= high")
        if not self.keep_rejected_in_denominator and self.mode != "mask" and self.veto is None and self.opsm is None:
            raise ValueError(
                f"OffPolicy.keep_rejected_in_denominator is false with mode {self.mode!r}, which rejects no token; remove it, or set mode "
                "to 'mask', a veto or opsm"
            )

    def terms(self, terms: PolicyTerms, rollout_log_probs: Tensor) -> OffPolicyTerms:
        """Return each token's weight and choice from `rollout_log_probs` [T], 0 where masked; `terms.seen` decides opsm."""
        sequences, old_log_probs = terms.sequences, terms.old_log_probs
        seen = terms.log_probs if terms.seen is None else terms.seen
        with torch.no_grad():
            kept = sequences.mask
            bounded = torch.zeros_like(kept)
            weight = torch.ones_like(old_log_probs)
            if self.mode != "none":
                ratio = importance_ratio(sequences, old_log_probs, rollout_log_probs, self.level)
                low = 0.0 if self.low is None else self.low
                high = math.inf if self.high is None else self.high
                bounded = kept & ((ratio < low) | (ratio > high))
                weight = ratio.clamp(low, high)
                kept = kept & ~bounded if self.mode == "mask" else kept
            if self.veto is not None:
                extreme = (old_log_probs - rollout_log_probs < math.log(self.veto)).to(weight.dtype)
                kept = kept & (sequences.expand(sequences.sum(extreme)) == 0)
            if self.opsm is not None:
                drift = sequences.expand(sequences.mean(rollout_log_probs - seen))
                kept = kept & ((terms.advantages >= 0) | (drift <= self.opsm))
            return OffPolicyTerms(weight=torch.where(kept, weight, 0.0), kept=kept, bounded=bounded)

    def log_weights(self, correction: OffPolicyTerms, sequences: Sequences) -> Tensor:
        """Return each sequence's log weight [S]: of a product, or of a common weight."""
        log_weight = torch.where(correction.kept & (correction.weight > 0), correction.weight, 1.0).log()
        return sequences.sum(log_weight) if self.level == "token" else sequences.mean(log_weight)


def current_share(weight_versions: Tensor, *, version: int, interpolates: bool) -> Tensor:
    """Return the share [T] of the current policy in log pi_old; the rest is that of log pi_rollout.

    A-3PO (arXiv 2512.06547; AReaL, docs/algorithms/prox_approx.md): log pi_prox = log pi_rollout +
    a (log pi - log pi_rollout), a = (v_prox - v_rollout) / (v - v_rollout), v_prox = v - 1, and a = 0
    at v_rollout = v. Here v is `version`, of the weights before the step. Without `interpolates` a
    is 0: the proximal policy is the rollout's. A token not made by an engine has a = 1.
    """
    age = (version - weight_versions).double()
    share = torch.where(age > 1, (age - 1) / age.clamp(min=1), 0.0) if interpolates else torch.zeros_like(age)
    return torch.where(weight_versions < 0, 1.0, share)


def importance_ratio(sequences: Sequences, old_log_probs: Tensor, rollout_log_probs: Tensor, level: str) -> Tensor:
    """Return pi_old / pi_rollout [T] per token, as product or geometric mean over the sequence, log-ratios cut to +-20."""
    log_ratio = old_log_probs - rollout_log_probs
    if level == "sequence":
        log_ratio = sequences.expand(sequences.sum(log_ratio))
    elif level == "geometric":
        log_ratio = sequences.expand(sequences.mean(log_ratio))
    return bounded_exp(log_ratio)
