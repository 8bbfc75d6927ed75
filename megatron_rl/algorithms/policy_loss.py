"""Per-token policy losses. None of them averages: `aggregation.py` owns the weights.

Legend: T tokens of this rank. r = pi / pi_old at the chosen ratio level, A the advantage. Every tensor holds zeros where the
mask is False. A clip distance of None means no bound on that side.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_rl.algorithms.arguments import CappedArguments, ClipArguments, KlCovArguments, SapoArguments, ValueArguments, VespoArguments
from megatron_rl.algorithms.objective import Objective
from megatron_rl.algorithms.policy_terms import PolicyLossTerms, PolicyTerms
from megatron_rl.algorithms.sequences import bounded_exp
from megatron_rl.errors import UserError
from megatron_rl.plugins import PolicyLoss, load

_DPPO_RATIO_CAP = 20.0
_VESPO_LOG_LIMITS = (-18.420680743952367, 20.0)  # ln 1e-8, so that the sequence weight stays in [1e-8, e^20]


def _bounds(objective: Objective) -> tuple[float | None, float | None]:
    low = None if objective.clip_low is None else 1.0 - objective.clip_low
    high = None if objective.clip_high is None else 1.0 + objective.clip_high
    return low, high


def _clamp(values: Tensor, low: float | None, high: float | None) -> Tensor:
    return values.clamp(low, high) if low is not None or high is not None else values


def _choose(condition: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    """torch.where of two numbers in the dtype of `like`; from Python numbers alone it would round them to float32."""
    return torch.where(condition, torch.full_like(like, yes), torch.full_like(like, no))


def _clip_events(objective: Objective, ratio: Tensor, advantages: Tensor) -> dict[str, Tensor]:
    low, high = _bounds(objective)
    none = torch.zeros_like(ratio, dtype=torch.bool)
    return {
        "clip_fraction_low": none if low is None else (advantages < 0) & (ratio < low),
        "clip_fraction_high": none if high is None else (advantages > 0) & (ratio > high),
    }


def clip(objective: Objective, terms: PolicyTerms) -> PolicyLossTerms:
    """-min(min(r, cap) A, clip(r) A), and at most -c A where A < 0 (PPO, arXiv 1707.06347; dual clip, arXiv 1912.09729)."""
    args = objective.arguments(ClipArguments)
    ratio = bounded_exp(terms.log_ratio)
    advantages = terms.advantages
    capped = ratio if args.ratio_cap is None else ratio.clamp(max=args.ratio_cap)
    losses = -torch.minimum(capped * advantages, _clamp(ratio, *_bounds(objective)) * advantages)
    events = _clip_events(objective, ratio, advantages)
    if args.dual_clip is not None:
        ceiling = -args.dual_clip * advantages
        events["dual_clip_fraction"] = (advantages < 0) & (losses > ceiling)
        losses = torch.where(advantages < 0, torch.minimum(losses, ceiling), losses)
    return PolicyLossTerms(losses, events)


def cispo(objective: Objective, terms: PolicyTerms) -> PolicyLossTerms:
    """-sg(clip(r)) A log pi: clipped tokens keep their gradient (MiniMax-M1, arXiv 2506.13585, section 3.1)."""
    ratio = bounded_exp(terms.log_ratio.detach())
    events = _clip_events(objective, ratio, terms.advantages)
    return PolicyLossTerms(-_clamp(ratio, *_bounds(objective)) * terms.advantages * terms.log_probs, events)


def sapo(objective: Objective, terms: PolicyTerms) -> PolicyLossTerms:
    """-(4 / tau) sigmoid(tau (r - 1)) A, a soft gate instead of a clip (arXiv 2511.20347)."""
    args = objective.arguments(SapoArguments)
    tau = _choose(terms.advantages > 0, args.tau_positive, args.tau_negative, terms.log_ratio)
    return PolicyLossTerms(-(4.0 / tau) * torch.sigmoid(tau * (bounded_exp(terms.log_ratio) - 1.0)) * terms.advantages)


def vespo(objective: Objective, terms: PolicyTerms) -> PolicyLossTerms:
    """-sg(phi(W)) A log pi with phi = exp(lambda + k ln W - lambda W), W the sequence's importance weight (arXiv 2602.10693).

    The off-policy weight is part of W, so it does not multiply the loss again.
    """
    args = objective.arguments(VespoArguments)
    log_ratio = (terms.log_probs.detach() - terms.old_log_probs).clamp(-20.0, 20.0)
    log_weight = terms.sequences.sum(log_ratio)
    if terms.log_off_policy is not None:
        log_weight = log_weight + terms.log_off_policy
    log_weight = terms.sequences.expand(log_weight.clamp(*_VESPO_LOG_LIMITS))
    positive = terms.advantages >= 0
    k = _choose(positive, args.k_positive, args.k_negative, log_weight)
    decay = _choose(positive, args.lambda_positive, args.lambda_negative, log_weight)
    phi = (decay + k * log_weight - decay * log_weight.exp()).exp()
    return PolicyLossTerms(-phi * terms.advantages * terms.log_probs)


def gmpo(objective: Objective, terms: PolicyTerms) -> PolicyLossTerms:
    """-A exp(mean over the sequence of clipped log r); the clip is one-sided by the sign of A, in log space (arXiv 2507.20673)."""
    log_ratio = terms.log_probs - terms.old_log_probs
    low = None if objective.clip_low is None else -objective.clip_low
    clipped = _clamp(log_ratio, low, objective.clip_high)
    sign = torch.sign(terms.advantages)
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * clipped)
    ratio = bounded_exp(terms.sequences.mean(pessimistic))
    none = torch.zeros_like(terms.sequences.mask)
    events = {
        "clip_fraction_low": none if low is None else (sign < 0) & (log_ratio < low),
        "clip_fraction_high": none if objective.clip_high is None else (sign > 0) & (log_ratio > objective.clip_high),
    }
    return PolicyLossTerms(-terms.advantages * terms.sequences.expand(ratio), events)


def gpg(objective: Objective, terms: PolicyTerms) -> PolicyLossTerms:
    """-A log pi, the plain policy gradient (arXiv 2504.02546)."""
    return PolicyLossTerms(-terms.advantages * terms.log_probs)


def _dppo(objective: Objective, terms: PolicyTerms, too_low: Tensor, too_high: Tensor) -> PolicyLossTerms:
    ratio_cap = objective.arguments(CappedArguments).ratio_cap
    cap = _DPPO_RATIO_CAP if ratio_cap is None else ratio_cap
    events = {"clip_fraction_low": (terms.advantages < 0) & too_low, "clip_fraction_high": (terms.advantages > 0) & too_high}
    blocked = torch.where(terms.advantages > 0, too_high, too_low)
    weight = torch.where(blocked, 0.0, bounded_exp(terms.log_ratio.detach()).clamp(max=cap))
    return PolicyLossTerms(-weight * terms.advantages * terms.log_probs, events)


def _beyond(distance: Tensor, limit: float | None) -> Tensor:
    return torch.zeros_like(distance, dtype=torch.bool) if limit is None else distance > limit


def dppo_tv(objective: Objective, terms: PolicyTerms) -> PolicyLossTerms:
    """-A sg(min(r, cap)) log pi where pi moved less than the clip distances in probability (divergence PPO, arXiv 2602.04879)."""
    move = terms.log_probs.detach().exp() - terms.old_log_probs.exp()
    return _dppo(objective, terms, _beyond(-move, objective.clip_low), _beyond(move, objective.clip_high))


def dppo_kl(objective: Objective, terms: PolicyTerms) -> PolicyLossTerms:
    """As `dppo_tv` with the binary KL(pi_old || pi) of taken / not taken as distance, in the direction of travel."""
    divergence = _binary_kl(terms.old_log_probs, terms.log_probs.detach())
    rising = terms.log_probs.detach() > terms.old_log_probs
    falling = terms.log_probs.detach() < terms.old_log_probs
    return _dppo(objective, terms, falling & _beyond(divergence, objective.clip_low), rising & _beyond(divergence, objective.clip_high))


def _binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL between Bernoulli(p) and Bernoulli(q) from the logs of p and q, [T]; p and q are kept off 0 and 1 by 1e-8."""
    not_p, not_q = (-torch.expm1(log_x).clamp(max=-1e-8) for log_x in (log_p, log_q))
    return log_p.exp() * (log_p - log_q) + not_p * (not_p.log() - not_q.log())


