"""A model that is put away between its steps trains as one that stays, when two ranks share its gradients and its optimizer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from layout_runs import make_settings, make_trainer, train_batches, weights_of
from layout_table import LAYOUTS

DTYPES = {"dp2 distopt": "float32", "dp2 distopt overlap": "bfloat16", "tp2 sp": "bfloat16"}
"""Of each layout that is tried."""


def run(rank: int, world_size: int, init_method: str, model: str, directory: str) -> dict[str, list[Any]]:
    """For each layout the metrics and weights of three steps, first of a model that stays, then of one that is put away."""
    from megatron_rl.training.topology import shutdown

    outcomes: dict[str, list[Any]] = {}
    for name, dtype in DTYPES.items():
        settings = make_settings(model, Path(directory), LAYOUTS[name], objective={}, dtype=dtype)
        for put_away in (False, True):
            trainer = make_trainer(settings, rank, f"{init_method}-{len(outcomes)}-{put_away}")
            metrics: list[Any] = []
            for seed in range(3):
                metrics += train_batches(trainer, settings, [seed])
                if put_away:
                    trainer.put_away(["gradients", "optimizer"])
                    assert sum(1 for _ in trainer.weights())
                    trainer.put_away()
                    trainer.take_back()
            outcomes.setdefault(name, []).append((metrics, weights_of(trainer)))
            shutdown()
    return outcomes


def test_two_ranks_train_bit_for_bit_the_same(run_ranks: Callable[..., list[Any]], tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    for outcomes in run_ranks(run, 2, str(tiny_model(tied=False)), str(tmp_path / "run"), timeout_s=240.0):
        assert set(outcomes) == set(DTYPES)
        for name, ((metrics, weights), (again, moved)) in outcomes.items():
            assert metrics == again, name
            assert all(np.array_equal(weights[key], moved[key]) for key in weights), name
