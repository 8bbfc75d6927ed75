"""Batches made of other people's data: alignment, defaults, and what is refused."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from megatron_rl.types import TrainBatch

PROMPTS, RESPONSES = [[5, 6], [5, 6], [9]], [[7], [8, 9, 1], [2, 3]]


def make(**fields: Any) -> TrainBatch:
    return TrainBatch.from_sequences(prompts=PROMPTS, responses=RESPONSES, **fields)


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
        ({"values": [1.0, 2.0, 3.0]}, r"values\[0\] of shape \(\) for a response of 1 tokens"),
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
        ([[1]], [[2], [3]], "1 prompts, .* and 2 responses"),
        ([[1.5]], [[2]], "prompts with a row of type float64"),
        ([[-5]], [[2]], "prompts with the token id -5; needs ids of 0 or more"),
        ([[0]], [[2, -100]], "responses with the token id -100"),
        ([[1]], [[[2, 3]]], r"responses with a row of type int64, shape \(1, 2\)"),
    ],
)
def test_rows_that_are_not_token_ids_are_refused(prompts: list[Any], responses: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainBatch.from_sequences(prompts=prompts, responses=responses)


@pytest.mark.parametrize("name", ["rollout_log_probs", "old_log_probs", "ref_log_probs", "values", "advantages"])
def test_fields_of_a_batch_are_checked_however_it_is_made(name: str) -> None:
    with pytest.raises(ValueError, match=rf"TrainBatch\.{name} has length 10, needs 11"):
        dataclasses.replace(make(), **{name: np.zeros(10)})
    with pytest.raises(ValueError, match=rf"TrainBatch\.{name} is inf on trainable token 2 of sequence 0"):
        dataclasses.replace(make(), **{name: np.full(11, np.inf)})
