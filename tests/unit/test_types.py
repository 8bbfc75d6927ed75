"""Batches made of other people's data: alignment, defaults, and what is refused."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from megatron_rl.data.batch import batch_from_sequences
from megatron_rl.types import Prompt, Sample, StopReason, TrainBatch, last_samples, trajectories

PROMPTS, RESPONSES = [[5, 6], [5, 6], [9]], [[7], [8, 9, 1], [2, 3]]


def make(**fields: Any) -> TrainBatch:
    return batch_from_sequences(prompts=PROMPTS, responses=RESPONSES, **fields)


def test_sequences_become_flat_arrays_with_sensible_defaults() -> None:
    batch = make(rewards=[1, 0, 0.5])
    assert batch.tokens.tolist() == [5, 6, 7, 5, 6, 8, 9, 1, 9, 2, 3]
    assert batch.cu_seqlens.tolist() == [0, 3, 8, 11] and batch.prompt_lengths.tolist() == [2, 2, 1]
    assert batch.loss_mask.tolist() == [False, False, True, False, False, True, True, True, False, True, True]
    assert batch.rewards.tolist() == [1, 0, 0.5] and batch.group_ids.tolist() == [0, 0, 1]
    assert (batch.weight_versions == -1).all() and not batch.truncated.any()
    assert batch.rollout_log_probs is None and batch.old_log_probs is None and batch.advantages is None
    assert np.isnan(make().rewards).all()


def test_numbers_per_token_stand_behind_their_prompts() -> None:
    batch = make(
        rollout_log_probs=[[-1], [-2, -3, -4], [-5, -6]],
        values=[[0.1], [0.2, 0.3, 0.4], [0.5, 0.6]],
        advantages=[2.0, [1, 2, 3], -1],
        loss_masks=[[1], [1, 0, 1], [0, 1]],
        group_ids=["b", "a", "b"],
        truncated=[False, True, False],
    )
    assert batch.rollout_log_probs is not None and batch.values is not None and batch.advantages is not None
    assert batch.rollout_log_probs.tolist() == [0, 0, -1, 0, 0, -2, -3, -4, 0, -5, -6]
    assert batch.values.tolist() == pytest.approx([0, 0, 0.1, 0, 0, 0.2, 0.3, 0.4, 0, 0.5, 0.6])
    assert batch.advantages.tolist() == [0, 0, 2, 0, 0, 1, 2, 3, 0, -1, -1]
    assert batch.loss_mask.tolist() == [False, False, True, False, False, True, False, True, False, False, True]
    assert batch.weight_versions.tolist() == [-1, -1, 0, -1, -1, 0, 0, 0, -1, 0, 0]
    assert batch.group_ids.tolist() == [0, 1, 0] and batch.truncated.tolist() == [False, True, False]
    chosen = batch.select(np.array([2, 0]))
    assert chosen.advantages is not None and chosen.values is not None and chosen.ref_log_probs is None
    assert chosen.advantages.tolist() == [0, -1, -1, 0, 0, 2] and chosen.values.tolist() == pytest.approx([0, 0.5, 0.6, 0, 0, 0.1])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"advantages": [[1], [1, 2], [1, 2]]}, r"advantages\[1\] of shape \(2,\) for a response of 3 tokens"),
        ({"old_log_probs": [[-1], [-1, -1, -1]]}, r"old_log_probs of 2 responses, needs those of all 3"),
        ({"values": [1.0, 2.0, 3.0]}, r"values\[0\] of shape \(\) for a response of 1 token"),
        ({"advantages": [[1], [1, np.nan, 1], [1, 2]]}, r"advantages is nan on trainable token 3 of sequence 1"),
        ({"ref_log_probs": [[-1], [-1, -1, -1], [-np.inf, -1]]}, r"ref_log_probs is -inf on trainable token 1 of sequence 2"),
        ({"rewards": [1.0, 2.0]}, r"rewards has length 2, needs 3"),
        ({"rewards": [[1.0], [2.0], [3.0]]}, r"rewards has 2 dimensions, needs 1"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**fields)


def test_a_token_that_is_not_trained_on_may_hold_anything() -> None:
    batch = make(advantages=[[1], [1, np.nan, 1], [1, 2]], loss_masks=[[1], [1, 0, 1], [1, 1]])
    assert batch.advantages is not None and np.isnan(batch.advantages[6])


@pytest.mark.parametrize(
    ("prompts", "responses", "message"),
    [
        ([[1], []], [[2], [3]], "the shortest of 0 tokens"),
        ([[1]], [[2], [3]], "1 prompt, .* and 2 responses"),
        ([[1.5]], [[2]], "prompts with a row of type float64"),
        ([[-1]], [[2]], "prompts with the token id -1; needs ids of 0 or more"),
        ([[0]], [[2, -100]], "responses with the token id -100"),
        ([[1]], [[[2, 3]]], r"responses with a row of type int64, shape \(1, 2\)"),
    ],
)
def test_rows_that_are_not_token_ids_are_refused(prompts: list[Any], responses: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        batch_from_sequences(prompts=prompts, responses=responses)


@pytest.mark.parametrize("name", ["rollout_log_probs", "old_log_probs", "ref_log_probs", "values", "advantages"])
def test_fields_of_a_batch_are_checked_however_it_is_made(name: str) -> None:
    with pytest.raises(ValueError, match=rf"TrainBatch\.{name} has length 10, needs 11"):
        dataclasses.replace(make(), **{name: np.zeros(10)})
    with pytest.raises(ValueError, match=rf"TrainBatch\.{name} is inf on trainable token 2 of sequence 0"):
        dataclasses.replace(make(), **{name: np.full(11, np.inf)})


def test_sequences_of_a_trajectory_share_a_group() -> None:
    batch = batch_from_sequences(
        prompts=[[5, 6], [5, 6], [9], [5, 6], [8]],
        responses=[[7], [8, 9, 1], [2, 3], [4], [4]],
        rewards=[1, 0, 0, 1, 3],
        trajectory_ids=["x", "y", "y", "x", "z"],
    )
    assert batch.trajectory_ids.tolist() == [0, 1, 1, 0, 2] and batch.group_ids.tolist() == [0, 0, 0, 0, 1]
    assert make().trajectory_ids.tolist() == [0, 1, 2]
    chosen = batch.select(np.array([4, 2, 1]))
    assert chosen.trajectory_ids.tolist() == [2, 1, 1]
    with pytest.raises(ValueError, match="rows without 3, needs all sequences of trajectory 0 or none"):
        batch.select(np.array([0, 4]))
    assert batch.select(np.array([0]), may_cut=True).trajectory_ids.tolist() == [0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rewards": [1, 0, 1]}, r"rewards is 0.0 for sequence 1 and 1.0 for sequence 0, needs the same for both, .* of trajectory 0"),
        ({"rewards": [1, np.nan, 1]}, "rewards is nan for sequence 1"),
        ({"group_ids": [0, 0, 1], "trajectory_ids": [0, 1, 1]}, "group_ids is 1 for sequence 2 and 0 for sequence 1"),
        ({"trajectory_ids": [0, 0]}, "2 trajectory_ids, needs one for each of 3 responses"),
    ],
)
def test_a_trajectory_has_one_group_and_one_reward(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**{"trajectory_ids": [0, 0, 2], **fields})
    make(trajectory_ids=[0, 0, 2], rewards=[np.nan, np.nan, 1])


def test_components_of_one_trajectory_are_the_same() -> None:
    fields: dict[str, Any] = {"component_names": ("a", "b"), "trajectory_ids": [0, 0, 1]}
    dataclasses.replace(make(), reward_components=np.array([[1, np.nan], [1, np.nan], [0, 0]]), **fields)
    with pytest.raises(ValueError, match=r"reward_components is .* for sequence 1"):
        dataclasses.replace(make(), reward_components=np.array([[1, 2], [1, 3], [0, 0]]), **fields)


def sample_of(index: int, trajectory: int | None, *, group_id: str = "a", versions: tuple[int, ...] = (0,)) -> Sample:
    return Sample(
        group_id=group_id,
        index=index,
        prompt=Prompt(id="a", token_ids=[1], text=""),
        response_ids=np.zeros(len(versions)),
        loss_mask=[version >= 0 for version in versions],
        rollout_log_probs=np.zeros(len(versions)),
        weight_versions=versions,
        stop_reason=StopReason.STOP,
        trajectory=trajectory,
    )


def test_samples_are_gathered_by_trajectory_or_stand_alone() -> None:
    samples = [sample_of(3, 7), sample_of(0, None), sample_of(1, 7), sample_of(1, None), sample_of(2, 0), sample_of(4, 7, group_id="b")]
    assert [[sample.index for sample in parts] for parts in trajectories(samples)] == [[1, 3], [0], [1], [2], [4]]
    assert [sample.index for sample in last_samples(samples)] == [3, 0, 1, 2, 4]


def test_a_trajectory_is_a_whole_number_whatever_counted_it() -> None:
    assert type(sample_of(0, np.int64(3)).trajectory) is int  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        sample_of(0, 1.5)  # type: ignore[arg-type]
