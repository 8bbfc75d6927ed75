import pytest
import torch

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
