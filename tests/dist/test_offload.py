"""A model that is put away between its steps trains as one that stays, when two ranks share its gradients and its optimizer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

DISTRIBUTED = {"optimizer": {"use_distributed_optimizer": True}}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dp2, distributed optimizer": ("float32", DISTRIBUTED),
    "dp2, overlap": ("bfloat16", {**DISTRIBUTED, "ddp": {"overlap_param_gather": True, "overlap_grad_reduce": True}}),
    "tp2": ("bfloat16", {"topology": {"num_ranks": 2, "tp": 2, "sequence_parallel": True}}),
}


def make_batch(seed: int) -> Any:
    from megatron_rl.types import TrainBatch

    random = np.random.default_rng(seed)
    lengths = np.array([5, 7, 4, 11])
    mask = np.concatenate([np.arange(length) >= 2 for length in lengths])
    return TrainBatch(
        tokens=random.integers(2, 30, lengths.sum()),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]),
        prompt_lengths=np.full(4, 2),
        loss_mask=mask,
        rollout_log_probs=np.where(mask, -3.0, 0.0),
        weight_versions=np.where(mask, 0, -1),
        rewards=random.random(4),
        group_ids=[0, 0, 1, 1],
        truncated=np.zeros(4),
    )


def train(trainer: Any, seed: int, *, dp: int) -> list[dict[str, Any]]:
    """This rank's shares of the metrics."""
    from megatron_rl.data.packing import make_shards

    shards = make_shards(make_batch(seed), dp=dp, optimizer_steps=1, max_tokens_per_micro_batch=12, seed=seed)
    steps: list[dict[str, Any]] = trainer.train_shard(shards[trainer.dp_rank])
    return steps


def run(rank: int, world_size: int, init_method: str, model: str, directory: str) -> dict[str, list[Any]]:
    """For each layout the metrics and weights of three steps, first of a model that stays, then of one that is put away."""
    from megatron_rl.config.settings import Settings
    from megatron_rl.training.topology import shutdown
    from megatron_rl.training.trainer import Trainer

    outcomes: dict[str, list[Any]] = {}
    for name, (dtype, layout) in LAYOUTS.items():
        for put_away in (False, True):
            training = {"topology": {"num_ranks": 2}, "max_tokens_per_micro_batch": 12, **layout}
            training["optimizer"] = {"lr": 1e-3, **training.get("optimizer", {})}
            settings = Settings.model_validate(
                {
                    "run": {"directory": directory},
                    "model": {"path": model, "dtype": dtype},
                    "data": {"train": "unused.jsonl"},
                    "training": training,
                }
            )
            trainer = Trainer.of(settings, rank=rank, init_method=f"{init_method}-{len(outcomes)}-{put_away}")
            metrics: list[Any] = []
            for seed in range(3):
                metrics += train(trainer, seed, dp=2 // settings.training.topology.tp)
                if put_away:
                    trainer.put_away(["gradients", "optimizer"])
                    assert sum(1 for _ in trainer.weights())
                    trainer.put_away()
                    trainer.take_back()
            weights = {name: tensor.float().numpy().copy() for name, tensor in trainer.weights()}
            outcomes.setdefault(name, []).append((metrics, weights))
            shutdown()
    return outcomes


def test_two_ranks_train_bit_for_bit_the_same(run_ranks: Callable[..., list[Any]], tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    for outcomes in run_ranks(run, 2, str(tiny_model(tied=False)), str(tmp_path / "run"), timeout_s=240.0):
        assert set(outcomes) == set(LAYOUTS)
        for name, ((metrics, weights), (again, moved)) in outcomes.items():
            assert metrics == again, name
            assert all(np.array_equal(weights[key], moved[key]) for key in weights), name
