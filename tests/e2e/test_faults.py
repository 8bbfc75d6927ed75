"""Faults in the modes of a run, on the real server: each fault in two modes, and what it must leave: all samples, versions, no process.

A fault comes in the middle of a rollout or of what follows. The run goes on by itself, or ends with one sentence where nothing could go on,
and the same command with `--resume` does the rest.
"""

import contextlib
import itertools
import random
import re
import signal
import socket
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from small_run import chat_arguments, metrics, rl_arguments

NUM_STEPS = 4
WAIT_S = 600.0
SLOW_REWARD = ("reward.function=tests.e2e.one_by_one:slow_score", "reward.args.seconds=0.03")
SMALL = (
    f"run.num_steps={NUM_STEPS}", "run.save_interval=1", "eval={}", "rollout.sampling.max_response_tokens=8",
)  # fmt: skip
MODES: dict[str, tuple[str, ...]] = {
    "sync": (),
    "async": ("rollout.max_staleness=1", "objective.proximal=rollout"),
    "partial": ("rollout.order={kind: first_complete, partial: true}",),
    "colocated": ("runtime.colocate=true",),
    "turns": (),
}
SERVER, SCHEDULER, RANK = "megatron_rl.engines.sglang_server", "sglang::scheduler", "ray::TrainerWorker"
ENGINE_BACK, RANKS_BACK = r"engine 0 is back after \d+ s", r"the ranks are back after \d+ s"


@dataclass(frozen=True)
class Fault:
    """What is done to a run, what the run says of it, and with which status it ends where it cannot go on by itself."""

    do: Callable[[Any, Path, ExitStack], None]
    says: str
    status: int = 0
    words: tuple[str, ...] = ()
    not_in: tuple[str, ...] = ()
    """Modes where it is another fault: engines on shared devices are not started again."""


