"""Choices of tokens that need the whole optimizer step: thresholds are found once, then every micro-batch applies them.

Without this, a top-entropy mask or a covariance clip would depend on how the step was split. Legend: T tokens, S sequences.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rl.algorithms import policy_loss
from megatron_rl.algorithms.arguments import ClipCovArguments, KlCovArguments
from megatron_rl.algorithms.inputs import LossInputs, off_policy_of, policy_terms, present, seen_log_probs
from megatron_rl.algorithms.objective import Objective
from megatron_rl.algorithms.policy_terms import PolicyTerms
from megatron_rl.algorithms.sequences import Sequences, SequenceSum, identity

Gather = Callable[[Tensor], Tensor]
"""[n] values of this rank -> the values of all data- and context-parallel ranks, concatenated; n differs between ranks, and may be 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStatistics:
    """What a micro-batch must know of the whole step. A field is None when the objective does not use it.

    `policy_tokens`, `policy_trajectories`: denominators of the policy term without rejected tokens; `kept_tokens`, how many each
    trajectory has left, by its id, where one has several sequences. `entropy_threshold`, nats, and
    `entropy_tokens` that reach it. `advantage_mean`, `log_prob_mean`: centre of the covariance. `covariance_threshold`: kl_cov
    takes tokens from here up. `key_threshold`: clip_cov takes candidates whose key hashes to this or less.
    """

    policy_tokens: int | None = None
    policy_trajectories: int | None = None
    kept_tokens: "KeptTokens | None" = None
    entropy_threshold: float | None = None
    entropy_tokens: int | None = None
    advantage_mean: float = 0.0
    log_prob_mean: float = 0.0
    covariance_threshold: float | None = None
    key_threshold: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class KeptTokens:
    """Tokens of each trajectory that an off-policy correction did not reject, over all ranks: `ids` [K] ascending, `counts` [K]."""

    ids: Tensor
    counts: Tensor

    def of(self, trajectory_ids: Tensor) -> Tensor:
        """The counts [S] of `trajectory_ids` [S]; of those without a token left, which nothing weighs, any number."""
        if not len(self.ids):
            return torch.zeros_like(trajectory_ids)
        return self.counts[torch.searchsorted(self.ids, trajectory_ids).clamp(max=len(self.ids) - 1)]


def quantile(values: Tensor, fraction: float) -> float:
    """The `fraction` quantile of `values` [n >= 1] with linear interpolation, in float64 and without torch.quantile's limit of 2^24."""
    ordered = values.double().sort().values
    position = fraction * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    low, high = float(ordered[below]), float(ordered[above])
    return low + (high - low) * (position - below)


def covariance(log_probs: Tensor, advantages: Tensor, statistics: StepStatistics) -> Tensor:
    """(A - mean A)(log pi - mean log pi) per token [T] in float64, means over the step. Cui et al., arXiv 2505.22617, section 4."""
    return (advantages.double() - statistics.advantage_mean) * (log_probs.double() - statistics.log_prob_mean)


def hashed(keys: Tensor, seed: int) -> Tensor:
    """A pseudo-random non-negative int64 per key [T]: the same token gets the same number in every split of the step (splitmix64)."""

    def shift(x: Tensor, bits: int) -> Tensor:
        return (x >> bits) & ((1 << (64 - bits)) - 1)

    x = keys * -7046029254386353131 + (seed * 7046029254386353131 + 1442695040888963407) % 2**63
    x = (x ^ shift(x, 30)) * -4658895280553007687
    x = (x ^ shift(x, 27)) * -7723592293110705685
    return shift(x ^ shift(x, 31), 1)


def smallest(values: Tensor, count: int) -> int | None:
    """The `count`-th smallest of the int64 `values` [n], the largest if there are fewer, None if there are none."""
    return int(values.kthvalue(min(count, len(values))).values) if len(values) else None


def largest(values: Tensor, count: int) -> float | None:
    """The `count`-th largest of `values` [n], the smallest if there are fewer, None if there are none."""
    return float(values.topk(min(count, len(values))).values[-1]) if len(values) else None


def covariance_selection(objective: Objective, statistics: StepStatistics, inputs: LossInputs, terms: PolicyTerms) -> Tensor:
    """Tokens [T] that clip_cov or kl_cov treats, by the step's thresholds."""
    covariances = covariance(seen_log_probs(inputs, terms), terms.advantages, statistics)
    if objective.policy_loss == "kl_cov":
        limit = statistics.covariance_threshold
        return torch.zeros_like(inputs.loss_mask) if limit is None else inputs.loss_mask & (covariances >= limit)
    candidates = _clip_cov_candidates(objective, inputs, terms, covariances)
    if statistics.key_threshold is None:
        return torch.zeros_like(candidates)
    return candidates & (hashed(_keys(inputs), statistics.seed) <= statistics.key_threshold)


def _keys(inputs: LossInputs) -> Tensor:
    if inputs.token_keys is None:
        raise ValueError("Objective.policy_loss clip_cov got no token_keys, needs a number per token that is unique within the step")
    return inputs.token_keys


def _clip_cov_candidates(objective: Objective, inputs: LossInputs, terms: PolicyTerms, covariances: Tensor) -> Tensor:
    """Tokens [T] that clip_cov may take: trainable, not clipped already, covariance within the bounds."""
    seen = PolicyTerms(seen_log_probs(inputs, terms), terms.old_log_probs, terms.log_ratio.detach(), terms.advantages, terms.sequences)
    events = policy_loss.clip(objective, seen).events
    clipped = events["clip_fraction_low"] | events["clip_fraction_high"]
    bounds = objective.arguments(ClipCovArguments)
    return inputs.loss_mask & ~clipped & (covariances > bounds.low) & (covariances < bounds.high)


