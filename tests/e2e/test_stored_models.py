"""Runs from weights that engines cannot read: codes, and our own format. The engines start empty and serve what the trainer has read."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_run import metrics, rl_arguments

from megatron_rl.convert.conversion import Options, convert


def assert_trained(run: Any, directory: Path) -> None:
    """Two steps, in each of which engines and trainer have the same weights."""
    assert run.wait() == 0, run.output
    assert re.search(
        r"note: engines cannot read the weights in .*: they start without, from .*/engine-model, and get the trainer's", run.output
    )
    steps = metrics(directory)
    assert steps[0]["weights/parity_mean"] <= 1e-4
    assert all(steps[step]["train/log_prob_diff"] <= 1e-4 for step in (1, 2))


@pytest.mark.slow
def test_training_and_evaluating_from_codes(task: Path, tmp_path: Path, start: Callable[..., Any]) -> None:
    convert(task / "model", tmp_path / "fp8", Options(quantise=True))
    words = rl_arguments(task, tmp_path / "rl", f"model.path={tmp_path / 'fp8'}", "run.num_steps=2", "weights.transport=broadcast")
    assert_trained(start(*words), tmp_path / "rl")
    exported = json.loads((tmp_path / "rl/huggingface/config.json").read_text())
    assert "quantization_config" not in exported
    first = metrics(tmp_path / "rl")[0]["eval/accuracy_greedy"]

    words = rl_arguments(task, tmp_path / "eval", f"model.path={tmp_path / 'fp8'}")[1:]
    evaluation = start("eval", *words)
    assert evaluation.wait() == 0, evaluation.output
    assert re.search(rf"eval/accuracy_greedy +{first:.4f}", evaluation.output)
    assert not (tmp_path / "eval/engine-weights").exists()


@pytest.mark.slow
def test_training_from_our_own_format_through_the_disk(task: Path, tmp_path: Path, start: Callable[..., Any]) -> None:
    convert(task / "model", tmp_path / "ours", Options(to="megatron"))
    words = rl_arguments(task, tmp_path / "rl", f"model.path={tmp_path / 'ours'}", "run.num_steps=2", "weights.transport=disk")
    assert_trained(start(*words), tmp_path / "rl")
