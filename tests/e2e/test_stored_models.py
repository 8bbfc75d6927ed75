"""Runs from weights that engines cannot read: codes, and our own format. The engines start empty and serve what the trainer has read."""

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_run import metrics, rl_arguments
from transformers import AutoModelForCausalLM

from megatron_rl.config.settings import RolloutSettings
from megatron_rl.convert.conversion import Options, convert
from megatron_rl.rollout.client import EngineClient
from megatron_rl.rollout.engine import Engine
from megatron_rl.types import Floats


def assert_trained(run: Any, directory: Path) -> None:
    """Two steps, in each of which engines and trainer have the same weights."""
    assert run.wait() == 0, run.output
    assert re.search(
        r"note: engines cannot read the weights in .*: they start without, from .*/engine-model, and get the trainer's", run.output
    )
    steps = metrics(directory)
    assert steps[0]["weights/parity_mean"] <= 1e-4
    assert all(steps[step]["train/log_prob_diff"] <= 1e-4 for step in (1, 2))


TOKENS = np.arange(2, 14)


async def scores(model: Path, log: Path) -> Floats:
    """Log-probs of TOKENS by an SGLang server on the exported directory."""
    engine = Engine(model, settings=RolloutSettings(startup_timeout_s=180), device_kind="cpu", dtype="float32", seed=7, log_path=log)
    try:
        async with EngineClient(engine.start(), request_timeout_s=60) as client:
            return (await client.score(TOKENS)).log_probs
    finally:
        engine.stop()


@pytest.mark.slow
def test_training_and_evaluating_from_codes(task: Path, tmp_path: Path, start: Callable[..., Any]) -> None:
    convert(task / "model", tmp_path / "fp8", Options(quantise=True))
    words = rl_arguments(task, tmp_path / "rl", f"model.path={tmp_path / 'fp8'}", "run.num_steps=2", "weights.transport=broadcast")
    assert_trained(start(*words), tmp_path / "rl")
    exported = json.loads((tmp_path / "rl/huggingface/config.json").read_text())
    assert "quantization_config" not in exported
    first = metrics(tmp_path / "rl")[0]["eval/accuracy_greedy"]

    served = asyncio.run(scores(tmp_path / "rl/huggingface", tmp_path / "served.log"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "rl/huggingface", dtype=torch.float32)
    expected = model(torch.from_numpy(TOKENS)[None]).logits[0].log_softmax(-1)[:-1].gather(1, torch.from_numpy(TOKENS)[1:, None])[:, 0]
    np.testing.assert_allclose(served[1:], expected.detach(), atol=1e-4)

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