def distillation(objective: Objective, terms: PolicyTerms) -> PolicyLossTerms:
    """-r sg(log pi_teacher - log pi_old): policy gradient of the reverse KL to the reference model, the teacher."""
    if terms.ref_log_probs is None:
        raise ValueError("Objective.policy_loss distillation got no ref_log_probs, needs those of the teacher")
    return PolicyLossTerms(-bounded_exp(terms.log_ratio) * (terms.ref_log_probs - terms.old_log_probs).detach())


def sft(objective: Objective, terms: PolicyTerms) -> PolicyLossTerms:
    """-log pi, supervised training on given responses."""
    return PolicyLossTerms(-terms.log_probs)


def value(objective: Objective, terms: PolicyTerms) -> PolicyLossTerms:
    """1/2 max((v - R)^2, (clip(v, old v +- value_clip) - R)^2), a critic's loss (PPO; clipped as in arXiv 2005.12729)."""
    if terms.values is None or terms.old_values is None or terms.returns is None:
        raise ValueError("Objective.policy_loss value got no values, needs values, old_values and returns")
    error = (terms.values - terms.returns).square()
    limit = objective.arguments(ValueArguments).value_clip
    if limit is None:
        return PolicyLossTerms(0.5 * error)
    # Clamped between bounds rather than by its difference, which rounds: a value inside the bounds has to stay bit-equal.
    clipped = (terms.values.clamp(terms.old_values - limit, terms.old_values + limit) - terms.returns).square()
    return PolicyLossTerms(0.5 * torch.maximum(error, clipped), {"value_clip_fraction": clipped > error})