def hit(number: signal.Signals, words: str, *, all_of_them: bool = False) -> Callable[..., None]:
    """Send a signal to the processes with these words in their command line, to the oldest alone or to all."""

    def do(run: Any, directory: Path, stack: ExitStack) -> None:
        found = run.members(words)
        assert found, f"no process has {words}:\n{run.output}"
        for process in found if all_of_them else found[:1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    return do


def steal_port(run: Any, directory: Path, stack: ExitStack) -> None:
    """Kill the engine, and listen where it did."""
    (server,) = run.members(SERVER)[:1]
    (port,) = {link.laddr.port for link in server.net_connections("tcp") if link.status == psutil.CONN_LISTEN and link.laddr.port >= 20000}
    server.kill()
    thief = stack.enter_context(socket.socket())
    thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    deadline = time.monotonic() + 10
    while True:
        try:
            thief.bind(("127.0.0.1", port))
            break
        except OSError:
            assert time.monotonic() < deadline
    thief.listen()


def lock_buffer(run: Any, directory: Path, stack: ExitStack) -> None:
    """Write in the buffer for some seconds, as another program."""
    with contextlib.closing(sqlite3.connect(directory / "buffer.sqlite", timeout=30)) as other:
        other.execute("BEGIN IMMEDIATE")
        time.sleep(6)
        other.rollback()


def fill_disk(run: Any, directory: Path, stack: ExitStack) -> None:
    """Fill the file system of the run's directory, until the run has ended."""
    file = directory.parent / "filling"
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as filling:
        while True:
            filling.write(bytes(2**16))
    stack.callback(file.unlink)


def forbid_writes(run: Any, directory: Path, stack: ExitStack) -> None:
    """Let nothing be made in the checkpoints' directory, until the run has ended: not even by root."""
    mount = directory / "checkpoints"
    subprocess.run(["mount", "--bind", mount, mount], check=True)
    stack.callback(subprocess.run, ["umount", "-l", mount], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", mount], check=True)


def nothing(run: Any, directory: Path, stack: ExitStack) -> None:
    """The fault is in the run's words."""


def network(kind: str) -> tuple[str, ...]:
    return ("rollout.function=tests.e2e.bad_network:rollout", f"rollout.args.kind={kind}")


FAULTS: dict[str, Fault] = {
    "rank killed": Fault(hit(signal.SIGKILL, RANK), RANKS_BACK),
    "rank stopped": Fault(hit(signal.SIGSTOP, RANK), rf"Megatron rank \d does not answer.*{RANKS_BACK}", words=("model.deadline_s=120",)),
    "engine killed": Fault(hit(signal.SIGKILL, SERVER), ENGINE_BACK, not_in=("colocated",)),
    "engine stopped": Fault(hit(signal.SIGSTOP, SCHEDULER), f"made no step.*{ENGINE_BACK}", not_in=("colocated",)),
    "server stopped": Fault(hit(signal.SIGSTOP, SERVER), f"did not answer.*{ENGINE_BACK}", not_in=("colocated",)),
    "engine's actor killed": Fault(hit(signal.SIGKILL, "ray::EngineWorker"), ENGINE_BACK, not_in=("colocated",)),
    "port stolen": Fault(steal_port, ENGINE_BACK, not_in=("colocated",)),
    "reward workers killed": Fault(hit(signal.SIGKILL, "multiprocessing.spawn", all_of_them=True), "", not_in=("turns",)),
    "buffer locked": Fault(lock_buffer, ""),
    "network slow": Fault(nothing, "", words=network("slow"), not_in=("turns",)),
    "network cut": Fault(nothing, "", words=network("cut"), not_in=("turns",)),
    "network garbled": Fault(nothing, ENGINE_BACK, words=network("garbled"), not_in=("turns", "colocated")),
    "disk full": Fault(fill_disk, "megatron-rl: .*No space left on device", status=2),
    "read-only": Fault(forbid_writes, "megatron-rl: .*Read-only file system", status=2),
    "driver killed": Fault(lambda run, *_: run.process.kill(), "", status=-signal.SIGKILL),
    "raylet killed": Fault(
        hit(signal.SIGKILL, "/raylet/raylet "), "megatron-rl: a library has ended the main process with status 1", status=1
    ),
    "Ray's control service killed": Fault(hit(signal.SIGKILL, "gcs/gcs_server"), "Ray's control service at .* is gone;", status=75),
}
SOAKED = ("rank killed", "engine killed", "engine's actor killed", "port stolen", "reward workers killed", "buffer locked")
IN_GATE = {("engine killed", "sync")}


def cases() -> Iterator[Any]:
    """Two modes for each fault, so that every mode has its turn."""
    turn = itertools.cycle(MODES)
    for name, fault in FAULTS.items():
        modes = [mode for mode in itertools.islice(turn, 5 + 2) if mode not in fault.not_in][:2]
        if any(gate == name for gate, _ in IN_GATE):
            modes = ["sync", *(mode for mode in modes if mode != "sync")][:2]
        for mode in modes:
            marks = () if (name, mode) in IN_GATE else (pytest.mark.slow,)
            yield pytest.param(name, mode, id=f"{name}, {mode}", marks=marks)


def arguments(task: Path, chat_task: Path, directory: Path, *, mode: str, words: tuple[str, ...]) -> list[str]:
    if mode == "turns":
        return chat_arguments(chat_task, directory, "rollout.args={seconds: 0.3}", f"run.num_steps={NUM_STEPS}", *words)
    return rl_arguments(task, directory, *SMALL, *SLOW_REWARD, *MODES[mode], *words)


def assert_nothing_lost_or_twice(directory: Path, *, mode: str, num_steps: int = NUM_STEPS) -> None:
    """A full batch for each step, all prompts in turn, each once, no token too old, and the current version in each step's row."""
    rows, per_step, samples = metrics(directory), *((4, 2) if mode == "turns" else (16, 4))
    assert list(rows) == list(range(num_steps + 1)), "no step twice, none missing"
    assert [rows[step]["weights/version"] for step in rows] == list(range(num_steps + 1))
    with contextlib.closing(sqlite3.connect(f"file:{directory}/buffer.sqlite?mode=ro", uri=True)) as buffer:
        groups = buffer.execute("SELECT consumed_step, id, position FROM groups WHERE consumed_step IS NOT NULL").fetchall()
        trajectories = dict(buffer.execute("SELECT group_id, count(DISTINCT sample_index) FROM samples GROUP BY 1"))
        ages = buffer.execute(
            "SELECT consumed_step, min(min_version), max(max_version) FROM groups JOIN samples ON id = group_id GROUP BY 1"
        )
        versions = {step: (oldest, newest) for step, oldest, newest in ages}
    assert [sum(step == each for each, *_ in groups) for step in range(1, num_steps + 1)] == [per_step] * num_steps
    assert sorted(place for *_, place in groups) == list(range(1, per_step * num_steps + 1))
    assert all(trajectories[name] >= samples for _, name, _ in groups)
    assert all(rows[step]["train/log_prob_diff"] <= 1e-4 for step in range(1, num_steps + 1) if mode in ("sync", "colocated"))
    for step, (oldest, newest) in versions.items():
        assert newest == step - 1 or mode in ("async", "partial")
        assert 0 <= oldest <= newest <= step - 1 and (oldest >= step - 2 or mode == "partial")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", place], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("file systems can be mounted by root alone")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def run_through(name: str, mode: str, *, command: list[str], directory: Path, start: Callable[..., Any]) -> None:
    """Start the run, let the fault come after its first step, and see the run to its end."""
    fault = FAULTS[name]
    with ExitStack() as stack:
        run = start(*command)
        run.wait_for(f"\n1/{NUM_STEPS} ")
        fault.do(run, directory, stack)
        assert run.wait(WAIT_S) == fault.status, run.output
    said = " ".join(run.output.split())
    assert re.search(fault.says, said), run.output
    assert "Traceback" not in run.output and "(raylet)" not in run.output.replace("] (raylet) ", ""), run.output
    assert run.survivors(timeout_s=30) == []
    if fault.status:
        again = start(*command, "--resume")
        assert again.wait(WAIT_S) == 0, again.output
        assert again.survivors() == []
    assert_nothing_lost_or_twice(directory, mode=mode)
    if fault.says.endswith(ENGINE_BACK):
        assert sum(row.get("engine/restarts", 0) for row in metrics(directory).values()) == len(re.findall(ENGINE_BACK, said))


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("name", "mode"), cases())
def test_a_fault_loses_nothing(
    task: Path, chat_task: Path, tmp_path: Path, start: Callable[..., Any], request: pytest.FixtureRequest, name: str, mode: str
) -> None:
    place = request.getfixturevalue("disk") if name in ("disk full", "read-only") else tmp_path
    command = arguments(task, chat_task, place / "run", mode=mode, words=FAULTS[name].words)
    run_through(name, mode, command=command, directory=place / "run", start=start)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_soak_leaves_the_curve_of_a_run_without_faults(
    task: Path, tmp_path: Path, start: Callable[..., Any], request: pytest.FixtureRequest
) -> None:
    """Deterministic engines: every reward and loss of every step is that of the run that nothing disturbs."""
    num_steps, every = request.config.getoption("--soak", 60), 15
    words = (*SMALL, f"run.num_steps={num_steps}", "rollout.sglang.enable_deterministic_inference=true", "run.keep_checkpoints=2")
    words += ("runtime.restarts=1000", "rollout.engine_restarts=1000", *SLOW_REWARD)
    whole = start(*rl_arguments(task, tmp_path / "whole", *words))
    assert whole.wait(3600) == 0, whole.output
    rng, done = random.Random(0), list[str]()
    run = start(*rl_arguments(task, tmp_path / "run", *words))
    for step in range(every, num_steps, every):
        run.wait_for(f"\n{step}/{num_steps} ")
        name = rng.choice(
            ["rank killed", "engine killed", "engine's actor killed", "port stolen", "reward workers killed", "buffer locked"]
        )
        time.sleep(rng.uniform(0, 2))
        with ExitStack() as stack:
            FAULTS[name].do(run, tmp_path / "run", stack)
        done.append(name)
    assert run.wait(3600) == 0, run.output
    assert run.survivors() == []
    assert_nothing_lost_or_twice(tmp_path / "run", mode="sync", num_steps=num_steps)
    got, wanted = metrics(tmp_path / "run"), metrics(tmp_path / "whole")
    names = ("rollout/reward", "train/loss", "train/grad_norm", "train/entropy")
    assert {step: [got[step][each] for each in names] for step in got if step} == {
        step: [wanted[step][each] for each in names] for step in wanted if step
    }
    took = [sum(row.get("time/rollout", 0) + row.get("time/train", 0) for row in rows.values()) for rows in (got, wanted)]
    print(f"{num_steps} steps with {len(done)} faults ({', '.join(done)}): the same curve; {run.output.count('are back after')} ranks' and "
          f"{run.output.count('is back after')} engines' returns; steps took {took[0]:.0f} s, without faults {took[1]:.0f} s")  # fmt: skip
