"""What a rank's model is given of some sequences, token by token."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl.training.micro_batch import MicroBatch, MicroBatches, make_micro_batch
from megatron_rl.types import TrainBatch

LENGTHS = [4, 7, 1, 6, 2]
STARTS = [0, 4, 11, 12, 18]


@pytest.fixture
def batch() -> TrainBatch:
    """Sequences of which the last has no trainable token, with recorded experts [T, 2, 1] of the first tokens of each."""
    total = sum(LENGTHS)
    mask = np.arange(total) % 3 != 0
    mask[[*STARTS, 19]] = False
    return TrainBatch(
        tokens=np.arange(total) + 100,
        cu_seqlens=np.array([*STARTS, total]),
        prompt_lengths=np.ones(len(LENGTHS)),
        loss_mask=mask,
        rollout_log_probs=-np.arange(total, dtype=np.float32),
        weight_versions=np.zeros(total),
        rewards=np.zeros(len(LENGTHS)),
        group_ids=np.arange(len(LENGTHS)),
        truncated=np.zeros(len(LENGTHS)),
        routed_experts=(np.arange(2 * total) % 250).astype(np.uint8).reshape(total, 2, 1),
        routed=np.concatenate([np.arange(length) < length - 1 for length in LENGTHS]),
    )


def made(batch: TrainBatch, rows: list[int], *, cp: int = 1, cp_rank: int = 0, pad_to: int = 1, all_tokens: bool = False) -> MicroBatch:
    topology: Any = SimpleNamespace(cp=cp, pad_to=pad_to)
    place: Any = SimpleNamespace(cp_rank=cp_rank)
    return make_micro_batch(
        batch, np.array(rows, np.int64), topology=topology, place=place, device=torch.device("cpu"), all_tokens=all_tokens
    )


@pytest.mark.parametrize("all_tokens", [False, True])
@pytest.mark.parametrize(("cp", "pad_to"), [(1, 1), (1, 4), (2, 1), (3, 2)])
def test_every_prediction_is_requested_once_before_its_token(batch: TrainBatch, cp: int, pad_to: int, all_tokens: bool) -> None:
    rows, seen = [4, 1, 3], []
    for cp_rank in range(cp):
        part = made(batch, rows, cp=cp, cp_rank=cp_rank, pad_to=pad_to, all_tokens=all_tokens)
        assert part.input_ids.shape[1] % pad_to == 0
        real = part.token_index >= 0
        np.testing.assert_array_equal(part.input_ids[0].numpy(), np.where(real, part.token_index + 100, 0))
        np.testing.assert_array_equal(
            part.packed.make_lengths()[real], [LENGTHS[np.searchsorted(STARTS, at, "right") - 1] for at in part.token_index[real]]
        )
        own = zip(part.positions.tolist(), part.targets.tolist(), part.target_index, part.sequence_index.tolist(), strict=True)
        for position, target, index, sequence in own:
            row, place = rows[sequence], int(part.position_ids[0, position])
            assert part.token_index[position] == STARTS[row] + place
            assert (index, target) == (STARTS[row] + place + 1, STARTS[row] + place + 101)
            seen.append(index)
        np.testing.assert_array_equal(part.pick(batch.rollout_log_probs).numpy(), -np.asarray(part.target_index, dtype=np.float32))
        assert part.sequence_tokens.tolist() == [int(batch.loss_mask[STARTS[row] : STARTS[row] + LENGTHS[row]].sum()) for row in rows]
    followed = [STARTS[row] + place for row in rows for place in range(1, LENGTHS[row])]
    assert sorted(seen) == sorted(index for index in followed if all_tokens or batch.loss_mask[index])


@pytest.mark.parametrize(("cp", "pad_to"), [(1, 4), (2, 1)])
def test_routers_get_the_owner_and_record_of_every_token(batch: TrainBatch, cp: int, pad_to: int) -> None:
    rows = [4, 2, 1]
    for cp_rank in range(cp):
        part = made(batch, rows, cp=cp, cp_rank=cp_rank, pad_to=pad_to)
        routed = part.routed
        assert routed.sequence_lengths.tolist() == [2, 1, 7]
        assert routed.counted.tolist() == [False, False, True]
        assert routed.experts is not None and routed.recorded is not None and batch.routed_experts is not None
        assert (part.token_index < 0).any(), "there is padding"
        for position, index in enumerate(part.token_index.tolist()):
            sequence = int(routed.sequence_index[position])
            if index < 0:
                assert sequence == -1 and not routed.recorded[position]
                continue
            assert STARTS[rows[sequence]] <= index < STARTS[rows[sequence]] + LENGTHS[rows[sequence]]
            np.testing.assert_array_equal(routed.experts[:, position].numpy(), batch.routed_experts[index])
            assert routed.recorded[position] == batch.routed[index]


def test_a_micro_batch_without_rows_is_uncounted_padding(batch: TrainBatch) -> None:
    part = made(batch, [], cp=2, pad_to=3)
    assert not part.input_ids.any() and (part.token_index == -1).all()
    assert len(part.positions) == len(part.targets) == len(part.sequence_tokens) == 0
    assert (part.routed.sequence_index == -1).all()
    assert part.routed.recorded is not None and not part.routed.recorded.any()
    assert part.routed.sequence_lengths.tolist() == [1], "a length that can be divided by"
    assert part.routed.counted.tolist() == [False]


@pytest.mark.parametrize(("cp", "num_passes"), [(1, 3), (2, 2)])
def test_the_forward_budget_is_per_context_parallel_rank(batch: TrainBatch, cp: int, num_passes: int) -> None:
    """Of 20 tokens 8 fit at once; under cp 2 the sequences are padded to 28 in all, of which each rank holds a half."""
    topology: Any = SimpleNamespace(cp=cp, pad_to=1, vpp=1, pp=1, dp=2)
    found = []
    for dp_rank in range(2):
        place: Any = SimpleNamespace(cp_rank=0, dp_rank=dp_rank)
        passes = MicroBatches(topology, place, torch.device("cpu"), max_tokens=8)
        whole = passes.of_all_tokens(batch, divided=False)
        assert len(whole) == num_passes and sorted(row for part in whole for row in part.rows.tolist()) == [0, 1, 2, 3, 4]
        assert max(part.input_ids.shape[1] for part in whole) <= 8
        found += [row for part in passes.of_all_tokens(batch, divided=True) for row in part.rows.tolist()]
    assert sorted(found) == [0, 1, 2, 3, 4], "the ranks share them"
