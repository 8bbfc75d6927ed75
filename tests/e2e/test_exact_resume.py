"""A run that was killed is the run that was not: every metric but those of the machine, every sample, every weight, bit for bit.

With `rollout.max_staleness` 0, one precision of float32 and engines with `enable_deterministic_inference`. With a `max_staleness` above 0
it depends on the clock which weights make a token; see test_asynchronous for what is promised then.
"""

import contextlib
import random
import re
import signal
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file
from small_run import metrics, rl_arguments

pytestmark = pytest.mark.slow

NUM_STEPS = 8
EXACT = (
    "rollout.sglang.enable_deterministic_inference=true", "rollout.sampling.max_response_tokens=8", f"run.num_steps={NUM_STEPS}",
    "run.save_interval=1", "run.keep_checkpoints=100",
)  # fmt: skip
REWARD = "reward.function=tests.e2e.one_by_one:score"
RESUMABLE = 75
MACHINE = ("time/", "memory/", "rollout/tokens_per_second", "train/tokens_per_second", "rollout/overlap_fraction")
"""Metrics that no two runs share."""
PARITY = "weights/parity_"
"""Measured whenever a run starts."""
WAIT_S = 240.0


@dataclass(frozen=True)
class Moment:
    """`delay_s` seconds after the phase of step `step` began."""

    phase: str
    step: int
    delay_s: float


def moments(seed: int) -> list[Moment]:
    """One in the rollout, the optimizer step, the save and the publication of weights, each of a later step than the one before."""
    rng = random.Random(seed)
    phases = ["rollout", "train", "save", "publish"]
    rng.shuffle(phases)
    steps = sorted(rng.sample(range(2, NUM_STEPS), len(phases)))
    longest = {"rollout": 0.5, "train": 0.5, "save": 0.2, "publish": 0.2}
    return [Moment(phase, step, rng.uniform(0, longest[phase])) for phase, step in zip(phases, steps, strict=True)]


def began(moment: Moment, directory: Path) -> bool:
    """Whether the run has come to the phase, by what everybody can see in its directory."""
    checkpoints, step = directory / "checkpoints", moment.step
    if moment.phase == "rollout":
        return step - 1 in (metrics(directory) if (directory / "metrics.jsonl").exists() else {})
    if moment.phase == "train":
        with contextlib.suppress(sqlite3.OperationalError), sqlite3.connect(f"file:{directory}/buffer.sqlite?mode=ro", uri=True) as buffer:
            return bool(buffer.execute("SELECT count(*) FROM groups WHERE consumed_step = ?", (step,)).fetchone()[0])
        return False
    name = f".step-{step:06d}.partial" if moment.phase == "save" else f"step-{step:06d}"
    # A save may be over before anybody looks.
    return (checkpoints / name).exists() or (checkpoints / f"step-{step:06d}").exists()


def kill_at(moment: Moment, run: Any, directory: Path) -> None:
    """kill -9 for the run and all that it has started, at once."""
    deadline = time.monotonic() + WAIT_S
    seen: set[psutil.Process] = set()
    while not began(moment, directory):
        seen = run.descendants()
        assert run.process.poll() is None, run.output
        assert time.monotonic() < deadline, f"{moment} did not come:\n{run.output}"
        time.sleep(0.01)
    time.sleep(moment.delay_s)
    run.process.kill()
    for process in seen:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    assert run.wait() == -signal.SIGKILL, f"{moment} came too late:\n{run.output}"


def samples(directory: Path) -> list[tuple[Any, ...]]:
    """Everything in the buffer but the times."""
    with sqlite3.connect(f"file:{directory}/buffer.sqlite?mode=ro", uri=True) as buffer:
        groups = buffer.execute("SELECT position, id, state, consumed_step, trained, rejection, prompt_ids FROM groups ORDER BY position")
        return groups.fetchall() + buffer.execute("SELECT * FROM samples ORDER BY group_id, sample_index").fetchall()


