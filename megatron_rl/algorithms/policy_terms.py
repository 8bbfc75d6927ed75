"""What a policy loss reads and what it gives, yours or ours.

Legend: T tokens of this rank, S sequences of this rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from megatron_rl.algorithms.sequences import Sequences


@dataclass(frozen=True, slots=True, eq=False)
class PolicyTerms:
    """What a policy loss may read, per token [T] with zeros outside the mask.

    `log_probs` carries the gradient. `log_ratio` is log_probs - old_log_probs per token, or its mean over the sequence at ratio
    level "sequence". `log_off_policy` [S] is the log of the off-policy weight of whole sequences, None without correction.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    log_ratio: Tensor
    advantages: Tensor
    sequences: Sequences
    log_off_policy: Tensor | None = None
    ref_log_probs: Tensor | None = None
    values: Tensor | None = None
    old_values: Tensor | None = None
    returns: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PolicyLossTerms:
    """`losses` [T] and, by metric name, which tokens [T] an event hit."""

    losses: Tensor
    events: Mapping[str, Tensor] = field(default_factory=dict)
