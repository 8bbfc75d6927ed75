"""Generation beside training, and on the trainer's devices: the real engines, ranks and buffer, on the CPU."""

import json
import shutil
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from small_run import metrics, rl_arguments

REWARD = "reward.function=tests.e2e.one_by_one:score"
ONE_BY_ONE = (
    "rollout.function=tests.e2e.one_by_one:rollout", "rollout.max_concurrent_requests=1", "rollout.sglang.disable_radix_cache=true",
)  # fmt: skip
"""Releasing memory forgets cached prefixes, and a log-prob behind a cached prefix may be rounded in another way."""
MEASURED = (
    "time/",
    "memory/",
    "engine/",
    "rollout/tokens_per_second",
    "train/tokens_per_second",
    "rollout/overlap_fraction",
    "rollout/reward_wait_fraction",
)
"""Metrics that no two runs share."""


def arguments(task: Path, directory: Path, *overrides: str) -> list[str]:
    return rl_arguments(task, directory, REWARD, *overrides)


def query(buffer: Path, sql: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(f"file:{buffer}?mode=ro", uri=True) as connection:
        return connection.execute(sql).fetchall()


def assert_no_token_is_too_old(buffer: Path, *, num_steps: int, max_staleness: int) -> None:
    """Every step has its groups, and none of them a token of weights older than allowed, nor one of weights that were not there yet."""
    rows = query(
        buffer,
        "SELECT consumed_step, count(DISTINCT id), min(min_version), max(max_version) FROM groups JOIN samples ON id = group_id "
        f"WHERE consumed_step <= {num_steps} GROUP BY 1 ORDER BY 1",
    )
    assert [row[:2] for row in rows] == [(step, 16) for step in range(1, num_steps + 1)]
    for step, _, oldest, newest in rows:
        # Step 1 trains the weights of version 0.
        assert step - 1 - max_staleness <= oldest <= newest <= step - 1


def assert_replays(
    recorded: Path, directory: Path, start: Callable[..., Any], *, same: tuple[str, ...] = ("train/", "rollout/reward")
) -> None:
    """A run without engines on the recorded batches has the same losses, norms of gradients and weights, bit for bit."""
    again = start("train", str(recorded / "settings.yaml"), f"run.directory={directory}", "--replay", str(recorded))
    assert again.wait() == 0, again.output
    steps, expected = metrics(directory), metrics(recorded)
    names = [name for name in steps[1] if name.startswith(same) and name in expected[1] and name not in MEASURED]
    assert {"train/loss", "train/grad_norm"} <= set(names) and expected[1]["train/grad_norm"] > 0
    assert {step: [row[name] for name in names] for step, row in steps.items()} == {
        step: [row[name] for name in names] for step, row in expected.items() if step
    }
    for file in sorted((recorded / "huggingface").resolve().glob("*.safetensors")):
        tensors, others = load_file(file), load_file((directory / "huggingface").resolve() / file.name)
        assert all(tensors[name].tobytes() == others[name].tobytes() for name in tensors)


@pytest.mark.slow
def test_later_steps_are_generated_while_one_trains(task: Path, tmp_path: Path, start: Callable[..., Any]) -> None:
    directory = tmp_path / "run"
    # Responses of some length, so that a weight sync comes in the middle of one.
    overrides = ("rollout.max_staleness=2", "run.num_steps=6", "rollout.sampling.max_response_tokens=24", "training.optimizer.lr=1.0e-3")
    overrides += ("rollout.max_concurrent_requests=null",)
    overrides += ("run.keep_groups=16",)
    decoupled = ("objective.proximal=interpolated", "objective.off_policy={mode: truncate, high: 5.0}")
    run = start(*arguments(task, directory, *overrides, *decoupled, "rollout.function=tests.e2e.ahead_of_training:rollout"))
    assert run.wait() == 0, run.output
    assert run.survivors() == []
    assert_no_token_is_too_old(directory / "buffer.sqlite", num_steps=6, max_staleness=2)
    steps = metrics(directory)
    assert steps[1]["rollout/staleness_max"] == 0
    assert steps[3]["rollout/staleness_max"] == 2
    assert steps[3]["rollout/mixed_versions_fraction"] > 0
    assert steps[1]["engine/prefix_hits"] >= 0 and all(steps[step]["engine/request_limit"] >= 8 for step in range(1, 7))
    # Weight syncs retract requests, too; a step whose groups were there before has no answers.
    assert {steps[step].get("engine/retractions", 0) for step in range(1, 7)} == {0}
    # Only tokens of age 2 have a share of the current policy, and so a weight.
    assert all(steps[step]["train/off_policy_ratio_square"] == 1 for step in (1, 2)) and steps[3]["train/off_policy_ratio_square"] != 1
    assert [steps[step]["weights/version"] for step in range(7)] == list(range(7))
    assert steps[6]["eval/greedy/reward"] > steps[0]["eval/greedy/reward"] + 0.1
    # Nothing is left over at the end of the run.
    assert query(directory / "buffer.sqlite", "SELECT count(*) FROM groups WHERE state != 'consumed'") == [(0,)]
    assert_replays(directory, tmp_path / "again", start)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_sets_beside_training_change_none_of_its_metrics(task: Path, tmp_path: Path, start: Callable[..., Any]) -> None:
    """A replay of the batches, without any evaluation, has the same metrics to the last bit."""
    directory, rows = tmp_path / "run", (task / "held_out.jsonl").read_text().splitlines(keepends=True)
    sizes, judged = {"first": 6, "second": 10}, "tests.e2e.one_by_one:coarse_score"
    overrides = ["rollout.max_staleness=1", "run.num_steps=4", "eval.interval=1", "run.keep_groups=16", "objective.proximal=rollout"]
    overrides += [f"eval.sets.{name}.interval=0" for name in ("greedy", "sampled")]
    for name, size in sizes.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(rows[:size]))
        overrides.append(f"eval.sets.{name}={{data: {tmp_path}/{name}.jsonl, samples: 8, reward: {{function: {judged}}}}}")
    run = start(*arguments(task, directory, *overrides))
    assert run.wait() == 0, run.output
    assert run.survivors() == []
    for name, size in sizes.items():
        for step in range(5):
            place = directory / "evaluation" / f"step-{step:06}"
            result = json.loads((place / f"{name}.json").read_text())
            assert result["weight_versions"] == [step, step] and result["estimates"]["failed"]["value"] == 0
            assert result["estimates"]["pass@8"]["num"] == size == len((place / f"{name}.jsonl").read_text().splitlines()) / 8
    # What is recorded is the training's alone.
    assert query(directory / "buffer.sqlite", "SELECT count(*) FROM samples") == [(4 * 16 * 4,)]
    assert_no_token_is_too_old(directory / "buffer.sqlite", num_steps=4, max_staleness=1)
    assert_replays(directory, tmp_path / "again", start, same=("train/", "rollout/"))


