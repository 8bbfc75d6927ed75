"""From groups of samples, or a caller's own B sequences, to the trainer's flat arrays [T]."""

import dataclasses
import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_rl.errors import UserError, counted
from megatron_rl.system.frozen_arrays import Candidates
from megatron_rl.types import Experts, Group, Ints, RewardOutcome, Sample, TrainBatch, trajectories

GREEDY_BASELINE = "greedy_baseline"
"""Component of rewards: the reward of the greedy response to the prompt, with which ReMax compares each sample."""


def compared_names(names: Sequence[str]) -> list[str]:
    """Return the names of components for GDPO, in their order: NAME/PART is counted within NAME already."""
    return [name for name in names if not any(name[:end] in names for end, char in enumerate(name) if char == "/")]


def make_train_batch(groups: Sequence[Group], *, version: int = 0) -> TrainBatch:
    """Return all scored samples as one batch for weights of `version`, in order.

    `group_ids` [B] are equal for trajectories of a group with one role. Samples of a trajectory are
    adjacent. A trajectory is truncated where one sample is. Components of rewards are in the order
    of their names, with NaN where a sample lacks a component.

    Samples with an error or a timeout of the reward are left out: they have no score, not a score
    of zero. Raises ValueError for a sample never given to a reward function or without the
    trajectory's reward, and UserError when no sample was scored.
    """
    whole, kept = _scored_samples(groups)
    if not kept:
        num_samples = sum(len(group.samples) for group in groups)
        messages = [sample.reward.message for group in groups for sample in group.samples if sample.reward]
        raise UserError(
            f"none of {counted(num_samples, 'sample')} in {counted(len(groups), 'group')} has a reward, at least one is needed; mend the "
            "reward function" + (f", whose first failure was: {messages[0].strip()}" if messages else "")
        )
    samples = [sample for *_, sample in kept]
    layout = _layout([sample.prompt.token_ids for sample in samples], [sample.response_ids for sample in samples])
    prompt_lengths = layout["prompt_lengths"]
    components = [sample.reward.components for sample in samples if sample.reward]
    names = tuple(sorted({name for parts in components for name in parts}))
    return TrainBatch(
        **layout,
        loss_mask=_with_prompts([sample.loss_mask for sample in samples], prompt_lengths, fill=False),
        rollout_log_probs=_with_prompts([sample.rollout_log_probs for sample in samples], prompt_lengths, fill=0.0),
        weight_versions=_with_prompts([sample.weight_versions for sample in samples], prompt_lengths, fill=-1),
        rewards=np.array([sample.reward.value for sample in samples if sample.reward]),
        group_ids=_numbered((position, sample.role) for _, position, sample in kept),
        trajectory_ids=np.array([number for number, *_ in kept]),
        truncated=np.array([any(part.truncated for part in whole[number][1]) for number, *_ in kept]),
        component_names=names,
        version=version,
        reward_components=np.array([[parts.get(name, np.nan) for name in names] for parts in components]),
        candidates=_candidates([sample.candidates for sample in samples], layout),
        **_routing([sample.routed_experts for sample in samples], lengths=np.diff(layout["cu_seqlens"])),
    )


def batch_samples(groups: Sequence[Group]) -> list[Sample]:
    """Return the sample of each row [B] of `make_train_batch(groups)`."""
    return [sample for *_, sample in _scored_samples(groups)[1]]


def _scored_samples(groups: Sequence[Group]) -> tuple[list[tuple[int, tuple[Sample, ...]]], list[tuple[int, int, Sample]]]:
    """Return all trajectories, with the group's position, and the scored samples, with those of trajectory and group."""
    whole = [(position, parts) for position, group in enumerate(groups) for parts in trajectories(group.samples)]
    return whole, [(number, position, sample) for number, (position, parts) in enumerate(whole) for sample in parts if _scored(parts)]


def batch_from_sequences(
    *,
    prompts: Sequence[ArrayLike],
    responses: Sequence[ArrayLike],
    rewards: ArrayLike | None = None,
    group_ids: Iterable[Hashable] | None = None,
    loss_masks: Sequence[ArrayLike] | None = None,
    rollout_log_probs: Sequence[ArrayLike] | None = None,
    old_log_probs: Sequence[ArrayLike] | None = None,
    ref_log_probs: Sequence[ArrayLike] | None = None,
    values: Sequence[ArrayLike] | None = None,
    advantages: Sequence[ArrayLike] | None = None,
    truncated: ArrayLike | None = None,
    trajectory_ids: Iterable[Hashable] | None = None,
    candidates: Sequence[Candidates | None] | None = None,
) -> TrainBatch:
    """Return a batch of B responses, `responses[b]` [R_b] to `prompts[b]` [P_b], as token ids.

    `rewards` and `truncated` [B]. `trajectory_ids` [B], any labels; by default each response is one.
    `group_ids` [B], any labels; by default equal first prompts of a trajectory. Others are [R_b], as
    in TrainBatch: `loss_masks` (default: all trained); an advantage may be one number. Without
    `rollout_log_probs` the generator is the policy before the step. Raises ValueError.
    """
    prompt_ids, response_ids = _token_rows(prompts, responses)
    num, layout = len(response_ids), _layout(prompt_ids, response_ids)
    attempts = list(range(num) if trajectory_ids is None else trajectory_ids)
    if len(attempts) != num:
        raise ValueError(f"batch_from_sequences got {len(attempts)} trajectory_ids, needs one for each of {num} responses")
    made = [np.full(len(ids), -1 if rollout_log_probs is None else 0) for ids in response_ids]
    flat = partial(_flat, response_ids, layout["prompt_lengths"])
    return TrainBatch(
        **layout,
        loss_mask=flat("loss_masks", [np.ones(len(ids)) for ids in response_ids] if loss_masks is None else loss_masks),
        weight_versions=_with_prompts(made, layout["prompt_lengths"], fill=-1),
        rollout_log_probs=flat("rollout_log_probs", rollout_log_probs),
        old_log_probs=flat("old_log_probs", old_log_probs),
        ref_log_probs=flat("ref_log_probs", ref_log_probs),
        values=flat("values", values),
        advantages=flat("advantages", advantages),
        rewards=np.full(num, np.nan) if rewards is None else np.asarray(rewards),
        group_ids=_numbered(_first_prompts(prompt_ids, attempts) if group_ids is None else group_ids),
        trajectory_ids=_numbered(attempts),
        truncated=np.zeros(num, np.bool_) if truncated is None else np.asarray(truncated),
        candidates=_candidates(candidates or [None] * num, layout),
    )