def top_entropy_mask(objective: Objective, statistics: StepStatistics, inputs: LossInputs, sequences: Sequences) -> Tensor | None:
    """Tokens [T] that the policy term trains on under `top_entropy_fraction`; None without a choice."""
    threshold = statistics.entropy_threshold
    if objective.top_entropy_fraction >= 1 or threshold is None:
        return None
    seen = inputs.entropy if inputs.selection_entropy is None else inputs.selection_entropy
    return present(seen, "entropy", sequences).detach().double() >= threshold


def step_statistics(
    objective: Objective,
    micro_batches: Sequence[LossInputs],
    *,
    num_tokens: int,
    sequence_sum: SequenceSum = identity,
    gather: Gather = identity,
    seed: int = 0,
) -> StepStatistics:
    """Thresholds and denominators that depend on the whole optimizer step, before its first micro-batch is trained.

    `micro_batches` are this rank's, with the log-probs and entropies of the policy before the step (selection_* when given).
    `gather` concatenates over dp and cp ranks; `seed` decides clip_cov's choice. Works under no_grad; costs O(N) numbers.
    """
    with torch.no_grad():
        fields: dict[str, Any] = {"seed": seed}
        parts = []
        for inputs in micro_batches:
            parts.append((inputs, policy_terms(objective, inputs, inputs.sequences(sequence_sum))))
        setting = objective.off_policy_correction
        if setting is not None and not setting.keep_rejected_in_denominator:
            fields |= _denominators(objective, parts, gather)
        if objective.top_entropy_fraction < 1:
            fields |= _entropy_threshold(objective, parts, gather)
        if objective.policy_loss in ("clip_cov", "kl_cov"):
            fields |= _covariance_thresholds(objective, parts, num_tokens, gather, seed)
        return StepStatistics(**fields)


Parts = Sequence[tuple[LossInputs, PolicyTerms]]


def _gathered(pieces: Sequence[Tensor], gather: Gather, dtype: torch.dtype) -> Tensor:
    return gather(torch.cat([piece.to(dtype) for piece in pieces]) if pieces else torch.empty(0, dtype=dtype))


def _denominators(objective: Objective, parts: Parts, gather: Gather) -> Mapping[str, Any]:
    shares, owners = [], []
    for inputs, terms in parts:
        correction = off_policy_of(objective, inputs, terms)
        if correction is None:
            continue
        left = terms.sequences.expand(terms.sequences.sum(correction.kept.double()))
        # 1 / n_i over the kept tokens of a sequence adds up to one sequence, also when its tokens lie on several ranks.
        shares.append(1.0 / left[correction.kept])
        if inputs.trajectory_ids is not None:
            owners.append(terms.sequences.expand(inputs.trajectory_ids)[correction.kept])
    if owners:
        ids, counts = torch.unique(_gathered(owners, gather, torch.int64), return_counts=True)
        return {"policy_tokens": int(counts.sum()), "policy_trajectories": len(ids), "kept_tokens": KeptTokens(ids, counts)}
    everything = _gathered(shares, gather, torch.float64)
    return {"policy_tokens": len(everything), "policy_trajectories": round(float(everything.sum()))}


def _entropy_threshold(objective: Objective, parts: Parts, gather: Gather) -> Mapping[str, float | int]:
    seen = [inputs.entropy if inputs.selection_entropy is None else inputs.selection_entropy for inputs, _ in parts]
    pieces = [present(entropy, "entropy", terms.sequences)[inputs.loss_mask] for entropy, (inputs, terms) in zip(seen, parts, strict=True)]
    everything = _gathered(pieces, gather, torch.float64)
    threshold = quantile(everything, 1.0 - objective.top_entropy_fraction) if len(everything) else 0.0
    return {"entropy_threshold": threshold, "entropy_tokens": int((everything >= threshold).sum())}


def _covariance_thresholds(
    objective: Objective, parts: Parts, num_tokens: int, gather: Gather, seed: int
) -> Mapping[str, float | int | None]:
    log_probs = _gathered([seen_log_probs(inputs, terms)[inputs.loss_mask] for inputs, terms in parts], gather, torch.float64)
    advantages = _gathered([terms.advantages[inputs.loss_mask] for inputs, terms in parts], gather, torch.float64)
    if len(log_probs) == 0:
        return {}
    means = StepStatistics(advantage_mean=float(advantages.mean()), log_prob_mean=float(log_probs.mean()), seed=seed)
    found: dict[str, float | int | None] = {"advantage_mean": means.advantage_mean, "log_prob_mean": means.log_prob_mean}
    if objective.policy_loss == "kl_cov":
        count = max(1, int(objective.arguments(KlCovArguments).fraction * num_tokens))
        found["covariance_threshold"] = largest(covariance(log_probs, advantages, means), count)
        return found
    keys = []
    for inputs, terms in parts:
        covariances = covariance(seen_log_probs(inputs, terms), terms.advantages, means)
        candidates = _clip_cov_candidates(objective, inputs, terms, covariances)
        keys.append(hashed(_keys(inputs), seed)[candidates])
    count = max(1, int(objective.arguments(ClipCovArguments).fraction * num_tokens))
    found["key_threshold"] = smallest(_gathered(keys, gather, torch.int64), count)
    return found
