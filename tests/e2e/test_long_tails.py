"""Steps that leave their slowest groups to later ones: the real engines, ranks and buffer, on the CPU."""

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_run import metrics, rl_arguments

BUDGET, NUM_STEPS = 48, 4
TAILS = (
    "reward.function=tests.e2e.one_by_one:score", "rollout.function=tests.e2e.unequal_lengths:rollout", f"run.num_steps={NUM_STEPS}",
    f"rollout.sampling.max_response_tokens={BUDGET}", "training.optimizer.lr=1.0e-3", f"run.keep_groups={2 * 16}",
)  # fmt: skip

STALE = ("rollout.max_staleness=1", "objective.off_policy={mode: truncate, high: 2.0}")


def samples(directory: Path) -> list[tuple[int, int, Any, Any]]:
    """Step, place in the order of prompts, versions and tokens of each trained sample."""
    with sqlite3.connect(f"file:{directory}/buffer.sqlite?mode=ro", uri=True) as connection:
        found = connection.execute(
            "SELECT consumed_step, position, weight_versions, response_ids FROM samples JOIN groups ON id = group_id"
        ).fetchall()
    return [(step, place, np.frombuffer(versions, "<i4"), np.frombuffer(ids, "<i4")) for step, place, versions, ids in found]


def assert_every_step_has_its_groups(directory: Path) -> list[tuple[int, int, Any, Any]]:
    rows = samples(directory)
    groups = {(step, place) for step, place, *_ in rows}
    assert [sum(at == step for at, _ in groups) for step in range(1, NUM_STEPS + 1)] == [16] * NUM_STEPS
    assert len({place for _, place in groups}) == len(groups) == NUM_STEPS * 16 and len(rows) == 4 * len(groups)
    # No group that is left waits behind a later one for ever: the last step takes the last of them.
    assert {place for _, place in groups} == set(range(1, NUM_STEPS * 16 + 1))
    assert any(step > other for step, place in groups for other, behind in groups if place < behind), "all in the order of prompts"
    for step, _, versions, ids in rows:
        assert len(versions) == len(ids) and versions.min() >= 0 and versions.max() <= step - 1
        assert (np.diff(versions) >= 0).all(), "a piece in front of an older one"
    return rows


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("colocate", ["false", "true"])
def test_partial_answers_go_on_from_their_own_tokens(task: Path, tmp_path: Path, start: Callable[..., Any], colocate: str) -> None:
    directory = tmp_path / "run"
    order = ("rollout.order={kind: first_complete, partial: true}", f"runtime.colocate={colocate}", "rollout.sampling.top_p=0.95")
    run = start(*rl_arguments(task, directory, *TAILS, *order))
    assert run.wait(600) == 0, run.output
    assert run.survivors() == []
    rows, steps = assert_every_step_has_its_groups(directory), metrics(directory)
    assert any(len(np.unique(versions)) > 1 for *_, versions, _ in rows), "no answer was continued"
    assert max(len(ids) for *_, ids in rows) == BUDGET, "a continued answer has the rest of the budget"
    assert steps[1]["rollout/carried_groups"] > 0 and steps[NUM_STEPS]["rollout/carried_groups"] == 0
    trained = [steps[step] for step in range(1, NUM_STEPS + 1)]
    assert any(row["rollout/stale_context_fraction"] > 0 for row in trained)
    assert all(row["rollout/trained_length"] <= row["rollout/response_length"] for row in trained)
    # Only tokens of the present weights are trained on, and the trainer finds the same log-probs behind the older pieces.
    assert all(row["train/log_prob_diff"] <= 1e-4 and row["train/full_entropy"] > row["train/entropy"] for row in trained)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_first_complete_groups_are_never_too_old(task: Path, tmp_path: Path, start: Callable[..., Any]) -> None:
    directory = tmp_path / "run"
    run = start(*rl_arguments(task, directory, *TAILS, "rollout.order={kind: first_complete}", *STALE))
    assert run.wait(600) == 0, run.output
    assert run.survivors() == []
    rows = assert_every_step_has_its_groups(directory)
    assert all(versions.min() >= step - 2 for step, _, versions, _ in rows)
    assert {len(ids) for *_, ids in rows} >= {8, BUDGET}
    assert all(metrics(directory)[step]["rollout/renewed_groups"] == 0 for step in range(1, NUM_STEPS + 1))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_forecast_fills_steps_with_groups_that_teach(task: Path, tmp_path: Path, start: Callable[..., Any]) -> None:
    directory = tmp_path / "run"
    overrides = ("reward.function=tests.e2e.one_by_one:coarse_score", "objective.zero_variance=resample", "run.num_steps=3")
    run = start(*rl_arguments(task, directory, *overrides, "rollout.sampling.max_response_tokens=8"))
    assert run.wait(600) == 0, run.output
    with sqlite3.connect(f"file:{directory}/buffer.sqlite?mode=ro", uri=True) as connection:
        query = (
            "SELECT consumed_step, sum(trained), count(*), group_concat(DISTINCT rejection) FROM groups WHERE state = 'consumed' GROUP BY 1"
        )
        steps = {step: found for step, *found in connection.execute(f"{query} ORDER BY 1")}
    assert [steps[step][0] for step in (1, 2, 3)] == [16, 16, 16]
    assert any(num_all > 16 for _, num_all, _ in steps.values()), "every group had a signal"
    assert {reason for *_, reason in steps.values()} <= {None, "no signal (objective.zero_variance)"}
    assert all("rollout/surplus_groups" in metrics(directory)[step] for step in (1, 2, 3))
