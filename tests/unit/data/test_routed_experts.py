"""Experts that engines recorded: what a sample may hold, how it is kept, and where it stands in a batch and in a micro-batch."""

import dataclasses
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from buffer_parts import take_done
from numpy.typing import NDArray

from megatron_rl.data.batch import make_train_batch
from megatron_rl.data.buffer import Buffer
from megatron_rl.data.packing import make_shards
from megatron_rl.types import Group, Reward, RewardOutcome, Sample, TrainBatch

LAYERS, EXPERTS, TOP_K = 3, 300, 2


def experts_of(num_tokens: int, *, seed: int, kind: Any = np.uint16) -> NDArray[Any]:
    """Different experts for each (token, layer) [num_tokens, LAYERS, TOP_K]."""
    scores = np.random.default_rng(seed).random((num_tokens, LAYERS, EXPERTS if kind is np.uint16 else 9))
    return scores.argsort(-1)[..., :TOP_K].astype(kind)


def with_experts(group: Group, *, kind: Any = np.uint16, without: int | None = None) -> Group:
    """The group with experts of all tokens but the last, except for the sample `without`."""
    samples = []
    for sample in group.samples:
        num_tokens = len(sample.prompt.token_ids) + len(sample.response_ids)
        experts = None if sample.index == without else experts_of(num_tokens - 1, seed=sample.index, kind=kind)
        reward = Reward(RewardOutcome.SCORED, 1.0)
        samples.append(dataclasses.replace(sample, routed_experts=experts, reward=reward))
    return Group(id=group.id, prompt=group.prompt, samples=tuple(samples))


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (np.zeros((4, 3), np.uint8), r"shape \(4, 3\), needs uint8 or uint16 \[tokens, layers"),
        (np.zeros((4, 3, 1), np.int64), "type int64"),
        (np.array([[[1, 2]], [[5, 5]]], np.uint8), "names expert 5 twice for token 1 in mixture layer 0"),
        (experts_of(10, seed=0), "experts of 10 tokens, needs at most 9"),
    ],
)
def test_a_record_that_cannot_be_one_is_refused(make_group: Any, experts: NDArray[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(make_group("a", num_samples=1).samples[0], routed_experts=experts)


def test_a_record_cannot_be_written_to(make_group: Any) -> None:
    mine = experts_of(8, seed=0)
    sample: Sample = dataclasses.replace(make_group("a", num_samples=1).samples[0], routed_experts=mine)
    mine[:] = 0
    assert sample.routed_experts is not None
    np.testing.assert_array_equal(sample.routed_experts, experts_of(8, seed=0))
    with pytest.raises(ValueError, match="read-only"):
        sample.routed_experts[0] = 1


def put_and_take(buffer: Buffer, group: Group) -> Group:
    buffer.add_prompts([group.prompt])
    buffer.take_pending(1)
    buffer.put_done(group)
    return take_done(buffer, 1, step=0)[0]


@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_the_buffer_gives_back_every_bit(tmp_path: Path, make_group: Any, kind: Any) -> None:
    group = with_experts(make_group("a", num_samples=3), kind=kind, without=1)
    with Buffer(tmp_path / "buffer.sqlite") as buffer:
        got = put_and_take(buffer, group)
        for sample, expected in zip(got.samples, group.samples, strict=True):
            if expected.routed_experts is None:
                assert sample.routed_experts is None
                continue
            assert sample.routed_experts is not None and sample.routed_experts.dtype == kind
            np.testing.assert_array_equal(sample.routed_experts, expected.routed_experts)
        buffer.prune(1, keep=0)
    with sqlite3.connect(tmp_path / "buffer.sqlite") as database:
        assert database.execute("SELECT count(*) FROM samples WHERE routed_experts IS NOT NULL").fetchone() == (0,)


def make_batch(make_group: Any) -> tuple[TrainBatch, list[Group]]:
    groups = [
        with_experts(make_group("a", num_samples=2, length=3), without=1),
        with_experts(make_group("b", num_samples=1), kind=np.uint8),
    ]
    return make_train_batch(groups), groups


def test_a_batch_holds_records_where_their_tokens_stand(make_group: Any) -> None:
    batch, groups = make_batch(make_group)
    assert batch.routed_experts is not None and batch.routed_experts.dtype == np.uint16
    samples = [sample for group in groups for sample in group.samples]
    for start, length, sample in zip(batch.cu_seqlens[:-1], batch.lengths, samples, strict=True):
        known = np.arange(length) < (0 if sample.routed_experts is None else length - 1)
        np.testing.assert_array_equal(batch.routed[start : start + length], known)
        if sample.routed_experts is not None:
            np.testing.assert_array_equal(batch.routed_experts[start : start + length - 1], sample.routed_experts)


def test_shards_take_the_records_of_their_sequences_along(make_group: Any) -> None:
    batch, _ = make_batch(make_group)
    for shard in make_shards(batch, dp=2, optimizer_steps=1, max_tokens_per_micro_batch=50, seed=0):
        for row, (start, end) in zip(shard.rows, zip(shard.batch.cu_seqlens[:-1], shard.batch.cu_seqlens[1:], strict=True), strict=True):
            whole = slice(batch.cu_seqlens[row], batch.cu_seqlens[row + 1])
            assert batch.routed_experts is not None and shard.batch.routed_experts is not None
            np.testing.assert_array_equal(shard.batch.routed_experts[start:end], batch.routed_experts[whole])
            np.testing.assert_array_equal(shard.batch.routed[start:end], batch.routed[whole])


def test_records_of_different_models_do_not_share_a_batch(make_group: Any) -> None:
    group = with_experts(make_group("a"))
    assert group.samples[1].routed_experts is not None
    other = dataclasses.replace(group.samples[1], routed_experts=group.samples[1].routed_experts[:, :2])
    with pytest.raises(ValueError, match=r"\[\(2, 2\), \(3, 2\)\], one batch needs the same"):
        make_train_batch([Group(id="a", prompt=group.prompt, samples=(group.samples[0], other))])


def test_a_batch_without_records_has_none(make_group: Any) -> None:
    batch = make_train_batch([make_group("a")])
    assert batch.routed_experts is None and not len(batch.routed)
