"""GroupStepAdam is torch's Adam bit for bit, and its step count cannot be shared between parameters."""

import copy

import pytest
import torch

from megatron_rl.training.adam import GroupStepAdam

SHAPES = ((5, 3), (7,), (4,))
GRAD_SCALES = (1.0, 1e-6, 1.0)
"""Next to the smaller gradients the epsilon counts."""


def make_params(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def set_grads(params: list[torch.Tensor], seed: int) -> None:
    for param, grad, scale in zip(params, make_params(seed), GRAD_SCALES, strict=True):
        param.grad = grad * scale


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_ten_steps_are_torchs_bit_for_bit(decoupled: bool, weight_decay: float) -> None:
    ours, theirs = make_params(0), make_params(0)
    optimizer = GroupStepAdam(ours, lr=1e-2, weight_decay=weight_decay, decoupled=decoupled)
    reference = (torch.optim.AdamW if decoupled else torch.optim.Adam)(theirs, lr=1e-2, weight_decay=weight_decay)
    for step in range(10):
        set_grads(ours, step + 1)
        set_grads(theirs, step + 1)
        # torch leaves out a parameter without a gradient, ours steps it with one of zero.
        ours[2].grad, theirs[2].grad = None, torch.zeros(SHAPES[2])
        optimizer.step()
        reference.step()
    for param, expected in zip(ours, theirs, strict=True):
        assert torch.equal(param, expected)


def test_a_state_dict_with_one_step_tensor_continues() -> None:
    straight, resumed = make_params(0), make_params(0)
    first, second = GroupStepAdam(straight, lr=1e-2), GroupStepAdam(resumed, lr=1e-2)
    for step in range(3):
        set_grads(straight, step)
        first.step()
    state = copy.deepcopy(first.state_dict())
    shared = torch.tensor(3.0)
    for entry in state["state"].values():
        entry["step"] = shared
    for param, source in zip(resumed, straight, strict=True):
        param.copy_(source)
    second.load_state_dict(state)
    for step in range(3, 6):
        for params, optimizer in ((straight, first), (resumed, second)):
            set_grads(params, step)
            optimizer.step()
    for param, expected in zip(resumed, straight, strict=True):
        assert torch.equal(param, expected)


@pytest.mark.parametrize("decoupled", [True, False])
def test_the_state_of_torchs_adam_is_continued_bit_for_bit(decoupled: bool) -> None:
    ours, theirs = make_params(0), make_params(0)
    reference = (torch.optim.AdamW if decoupled else torch.optim.Adam)(theirs, lr=1e-2, weight_decay=0.1)
    for step in range(3):
        set_grads(theirs, step)
        reference.step()
    optimizer = GroupStepAdam(ours, lr=1e-2, decoupled=decoupled)
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    for param, source in zip(ours, theirs, strict=True):
        param.copy_(source)
    set_grads(ours, 3)
    set_grads(theirs, 3)
    optimizer.step()
    reference.step()
    for param, expected in zip(ours, theirs, strict=True):
        assert torch.equal(param, expected)


def test_a_state_without_parameter_steps_takes_the_group_s() -> None:
    optimizer = GroupStepAdam(make_params(0), lr=1e-2)
    state = optimizer.state_dict()
    for entry in state["state"].values():
        del entry["step"]
    state["param_groups"][0]["step"] = 4
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["step"] == 4
    del state["param_groups"][0]["step"]
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["step"] == 0


def test_parameters_of_one_group_at_different_steps_are_refused() -> None:
    optimizer = GroupStepAdam(make_params(0), lr=1e-2)
    state = optimizer.state_dict()
    state["state"][0]["step"] = torch.tensor(2.0)
    with pytest.raises(ValueError, match=r"steps \[0, 2\]"):
        optimizer.load_state_dict(state)


def test_in_place_of_takes_views_and_shares_the_groups() -> None:
    buffer = torch.ones(6)
    view = buffer.view(2, 3)
    adam = torch.optim.AdamW([torch.zeros(1)], lr=0.5, betas=(0.8, 0.9))
    adam.param_groups[0]["params"] = [view]
    optimizer = GroupStepAdam.in_place_of(adam, decoupled=True)
    view.grad = torch.ones(2, 3)
    optimizer.step()
    assert optimizer.param_groups is adam.param_groups
    assert (buffer < 1).all()
