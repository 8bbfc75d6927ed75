"""The KL to the reference: two places in the objective, sample estimators, adaptive coefficient.

k1, k2, k3: J. Schulman, Approximating KL divergence, 2020. low_variance is k3 cut to +-10.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_rl.algorithms.aggregation import LOG_RATIO_LIMIT, Metrics, Sequences
from megatron_rl.algorithms.choices import Choice, doc
from megatron_rl.algorithms.lazy_torch import Tensor, torch

KLEstimator = Literal["k1", "k2", "k3", "low_variance"]
_LOW_VARIANCE_LIMIT = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KLControl(Choice):
    """Adaptive KL coefficient (Ziegler et al. 2019, section 2.2), starting from the term's own."""

    target: float = doc("KL to hold: mean over trajectories of the mean per token, in nats.", 6.0, gt=0)
    horizon: float = doc("Sequences over which a full correction acts.", 10000.0, gt=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class KLLoss(Choice):
    """The KL to the reference in the loss."""

    coef: float = doc("Coefficient of the KL to the reference in the loss.", gt=0)
    estimator: KLEstimator = doc("Estimator of the KL in the loss.", "k3")
    unbiased: bool = doc("Multiply the KL in the loss by the differentiable ratio, which makes its gradient unbiased.", False)
    control: KLControl | None = doc("Adapt the coefficient; fixed when not set.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class KLReward(Choice):
    """The KL to the reference in the rewards of tokens."""

    coef: float = doc("Coefficient of the KL to the reference in the token rewards.", gt=0)
    estimator: KLEstimator = doc("Estimator of the KL in the token rewards.", "k1")
    control: KLControl | None = doc("Adapt the coefficient; fixed when not set.", None)


def kl_estimate(log_probs: Tensor, *, reference: Tensor, estimator: KLEstimator) -> Tensor:
    """Return the per-token KL estimate [T], nats, differentiable in `log_probs` [T]; `reference` [T] is constant.

    With d = reference - log_prob: k1 = -d, k2 = d^2 / 2, k3 = e^d - 1 - d. d is cut at 20 from
    above in k3, against overflow of e^d; low_variance also cuts the estimate to [-10, 10].
    """
    difference = reference.detach() - log_probs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference.square() / 2
    bounded = difference.clamp(max=LOG_RATIO_LIMIT)
    k3 = torch.expm1(bounded) - bounded
    return k3 if estimator == "k3" else k3.clamp(-_LOW_VARIANCE_LIMIT, _LOW_VARIANCE_LIMIT)


def kl_metrics(log_probs: Tensor, reference: Tensor, sequences: Sequences, *, steered: KLEstimator | None) -> Metrics:
    """Return means of raw KL estimates [T] over trainable tokens; `steered` is that of an adaptive coefficient, if any."""
    raw = log_probs.detach()
    names: tuple[KLEstimator, ...] = ("k1", "k2", "k3")
    metrics = {f"kl_{name}": sequences.mean_pair(kl_estimate(raw, reference=reference, estimator=name)) for name in names}
    if steered is not None:
        # Each token counts 1 / n_i: the weights of a trajectory add up to 1, on one rank or several.
        share = sequences.expand(1.0 / sequences.mean_divisor.to(raw.dtype)).masked_fill(sequences.excluded, 0.0)
        per_token = kl_estimate(raw, reference=reference, estimator=steered)
        metrics["kl_per_sequence"] = ((per_token * share).sum().double(), share.sum().double())
    return metrics


def updated_kl_coef(coef: float, *, kl: float, num_trajectories: int, control: KLControl) -> float:
    """Return coef x (1 + clip(kl / target - 1, -0.2, 0.2) x trajectories / horizon) (arXiv 1909.08593, 2.2)."""
    error = min(max(kl / control.target - 1.0, -0.2), 0.2)
    return coef * (1.0 + error * num_trajectories / control.horizon)
