"""Estimators of KL(pi || pi_ref) from samples of pi, the KL as a token reward, and the adaptive coefficient.

k1, k2, k3: J. Schulman, Approximating KL divergence, 2020. low_variance is k3 cut to +-10.
"""

import torch
from torch import Tensor

from megatron_rl.algorithms.objective import KLControl, KLEstimator
from megatron_rl.algorithms.sequences import LOG_RATIO_LIMIT

_LOW_VARIANCE_LIMIT = 10.0


def kl_estimate(log_probs: Tensor, *, reference: Tensor, estimator: KLEstimator) -> Tensor:
    """Per-token KL estimate [T], nats, differentiable in `log_probs` [T]; both aligned, `reference` is taken as constant.

    With d = reference - log_prob: k1 = -d, k2 = d^2 / 2, k3 = e^d - 1 - d. d is cut at 20 from above in k3, where e^d would
    overflow; low_variance also cuts its value to [-10, 10].
    """
    difference = reference.detach() - log_probs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference.square() / 2
    bounded = difference.clamp(max=LOG_RATIO_LIMIT)
    k3 = torch.expm1(bounded) - bounded
    return k3 if estimator == "k3" else k3.clamp(-_LOW_VARIANCE_LIMIT, _LOW_VARIANCE_LIMIT)


def updated_kl_coef(coef: float, *, kl: float, num_sequences: int, control: KLControl) -> float:
    """The next coefficient: coef x (1 + clip(kl / target - 1, -0.2, 0.2) x sequences / horizon).

    `kl` is the mean over the step's sequences of their mean per token. Ziegler et al. 2019, arXiv 1909.08593, section 2.2.
    """
    error = min(max(kl / control.target - 1.0, -0.2), 0.2)
    return coef * (1.0 + error * num_sequences / control.horizon)
