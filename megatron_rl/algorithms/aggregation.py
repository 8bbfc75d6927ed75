"""Sequences and token weights of one micro-batch: the one place of denominators.

Every term of the objective is sum_t w_t l_t. The weights carry mask and normalisation, from counts
over the whole optimizer step, so the sum is additive over micro-batches and ranks. A sequence is
one piece of model input: ratios and masks belong to it, in any trajectory. Legend: T tokens of this
rank's part of the micro-batch, S its sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Literal, TypeAlias

from megatron_rl.algorithms.lazy_torch import Tensor, torch

Aggregation = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_mean_token_sum_norm", "token_sum"]

SequenceSum: TypeAlias = "Callable[[Tensor], Tensor]"
"""[S] partial sums of this context-parallel rank -> [S] sums over all of them; differentiable: its backward sums as well."""

Metrics: TypeAlias = "dict[str, tuple[Tensor, Tensor]]"
"""(sum, weight) pairs of detached scalars that add up over micro-batches and ranks."""

# exp() of more overflows float32 soon after; every rule here clips or rejects a ratio so far away.
LOG_RATIO_LIMIT = 20.0
_PER_SEQUENCE = ("sequence_tokens", "trajectory_ids", "trajectory_tokens")


def identity(partial: Tensor) -> Tensor:
    """Return `partial` [S]: the `SequenceSum` of a single context-parallel rank."""
    return partial


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Return exp of the log-ratio [T] clamped to +-20: always finite, with gradient 0 outside."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """The sequence of each token: `index` [T] in [0, S), `mask` [T] trainable, and counts.

    `tokens` [S] trainable of the whole sequence; `trajectory_tokens` [S] of all sequences of its
    trajectory, the divisor of means over trajectories, None where each sequence is a trajectory.
    Derived once, because reductions and selections by bools are slow: `excluded` [T] = not mask,
    `count` of this rank's trainable tokens.
    """

    index: Tensor
    mask: Tensor
    tokens: Tensor
    sequence_sum: SequenceSum = identity
    trajectory_tokens: Tensor | None = None
    excluded: Tensor = field(init=False)
    count: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "excluded", ~self.mask)
        object.__setattr__(self, "count", torch.count_nonzero(self.mask))

    def sum(self, values: Tensor) -> Tensor:
        """Return sums [T] -> [S] over trainable tokens of all context-parallel ranks."""
        kept = values.masked_fill(self.excluded, 0.0)
        partial = torch.zeros(self.tokens.shape[0], dtype=kept.dtype, device=kept.device).index_add(0, self.index, kept)
        return self.sequence_sum(partial)

    def mean(self, values: Tensor) -> Tensor:
        """Return means [T] -> [S] over trainable tokens; 0 for a sequence without any."""
        return self.sum(values) / self.tokens.clamp(min=1)

    @property
    def mean_divisor(self) -> Tensor:
        """Return the divisor [S] of means over each sequence's trajectory: at least 1."""
        return (self.tokens if self.trajectory_tokens is None else self.trajectory_tokens).clamp(min=1)

    def expand(self, per_sequence: Tensor) -> Tensor:
        """Return each sequence's value at all tokens, [S] -> [T]."""
        return per_sequence[self.index]

    def masked(self, values: Tensor) -> Tensor:
        """Return `values` [T] in at least float32, with 0 wherever the mask is False, so their content cannot spread."""
        wide = values if values.dtype == torch.float64 else values.float()
        return wide.masked_fill(self.excluded, 0.0)

    def mean_pair(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return (sum, count) over this rank's trainable tokens of `values` [T], numbers or bools."""
        if values.dtype == torch.bool:
            return torch.count_nonzero(values & self.mask).double(), self.count.double()
        return values.detach().masked_fill(self.excluded, 0.0).sum().double(), self.count.double()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LossInputs:
    """One micro-batch on one rank. Per-token tensors [T] are aligned with the scored token; masked
    positions may hold anything.

    `sequence_index` [T] int64 in [0, S), `sequence_tokens` [S] trainable of the whole sequence over
    all context-parallel ranks. In nats: `log_probs` (with gradient), `entropy`, `varentropy` of the
    current policy; `old_log_probs` of the proximal one, before the step's first update;
    `rollout_log_probs` of the generating one; `ref_log_probs` of the reference or teacher.
    `current_share`: the current policy's part of the proximal one, whose rest is the generating
    one's; `old_log_probs` is then unread.
    `kl_mask`: tokens with a KL in the loss, all when None. `token_keys` int64: unique within the
    step (clip_cov). `selection_log_probs`, `selection_entropy`: the inputs of `step_statistics`,
    where not from the current pass. `trajectory_ids` [S] int64 name each sequence's trajectory in
    the whole step, and `trajectory_tokens` [S] count its trainable tokens; None on every rank where
    each sequence is a trajectory.
    """

    loss_mask: Tensor
    sequence_index: Tensor
    sequence_tokens: Tensor
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    varentropy: Tensor | None = None
    old_log_probs: Tensor | None = None
    rollout_log_probs: Tensor | None = None
    current_share: Tensor | None = None
    ref_log_probs: Tensor | None = None
    advantages: Tensor | None = None
    kl_mask: Tensor | None = None
    token_keys: Tensor | None = None
    selection_log_probs: Tensor | None = None
    selection_entropy: Tensor | None = None
    trajectory_ids: Tensor | None = None
    trajectory_tokens: Tensor | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            name, tensor = item.name, getattr(self, item.name)
            like = "sequence_tokens" if name in _PER_SEQUENCE else "loss_mask"
            if tensor is not None and tensor.shape != getattr(self, like).shape:
                raise ValueError(
                    f"LossInputs.{name} has shape {tuple(tensor.shape)}, needs that of {like} {tuple(getattr(self, like).shape)}"
                )
        if self.loss_mask.dtype != torch.bool or self.loss_mask.ndim != 1 or self.sequence_tokens.ndim != 1:
            raise ValueError(f"LossInputs.loss_mask is {self.loss_mask.dtype} {tuple(self.loss_mask.shape)}, needs a flat bool tensor [T]")
        if (self.trajectory_ids is None) != (self.trajectory_tokens is None):
            raise ValueError("LossInputs has one of trajectory_ids and trajectory_tokens, needs both, or neither")

    def sequences(self, sequence_sum: SequenceSum) -> Sequences:
        """Return the sequence of each token; `sequence_sum` adds over context-parallel ranks."""
        return Sequences(self.sequence_index, self.loss_mask, self.sequence_tokens, sequence_sum, self.trajectory_tokens)

    def present(self, name: str, sequences: Sequences) -> Tensor:
        """Return the tensor `name` [T] in at least float32 with zeros at masked positions. Raises ValueError without it."""
        tensor: Tensor | None = getattr(self, name)
        if tensor is None:
            raise ValueError(f"compute_loss got no {name}, which this objective needs")
        return sequences.masked(tensor)


def token_weights(
    sequences: Sequences,
    *,
    aggregation: Aggregation,
    num_tokens: int,
    num_trajectories: int,
    max_response_length: int | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return the weights [T] of per-token losses, 0 where the mask is False, and everywhere in a
    step without a trainable token.

    N = `num_tokens` counts the trainable tokens of the whole step, and B = `num_trajectories` the
    trajectories with at least one. token_mean is 1/N; sequence_mean_token_mean 1/(B n_i), with n_i
    tokens of all sequences of the trajectory; sequence_mean_token_sum 1/B;
    sequence_mean_token_sum_norm 1/(B L); token_sum 1. Raises ValueError for a needed
    L = `max_response_length` of None.
    """
    tokens = max(num_tokens, 1)
    rows = max(num_trajectories, 1)
    if aggregation == "sequence_mean_token_mean":
        per_sequence = 1.0 / (rows * sequences.mean_divisor.to(dtype))
        return sequences.expand(per_sequence).masked_fill(sequences.excluded, 0.0)
    if aggregation == "sequence_mean_token_sum_norm" and max_response_length is None:
        raise ValueError(
            "Objective.aggregation sequence_mean_token_sum_norm has no max_response_length, needs the constant L in tokens; set it"
        )
    constants = {
        "token_mean": 1.0 / tokens,
        "sequence_mean_token_sum": 1.0 / rows,
        "sequence_mean_token_sum_norm": 1.0 / (rows * (max_response_length or 1)),
        "token_sum": 1.0,
    }
    return torch.full(sequences.mask.shape, constants[aggregation], dtype=dtype, device=sequences.mask.device).masked_fill_(
        sequences.excluded, 0.0
    )
