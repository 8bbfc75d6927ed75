"""Policy losses with a rule for tokens of high covariance between advantage and log-prob (arXiv 2505.22617, section 4).

Thresholds are found once for the optimizer step, so the choice does not depend on the split of the
step. Legend: T tokens of this rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from megatron_rl.algorithms.aggregation import bounded_exp
from megatron_rl.algorithms.choices import doc
from megatron_rl.algorithms.lazy_torch import Tensor, torch
from megatron_rl.algorithms.policy_loss import CappedClip, Gather, PolicyLossTerms, PolicyTerms, RatioLoss


@dataclass(frozen=True, slots=True, kw_only=True)
class Covariances:
    """The centre of the step's covariances, and the `limit` of the choice: kl_cov's smallest one, clip_cov's largest hash."""

    advantage_mean: float = 0.0
    log_prob_mean: float = 0.0
    limit: float | None = None
    seed: int = 0

    @classmethod
    def centred(cls, parts: Sequence[PolicyTerms], gather: Gather, *, seed: int) -> Covariances:
        """Return the step's covariances without a limit from this rank's `parts`; around 0 in a step without tokens."""
        log_probs = gathered([_seen(terms)[terms.sequences.mask] for terms in parts], gather, torch.float64)
        advantages = gathered([terms.advantages[terms.sequences.mask] for terms in parts], gather, torch.float64)
        if len(log_probs) == 0:
            return cls(seed=seed)
        return cls(advantage_mean=float(advantages.mean()), log_prob_mean=float(log_probs.mean()), seed=seed)

    def of(self, terms: PolicyTerms) -> Tensor:
        """Return (A - mean A)(log pi - mean log pi) per token [T] in float64, means over the step."""
        return (terms.advantages.double() - self.advantage_mean) * (_seen(terms).double() - self.log_prob_mean)


def gathered(pieces: Sequence[Tensor], gather: Gather, dtype: torch.dtype) -> Tensor:
    """Return this rank's `pieces` [n] and the pieces of all other ranks in one tensor of `dtype`."""
    return gather(torch.cat([piece.to(dtype) for piece in pieces]) if pieces else torch.empty(0, dtype=dtype))


def _seen(terms: PolicyTerms) -> Tensor:
    return terms.log_probs.detach() if terms.seen is None else terms.seen


def _fraction() -> Any:
    return doc("Share of the step's tokens that are chosen (at least one).", 2e-4, ge=0, le=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class KlCov(RatioLoss):
    """-r A, plus coef |log r| on the tokens of highest covariance; nothing is clipped."""

    needs_statistics: ClassVar[bool] = True

    kind: Literal["kl_cov"] = "kl_cov"
    fraction: float = _fraction()
    coef: float = doc("Coefficient of the penalty |log ratio|.", 1.0, ge=0)

    def statistics(self, parts: Sequence[PolicyTerms], *, num_tokens: int, gather: Gather, seed: int) -> Covariances:
        """Return the centre and the smallest chosen covariance."""
        centre = Covariances.centred(parts, gather, seed=seed)
        values = gathered([centre.of(terms)[terms.sequences.mask] for terms in parts], gather, torch.float64)
        count = min(max(1, int(self.fraction * num_tokens)), len(values))
        return dataclasses.replace(centre, limit=float(values.topk(count).values[-1]) if count else None)

    def chosen(self, terms: PolicyTerms, statistics: Covariances) -> Tensor:
        """Return the tokens [T] of highest covariance."""
        mask = terms.sequences.mask
        return torch.zeros_like(mask) if statistics.limit is None else mask & (statistics.of(terms) >= statistics.limit)

    def losses(self, terms: PolicyTerms, statistics: Any = None) -> PolicyLossTerms:
        """Return the losses [T] and the chosen tokens."""
        chosen = self.chosen(terms, statistics)
        penalty = self.coef * terms.log_ratio.abs()
        losses = -bounded_exp(terms.log_ratio) * terms.advantages
        return PolicyLossTerms(losses + torch.where(chosen, penalty, 0.0), {"covariance_fraction": chosen})


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipCov(CappedClip):
    """The clipped loss without a random choice of the tokens whose covariance lies within bounds."""

    needs_statistics: ClassVar[bool] = True

    kind: Literal["clip_cov"] = "clip_cov"
    fraction: float = _fraction()
    covariance_low: float = doc("Lower covariance bound of the tokens to choose from.", 1.0)
    covariance_high: float = doc("Upper covariance bound of the tokens to choose from.", 5.0)

    def __post_init__(self) -> None:
        CappedClip.__post_init__(self)
        if self.covariance_low >= self.covariance_high:
            raise ValueError(
                f"ClipCov.covariance_low {self.covariance_low} is not below covariance_high {self.covariance_high}, so that no token lies "
                "between"
            )

    def _candidates(self, terms: PolicyTerms, covariances: Tensor) -> Tensor:
        """Return candidate tokens [T]: trainable, not clipped, covariance within bounds."""
        events = self._clip_events(bounded_exp(terms.log_ratio.detach()), terms.advantages)
        clipped = events["clip_fraction_low"] | events["clip_fraction_high"]
        return terms.sequences.mask & ~clipped & (covariances > self.covariance_low) & (covariances < self.covariance_high)

    def statistics(self, parts: Sequence[PolicyTerms], *, num_tokens: int, gather: Gather, seed: int) -> Covariances:
        """Return the centre and the largest chosen hash."""
        centre = Covariances.centred(parts, gather, seed=seed)
        keys = gathered([hashed(_keys(terms), seed)[self._candidates(terms, centre.of(terms))] for terms in parts], gather, torch.int64)
        count = min(max(1, int(self.fraction * num_tokens)), len(keys))
        return dataclasses.replace(centre, limit=int(keys.kthvalue(count).values) if count else None)

    def chosen(self, terms: PolicyTerms, statistics: Covariances) -> Tensor:
        """Return the removed tokens [T]."""
        candidates = self._candidates(terms, statistics.of(terms))
        if statistics.limit is None:
            return torch.zeros_like(candidates)
        return candidates & (hashed(_keys(terms), statistics.seed) <= statistics.limit)

    def losses(self, terms: PolicyTerms, statistics: Any = None) -> PolicyLossTerms:
        """Return the losses [T], and the clipped and chosen tokens."""
        chosen, clipped = self.chosen(terms, statistics), CappedClip.losses(self, terms)
        return PolicyLossTerms(torch.where(chosen, 0.0, clipped.losses), {**clipped.events, "covariance_fraction": chosen})


def _keys(terms: PolicyTerms) -> Tensor:
    if terms.token_keys is None:
        raise ValueError("Objective.policy_loss clip_cov got no token_keys, needs a number per token that is unique within the step")
    return terms.token_keys


def hashed(keys: Tensor, seed: int) -> Tensor:
    """Return a pseudo-random non-negative int64 per key [T], the same in every split of the step (splitmix64)."""

    def shift(x: Tensor, bits: int) -> Tensor:
        return (x >> bits) & ((1 << (64 - bits)) - 1)

    x = keys * -7046029254386353131 + (seed * 7046029254386353131 + 1442695040888963407) % 2**63
    x = (x ^ shift(x, 30)) * -4658895280553007687
    x = (x ^ shift(x, 27)) * -7723592293110705685
    return shift(x ^ shift(x, 31), 1)


CovarianceLosses = ClipCov | KlCov
