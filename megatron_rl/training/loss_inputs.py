"""The loss's view of a micro-batch."""

import torch

from megatron_rl.algorithms.inputs import LossInputs
from megatron_rl.algorithms.log_prob import TokenStatistics
from megatron_rl.training.micro_batch import MicroBatch
from megatron_rl.training.token_data import TokenData


def loss_inputs(
    micro_batch: MicroBatch, statistics: TokenStatistics, data: TokenData, *, seen: TokenStatistics | None = None
) -> LossInputs:
    """Inputs [N] of trainable tokens only, so that every mask entry is True; `seen` are the statistics of the pass before the step."""
    current = statistics.log_prob.detach()
    rollout = data.rollout_log_probs
    return LossInputs(
        log_probs=statistics.log_prob,
        entropy=statistics.entropy,
        varentropy=statistics.varentropy,
        old_log_probs=current if data.old_log_probs is None else micro_batch.pick(data.old_log_probs),
        rollout_log_probs=None if rollout is None else micro_batch.pick(rollout),
        ref_log_probs=None if data.ref_log_probs is None else micro_batch.pick(data.ref_log_probs),
        advantages=micro_batch.pick(data.advantages),
        loss_mask=torch.ones_like(current, dtype=torch.bool),
        sequence_index=micro_batch.sequence_index,
        sequence_tokens=micro_batch.sequence_tokens,
        kl_mask=None if data.kl_mask is None else micro_batch.pick(data.kl_mask, dtype=torch.bool),
        token_keys=micro_batch.pick(data.token_keys, dtype=torch.int64),
        selection_log_probs=None if seen is None else seen.log_prob,
        selection_entropy=None if seen is None else seen.entropy,
    )
