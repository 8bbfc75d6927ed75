"""A distributed optimizer with several padded gradient buckets continues from its checkpoint as if it had not stopped."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import distributed

from megatron_rl.data.packing import make_shards
from megatron_rl.training import gathered_states
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


@pytest.mark.parametrize("bound", [2**30, 8000], ids=["at once", "in pieces"])
def test_states_come_back_to_their_parameters(
    make_trainer: Callable[..., Trainer], tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: int
) -> None:
    monkeypatch.setattr(gathered_states, "GATHERED_BYTES", bound)
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


def test_no_more_is_gathered_on_a_device_at_once_than_the_bound(
    make_trainer: Callable[..., Trainer], tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tiny_model(), {"policy_loss": "sft"}, **TRAINING)
    gather, sizes = distributed.gather, []

    def counted(sent: torch.Tensor, received: list[torch.Tensor] | None, **named: object) -> None:
        sizes.append(sent.numel())
        assert received is not None and all(len(part) == len(sent) for part in received)
        gather(sent, received, **named)

    monkeypatch.setattr(gathered_states, "GATHERED_BYTES", 8000)
    monkeypatch.setattr(distributed, "gather", counted)
    trainer.save(tmp_path / "checkpoint")
    states = 3 * sum(bucket.grad_data.numel() for bucket in trainer._model.chunks[0].buffers[0].buckets)
    assert max(sizes) == 2000 and sum(sizes) == states