@pytest.mark.slow
def test_ranks_and_engines_take_turns_on_shared_devices(task: Path, tmp_path: Path, start: Callable[..., Any]) -> None:
    directory = tmp_path / "run"
    run = start(
        *arguments(task, directory, "runtime.colocate=true", "run.num_steps=2", "training.optimizer.use_distributed_optimizer=true")
    )
    assert run.wait() == 0, run.output
    assert run.survivors() == []
    steps = metrics(directory)
    assert all(steps[step]["train/log_prob_diff"] <= 1e-4 for step in (1, 2))
    assert all(steps[step]["time/swap"] > 0 for step in (0, 1, 2))
    assert [steps[step]["weights/version"] for step in (0, 1, 2)] == [0, 1, 2]
    assert [steps[step]["engine/compared_weights"] > 0 for step in (0, 1, 2)] == [True, False, False]
    assert not (directory / "weights").exists(), "nothing of a sync goes to the disk"


def assert_same_run(directory: Path, expected: Path) -> None:
    """Every metric but those that measure the machine, and every weight, to the last bit."""
    got, wanted = metrics(directory), metrics(expected)
    assert got.keys() == wanted.keys()
    for step, row in wanted.items():
        names = [name for name in row if "/" in name and not name.startswith(MEASURED)]
        assert len(names) > 10
        assert {name: got[step][name] for name in names} == {name: row[name] for name in names}, step
    weights, others = (load_file(path / "huggingface" / "model.safetensors") for path in (directory, expected))
    assert weights.keys() == others.keys()
    assert all(np.array_equal(weights[name], others[name]) for name in weights)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((), id="broadcast"),
        pytest.param(("weights.transport=disk", "training.optimizer.use_distributed_optimizer=true"), id="disk"),
    ],
)
def test_a_run_in_phases_is_bit_equal_to_separate_devices(
    task: Path, tmp_path: Path, start: Callable[..., Any], overrides: tuple[str, ...]
) -> None:
    for name, colocate in (("own", "false"), ("shared", "true")):
        run = start(
            *arguments(
                task, tmp_path / name, "run.num_steps=3", *ONE_BY_ONE, f"runtime.colocate={colocate}", "run.save_interval=2", *overrides
            )
        )
        assert run.wait() == 0, run.output
    assert_same_run(tmp_path / "shared", tmp_path / "own")
    assert metrics(tmp_path / "own")[3]["train/grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_colocated_run_resumes(task: Path, tmp_path: Path, start: Callable[..., Any]) -> None:
    directory = tmp_path / "run"
    first = start(*arguments(task, directory, "runtime.colocate=true", "run.num_steps=2"))
    assert first.wait() == 0, first.output
    second = start("train", directory / "settings.yaml", "--resume", "run.num_steps=4")
    assert second.wait() == 0, second.output
    steps = metrics(directory)
    assert [steps[step]["weights/version"] for step in (3, 4)] == [3, 4]
    assert all(steps[step]["train/log_prob_diff"] <= 1e-4 for step in (3, 4))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_asynchronous_run_goes_on_under_the_same_rule(task: Path, tmp_path: Path, start: Callable[..., Any]) -> None:
    directory = tmp_path / "run"
    overrides = ("rollout.max_staleness=1", "run.num_steps=1000", "run.save_interval=2", "eval.interval=0")
    run = start(*arguments(task, directory, *overrides, "objective.proximal=rollout"))
    run.wait_for("  5/1000")
    run.descendants()
    run.process.kill()
    assert run.wait() == -signal.SIGKILL
    run.survivors()
    left = tmp_path / "left"
    left.mkdir()
    for file in directory.glob("buffer.sqlite*"):
        shutil.copy(file, left / file.name)
    resumed_at = max(int(path.name.removeprefix("step-")) for path in (directory / "checkpoints").glob("step-*"))
    finished = (
        "SELECT group_id, sample_index, response_text, reward FROM samples WHERE group_id IN (SELECT group_id FROM samples JOIN groups ON "
        f"id = group_id WHERE state IN ('done', 'consumed') GROUP BY 1 HAVING max(max_version) <= {resumed_at})"
    )
    with sqlite3.connect(left / "buffer.sqlite") as connection:
        before = set(connection.execute(finished))
    num_steps = resumed_at + 4
    again = start("train", directory / "settings.yaml", "--resume", f"run.num_steps={num_steps}")
    assert again.wait() == 0, again.output
    assert f"after {resumed_at} steps" in again.output
    assert_no_token_is_too_old(directory / "buffer.sqlite", num_steps=num_steps, max_staleness=1)
    after = set(query(directory / "buffer.sqlite", "SELECT group_id, sample_index, response_text, reward FROM samples"))
    assert len(before) >= 4 * 16 * resumed_at
    assert before <= after, "a finished group was lost"
    assert max(metrics(directory)[step]["rollout/staleness_max"] for step in range(resumed_at + 2, num_steps + 1)) == 1
