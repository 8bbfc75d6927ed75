"""A run that was killed is the run that was not: every metric but those of the machine, every sample, every weight, bit for bit.

With `rollout.max_staleness` 0, one precision of float32 and engines with `enable_deterministic_inference`; the whole promise stands in
`megatron_rl/runtime/README.md`. With a `max_staleness` above 0 it depends on the clock which weights make a token: then nothing is lost,
made twice or too old.
"""

import contextlib
import random
import re
import signal
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import safetensors.numpy
from safetensors.numpy import load_file
from small_run import chat_arguments, metrics, rl_arguments

from megatron_rl.observe.summary import read_summary

NUM_STEPS = 8
EXACT = (
    "rollout.sglang.enable_deterministic_inference=true", "rollout.sampling.max_response_tokens=8", f"run.num_steps={NUM_STEPS}",
    "run.save_interval=1", "run.keep_checkpoints=100", "rollout.sampling.top_p=0.95",
)  # fmt: skip
REWARD = "reward.function=tests.e2e.one_by_one:score"
SLOW_REWARD = ("reward.function=tests.e2e.one_by_one:slow_score", "reward.args={seconds: 0.02}")
"""The rewards of REWARD, one after the other: steps of a second at least, so that a loaded machine sees the run before its end."""
RESUMABLE = 75
MACHINE = (
    "time/",
    "memory/",
    "engine/",
    "rollout/tokens_per_second",
    "train/tokens_per_second",
    "rollout/overlap_fraction",
    "rollout/reward_wait_fraction",
)
"""Metrics that no two runs share."""
PARITY = "weights/parity_"
"""Measured whenever a run starts."""
WAIT_S = 480.0
PHASES = ("rollout", "train", "save", "publish")
GONE_S = 30.0
"""After the driver's death. It takes 4 s where the machine has room."""


@dataclass(frozen=True)
class Moment:
    """`delay_s` seconds after the phase began, in a step that is not over yet."""

    phase: str
    delay_s: float


def moments(seed: int, whole: Path) -> list[Moment]:
    """One in the rollout, the optimizer step, the save and the publication of weights, in any order.

    Phases are as long as in the run in the directory `whole`: on a fast machine a step is over in what is a part of a phase on another.
    """
    rng = random.Random(seed)
    steps = list(metrics(whole).values())[1:]
    lengths_s = {name: statistics.median(row[f"time/{name}"] for row in steps) for name in ("rollout", "train", "save", "sync")}
    # Weights are published while the checkpoint is being written: as soon as it has begun.
    lengths_s["publish"] = lengths_s["save"] + lengths_s["sync"]
    return [Moment(phase, rng.uniform(0, lengths_s[phase])) for phase in rng.sample(PHASES, len(PHASES))]


def began(phase: str, step: int, directory: Path) -> bool:
    """Whether the run has come to the phase of the step, by what everybody can see in its directory."""
    checkpoints = directory / "checkpoints"
    if phase == "rollout":
        return step - 1 in (metrics(directory) if (directory / "metrics.jsonl").exists() else {})
    if phase == "train":
        with contextlib.suppress(sqlite3.OperationalError), sqlite3.connect(f"file:{directory}/buffer.sqlite?mode=ro", uri=True) as buffer:
            return bool(buffer.execute("SELECT count(*) FROM groups WHERE consumed_step = ?", (step,)).fetchone()[0])
        return False
    # A save may be over before anybody looks.
    return any((checkpoints / name).exists() for name in (f".step-{step:06d}.partial", f"step-{step:06d}"))


def reach(moment: Moment, run: Any, directory: Path, *, step: int) -> None:
    """Wait for the moment in a step that the run has not come to."""
    deadline = time.monotonic() + WAIT_S
    while not began(moment.phase, step, directory):
        run.descendants()
        assert run.process.poll() is None, run.output
        assert time.monotonic() < deadline, f"{moment} of step {step} did not come:\n{run.output}"
        time.sleep(0.05)
    time.sleep(moment.delay_s)


def kill_driver(run: Any) -> None:
    """kill -9 for the command alone, when Ray has logged as much as it does in hours and an engine hangs: all goes down with it."""
    (raylet,) = run.members("/raylet/raylet ")
    (log,) = {file.path for file in raylet.open_files() if "raylet.out" in file.path}
    with open(log, "a") as file:
        file.write(f"{'x' * 99}\n" * 20_000)
    (server,) = run.members("megatron_rl.engines.sglang_server")[:1]
    for process in (server, *server.children(recursive=True)):
        process.suspend()
    run.process.kill()
    assert run.wait() == -signal.SIGKILL, run.output
    assert run.survivors(timeout_s=GONE_S) == []


