"""Sums and means over whole sequences of a packed micro-batch whose tokens may be spread over context-parallel ranks.

A sequence is what the model sees in one piece: ratios and masks of sequences are its own, whatever trajectory it is a part of.

Legend: T tokens of this rank, S sequences of the micro-batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

SequenceSum = Callable[[Tensor], Tensor]
"""[S] partial sums of this context-parallel rank -> [S] sums over all of them; differentiable: its backward sums as well."""

# exp() of more overflows float32 soon after; a ratio that far away is clipped or rejected by every rule here.
LOG_RATIO_LIMIT = 20.0


def identity(partial: Tensor) -> Tensor:
    """The `SequenceSum` of a single context-parallel rank: `partial` [S] is the sum."""
    return partial


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp of the log-ratio [T] clamped to +-20: always finite, with gradient 0 outside."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """Which token belongs to which sequence: `index` [T] in [0, S), `mask` [T] trainable, `tokens` [S] trainable of the whole sequence.

    `trajectory_tokens` [S]: trainable tokens of all sequences of the trajectory that each sequence is a part of, by which means over
    trajectories divide; None where each sequence is a trajectory. Derived once, because reductions and selections by bools are slow:
    `excluded` [T] = not mask, `count` of this rank's trainable tokens.
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
        """[T] -> [S], over trainable tokens of all context-parallel ranks."""
        kept = values.masked_fill(self.excluded, 0.0)
        partial = torch.zeros(self.tokens.shape[0], dtype=kept.dtype, device=kept.device).index_add(0, self.index, kept)
        return self.sequence_sum(partial)

    def mean(self, values: Tensor) -> Tensor:
        """[T] -> [S], over trainable tokens; 0 for a sequence without any."""
        return self.sum(values) / self.tokens.clamp(min=1)

    @property
    def mean_divisor(self) -> Tensor:
        """What a mean over the tokens of each sequence's trajectory divides by, [S]: their number, and 1 where there is none."""
        return (self.tokens if self.trajectory_tokens is None else self.trajectory_tokens).clamp(min=1)

    def expand(self, per_sequence: Tensor) -> Tensor:
        """[S] -> [T]."""
        return per_sequence[self.index]

    def masked(self, values: Tensor) -> Tensor:
        """`values` [T] in at least float32, with 0 wherever the mask is False, so that nothing stored there can spread."""
        wide = values if values.dtype == torch.float64 else values.float()
        return wide.masked_fill(self.excluded, 0.0)