def _layout(prompts: Sequence[Ints], responses: Sequence[Ints]) -> dict[str, Any]:
    """Return the fields of a batch that follow from the token ids alone."""
    prompt_lengths = np.array([len(ids) for ids in prompts], np.int64)
    return {
        "tokens": np.concatenate([np.empty(0, np.int64), *itertools.chain(*zip(prompts, responses, strict=True))]),
        "cu_seqlens": np.cumsum([0, *(prompt_lengths + [len(ids) for ids in responses])]),
        "prompt_lengths": prompt_lengths,
    }


def _token_rows(prompts: Sequence[ArrayLike], responses: Sequence[ArrayLike]) -> tuple[list[Ints], list[Ints]]:
    """Return the ids of both, of each row [n]. Raises ValueError for other numbers and for padding."""
    prompt_ids, response_ids = (
        [_token_row(ids, name) for ids in given] for name, given in (("prompts", prompts), ("responses", responses))
    )
    shortest = min(map(len, prompt_ids), default=0)
    if len(prompts) != len(responses) or (len(prompts) and not shortest):
        raise ValueError(
            f"batch_from_sequences got {counted(len(prompts), 'prompt')}, the shortest of {counted(shortest, 'token')}, and "
            f"{counted(len(responses), 'response')}; needs a prompt of a token or more for each response"
        )
    return prompt_ids, response_ids


def _token_row(ids: ArrayLike, name: str) -> Ints:
    row, got = np.asarray(ids), f"batch_from_sequences got {name} with"
    if row.ndim != 1 or (row.size and not np.issubdtype(row.dtype, np.integer)):
        raise ValueError(f"{got} a row of type {row.dtype}, shape {row.shape}; needs token ids [n], without padding")
    if row.size and row.min() < 0:
        raise ValueError(f"{got} the token id {row.min()}; needs ids of 0 or more, without padding")
    return row.astype(np.int64)


def _first_prompts(prompts: Sequence[Ints], trajectories: Sequence[Hashable]) -> list[Hashable]:
    """Return the first prompt of each prompt's trajectory, as bytes, [B]."""
    first: dict[Hashable, Hashable] = {}
    return [first.setdefault(trajectory, ids.tobytes()) for trajectory, ids in zip(trajectories, prompts, strict=True)]


def _flat(responses: Sequence[Ints], prompt_lengths: Ints, name: str, given: Sequence[ArrayLike] | None) -> Any:
    """Return the argument `name`, a number for each token of `responses`, flat [T] with prompts."""
    if given is None:
        return None
    if len(given) != len(responses):
        raise ValueError(f"batch_from_sequences got {name} of {len(given)} responses, needs those of all {len(responses)}")
    rows = []
    for index, (numbers, response) in enumerate(zip(given, responses, strict=True)):
        row = np.asarray(numbers, np.float32)
        if name == "advantages" and row.ndim == 0:
            row = np.full(len(response), row, np.float32)
        if row.shape != response.shape:
            tokens = counted(len(response), "token")
            raise ValueError(f"batch_from_sequences got {name}[{index}] of shape {row.shape} for a response of {tokens}, needs one each")
        rows.append(row)
    return _with_prompts(rows, prompt_lengths, fill=0.0)


def _numbered(labels: Iterable[Hashable]) -> Ints:
    """Return equal labels as equal numbers, counted from 0 in order of first appearance, [B]."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(label, len(numbers)) for label in labels], np.int64)


def with_records(batch: TrainBatch, records: Sequence[Experts | None]) -> TrainBatch:
    """Return the batch with records of experts [N, L, K] for sequences [B]. Raises ValueError."""
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
    """Return the fields of known experts for `lengths` [B]. Raises ValueError for unlike records."""
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


def _candidates(records: Sequence[Candidates | None], layout: Mapping[str, Any]) -> Candidates | None:
    """Return the candidates [T], none for prompts and responses without a record; None without any record."""
    if all(record is None for record in records):
        return None
    lengths = np.diff(layout["cu_seqlens"]) - layout["prompt_lengths"]
    known = [Candidates.none(length) if record is None else record for record, length in zip(records, lengths, strict=True)]
    prompts = map(Candidates.none, layout["prompt_lengths"])
    return Candidates.joined(itertools.chain(*zip(prompts, known, strict=True)))


def _with_prompts(responses: Sequence[NDArray[Any]], prompt_lengths: Ints, *, fill: float) -> NDArray[Any]:
    """Return arrays of the responses' tokens with `fill` on the prompt tokens before, flat [T]."""
    parts: list[NDArray[Any]] = [np.empty(0, np.bool_)]
    for response, length in zip(responses, prompt_lengths, strict=True):
        parts += [np.full(length, fill, response.dtype), response]
    return np.concatenate(parts)
