"""Runs whose trajectories have an environment, with all real parts: turns, tokens, rewards and resume."""

import json
import sqlite3
import sys
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_run import beyond_loopback, chat_arguments, listeners, metrics


@pytest.mark.slow
def test_a_check_names_the_renderer(chat_task: Path, tmp_path: Path, start: Callable[..., Any]) -> None:
    checked = start(*chat_arguments(chat_task, tmp_path / "run"), "--check")
    assert checked.wait() == 0, checked.output
    assert "rollout.environment takes the renderer qwen3: turns after tools keep the tokens before" in " ".join(checked.output.split())


def test_a_run_with_an_environment(interviews: Path) -> None:
    steps = metrics(interviews)
    for step in (1, 2):
        row = steps[step]
        assert row["rollout/failures"] == 0 and 2 < row["rollout/turns"] <= 3
        assert row["train/log_prob_diff"] <= 1e-4
        assert row["rollout/samples_per_trajectory"] > 1
    check_buffer(interviews / "buffer.sqlite")
    check_log(interviews / "logs" / "environments.log", num_trajectories=16)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["command", "function"])
def test_a_run_with_agents(chat_task: Path, tmp_path: Path, start: Callable[..., Any], form: str) -> None:
    seen = tmp_path / "url"
    program = f"command: [{sys.executable}, tests/e2e/interviewer.py], max_processes: 3"
    agent = {"command": f"{{{program}}}", "function": "{function: tests.e2e.interviewer:play, sampling: override}"}[form]
    given = chat_arguments(chat_task, tmp_path / "run", "rollout.max_turns=8", rollout=f"rollout.agent={agent}")
    given += [f"rollout.args={{seen: {seen}}}", "rollout.sampling.top_p=0.9"] * (form == "function")
    checked = start(*given, "--check")
    assert checked.wait() == 0, checked.output
    assert "rollout.agent takes the renderer qwen3: turns after tools keep" in " ".join(checked.output.split())
    seen.unlink(missing_ok=True)
    run = start(*given)
    if form == "function":
        while not seen.exists() or not seen.read_text():
            assert run.process.poll() is None, run.output
            time.sleep(0.05)
        port = urllib.parse.urlsplit(seen.read_text()).port
        listening = listeners(run)
        assert ("127.0.0.1", port) in set.union(*listening.values()) and beyond_loopback(listening) == {}
    assert run.wait() == 0, run.output
    assert run.survivors() == []
    steps = metrics(tmp_path / "run")
    for step in (1, 2):
        row = steps[step]
        assert (row["rollout/failures"], row["rollout/refused_requests"], row["rollout/turns"]) == (0, 0, 5)
        # Model and temperature of the one request in the other dialect.
        assert row["rollout/overridden_requests"] == (8 if form == "function" else 0)
        assert row["train/log_prob_diff"] <= 1e-4 and ("train/candidates" in row) == (form == "function")
        assert row["rollout/samples_per_trajectory"] > 1 and row["rollout/reward_component/summary"] > 0
    with sqlite3.connect(tmp_path / "run" / "buffer.sqlite") as connection:
        rows = connection.execute("SELECT loss_mask, weight_versions, reward, reward_components, metadata FROM samples").fetchall()
    assert rows and any("branches" in json.loads(row[-1]) for row in rows)
    for mask, versions, reward, components, _ in rows:
        assert reward == pytest.approx(sum(json.loads(components).values()))
        assert not np.frombuffer(mask, "u1").astype(bool)[np.frombuffer(versions, "<i4") < 0].any()


def check_log(path: Path, *, num_trajectories: int) -> None:
    """Every trajectory has one environment of its own, in a process of its own."""
    said = [line.split(maxsplit=3)[1:] for line in path.read_text().splitlines() if line.startswith("interview ")]
    turns: dict[str, list[tuple[str, str]]] = {}
    for process, turn, prompt in said:
        turns.setdefault(process, []).append((prompt, turn))
    for found in turns.values():
        assert [turn for _, turn in found] == ["1", "2", "3"][: len(found)] and len({prompt for prompt, _ in found}) == 1
    assert len(turns) == num_trajectories
    assert set(Counter(found[0][0] for found in turns.values()).values()) == {2}


def check_buffer(path: Path) -> None:
    """Each sampled token has one version and one place in the loss."""
    with sqlite3.connect(path) as connection:
        rows = connection.execute("SELECT loss_mask, weight_versions, reward, reward_components, metadata FROM samples").fetchall()
    for mask, versions, reward, components, _ in rows:
        assert reward == pytest.approx(sum(json.loads(components).values()))
        sampled = np.frombuffer(versions, "<i4") >= 0
        assert np.array_equal(sampled, np.frombuffer(mask, "u1").astype(bool))
    assert any(json.loads(row[-1]).get("num_turns") == 3 for row in rows)
