"""Policy losses per token: the form of all of them, and the family with a bounded ratio. No loss averages.

Every tensor holds zeros where the mask is False. A clip distance of None means no bound on its
side. Legend: T tokens of this rank, S its sequences. r = pi / pi_old at the chosen ratio level, A
the advantage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias

from megatron_rl.algorithms.aggregation import LossInputs, Sequences, bounded_exp
from megatron_rl.algorithms.choices import Choice, check_fields, doc
from megatron_rl.algorithms.lazy_torch import Tensor, torch

Gather: TypeAlias = "Callable[[Tensor], Tensor]"
"""[n] values of this rank -> the values of all data- and context-parallel ranks, concatenated; n differs between ranks, and may be 0."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PolicyTerms:
    """The input of a policy loss, per token [T] with zeros outside the mask; `log_probs` carries the gradient.

    `log_ratio` is log_probs - old_log_probs per token, or the mean over the sequence at ratio level
    "sequence". `log_off_policy` [S] is the log of whole sequences' off-policy weight, None without
    correction. `seen` are the log-probs for the choice of tokens.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    log_ratio: Tensor
    advantages: Tensor
    sequences: Sequences
    log_off_policy: Tensor | None = None
    ref_log_probs: Tensor | None = None
    seen: Tensor | None = None
    token_keys: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PolicyLossTerms:
    """`losses` [T] and, by metric name, the tokens [T] hit by an event."""

    losses: Tensor
    events: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss(Choice):
    """The form of every policy loss: fields are arguments, `losses` the maths, flags the needs.

    `bounded_by`: fields with the bounds that keep the policy near the proximal one, none where the
    formula does so; None for a loss without a bound. `reads_advantages` and `trains_by_rewards` (also
    ratios) are False where the loss depends on neither. `weighs_off_policy`: the off-policy weight is
    inside. `needs_statistics`: of the whole step.
    """

    trains_by_rewards: ClassVar[bool] = True
    reads_advantages: ClassVar[bool] = True
    needs_reference: ClassVar[bool] = False
    needs_statistics: ClassVar[bool] = False
    weighs_off_policy: ClassVar[bool] = False
    bounded_by: ClassVar[tuple[str, ...] | None] = None

    kind: str

    @property
    def bounds_ratio(self) -> bool:
        """Return True for a trust region around the proximal policy: all bounds of the ratio are set."""
        return self.bounded_by is not None and all(getattr(self, name) is not None for name in self.bounded_by)

    def losses(self, terms: PolicyTerms, statistics: Any = None) -> PolicyLossTerms:
        """Return the losses [T]; `statistics` of the whole step where needed."""
        raise NotImplementedError

    def statistics(self, parts: Sequence[PolicyTerms], *, num_tokens: int, gather: Gather, seed: int) -> Any:
        """Return what `losses` must know of the whole step, from the terms of this rank's micro-batches."""
        raise NotImplementedError

    def _ratio(self, log_ratio: Tensor, sequences: Sequences) -> Tensor:
        """Return the log-ratio [T] at this loss's level from the log-ratio per token."""
        return log_ratio

    def terms(self, inputs: LossInputs, sequences: Sequences) -> PolicyTerms:
        """Return the input of the loss, with zeros at masked positions. Raises ValueError for missing parts."""
        log_probs = inputs.present("log_probs", sequences)
        if not self.trains_by_rewards:
            zero = torch.zeros_like(log_probs).detach()
            current = log_probs.detach()
            return PolicyTerms(log_probs=log_probs, old_log_probs=current, log_ratio=zero, advantages=zero, sequences=sequences)
        advantages = inputs.present("advantages", sequences).detach()
        seen = (log_probs if inputs.selection_log_probs is None else sequences.masked(inputs.selection_log_probs)).detach()
        if inputs.current_share is None:
            old_log_probs = inputs.present("old_log_probs", sequences).detach()
        else:
            rollout = inputs.present("rollout_log_probs", sequences).detach()
            old_log_probs = rollout + sequences.masked(inputs.current_share) * (seen - rollout)
        return PolicyTerms(
            log_probs=log_probs,
            old_log_probs=old_log_probs,
            log_ratio=self._ratio(log_probs - old_log_probs, sequences),
            advantages=advantages,
            sequences=sequences,
            ref_log_probs=None if inputs.ref_log_probs is None else sequences.masked(inputs.ref_log_probs).detach(),
            seen=seen,
            token_keys=inputs.token_keys,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioLoss(PolicyLoss):
    """A loss of an importance ratio per token, or of the sequence's."""

    ratio_level: Literal["token", "sequence"] = doc("Importance ratio per token, or its geometric mean over the sequence (GSPO).", "token")

    def _ratio(self, log_ratio: Tensor, sequences: Sequences) -> Tensor:
        return sequences.expand(sequences.mean(log_ratio)) if self.ratio_level == "sequence" else log_ratio


def _clip_distance(side: str, default: float | None = 0.2) -> Any:
    return doc(
        f"{side} clip distance: ratios are clipped at 1 {'-' if side == 'Lower' else '+'} this; null clips none there.", default, ge=0
    )


def _clamp(values: Tensor, low: float | None, high: float | None) -> Tensor:
    return values.clamp(low, high) if low is not None or high is not None else values


def _beyond(distance: Tensor, limit: float | None) -> Tensor:
    return torch.zeros_like(distance, dtype=torch.bool) if limit is None else distance > limit


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedLoss(RatioLoss):
    """A loss with the ratio clipped to [1 - low, 1 + high]."""

    bounded_by: ClassVar[tuple[str, ...] | None] = ("low", "high")

    low: float | None = _clip_distance("Lower")
    high: float | None = _clip_distance("Upper")

    def __post_init__(self) -> None:
        check_fields(self)
        if self.low is not None and self.low > 1:
            raise ValueError(
                f"{type(self).__name__}.low is {self.low}, so that ratios would be clipped at {1 - self.low:g}, and no ratio is "
                "negative, needs a distance of at most 1; set it to null for no lower clip"
            )

    def _clipped(self, ratio: Tensor) -> Tensor:
        """Return `ratio` [T] within the bounds."""
        return _clamp(ratio, None if self.low is None else 1.0 - self.low, None if self.high is None else 1.0 + self.high)

    def _clip_events(self, ratio: Tensor, advantages: Tensor) -> dict[str, Tensor]:
        """Return the tokens [T] without gradient because of a bound."""
        none = torch.zeros_like(ratio, dtype=torch.bool)
        return {
            "clip_fraction_low": none if self.low is None else (advantages < 0) & (ratio < 1.0 - self.low),
            "clip_fraction_high": none if self.high is None else (advantages > 0) & (ratio > 1.0 + self.high),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CappedClip(ClippedLoss):
    """-min(min(r, cap) A, clip(r) A), and at most -c A where A < 0 (PPO, arXiv 1707.06347; dual clip, arXiv 1912.09729)."""

    ratio_cap: float | None = doc("Cap of the ratio in the unclipped branch (delta).", None, gt=0)
    dual_clip: float | None = doc("Bound c of the loss at negative advantages: at most -c A (dual-clip PPO).", None, gt=1)

    def losses(self, terms: PolicyTerms, statistics: Any = None) -> PolicyLossTerms:
        """Return the losses [T], and the clipped tokens."""
        ratio = bounded_exp(terms.log_ratio)
        advantages = terms.advantages
        capped = ratio if self.ratio_cap is None else ratio.clamp(max=self.ratio_cap)
        losses = -torch.minimum(capped * advantages, self._clipped(ratio) * advantages)
        events = self._clip_events(ratio, advantages)
        if self.dual_clip is not None:
            ceiling = -self.dual_clip * advantages
            events["dual_clip_fraction"] = (advantages < 0) & (losses > ceiling)
            losses = torch.where(advantages < 0, torch.minimum(losses, ceiling), losses)
        return PolicyLossTerms(losses, events)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip(CappedClip):
    """PPO's clipped ratio, also used by GRPO."""

    kind: Literal["clip"] = "clip"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cispo(ClippedLoss):
    """-sg(clip(r)) A log pi: clipped tokens keep their gradient (MiniMax-M1, arXiv 2506.13585, 3.1, with a cap at 5)."""

    bounded_by: ClassVar[tuple[str, ...] | None] = ("high",)  # the ratio is a weight, as of truncated importance sampling

    kind: Literal["cispo"] = "cispo"
    low: float | None = _clip_distance("Lower", None)
    high: float | None = _clip_distance("Upper", 4.0)

    def losses(self, terms: PolicyTerms, statistics: Any = None) -> PolicyLossTerms:
        """Return the losses [T], and the clipped tokens."""
        ratio = bounded_exp(terms.log_ratio.detach())
        return PolicyLossTerms(-self._clipped(ratio) * terms.advantages * terms.log_probs, self._clip_events(ratio, terms.advantages))


@dataclass(frozen=True, slots=True, kw_only=True)
class Gmpo(PolicyLoss):
    """-A exp(mean over the sequence of clipped log r); the clip is one-sided by the sign of A, in log space (arXiv 2507.20673)."""

    bounded_by: ClassVar[tuple[str, ...] | None] = ("low", "high")

    kind: Literal["gmpo"] = "gmpo"
    low: float | None = doc("Lower clip distance of log r; null clips none there.", 0.4, ge=0)
    high: float | None = doc("Upper clip distance of log r; null clips none there.", 0.4, ge=0)

    def losses(self, terms: PolicyTerms, statistics: Any = None) -> PolicyLossTerms:
        """Return the losses [T], and the clipped tokens."""
        log_ratio = terms.log_probs - terms.old_log_probs
        clipped = _clamp(log_ratio, None if self.low is None else -self.low, self.high)
        sign = torch.sign(terms.advantages)
        pessimistic = sign * torch.minimum(sign * log_ratio, sign * clipped)
        ratio = bounded_exp(terms.sequences.mean(pessimistic))
        events = {
            "clip_fraction_low": (sign < 0) & _beyond(-log_ratio, self.low),
            "clip_fraction_high": (sign > 0) & _beyond(log_ratio, self.high),
        }
        return PolicyLossTerms(-terms.advantages * terms.sequences.expand(ratio), events)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dppo(RatioLoss):
    """-A sg(min(r, cap)) log pi where pi moved less than the clip distances (divergence PPO, arXiv 2602.04879).

    dppo_tv measures the move by the change of the token's probability, dppo_kl by the binary KL(pi_old
    || pi) of taken / not taken, in the direction of travel.
    """

    bounded_by: ClassVar[tuple[str, ...] | None] = ("low", "high")

    kind: Literal["dppo_tv", "dppo_kl"] = "dppo_tv"
    low: float | None = doc("Largest fall of a token: of dppo_tv in probability, of dppo_kl the KL in nats; null for none.", 0.2, ge=0)
    high: float | None = doc("Largest rise of a token: of dppo_tv in probability, of dppo_kl the KL in nats; null for none.", 0.2, ge=0)
    ratio_cap: float = doc("Cap of the weight.", 20.0, gt=0)

    def losses(self, terms: PolicyTerms, statistics: Any = None) -> PolicyLossTerms:
        """Return the losses [T], and the clipped tokens."""
        now, old = terms.log_probs.detach(), terms.old_log_probs
        if self.kind == "dppo_tv":
            rise = now.exp() - old.exp()
            fall = -rise
        else:
            divergence = _binary_kl(old, now)
            fall, rise = torch.where(now < old, divergence, 0.0), torch.where(now > old, divergence, 0.0)
        too_low, too_high = _beyond(fall, self.low), _beyond(rise, self.high)
        events = {"clip_fraction_low": (terms.advantages < 0) & too_low, "clip_fraction_high": (terms.advantages > 0) & too_high}
        blocked = torch.where(terms.advantages > 0, too_high, too_low)
        weight = torch.where(blocked, 0.0, bounded_exp(terms.log_ratio.detach()).clamp(max=self.ratio_cap))
        return PolicyLossTerms(-weight * terms.advantages * terms.log_probs, events)


def _binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return the KL [T] between Bernoulli(p) and Bernoulli(q) from the logs of p and q, kept off 0 and 1 by 1e-8."""
    not_p, not_q = (-torch.expm1(log_x).clamp(max=-1e-8) for log_x in (log_p, log_q))
    return log_p.exp() * (log_p - log_q) + not_p * (not_p.log() - not_q.log())


ClippedLosses = Clip | Cispo | Gmpo | Dppo
