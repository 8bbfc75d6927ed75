"""Optimizer state goes from every kind of optimizer and precision to every other, and lies where its parameter is."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl.checkpoints.optimizer_shards import boxes, parts_of
from megatron_rl.data.packing import make_shards
from megatron_rl.training.trainer import Trainer
from megatron_rl.types import TrainBatch

TRAINING = {
    "optimizer": {"lr": 1e-3, "use_distributed_optimizer": True},
    "ddp": {"overlap_grad_reduce": True, "bucket_size": 20000},
}


def train(trainer: Trainer) -> None:
    mask = np.arange(12) % 6 >= 2
    batch = TrainBatch(
        tokens=np.arange(12) + 3,
        cu_seqlens=np.array([0, 6, 12]),
        prompt_lengths=np.array([2, 2]),
        loss_mask=mask,
        rollout_log_probs=np.zeros(12),
        weight_versions=np.full(12, -1),
        rewards=np.zeros(2),
        group_ids=np.arange(2),
        truncated=np.zeros(2),
    )
    trainer.train_shard(make_shards(batch, dp=1, optimizer_steps=1, max_tokens_per_micro_batch=12, seed=0)[0])


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.weights()}


@pytest.mark.parametrize("shape", [(), (1,), (7,), (1, 5), (3, 4), (4, 1), (2, 3, 4), (1, 3, 2), (3, 1, 2)])
def test_boxes_are_the_elements_of_a_range_in_their_order(shape: tuple[int, ...]) -> None:
    elements = torch.arange(math.prod(shape)).view(shape)
    for start, stop in itertools.combinations_with_replacement(range(math.prod(shape) + 1), 2):
        found = list(boxes(shape, start, stop))
        parts = [elements[tuple(slice(first, first + n) for first, n in zip(offset, size, strict=True))] for offset, size in found]
        assert all(tuple(part.shape) == size for part, (_, size) in zip(parts, found, strict=True))
        assert [int(value) for part in parts for value in part.flatten()] == list(range(start, stop))
        assert len(found) <= max(1, 2 * len(shape) - 1)


KINDS: dict[str, dict[str, Any]] = {"plain": {"optimizer": {"lr": 1e-3}}, "distributed, several padded buckets": TRAINING}


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Copies of main weights and moments of every parameter, by the parameter's name."""
    chunk = trainer._model.chunks[0].module
    (part,) = parts_of(trainer._model.optimizer)
    found = {}
    for name, parameter in chunk.named_parameters():
        if hasattr(part, "model_param_group_index_map"):
            tensors = part._get_main_param_and_optimizer_states(parameter)
        else:
            main = parameter if parameter.dtype is torch.float32 else parameter.main_param
            tensors = {"param": main, **part.optimizer.state[main]}
        found |= {f"{name} {kind}": tensor.detach().flatten().clone() for kind, tensor in tensors.items()}
    return found


@pytest.mark.parametrize("saved", [("plain", "float32"), ("distributed, several padded buckets", "bfloat16")])
def test_another_kind_or_precision_has_the_same_state(
    make_trainer: Callable[..., Trainer], tiny_model: Callable[..., Path], tmp_path: Path, saved: tuple[str, str]
) -> None:
    model = tiny_model(vocab=33, layers=2)
    trainer = make_trainer(model, {"policy_loss": "sft"}, dtype=saved[1], **KINDS[saved[0]])
    train(trainer)
    train(trainer)
    trainer.save(tmp_path / "checkpoint")
    want = state_of(trainer)
    for loaded in itertools.product(KINDS, ("float32", "bfloat16")):
        resumed = make_trainer(model, {"policy_loss": "sft"}, dtype=loaded[1], **KINDS[loaded[0]])
        resumed.load(tmp_path / "checkpoint")
        got = state_of(resumed)
        assert got.keys() == want.keys(), loaded
        for name, tensor in want.items():
            assert tensor.any() and torch.equal(got[name], tensor), (loaded, name)
        for name, parameter in resumed._model.chunks[0].module.named_parameters():
            assert torch.equal(parameter.float().flatten(), want[f"{name} param"].to(parameter.dtype).float()), (loaded, name)
        states = [state for part in parts_of(resumed._model.optimizer) for state in part.optimizer.state.values()]
        assert [int(state["step"]) for state in states] == [2] * len(states), loaded
        # A shared count would be advanced by the update of every parameter.
        assert len({state["step"].data_ptr() for state in states}) == len(states), loaded


def test_a_distributed_optimizer_with_padded_buckets_continues(
    make_trainer: Callable[..., Trainer], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny_model(vocab=33)
    trainer = make_trainer(model, {"policy_loss": "sft"}, **TRAINING)
    buckets = trainer._model.chunks[0].buffers[0].buckets
    assert len(buckets) > 1 and any(bucket.numel_unpadded < bucket.grad_data.numel() for bucket in buckets[:-1])
    train(trainer)
    trainer.save(tmp_path / "checkpoint")
    saved = weights_of(trainer)
    train(trainer)
    expected = weights_of(trainer)
    resumed = make_trainer(model, {"policy_loss": "sft"}, **TRAINING)
    resumed.load(tmp_path / "checkpoint")
    for name, tensor in weights_of(resumed).items():
        assert torch.equal(tensor, saved[name]), name
    train(resumed)
    for name, tensor in weights_of(resumed).items():
        assert torch.equal(tensor, expected[name]), name
