"""From groups of samples to the flat arrays that the trainer gets.

T tokens of all sequences, B sequences.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_rl.errors import UserError
from megatron_rl.types import Group, Ints, RewardOutcome, Sample, TrainBatch


def make_train_batch(groups: Sequence[Group]) -> TrainBatch:
    """All scored samples as one batch, in order; `group_ids` [B] are the positions of their groups in `groups`.

    Components of rewards come in the order of their names, and NaN where a sample lacks one that another has.

    Samples whose reward ended in an error or a timeout are left out: they have no score, not a score of zero. Raises ValueError
    for a sample that was never given to a reward function and UserError when no sample was scored.
    """
    kept = [(position, sample) for position, group in enumerate(groups) for sample in group.samples if _scored(sample)]
    if not kept:
        num_samples = sum(len(group.samples) for group in groups)
        messages = [sample.reward.message for group in groups for sample in group.samples if sample.reward]
        raise UserError(
            f"none of {num_samples} samples in {len(groups)} groups has a reward, at least one is needed; mend the reward function"
            + (f", whose first failure was: {messages[0].strip()}" if messages else "")
        )
    samples = [sample for _, sample in kept]
    prompt_lengths = np.array([len(sample.prompt.token_ids) for sample in samples])
    response_lengths = np.array([len(sample.response_ids) for sample in samples])
    ends = np.cumsum(prompt_lengths + response_lengths)
    components = [sample.reward.components for sample in samples if sample.reward]
    names = tuple(sorted({name for parts in components for name in parts}))
    return TrainBatch(
        tokens=np.concatenate([part for sample in samples for part in (sample.prompt.token_ids, sample.response_ids)]),
        cu_seqlens=np.concatenate([[0], ends]),
        prompt_lengths=prompt_lengths,
        loss_mask=_with_prompts([sample.loss_mask for sample in samples], prompt_lengths, fill=False),
        rollout_log_probs=_with_prompts([sample.rollout_log_probs for sample in samples], prompt_lengths, fill=0.0),
        weight_versions=_with_prompts([sample.weight_versions for sample in samples], prompt_lengths, fill=-1),
        rewards=np.array([sample.reward.value for sample in samples if sample.reward]),
        group_ids=np.array([position for position, _ in kept]),
        truncated=np.array([sample.truncated for sample in samples]),
        component_names=names,
        reward_components=np.array([[parts.get(name, np.nan) for name in names] for parts in components]),
    )


def _scored(sample: Sample) -> bool:
    if sample.reward is None:
        raise ValueError(f"sample {sample.index} of group {sample.group_id!r} was never given to a reward function")
    return sample.reward.outcome is RewardOutcome.SCORED


def _with_prompts(responses: Sequence[NDArray[Any]], prompt_lengths: Ints, *, fill: float) -> NDArray[Any]:
    """Arrays of the responses' tokens with `fill` on the prompts' tokens before them, flat [T]."""
    parts: list[NDArray[Any]] = []
    for response, length in zip(responses, prompt_lengths, strict=True):
        parts += [np.full(length, fill, response.dtype), response]
    return np.concatenate(parts)
