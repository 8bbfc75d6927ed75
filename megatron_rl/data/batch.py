"""From groups of samples to the flat arrays that the trainer gets.

T tokens of all sequences, B sequences.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_rl.errors import UserError, counted
from megatron_rl.types import Experts, Group, Ints, RewardOutcome, Sample, TrainBatch, trajectories


def make_train_batch(groups: Sequence[Group]) -> TrainBatch:
    """Return all scored samples as one batch, in order; `group_ids` [B] are positions in `groups`.

    Samples of a trajectory are adjacent. A trajectory is truncated where one sample is. Components
    of rewards are in the order of their names, with NaN where a sample lacks a component.

    Samples with an error or a timeout of the reward are left out: they have no score, not a score
    of zero. Raises ValueError for a sample never given to a reward function or without the
    trajectory's reward, and UserError when no sample was scored.

    Recorded experts are included; tokens without a record are marked.
    """
    whole = [(position, parts) for position, group in enumerate(groups) for parts in trajectories(group.samples)]
    kept = [(number, position, sample) for number, (position, parts) in enumerate(whole) for sample in parts if _scored(parts)]
    if not kept:
        num_samples = sum(len(group.samples) for group in groups)
        messages = [sample.reward.message for group in groups for sample in group.samples if sample.reward]
        raise UserError(
            f"none of {counted(num_samples, 'sample')} in {counted(len(groups), 'group')} has a reward, at least one is needed; mend the "
            "reward function" + (f", whose first failure was: {messages[0].strip()}" if messages else "")
        )
    samples = [sample for *_, sample in kept]
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
        group_ids=np.array([position for _, position, _ in kept]),
        trajectory_ids=np.array([number for number, *_ in kept]),
        truncated=np.array([any(part.truncated for part in whole[number][1]) for number, *_ in kept]),
        component_names=names,
        reward_components=np.array([[parts.get(name, np.nan) for name in names] for parts in components]),
        **_routing([sample.routed_experts for sample in samples], lengths=prompt_lengths + response_lengths),
    )


def with_records(batch: TrainBatch, records: Sequence[Experts | None]) -> TrainBatch:
    """Return the batch with the experts [N, L, K] of the first N tokens of each sequence [B].

    Without any record the batch is unchanged. Raises ValueError when records are of different
    models.
    """
    return dataclasses.replace(batch, **_routing(records, lengths=batch.lengths))


def _scored(parts: Sequence[Sample]) -> bool:
    """Return True when the samples of one trajectory have a score, equal for all."""
    outcomes = []
    for sample in parts:
        if sample.reward is None:
            raise ValueError(f"sample {sample.index} of group {sample.group_id!r} was never given to a reward function")
        outcomes.append((sample.reward.outcome, sample.reward.value))
    if len(set(outcomes)) > 1:
        raise ValueError(
            f"samples {[sample.index for sample in parts]} of group {parts[0].group_id!r} are of one trajectory and have the rewards "
            f"{[value for _, value in outcomes]}, needs one reward for all of them"
        )
    return outcomes[0][0] is RewardOutcome.SCORED


def _routing(records: Sequence[Experts | None], *, lengths: Ints) -> dict[str, Any]:
    """The fields `routed_experts` [T, L, K] and `routed` [T] of a batch of sequences of `lengths` [B]; none where no sequence has a record.

    Raises ValueError when records are of different models.
    """
    known = [record for record in records if record is not None]
    if not known:
        return {}
    shapes = {record.shape[1:] for record in known}
    if len(shapes) > 1:
        raise ValueError(f"samples have experts of shapes [layers, experts of a token] {sorted(shapes)}, one batch needs the same for all")
    experts = np.zeros((int(lengths.sum()), *known[0].shape[1:]), np.result_type(*known))
    routed = np.zeros(len(experts), np.bool_)
    for record, start in zip(records, np.cumsum(lengths) - lengths, strict=True):
        if record is not None:
            experts[start : start + len(record)] = record
            routed[start : start + len(record)] = True
    experts.setflags(write=False)
    return {"routed_experts": experts, "routed": routed}


def _with_prompts(responses: Sequence[NDArray[Any]], prompt_lengths: Ints, *, fill: float) -> NDArray[Any]:
    """Return arrays of the responses' tokens with `fill` on the prompt tokens before, flat [T]."""
    parts: list[NDArray[Any]] = []
    for response, length in zip(responses, prompt_lengths, strict=True):
        parts += [np.full(length, fill, response.dtype), response]
    return np.concatenate(parts)