def assert_same_run(directory: Path, expected: Path) -> None:
    got, wanted = metrics(directory), metrics(expected)
    assert list(got) == list(wanted) == list(range(NUM_STEPS + 1)), "no step twice, none missing"
    for step, row in wanted.items():
        names = {name for name in row if "/" in name and not name.startswith(MACHINE)}
        assert len(names) > (10 if step else 0)
        assert {name: (got[step].get(name), row[name]) for name in names if got[step].get(name) != row[name]} == {}, step
        assert {name for name in got[step].keys() - row.keys() if not name.startswith((*MACHINE, PARITY))} == set(), step
    for row, other in zip(samples(directory), samples(expected), strict=True):
        # Tokens of steps before the oldest checkpoint are dropped, and the runs need not have checkpoints of the same steps.
        pairs = [(value, wish) for value, wish in zip(row, other, strict=True) if value is not None and wish is not None]
        assert len(pairs) >= len(row) - 12 and all(value == wish for value, wish in pairs), (row, other)
    weights, others = (load_file(path / "huggingface" / "model.safetensors") for path in (directory, expected))
    assert weights.keys() == others.keys()
    assert all(np.array_equal(weights[name], others[name]) for name in weights)


@pytest.fixture(scope="module")
def whole(task: Path, tmp_path_factory: pytest.TempPathFactory, finish: Callable[..., None]) -> Path:
    """The directory of a run that nothing interrupts, with one engine."""
    root = tmp_path_factory.mktemp("whole")
    finish(root / "output.txt", *rl_arguments(task, root / "run", REWARD, *EXACT))
    return root / "run"


@pytest.mark.timeout(900)
def test_a_run_that_was_asked_to_end_is_the_run_that_was_not(task: Path, tmp_path: Path, start: Callable[..., Any], whole: Path) -> None:
    """Twice the same command."""
    directory = tmp_path / "run"
    command = (*rl_arguments(task, directory, REWARD, *EXACT, "run.save_interval=0"), "--resume")
    first = start(*command)
    first.wait_for(f"  3/{NUM_STEPS}")
    first.process.send_signal(signal.SIGTERM)
    assert first.wait() == RESUMABLE, first.output
    assert re.search(r"megatron-rl: ended by SIGTERM; the same command with --resume continues after step \d", first.output)
    second = start(*command)
    assert second.wait() == 0, second.output
    assert_same_run(directory, whole)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("seed", "overrides"),
    [
        pytest.param(0, (), id="gate"),
        *(pytest.param(seed, (), id=f"seed {seed}") for seed in range(1, 4)),
        pytest.param(4, ("rollout.num_engines=2",), id="2 engines"),
        pytest.param(5, ("runtime.colocate=true",), id="in turns"),
    ],
)
def test_a_run_that_was_killed_four_times_is_the_run_that_was_not(
    task: Path, tmp_path: Path, start: Callable[..., Any], whole: Path, seed: int, overrides: tuple[str, ...]
) -> None:
    directory = tmp_path / "run"
    command = (*rl_arguments(task, directory, REWARD, *EXACT, *overrides), "--resume")
    for moment in moments(seed):
        kill_at(moment, start(*command), directory)
    last = start(*command)
    assert last.wait() == 0, last.output
    assert_same_run(directory, whole)


@pytest.mark.timeout(900)
def test_a_run_whose_engine_died_is_the_run_whose_engine_did_not(
    task: Path, tmp_path: Path, start: Callable[..., Any], whole: Path
) -> None:
    directory = tmp_path / "run"
    run = start(*rl_arguments(task, directory, REWARD, *EXACT, "rollout.num_engines=2"))
    run.wait_for(f"  2/{NUM_STEPS}")
    servers = [process for process in run.descendants() if "megatron_rl.rollout.sglang_server" in " ".join(process.cmdline())]
    min(servers, key=psutil.Process.create_time).kill()
    assert run.wait() == 0, run.output
    assert "the run goes on with 1 of 2 engines" in run.output
    assert_same_run(directory, whole)
