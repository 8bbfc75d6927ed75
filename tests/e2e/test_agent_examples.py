"""Each example of agents for two steps, with all real parts."""

import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_run import metrics

from examples.agents.make_task import EXAMPLES, make_task

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_of_agents(name: str, tmp_path: Path, finish: Callable[..., None]) -> None:
    if name == "reasoning":
        pytest.importorskip("reasoning_gym")
    words = ["bash", "examples/agents/run.sh", name, "--dry-run"]
    done = subprocess.run(words, cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, check=True)
    (sft, grpo) = (shlex.split(line)[3:] for line in done.stdout.splitlines() if " train " in line)
    task, warm, rl = tmp_path / "task", tmp_path / "sft", tmp_path / "grpo"
    make_task(name, task, seed=1)
    paths = (f"run.directory={warm}", f"model.path={task}/model", f"data.train={task}/supervised.jsonl")
    finish(tmp_path / "sft.txt", *sft, *paths, "run.num_steps=30")
    paths = (f"run.directory={rl}", f"model.path={warm}/huggingface", f"data.train={task}/train.jsonl")
    sizes = (
        "run.num_steps=2",
        "training.schedule.warmup_steps=1",
        "eval={}",
        "data.prompts_per_step=2",
        "data.samples_per_prompt=2",
    )
    finish(tmp_path / "grpo.txt", *grpo, *paths, *sizes)
    rows: list[dict[str, Any]] = [metrics(rl)[step] for step in (1, 2)]
    assert all(row["rollout/failures"] == 0 and row["train/log_prob_diff"] <= 1e-4 for row in rows)
    assert all(row["rollout/reward"] is not None and row["train/num_tokens"] > 0 for row in rows)
    # Thirty steps of the teacher are too few for a reward in these two.
    assert name in ("shop", "reasoning") or sum(row["rollout/reward"] for row in rows) > 0
