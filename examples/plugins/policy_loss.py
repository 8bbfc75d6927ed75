"""REINFORCE with the ratio's square as a penalty: -A log pi + coef (log r)^2 per token."""

from megatron_rl.algorithms.objective import Objective
from megatron_rl.algorithms.policy_loss import PolicyLossTerms, PolicyTerms


def loss(*, objective: Objective, terms: PolicyTerms, coef: float = 0.05) -> PolicyLossTerms:
    """Losses [T] before any mean; `far_fraction` is the share of tokens that moved by more than 0.2 nats."""
    penalty = coef * terms.log_ratio.square()
    return PolicyLossTerms(-terms.advantages * terms.log_probs + penalty, {"far_fraction": terms.log_ratio.abs() > 0.2})
