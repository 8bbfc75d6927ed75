"""Candidates of a sampler: what a record may be, how it is kept, and where it stands in a batch and in a micro-batch."""

import dataclasses
import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from buffer_parts import fill, take_done

from megatron_rl.algorithms.log_prob import Shard
from megatron_rl.data.batch import batch_from_sequences, make_train_batch
from megatron_rl.data.buffer import Buffer
from megatron_rl.data.packing import make_shards
from megatron_rl.system.frozen_arrays import Candidates
from megatron_rl.training.micro_batch import make_micro_batch
from megatron_rl.types import Group, Sample

ROWS = [[4], [], [7, 1, 2], [3, 9], [5, 0, 8, 6]]


def rows_of(candidates: Candidates | None) -> list[list[int]]:
    assert candidates is not None
    return [part.tolist() for part in np.split(candidates.ids, np.cumsum(candidates.counts)[:-1])] if len(candidates) else []


def with_candidates(group: Group, *, without: int | None = None) -> Group:
    """The group with the token and 0 to 3 others for each trained token, except for the sample `without`."""
    samples = []
    for sample in group.samples:
        pairs = enumerate(zip(sample.response_ids.tolist(), sample.loss_mask.tolist(), strict=True))
        rows = [[*range(place % 4), token] if trained else [] for place, (token, trained) in pairs]
        samples.append(dataclasses.replace(sample, candidates=None if sample.index == without else Candidates.of(rows)))
    return dataclasses.replace(group, samples=tuple(samples))


def test_rows_are_taken_joined_and_packed_in_value() -> None:
    whole = Candidates.of(ROWS)
    assert rows_of(whole) == ROWS and len(whole) == 5 and whole.ids.dtype == np.int32
    assert rows_of(whole.take(np.array([2, 0, 1, 2]))) == [[7, 1, 2], [4], [], [7, 1, 2]]
    assert rows_of(whole.take(slice(1, 4))) == ROWS[1:4] and rows_of(whole.take(slice(0))) == []
    assert rows_of(Candidates.joined([whole, Candidates.none(2), whole.take(slice(3, None))])) == [*ROWS, [], [], *ROWS[3:]]
    assert rows_of(Candidates.joined([])) == []
    assert rows_of(Candidates.unpacked(whole.packed(), 5)) == ROWS
    assert whole.hold(np.array([4, 4, 1, 4, 6])).tolist() == [True, False, True, False, True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows[:-1], "candidates for 4 tokens, needs those of 5"),
        (lambda rows: [*rows[:3], [], rows[4]], "has 0 candidates for trainable token 3 without the token"),
        (lambda rows: [*rows[:2], [1, 2], *rows[3:]], "has 2 candidates for trainable token 2 without the token"),
    ],
)
def test_a_trained_token_without_its_record_is_refused(make_group: Any, change: Any, message: str) -> None:
    sample: Sample = with_candidates(make_group("a", num_samples=1)).samples[0]
    changed = Candidates.of(change(rows_of(sample.candidates)))
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(sample, candidates=changed)
    # The token outside of the mask needs none.
    assert rows_of(sample.candidates)[1] == []
    with pytest.raises(ValueError, match=r"counts add up to 3, needs numbers >= 0 for all 2 ids"):
        Candidates(np.array([1, 2]), np.array([3]))


def test_the_buffer_keeps_candidates_until_pruning(tmp_path: Path, make_group: Any) -> None:
    group, *others = (with_candidates(make_group(name, num_samples=3), without=1) for name in "abc")
    with Buffer(tmp_path / "buffer.sqlite") as buffer:
        fill(buffer, [group, *others])
        (found,) = take_done(buffer, 1, step=1)
        take_done(buffer, 2, step=2)
        for sample, expected in zip(found.samples, group.samples, strict=True):
            assert (sample.candidates is None) == (expected.candidates is None) == (sample.index == 1)
            assert sample.candidates is None or rows_of(sample.candidates) == rows_of(expected.candidates)
        buffer.prune(step=2, keep=1)
    with sqlite3.connect(tmp_path / "buffer.sqlite") as database:
        kept = database.execute(
            "SELECT id, pruned, made_by IS NULL, count(candidates) FROM groups JOIN samples ON id = group_id GROUP BY 1"
        )
        # A step that stays whole can be replayed.
        assert kept.fetchall() == [("a", 2, 0, 2), ("b", 2, 1, 0), ("c", 1, 1, 0)]


def test_a_batch_lays_candidates_beside_its_tokens(make_group: Any) -> None:
    groups = [with_candidates(make_group(name, scored=True, length=length)) for name, length in (("a", 5), ("b", 3))]
    batch = make_train_batch(groups)
    expected = [rows for group in groups for each in group.samples for rows in ([[]] * 4, rows_of(each.candidates))]
    assert rows_of(batch.candidates) == [row for rows in expected for row in rows]
    rows = rows_of(batch.candidates)
    assert rows_of(batch.select(np.array([3, 0])).candidates) == rows[-7:] + rows[:9]
    shards = make_shards(batch, dp=2, optimizer_steps=1, max_tokens_per_micro_batch=32, seed=0)
    assert sum(len(rows_of(shard.batch.candidates)) for shard in shards) == len(rows)
    assert make_train_batch([make_group("a", scored=True)]).candidates is None
    with pytest.raises(ValueError, match="TrainBatch has 0 candidates for trainable token 13 without the token"):
        make_train_batch([with_candidates(make_group("a", scored=True), without=1)])


def test_a_caller_s_own_sequences_bring_candidates() -> None:
    sets = [Candidates.of([[5, 1], [6]]), Candidates.of([[7]])]
    batch = batch_from_sequences(prompts=[[1, 2], [3]], responses=[[5, 6], [7]], candidates=sets)
    assert rows_of(batch.candidates) == [[], [], [5, 1], [6], [], [7]]
    with pytest.raises(ValueError, match="0 candidates for trainable token 5"):
        batch_from_sequences(prompts=[[1, 2], [3]], responses=[[5, 6], [7]], candidates=[sets[0], None])


@pytest.mark.parametrize("cp", [1, 2])
def test_a_rank_restricts_its_own_rows_and_columns(make_group: Any, cp: int) -> None:
    group = with_candidates(make_group("a", scored=True))
    small = [dataclasses.replace(each, response_ids=each.response_ids % 12, candidates=None) for each in group.samples]
    batch = make_train_batch([with_candidates(dataclasses.replace(group, samples=tuple(small)))])
    expected, seen = rows_of(batch.candidates), 0
    for cp_rank in range(cp):
        topology: Any = SimpleNamespace(cp=cp, pad_to=1)
        place: Any = SimpleNamespace(cp_rank=cp_rank)
        part = make_micro_batch(batch, np.array([1, 0]), topology=topology, place=place, device=torch.device("cpu"))
        assert part.candidates is not None
        seen += len(part.targets)
        for start in range(min(2, len(part.targets) + 1)):
            # Columns of a vocabulary of 12 on two ranks, the second of which has two of padding.
            for first, columns in ((0, 6), (6, 6)):
                logits = torch.zeros(len(part.targets) - start, 8)
                shard = Shard(1.0, first, columns)
                found = part.candidates.restricted(logits, slice(start, len(part.targets)), shard, in_place=False)
                kept = [(row.isfinite().nonzero().flatten() + first).tolist() for row in found]
                wanted = [sorted({each for each in expected[place] if first <= each < first + 6}) for place in part.target_index[start:]]
                assert kept == wanted and not logits.any()
    assert seen == batch.loss_mask.sum()