# clip_cov and kl_cov, below, take a choice of tokens as well, which needs the whole step; `selection.py` makes it.
_LOSSES: Mapping[str, PolicyLoss] = {
    "clip": clip, "cispo": cispo, "sapo": sapo, "vespo": vespo, "gmpo": gmpo, "gpg": gpg, "dppo_tv": dppo_tv, "dppo_kl": dppo_kl,
    "distillation": distillation, "sft": sft, "value": value,
}  # fmt: skip


def kl_cov(objective: Objective, terms: PolicyTerms, selected: Tensor) -> PolicyLossTerms:
    """-r A, plus coef |log r| on the `selected` [T] tokens of highest covariance; nothing is clipped (arXiv 2505.22617)."""
    penalty = objective.arguments(KlCovArguments).coef * terms.log_ratio.abs()
    losses = -bounded_exp(terms.log_ratio) * terms.advantages
    return PolicyLossTerms(losses + torch.where(selected, penalty, 0.0), {"covariance_fraction": selected})


def clip_cov(objective: Objective, terms: PolicyTerms, selected: Tensor) -> PolicyLossTerms:
    """The clipped loss, with the `selected` [T] tokens taken out of it (arXiv 2505.22617)."""
    clipped = clip(objective, terms)
    return PolicyLossTerms(torch.where(selected, 0.0, clipped.losses), {**clipped.events, "covariance_fraction": selected})


def find_policy_loss(objective: Objective) -> PolicyLoss:
    """The policy loss that `objective` names, called as loss(objective=.., terms=..) -> PolicyLossTerms; losses [T], one for each token.

    Of your own `package.module:function` what it returns is checked.

    Raises UserError when the path cannot be imported or does not take `objective.loss_args`.
    """
    path = objective.policy_loss
    if path in _LOSSES:
        return _LOSSES[path]
    loss = load(path, kind="policy_loss", args=objective.loss_args)

    def checked(*, objective: Objective, terms: PolicyTerms) -> PolicyLossTerms:
        made = loss(objective=objective, terms=terms)
        _check_made(made, terms=terms, name=f"objective.policy_loss {path}")
        return made

    return checked


def _check_made(made: object, *, terms: PolicyTerms, name: str) -> None:
    """Raise UserError where a user's loss did not return a number and a choice for each token."""
    if not isinstance(made, PolicyLossTerms):
        raise UserError(f"{name} returned {made!r:.80} of type {type(made).__name__}, needs PolicyLossTerms")
    shape = tuple(terms.log_probs.shape)
    for field_name, tensor in {"losses": made.losses, **{f"events[{event!r}]": hit for event, hit in made.events.items()}}.items():
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != shape:
            got = f"shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else f"type {type(tensor).__name__}"
            raise UserError(f"{name} returned {field_name} of {got}, needs a tensor of shape {shape}, a number for each token")
