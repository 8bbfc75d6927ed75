"""Where the processes of a run listen, by how it syncs; test_environments has those of the endpoint, test_faults those of each mode."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_run import beyond_loopback, exposures, listeners, metrics, rl_arguments

NUM_STEPS = 4
MODES = {
    "colocated": ("runtime.colocate=true",),
    "disk": ("weights.transport=disk", "weights.delta=true"),
    "asynchronous": ("rollout.max_staleness=1", "objective.off_policy={mode: truncate, high: 2.0}", "weights.delta=true"),
    "two ranks": ("training.topology.num_ranks=2",),
}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("mode", MODES)
def test_no_process_can_be_reached_from_elsewhere(task: Path, tmp_path: Path, start: Callable[..., Any], mode: str) -> None:
    """And deltas, which are no gain where every element changes, leave a run as it is."""
    directory = tmp_path / "run"
    run = start(*rl_arguments(task, directory, f"run.num_steps={NUM_STEPS}", "eval={}", *MODES[mode]))
    run.wait_for(f"\n1/{NUM_STEPS} ")
    deadline = time.monotonic() + 60
    # A process that changes its threads or files meanwhile can be missed.
    while not {"sglang::scheduler", "raylet", "gcs_server"} <= (by_process := listeners(run)).keys():
        assert time.monotonic() < deadline, by_process
    assert beyond_loopback(by_process) == {}
    key = run.members("/raylet ")[0].environ()["RAY_AUTH_TOKEN"]
    assert exposures(key, tmp_path) == []
    assert run.wait() == 0, run.output
    if "weights.delta=true" in MODES[mode]:
        steps = metrics(directory)
        # After the first sync an engine reads the checkpoint by itself, so that the next sends everything, too.
        assert [steps[step]["engine/compared_weights"] > 0 for step in range(4)] == [True, True, True, False]
        whole = steps[0]["weights/bytes"]
        assert steps[1]["weights/bytes"] == whole < steps[2]["weights/bytes"] and 0 < steps[3]["weights/bytes"] <= whole
    assert "is started again" not in run.output