def kill_rank(run: Any, *, number: int) -> None:
    """kill -9 for one trainer rank, as the kernel does it where memory runs out: the run starts all of them again by itself."""
    run.members("ray::TrainerWorker")[number].kill()
    run.wait_for("the ranks are back after")
    sentence = r"all ranks are started again, 1 of runtime.restarts 4 within an hour, because: Megatron rank \d died"
    assert re.search(sentence, run.output) and "Traceback" not in run.output, run.output


def kill_tree(run: Any) -> None:
    """kill -9 for the run and all that it has started at once."""
    seen = run.descendants()
    run.process.kill()
    for process in seen:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    assert run.wait() == -signal.SIGKILL, run.output


def end_without_patience(run: Any) -> None:
    """SIGTERM, and kill -9 while the run leaves what it has: a period of grace that is shorter than it needs."""
    run.process.send_signal(signal.SIGTERM)
    # Then engines, ranks and Ray have to be stopped still, which takes seconds.
    run.wait_for("] report ...")
    kill_tree(run)


def kill_and_resume(
    start: Callable[..., Any], command: tuple[str, ...], directory: Path, *, seed: int, whole: Path, num_ends: int = 4
) -> None:
    """Start the same command again and again, each time ended at another moment and in another way, until it comes to its end.

    Each life has to reach a phase that none before has: a moment that is over when the run starts would be none. A rank's death ends none.
    """
    ends = (kill_driver, partial(kill_rank, number=seed % 2), end_without_patience, kill_tree)
    killed, run = [], start(*command)
    for number, (moment, end) in enumerate(list(zip(moments(seed, whole), ends, strict=True))[:num_ends]):
        step = next(step for step in range(2 + number, NUM_STEPS + 1) if not began(moment.phase, step, directory))
        reach(moment, run, directory, step=step)
        end(run)
        if run.process.poll() is None:
            continue
        if run.process.returncode == -signal.SIGKILL:
            killed.append(run.process.pid)
        run = start(*command)
    assert run.wait() == 0, run.output
    # Removed by the life after it, or by any run that has started on the machine since.
    assert killed and not any(found for pid in killed for found in Path(tempfile.gettempdir(), "ray").glob(f"session_*_{pid}"))


def samples(directory: Path) -> list[tuple[Any, ...]]:
    """Everything in the buffer but the times."""
    with sqlite3.connect(f"file:{directory}/buffer.sqlite?mode=ro", uri=True) as buffer:
        groups = "SELECT consumed_step, position, id, state, trained, rejection, prompt_ids FROM groups ORDER BY position"
        rows = "SELECT consumed_step, samples.* FROM samples JOIN groups ON id = group_id ORDER BY group_id, sample_index"
        return buffer.execute(groups).fetchall() + buffer.execute(rows).fetchall()


def assert_same_run(directory: Path, expected: Path, *, oldest_checkpoint: int = 1) -> None:
    got, wanted = metrics(directory), metrics(expected)
    assert list(got) == list(wanted) == list(range(len(wanted))), "no step twice, none missing"
    for step, row in wanted.items():
        names = {name for name in row if "/" in name and not name.startswith(MACHINE)}
        assert len(names) > (10 if step else 0)
        assert {name: (got[step].get(name), row[name]) for name in names if got[step].get(name) != row[name]} == {}, step
        assert {name for name in got[step].keys() - row.keys() if not name.startswith((*MACHINE, PARITY))} == set(), step
    for row, other in zip(samples(directory), samples(expected), strict=True):
        if row[0] is not None and row[0] <= oldest_checkpoint:
            # Tokens of these steps are dropped, at the next save of whichever life.
            pairs = [(value, wish) for value, wish in zip(row, other, strict=True) if value is not None and wish is not None]
            assert pairs and all(value == wish for value, wish in pairs), (row, other)
        else:
            assert row == other
    weights, others = (load_file(path / "huggingface" / "model.safetensors") for path in (directory, expected))
    assert weights.keys() == others.keys()
    assert all(np.array_equal(weights[name], others[name]) for name in weights)


