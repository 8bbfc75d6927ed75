"""Thresholds and denominators of the whole optimizer step, independent of its split. Legend: T tokens, S sequences."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rl.algorithms.aggregation import LossInputs, Sequences, SequenceSum, identity
from megatron_rl.algorithms.covariance_losses import gathered
from megatron_rl.algorithms.objective import Objective
from megatron_rl.algorithms.off_policy import OffPolicy
from megatron_rl.algorithms.policy_loss import Gather, PolicyTerms


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStatistics:
    """Facts about the whole step for a micro-batch; None where the objective does not use them.

    `policy_tokens`, `policy_trajectories`: denominators of the policy term without rejected tokens;
    `kept_tokens` of each trajectory, where one has several sequences. `entropy_threshold`, nats,
    and `entropy_tokens` at or above it. `policy_loss`: the policy loss's own statistics of the
    step's terms.
    """

    policy_tokens: int | None = None
    policy_trajectories: int | None = None
    kept_tokens: "KeptTokens | None" = None
    entropy_threshold: float | None = None
    entropy_tokens: int | None = None
    policy_loss: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class KeptTokens:
    """Tokens of each trajectory without rejected ones, over all ranks: trajectory `ids` [K] ascending, `counts` [K]."""

    ids: Tensor
    counts: Tensor

    def of(self, trajectory_ids: Tensor) -> Tensor:
        """Return the counts [S] of `trajectory_ids` [S]; any number, without weight, where no token is left."""
        if not len(self.ids):
            return torch.zeros_like(trajectory_ids)
        return self.counts[torch.searchsorted(self.ids, trajectory_ids).clamp(max=len(self.ids) - 1)]


def quantile(values: Tensor, fraction: float) -> float:
    """Return the `fraction` quantile of `values` [n >= 1], interpolated, in float64 and without torch.quantile's limit of 2^24."""
    ordered = values.double().sort().values
    position = fraction * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    low, high = float(ordered[below]), float(ordered[above])
    return low + (high - low) * (position - below)


def top_entropy_mask(threshold: float | None, inputs: LossInputs, sequences: Sequences) -> Tensor | None:
    """Return tokens [T] with entropy of at least `threshold` in the choosing pass; None without a threshold."""
    return None if threshold is None else _seen_entropy(inputs, sequences).double() >= threshold


def _seen_entropy(inputs: LossInputs, sequences: Sequences) -> Tensor:
    return inputs.present("entropy" if inputs.selection_entropy is None else "selection_entropy", sequences).detach()


def step_statistics(
    objective: Objective,
    micro_batches: Sequence[LossInputs],
    *,
    num_tokens: int,
    sequence_sum: SequenceSum = identity,
    gather: Gather = identity,
    seed: int = 0,
) -> StepStatistics:
    """Return the thresholds and denominators of the whole optimizer step, before its first micro-batch.

    `micro_batches` are this rank's, with log-probs and entropies before the step. `gather`
    concatenates over dp and cp ranks; `seed` decides clip_cov's choice. Costs O(N) numbers.
    """
    with torch.no_grad():
        fields: dict[str, Any] = {}
        loss, correction = objective.policy_loss, objective.off_policy
        parts = [(inputs, loss.terms(inputs, inputs.sequences(sequence_sum))) for inputs in micro_batches]
        if correction is not None and not correction.keep_rejected_in_denominator:
            fields |= _denominators(correction, parts, gather)
        if objective.top_entropy_fraction < 1:
            fields |= _entropy_threshold(objective.top_entropy_fraction, parts, gather)
        if loss.needs_statistics:
            fields["policy_loss"] = loss.statistics([terms for _, terms in parts], num_tokens=num_tokens, gather=gather, seed=seed)
        return StepStatistics(**fields)


Parts = Sequence[tuple[LossInputs, PolicyTerms]]


def _denominators(correction: OffPolicy, parts: Parts, gather: Gather) -> Mapping[str, Any]:
    shares, owners = [], []
    for inputs, terms in parts:
        kept = correction.terms(terms, inputs.present("rollout_log_probs", terms.sequences).detach()).kept
        left = terms.sequences.expand(terms.sequences.sum(kept.double()))
        # 1 / n_i over the kept tokens of a sequence adds up to one sequence, also with tokens on several ranks.
        shares.append(1.0 / left[kept])
        if inputs.trajectory_ids is not None:
            owners.append(terms.sequences.expand(inputs.trajectory_ids)[kept])
    if owners:
        ids, counts = torch.unique(gathered(owners, gather, torch.int64), return_counts=True)
        return {"policy_tokens": int(counts.sum()), "policy_trajectories": len(ids), "kept_tokens": KeptTokens(ids, counts)}
    everything = gathered(shares, gather, torch.float64)
    return {"policy_tokens": len(everything), "policy_trajectories": round(float(everything.sum()))}


def _entropy_threshold(fraction: float, parts: Parts, gather: Gather) -> Mapping[str, float | int]:
    everything = gathered([_seen_entropy(inputs, terms.sequences)[inputs.loss_mask] for inputs, terms in parts], gather, torch.float64)
    threshold = quantile(everything, 1.0 - fraction) if len(everything) else 0.0
    return {"entropy_threshold": threshold, "entropy_tokens": int((everything >= threshold).sum())}
