"""A trainer of one rank."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.algorithms.objective import expand_preset
from megatron_rl.config.settings import Settings
from megatron_rl.training.topology import shutdown
from megatron_rl.training.trainer import Trainer

OPTIMIZER = {"lr": 1e-3, "clip_grad": 0.5, "weight_decay": 0.1, "adam_eps": 1e-6}
TEMPERATURE = 0.7
MakeTrainer = Callable[..., Trainer]


@pytest.fixture
def tiny_model(tiny_model: Callable[..., Path]) -> Callable[..., Path]:
    """That of all tests, but a Qwen3 has one layer where a test does not say how many: trainers take most of the time of these tests."""
    return lambda **options: tiny_model(**options if "family" in options else {"layers": 1, **options})


@pytest.fixture
def make_trainer(tmp_path: Path) -> Iterator[MakeTrainer]:
    """Builds one-rank trainers, the earlier one closed before the next; the last is closed at the end."""
    made: list[Trainer] = []

    def close() -> None:
        if torch.distributed.is_initialized():
            shutdown()

    def make(
        model: Path,
        objective: dict[str, Any] | None = None,
        *,
        dtype: str = "float32",
        megatron: dict[str, Any] | None = None,
        teacher: Path | None = None,
        **training: Any,
    ) -> Trainer:
        close()
        settings = Settings.model_validate(
            {
                "run": {"directory": tmp_path / "run"},
                "model": {"path": model, "dtype": dtype, "megatron": megatron or {}, "teacher": teacher},
                "data": {"train": "unused.jsonl"},
                "objective": expand_preset(objective or {}),
                "rollout": {"sampling": {"temperature": TEMPERATURE}},
                "training": {"optimizer": OPTIMIZER, "max_tokens_per_micro_batch": 12, **training},
            }
        )
        made.append(Trainer.of(settings, rank=0, init_method=f"file://{tmp_path}/rendezvous{len(made)}"))
        return made[-1]

    yield make
    close()
