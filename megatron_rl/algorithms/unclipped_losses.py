"""Policy losses without a clip. Legend: T tokens of this rank, r = pi / pi_old at the chosen ratio level, A the advantage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from megatron_rl.algorithms.aggregation import bounded_exp
from megatron_rl.algorithms.choices import doc
from megatron_rl.algorithms.lazy_torch import Tensor, torch
from megatron_rl.algorithms.policy_loss import PolicyLoss, PolicyLossTerms, PolicyTerms, RatioLoss

_VESPO_LOG_LIMITS = (-18.420680743952367, 20.0)  # ln 1e-8, so that the sequence weight stays in [1e-8, e^20]


def _choose(condition: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    """Return torch.where of two numbers in the dtype of `like`: of Python numbers alone it would round to float32."""
    return torch.where(condition, torch.full_like(like, yes), torch.full_like(like, no))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sapo(RatioLoss):
    """-(4 / tau) sigmoid(tau (r - 1)) A, a soft gate instead of a clip (arXiv 2511.20347)."""

    bounded_by: ClassVar[tuple[str, ...] | None] = ()

    kind: Literal["sapo"] = "sapo"
    tau_positive: float = doc("Gate temperature at positive advantages.", 1.0, gt=0)
    tau_negative: float = doc("Gate temperature at other advantages.", 1.05, gt=0)

    def losses(self, terms: PolicyTerms, statistics: Any = None) -> PolicyLossTerms:
        """Return the losses [T]."""
        tau = _choose(terms.advantages > 0, self.tau_positive, self.tau_negative, terms.log_ratio)
        return PolicyLossTerms(-(4.0 / tau) * torch.sigmoid(tau * (bounded_exp(terms.log_ratio) - 1.0)) * terms.advantages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vespo(PolicyLoss):
    """-sg(phi(W)) A log pi, phi = exp(lambda + k ln W - lambda W), W the sequence's weight,
    off-policy included (arXiv 2602.10693).
    """

    weighs_off_policy: ClassVar[bool] = True
    bounded_by: ClassVar[tuple[str, ...] | None] = ()

    kind: Literal["vespo"] = "vespo"
    k_positive: float = doc("Exponent of the sequence weight, advantages >= 0.", 2.0, ge=0)
    lambda_positive: float = doc("Decay of the sequence weight, advantages >= 0.", 3.0, ge=0)
    k_negative: float = doc("Exponent of the sequence weight, advantages < 0.", 3.0, ge=0)
    lambda_negative: float = doc("Decay of the sequence weight, advantages < 0.", 2.0, ge=0)

    def losses(self, terms: PolicyTerms, statistics: Any = None) -> PolicyLossTerms:
        """Return the losses [T]."""
        log_ratio = (terms.log_probs.detach() - terms.old_log_probs).clamp(-20.0, 20.0)
        log_weight = terms.sequences.sum(log_ratio)
        if terms.log_off_policy is not None:
            log_weight = log_weight + terms.log_off_policy
        log_weight = terms.sequences.expand(log_weight.clamp(*_VESPO_LOG_LIMITS))
        positive = terms.advantages >= 0
        k = _choose(positive, self.k_positive, self.k_negative, log_weight)
        decay = _choose(positive, self.lambda_positive, self.lambda_negative, log_weight)
        phi = (decay + k * log_weight - decay * log_weight.exp()).exp()
        return PolicyLossTerms(-phi * terms.advantages * terms.log_probs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpg(PolicyLoss):
    """-A log pi, the plain policy gradient (arXiv 2504.02546)."""

    kind: Literal["gpg"] = "gpg"

    def losses(self, terms: PolicyTerms, statistics: Any = None) -> PolicyLossTerms:
        """Return the losses [T]."""
        return PolicyLossTerms(-terms.advantages * terms.log_probs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Distillation(RatioLoss):
    """-r sg(log pi_teacher - log pi_old): policy gradient of the reverse KL to a teacher, whose log-probs come with the batch."""

    reads_advantages: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = True

    kind: Literal["distillation"] = "distillation"

    def losses(self, terms: PolicyTerms, statistics: Any = None) -> PolicyLossTerms:
        """Return the losses [T]. Raises ValueError without a teacher."""
        if terms.ref_log_probs is None:
            raise ValueError("Objective.policy_loss distillation got no ref_log_probs, needs those of the teacher")
        return PolicyLossTerms(-bounded_exp(terms.log_ratio) * (terms.ref_log_probs - terms.old_log_probs).detach())


@dataclass(frozen=True, slots=True, kw_only=True)
class Sft(PolicyLoss):
    """-log pi, supervised training on given responses: no rewards, no ratios, no engine."""

    trains_by_rewards: ClassVar[bool] = False
    reads_advantages: ClassVar[bool] = False

    kind: Literal["sft"] = "sft"

    def losses(self, terms: PolicyTerms, statistics: Any = None) -> PolicyLossTerms:
        """Return the losses [T]."""
        return PolicyLossTerms(-terms.log_probs)


UnclippedLosses = Sapo | Vespo | Gpg | Distillation | Sft
