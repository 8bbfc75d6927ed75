from typing import Any

import pytest
import torch

from megatron_rl.training import offload
from megatron_rl.training.resting import RestingWeights


@pytest.mark.parametrize("replacing", [True, False], ids=["reference", "teacher"])
def test_weights_come_back_bit_for_bit(replacing: bool) -> None:
    held = [torch.arange(3.0), torch.ones(2, 2)]
    resting = RestingWeights(lambda: held, replacing=replacing)
    if replacing:
        for tensor in held:
            tensor.mul_(-2)
    for _ in range(2):
        with resting.in_place():
            assert [tensor.tolist() for tensor in held] == [[0.0, 1.0, 2.0], [[1.0, 1.0], [1.0, 1.0]]]
        if replacing:
            assert [tensor.tolist() for tensor in held] == [[0.0, -2.0, -4.0], [[-2.0, -2.0], [-2.0, -2.0]]]


@pytest.mark.parametrize("replacing", [True, False], ids=["reference", "teacher"])
def test_a_rank_that_trains_nothing_has_nothing_to_rest(replacing: bool) -> None:
    """As the stage of a pipeline whose weights are all frozen."""
    with RestingWeights(lambda: [], replacing=replacing).in_place():
        pass


@pytest.mark.parametrize("replacing", [True, False], ids=["reference", "teacher"])
@pytest.mark.parametrize("piece_bytes", [1, 7, 40, 1000])
def test_pieces_of_page_locked_memory_end_anywhere_in_a_tensor(monkeypatch: pytest.MonkeyPatch, piece_bytes: int, replacing: bool) -> None:
    """Each is rounded up to a power of two, so all are of one size but the last, however large the tensors are."""
    monkeypatch.setattr(offload, "PIECE_BYTES", piece_bytes)
    made, empty = [], torch.empty

    def page_locked(*arguments: Any, pin_memory: bool = False, **named: Any) -> torch.Tensor:
        made.append((arguments[0], pin_memory))
        return empty(*arguments, **named)

    held = [torch.arange(10.0), torch.arange(6, dtype=torch.bfloat16).view(2, 3), torch.empty(0), torch.tensor(5, dtype=torch.int64)]
    wanted = [tensor.clone() for tensor in held]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", page_locked)
        patch.setattr(torch.cuda, "is_available", lambda: True)
        resting = RestingWeights(lambda: held, replacing=replacing)
    whole, rest = divmod(40 + 12 + 8, piece_bytes)
    assert made == [(piece_bytes, True)] * whole + [(rest, True)] * bool(rest)
    for tensor in held:
        tensor.zero_()
    with resting.in_place():
        assert all(map(torch.equal, held, wanted))
        assert [tensor.dtype for tensor in held] == [tensor.dtype for tensor in wanted]
    assert not any(bool(tensor.any()) for tensor in held), "what was trained is back, or nothing is left of the teacher"
    if not replacing:
        assert sum(tensor.nbytes for tensor in held) == 0