@pytest.fixture(scope="module")
def whole(task: Path, tmp_path_factory: pytest.TempPathFactory, finish: Callable[..., None]) -> Path:
    """The directory of a run that nothing interrupts, with one engine."""
    root = tmp_path_factory.mktemp("whole")
    finish(root / "output.txt", *rl_arguments(task, root / "run", REWARD, *EXACT))
    return root / "run"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("seed", "overrides", "num_ends"),
    [
        # The driver's and a rank's, in a run whose ranks and engine take turns on the same devices.
        pytest.param(0, ("runtime.colocate=true",), 2, id="gate"),
        # An end in each phase, always, and each kind of end; 20 in all.
        *(pytest.param(seed, (), 4, id=f"seed {seed}", marks=pytest.mark.slow) for seed in range(1, 4)),
        pytest.param(4, ("rollout.num_engines=2",), 4, id="2 engines", marks=pytest.mark.slow),
        pytest.param(5, ("runtime.colocate=true",), 4, id="in turns", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_was_ended_is_the_run_that_was_not(
    task: Path, tmp_path: Path, start: Callable[..., Any], whole: Path, seed: int, overrides: tuple[str, ...], num_ends: int
) -> None:
    directory = tmp_path / "run"
    command = (*rl_arguments(task, directory, REWARD, *EXACT, *overrides), "--resume")
    kill_and_resume(start, command, directory, seed=seed, whole=whole, num_ends=num_ends)
    assert_same_run(directory, whole)
    summary, expected = read_summary(directory), read_summary(whole)
    assert summary is not None and expected is not None
    assert (summary.status, summary.steps, summary.evaluation_before) == (expected.status, NUM_STEPS, expected.evaluation_before)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_that_was_asked_to_end_is_the_run_that_was_not(task: Path, tmp_path: Path, start: Callable[..., Any], whole: Path) -> None:
    """Twice the same command."""
    directory = tmp_path / "run"
    command = (*rl_arguments(task, directory, *SLOW_REWARD, *EXACT, "run.save_interval=0"), "--resume")
    first = start(*command)
    reach(Moment("rollout", 0.0), first, directory, step=4)
    first.process.send_signal(signal.SIGTERM)
    assert first.wait() == RESUMABLE, first.output
    ended = re.search(r"megatron-rl: ended by SIGTERM; the same command with --resume continues after step (\d)", first.output)
    assert ended, first.output
    second = start(*command)
    assert second.wait() == 0, second.output
    assert_same_run(directory, whole, oldest_checkpoint=int(ended[1]))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_engines", [1, 2])
def test_a_run_whose_engine_died_is_the_run_whose_engine_did_not(
    task: Path, tmp_path: Path, start: Callable[..., Any], whole: Path, num_engines: int
) -> None:
    directory = tmp_path / "run"
    run = start(*rl_arguments(task, directory, *SLOW_REWARD, *EXACT, f"rollout.num_engines={num_engines}"))
    reach(Moment("rollout", 0.0), run, directory, step=3)
    run.members("megatron_rl.engines.sglang_server")[0].kill()
    assert run.wait() == 0, run.output
    # The run with two engines may end before it is back.
    left = f"the run goes on with {num_engines - 1} of {num_engines} engines"
    assert re.search(rf"engine \d is started again, and {left}", run.output) and "Traceback" not in run.output
    assert_same_run(directory, whole)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_ended_four_times_loses_nothing_of_later_steps(task: Path, tmp_path: Path, start: Callable[..., Any], whole: Path) -> None:
    """With `max_staleness` 1: every step once, the same prompts in the same order, no sample lost, made twice, or too old."""
    directory = tmp_path / "run"
    command = (*rl_arguments(task, directory, REWARD, *EXACT, "rollout.max_staleness=1", "objective.proximal=rollout"), "--resume")
    kill_and_resume(start, command, directory, seed=6, whole=whole)
    rows = metrics(directory)
    assert list(rows) == list(range(NUM_STEPS + 1))
    assert [rows[step]["weights/version"] for step in rows] == list(range(NUM_STEPS + 1))
    with sqlite3.connect(f"file:{directory}/buffer.sqlite?mode=ro", uri=True) as buffer:
        query = (
            "SELECT consumed_step, count(DISTINCT id), count(*), min(min_version), max(max_version), min(position), max(position) "
            "FROM groups JOIN samples ON id = group_id GROUP BY 1 ORDER BY 1"
        )
        steps = buffer.execute(query).fetchall()
    assert [row[:3] for row in steps] == [(step, 16, 64) for step in range(1, NUM_STEPS + 1)]
    for step, _, _, oldest, newest, first, last in steps:
        assert step - 2 <= oldest <= newest <= step - 1
        assert (first, last) == (16 * step - 15, 16 * step)
    assert all(rows[step]["train/log_prob_diff"] <= 1e-4 for step in range(1, NUM_STEPS + 1) if not rows[step]["rollout/staleness_max"])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_kill_inside_a_group_costs_only_unfinished_answers(task: Path, tmp_path: Path, start: Callable[..., Any]) -> None:
    """Engines that draw anew at every start, so that an equal answer is one that was kept."""
    directory = tmp_path / "run"
    words = ("run.num_steps=2", "rollout.sampling.max_response_tokens=40", "rollout.function=tests.e2e.one_by_one:slow_rollout")
    # Tokens of the second step are kept to the end.
    command = (*rl_arguments(task, directory, REWARD, *words, "run.save_interval=1", "eval.interval=0"), "--resume")
    run, found = start(*command), {}
    deadline = time.monotonic() + WAIT_S
    while not found:
        run.descendants()
        assert run.process.poll() is None and time.monotonic() < deadline, run.output
        time.sleep(0.05)
        # Answers of weights that no checkpoint has are made anew.
        if (directory / "checkpoints" / "step-000001").exists():
            found = answers_of(directory)
    run.process.kill()
    run.wait()
    found = answers_of(directory)
    assert run.survivors(timeout_s=GONE_S) == []
    assert all(0 < len(answers) < 4 for answers in found.values()), "whole groups are samples"
    again = start(*command)
    assert again.wait() == 0, again.output
    with sqlite3.connect(f"file:{directory}/buffer.sqlite?mode=ro", uri=True) as buffer:
        for group, answers in found.items():
            made = [row for (row,) in buffer.execute("SELECT response_ids FROM samples WHERE group_id = ?", (group,))]
            # Two of them may be the same single token.
            assert len(made) == 4 and set(answers) <= set(made)
    assert answers_of(directory) == {}


AGENT = "rollout.agent={function: tests.e2e.interviewer:ask_in_turn}"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("turn", "form"), [(1, "environment"), (2, "environment"), (2, "agent")])
def test_a_run_killed_between_turns_is_the_run_that_was_not(
    chat_task: Path, request: pytest.FixtureRequest, tmp_path: Path, start: Callable[..., Any], finish: Any, turn: int, form: str
) -> None:
    """Environment or agent begins anew and says the same, so that no finished answer is asked for again."""
    directory, whole = tmp_path / "run", tmp_path / "whole"
    if form == "agent":
        arguments = partial(chat_arguments, rollout=AGENT)
        finish(tmp_path / "output.txt", *arguments(chat_task, whole))
    else:
        arguments, whole = chat_arguments, request.getfixturevalue("interviews")
    command = (*arguments(chat_task, directory, "rollout.args={seconds: 2}"), "--resume")
    run, num_kept = start(*command), 0
    deadline = time.monotonic() + WAIT_S
    # One answer of a turn, and all 8 of each turn before.
    while num_kept <= 8 * (turn - 1):
        run.descendants()
        assert run.process.poll() is None and time.monotonic() < deadline, run.output
        time.sleep(0.05)
        if (directory / "checkpoints" / "step-000001").exists():
            num_kept = sum(map(len, answers_of(directory).values()))
    run.process.kill()
    run.wait()
    assert run.survivors(timeout_s=GONE_S) == [], "the environments end, too"
    num_kept, before = sum(map(len, answers_of(directory).values())), num_requests(directory)
    again = start(*command)
    assert again.wait() == 0, again.output
    assert_same_run(directory, whole)
    turns = [round(8 * metrics(whole)[step]["rollout/turns"]) for step in (1, 2)]
    # Each sync has fixed tokens scored, and a life from the checkpoint of step 1 on has none of version 0.
    num_others = num_requests(whole) - sum(turns) - 1
    num_again = num_requests(directory) - before - num_others
    print(f"killed in turn {turn} of step 2: of {turns[1]} answers {num_kept} were kept and {num_again} asked for after the resume")
    assert num_again == turns[1] - num_kept


def num_requests(directory: Path) -> int:
    """The requests that the engine's log counts, over all lives of a run."""
    return (directory / "logs" / "engine-0.log").read_text(errors="replace").count("POST /generate")


def answers_of(directory: Path) -> dict[str, list[bytes]]:
    """Token ids of the answers that the buffer keeps of groups in flight, as it stores those of samples."""
    with sqlite3.connect(f"file:{directory}/buffer.sqlite?mode=ro", uri=True) as buffer:
        found: dict[str, list[bytes]] = {}
        for group, content in buffer.execute("SELECT group_id, content FROM answers"):
            found.setdefault(group, []).append(safetensors.numpy.load(content)["token_ids"].astype("<i4").tobytes())
    return found
