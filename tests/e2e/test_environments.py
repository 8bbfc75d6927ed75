"""Runs whose trajectories have an environment, with all real parts: turns, tokens, rewards and resume."""

import json
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_parts import chat_tokenizer
from small_run import metrics
from transformers import Qwen3Config, Qwen3ForCausalLM


@pytest.fixture(scope="session")
def chat_task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny chat model with random weights, and rows."""
    directory = tmp_path_factory.mktemp("chat")
    tokenizer = chat_tokenizer()
    config = Qwen3Config(
        vocab_size=272, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, max_position_embeddings=1024, tie_word_embeddings=True, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    lines = [json.dumps({"prompt": f"Question {number}", "label": str(number)}) for number in range(12)]
    (directory / "rows.jsonl").write_text("\n".join(lines))
    return directory


def arguments(task: Path, directory: Path, *overrides: str) -> list[str]:
    # A random model seldom ends a turn: every printable character of ASCII ends it, others do not.
    stops = list(range(94))
    return [
        "train", f"run.directory={directory}", "run.num_steps=2", f"model.path={task}/model", f"data.train={task}/rows.jsonl",
        "data.prompts_per_step=4", "data.samples_per_prompt=2", "data.max_prompt_tokens=64", "rollout.max_turns=4",
        "rollout.environment=tests.e2e.interview:Interview", "rollout.sampling.max_response_tokens=24",
        f"rollout.sampling.stop_token_ids={stops}", "rollout.sglang.max_total_tokens=8192", "training.topology.num_ranks=1",
        "training.optimizer.lr=1e-3", *overrides,
    ]  # fmt: skip


def test_a_run_with_an_environment(chat_task: Path, tmp_path: Path, start: Callable[..., Any]) -> None:
    checked = start(*arguments(chat_task, tmp_path / "run"), "--check")
    assert checked.wait() == 0, checked.output
    assert "rollout.environment takes the renderer qwen3: turns after tools keep the tokens before" in " ".join(checked.output.split())
    run = start(*arguments(chat_task, tmp_path / "run"))
    assert run.wait() == 0, run.output
    assert run.survivors() == []
    steps = metrics(tmp_path / "run")
    for step in (1, 2):
        row = steps[step]
        assert row["rollout/failures"] == 0 and 2 < row["rollout/turns"] <= 3
        assert row["train/log_prob_diff"] <= 1e-4
        assert row["rollout/samples_per_trajectory"] > 1
    check_buffer(tmp_path / "run" / "buffer.sqlite")
    again = start(*arguments(chat_task, tmp_path / "run", "run.num_steps=3"), "--resume")
    assert again.wait() == 0, again.output
    assert metrics(tmp_path / "run")[3]["rollout/failures"] == 0


def check_buffer(path: Path) -> None:
    """Every trajectory has one environment of its own, and each sampled token one version and one place in the loss."""
    with sqlite3.connect(path) as connection:
        rows = connection.execute(
            "SELECT group_id, coalesce(trajectory, -1 - sample_index), response_text, own_prompt_text, loss_mask, weight_versions, "
            "reward, reward_components, metadata FROM samples"
        ).fetchall()
    owners: dict[str, set[tuple[str, int]]] = {}
    for group, trajectory, text, prompt, mask, versions, reward, components, _ in rows:
        assert reward == pytest.approx(sum(json.loads(components).values()))
        for process in re.findall(r"(\d+): and then\?", (prompt or "") + text):
            owners.setdefault(process, set()).add((group, trajectory))
        sampled = np.frombuffer(versions, "<i4") >= 0
        assert np.array_equal(sampled, np.frombuffer(mask, "u1").astype(bool))
    assert owners and all(len(each) == 1 for each in owners.values())
    assert any(json.loads(row[-1]).get("num_turns") == 3 for row in rows)
