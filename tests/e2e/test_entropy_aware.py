"""Entropy-aware sampling in the main job: the trainer finds the log-probs that the engine drew by, or stops."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_run import chat_arguments, metrics, rl_arguments

from megatron_rl.algorithms.entropy_aware import QUADRANTS

WORDS = (
    "run.num_steps=2", "run.save_interval=0", "training.topology.num_ranks=1", "objective.off_policy={mode: truncate, high: 2.0}",
    "rollout.sampling.entropy={thresholds: [2.5, 0.15], quadrants: {argmax: {top_k: 5}, branch: {temperature: 1.2, top_k: 6}}}",
)  # fmt: skip


def check_steps(directory: Path, *, num_steps: int) -> None:
    """Engine and trainer agree about every fresh token, and about the policy itself at every sync."""
    steps = metrics(directory)
    assert steps[0]["weights/parity_mean"] <= 1e-4 and steps[0]["weights/scored_mean"] <= 1e-4
    for step in range(1, num_steps + 1):
        row = steps[step]
        # A step may train on older tokens alone.
        assert row.get("train/log_prob_diff_clipped", 0.0) <= 1e-5 and row.get("train/log_prob_diff_max", 0.0) <= 1e-3, row
        assert row["weights/scored_mean"] <= 1e-4
        shares = {name: row[f"train/quadrant_{name}"] for name in QUADRANTS}
        assert sum(shares.values()) == pytest.approx(1), shares
        assert row["train/draw_log_ratio"] < -0.01
    print(directory.name, shares, {name: row[f"train/{name}"] for name in ("draw_log_ratio", "off_policy_ratio", "log_prob_diff")})


@pytest.mark.slow
def test_a_run_trains_on_what_was_drawn_by_entropy(task: Path, tmp_path: Path, start: Callable[..., Any]) -> None:
    run = start(*rl_arguments(task, tmp_path / "run", *WORDS, "training.optimizer_steps_per_batch=2"))
    assert run.wait() == 0, run.output
    check_steps(tmp_path / "run", num_steps=2)
    first = metrics(tmp_path / "run")[1]
    assert first["train/off_policy_ratio"] < 0.99 and first["train/log_prob_diff_max"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(("rollout.max_staleness=1", "run.num_steps=4"), id="asynchronous"),
        pytest.param(("runtime.colocate=true", "training.optimizer.use_distributed_optimizer=true"), id="colocated"),
        pytest.param(
            ("rollout.function=megatron_rl.rollout.branching:rollout", "rollout.args.leaves=3", "rollout.sampling.max_response_tokens=12"),
            id="branching",
        ),
        pytest.param(("training.topology={num_ranks: 2, tp: 2}", "objective.proximal=rollout", "objective.off_policy=null"), id="tp2"),
    ],
)
def test_kinds_of_runs_draw_by_entropy(task: Path, tmp_path: Path, start: Callable[..., Any], overrides: tuple[str, ...]) -> None:
    run = start(*rl_arguments(task, tmp_path / "run", *WORDS, *overrides))
    assert run.wait() == 0, run.output
    check_steps(tmp_path / "run", num_steps=4 if "run.num_steps=4" in overrides else 2)


@pytest.mark.slow
def test_turns_of_a_conversation_are_drawn_by_entropy(chat_task: Path, tmp_path: Path, start: Callable[..., Any]) -> None:
    # Random weights draw nearly all words alike, which a higher temperature alone would not change.
    run = start(*chat_arguments(chat_task, tmp_path / "run", *WORDS, "rollout.sampling.entropy={thresholds: [100.0, 0.0]}"))
    assert run.wait() == 0, run.output
    check_steps(tmp_path / "run", num_steps=2)


@pytest.mark.slow
def test_changed_log_probs_of_draws_are_named(task: Path, tmp_path: Path, start: Callable[..., Any]) -> None:
    change = ("rollout.function=tests.e2e.changed_samples:rollout", "rollout.args.change=reversed")
    run = start(*rl_arguments(task, tmp_path / "run", *WORDS, *change, "rollout.sampling.max_response_tokens=12"))
    assert run.wait() != 0, run.output
    assert re.search("engine and trainer disagree about the samples.*it looks like tokens in reversed order", run.output, re.DOTALL), (
        run.output
    )
