"""What the loss of one micro-batch reads, and its preparation: masked positions become zeros, constants lose their gradient.

Legend: T tokens of this rank's part of the micro-batch, S its sequences.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from megatron_rl.algorithms.objective import Objective
from megatron_rl.algorithms.off_policy import OffPolicyTerms, off_policy_terms
from megatron_rl.algorithms.policy_terms import PolicyTerms
from megatron_rl.algorithms.sequences import Sequences, SequenceSum

_PER_SEQUENCE = ("sequence_tokens", "trajectory_ids", "trajectory_tokens")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LossInputs:
    """One micro-batch on one rank. Per-token tensors [T] are aligned with the token they score; masked positions may hold anything.

    `sequence_index` [T] int64 in [0, S), `sequence_tokens` [S] trainable tokens of the whole sequence over all context-parallel ranks.
    Log-probs and entropies are in nats. `log_probs` (with gradient), `entropy`, `varentropy`: of the current policy. `old_log_probs`: of
    the proximal policy, before the step's first update. `rollout_log_probs`: of the policy that generated. `ref_log_probs`: of the
    reference or teacher. `kl_mask`: tokens whose KL term counts in the loss, all when None (zero-variance groups under mask_kl).
    `token_keys` int64: any number that identifies the token within the step (clip_cov). `selection_log_probs`, `selection_entropy`: what
    `step_statistics` saw, when that was not the current pass. `values` (with gradient), `old_values`, `returns`: of a critic.
    `trajectory_ids` [S] int64, the same in every micro-batch of the step, and `trajectory_tokens` [S], trainable ones of all the
    trajectory's sequences, say what each sequence is a part of; None on every rank where each sequence is a trajectory.
    """

    loss_mask: Tensor
    sequence_index: Tensor
    sequence_tokens: Tensor
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    varentropy: Tensor | None = None
    old_log_probs: Tensor | None = None
    rollout_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    advantages: Tensor | None = None
    kl_mask: Tensor | None = None
    token_keys: Tensor | None = None
    selection_log_probs: Tensor | None = None
    selection_entropy: Tensor | None = None
    values: Tensor | None = None
    old_values: Tensor | None = None
    returns: Tensor | None = None
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
        """Which token belongs to which sequence; `sequence_sum` adds over context-parallel ranks."""
        return Sequences(self.sequence_index, self.loss_mask, self.sequence_tokens, sequence_sum, self.trajectory_tokens)


def present(tensor: Tensor | None, name: str, sequences: Sequences) -> Tensor:
    """`tensor` [T] in at least float32 with zeros at masked positions; ValueError with its `name` when it is missing."""
    if tensor is None:
        raise ValueError(f"compute_loss got no {name}, which this objective needs")
    return sequences.masked(tensor)


def policy_terms(objective: Objective, inputs: LossInputs, sequences: Sequences) -> PolicyTerms:
    """Everything a policy loss may read, with zeros at masked positions."""
    if objective.policy_loss == "value":
        values = present(inputs.values, "values", sequences)
        old_values = present(inputs.old_values, "old_values", sequences).detach()
        returns = present(inputs.returns, "returns", sequences).detach()
        zero = torch.zeros_like(returns)
        return PolicyTerms(zero, zero, zero, zero, sequences, values=values, old_values=old_values, returns=returns)
    log_probs = present(inputs.log_probs, "log_probs", sequences)
    if objective.policy_loss == "sft":
        zero = torch.zeros_like(log_probs).detach()
        return PolicyTerms(log_probs, log_probs.detach(), zero, zero, sequences)
    old_log_probs = present(inputs.old_log_probs, "old_log_probs", sequences).detach()
    advantages = present(inputs.advantages, "advantages", sequences).detach()
    log_ratio = log_probs - old_log_probs
    if objective.ratio_level == "sequence":
        log_ratio = sequences.expand(sequences.mean(log_ratio))
    reference = None if inputs.ref_log_probs is None else sequences.masked(inputs.ref_log_probs).detach()
    return PolicyTerms(log_probs, old_log_probs, log_ratio, advantages, sequences, ref_log_probs=reference)


def off_policy_of(objective: Objective, inputs: LossInputs, terms: PolicyTerms) -> OffPolicyTerms | None:
    """The off-policy correction of this micro-batch, None without one."""
    correction = objective.off_policy_correction
    if correction is None or not objective.trains_by_rewards:
        return None
    rollout = present(inputs.rollout_log_probs, "rollout_log_probs", terms.sequences).detach()
    return off_policy_terms(
        correction,
        sequences=terms.sequences,
        log_probs=seen_log_probs(inputs, terms),
        old_log_probs=terms.old_log_probs,
        rollout_log_probs=rollout,
        advantages=terms.advantages,
    )


def seen_log_probs(inputs: LossInputs, terms: PolicyTerms) -> Tensor:
    """The log-probs [T] that choices of tokens are based on: those of the pass before the step when given, else the current ones."""
    current = terms.log_probs if inputs.selection_log_probs is None else terms.sequences.masked(inputs.selection_log_probs)
    return current.detach()
