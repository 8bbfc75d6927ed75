"""Faults in the modes of a run, on the real server: each fault in two modes, and what it must leave: all samples, versions, no process.

A fault comes in the middle of a rollout or of what follows. The run goes on by itself, or ends with one sentence where nothing could go on,
and the same command with `--resume` does the rest.
"""

import contextlib
import random
import re
import resource
import shutil
import signal
import socket
import sqlite3
import struct
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from small_run import beyond_loopback, chat_arguments, listeners, metrics, rl_arguments

from megatron_rl.engines.engine import FIRST_PORT, LAST_PORT
from megatron_rl.report.status import report_status

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
    "nodes": (),  # virtual ones: of the driver, of the ranks, of the engine, and one to spare
}
SERVER, SCHEDULER, RANK = "megatron_rl.engines.sglang_server", "sglang::scheduler", "ray::TrainerWorker"
ENGINE_BACK, RANKS_BACK = r"engine 0 is back after \d+ s", r"the ranks are back after \d+ s"
CLUSTERS_OWN = (
    "/raylet/raylet ",
    "gcs_server",
    "ray::IDLE",
    "ray::DashboardAgent",
    "ray::RuntimeEnvAgent",
    "/ray/_private/",
    "/ray/dashboard/",
    "/ray/autoscaler/",
)
ENGINE_PORTS = range(FIRST_PORT, LAST_PORT)


@dataclass(frozen=True)
class Fault:
    """What is done to a run, what the run says of it, and with which status it ends where it cannot go on by itself."""

    do: Callable[[Any, Path, ExitStack], None]
    says: str
    modes: tuple[str, ...]
    """Those that are tried. Engines on shared devices are not started again, and some faults are in a rollout of their own."""
    status: int = 0
    words: tuple[str, ...] = ()


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
    (port,) = {
        link.laddr.port for link in server.net_connections("tcp") if link.status == psutil.CONN_LISTEN and link.laddr.port in ENGINE_PORTS
    }
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


def kill_tools(run: Any, directory: Path, stack: ExitStack) -> None:
    """Kill the processes of all environments; the one that forks them lives."""
    opened: list[psutil.Process] = []

    def are_open() -> bool:
        found = run.members("multiprocessing.spawn")
        opened[:] = [process for process in found if process.ppid() in {each.pid for each in found}]
        return bool(opened)

    run.wait_until(are_open, what="environments")
    for process in opened:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def lose_node(words: str) -> Callable[..., None]:
    """Kill everything on the virtual node that has the process with these words: the machine has lost power."""

    def do(run: Any, directory: Path, stack: ExitStack) -> None:
        (raylet,) = {each for each in run.members(words)[0].parents() if "/raylet/raylet " in " ".join(each.cmdline())}
        for process in (raylet, *raylet.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    return do


def limit_memory(words: str) -> Callable[..., None]:
    """Let the processes with these words get no more memory."""

    def do(run: Any, directory: Path, stack: ExitStack) -> None:
        for process in run.members(words):
            for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA):  # the second for what malloc has reserved
                process.rlimit(limit, (2**20, 2**20))

    return do


def jump(run: Any, directory: Path, stack: ExitStack) -> None:
    """Set the wall clock of the run's processes three hours forward, then five back."""
    for words in (RANK, SCHEDULER):
        assert "wall_clock.so" in Path(f"/proc/{run.members(words)[0].pid}/maps").read_text()
    for step, hours in ((2, 3), (3, -2)):
        set_clock(directory.parent, hours=hours)
        run.wait_for(number_line(step, NUM_STEPS))
        assert report_status(directory).life in ("running", "late")
    # The times of the rows show that the jumps came.
    assert [round((metrics(directory)[step]["time"] - time.time()) / 3600) for step in (1, 2, 3)] == [0, 3, -2]


def set_clock(directory: Path, *, hours: int) -> None:
    """Set the clock that the fixture `clock` gives a run; in one write, at which processes may look at any time."""
    with (directory / "clock").open("r+b", buffering=0) as file:
        file.write(struct.pack("l", 3600 * hours))


def nothing(run: Any, directory: Path, stack: ExitStack) -> None:
    """The fault is in the run's words."""


def network(kind: str) -> tuple[str, ...]:
    return ("rollout.function=tests.e2e.bad_network:rollout", f"rollout.args.kind={kind}")


def in_sync(kind: str) -> tuple[str, ...]:
    return ("rollout.function=tests.e2e.broken_sync:rollout", f"rollout.args.kind={kind}")


KILL, STOP, NO_ROOM = signal.SIGKILL, signal.SIGSTOP, "(No space left on device|database or disk is full)"
HANGS = f"made no step.*{ENGINE_BACK}"
NO_FAULT = r"^(?!.*(made no step|did not answer|does not answer|died|back after|has taken \d{4}))"
FAULTS: dict[str, Fault] = {
    "rank killed": Fault(hit(KILL, RANK), RANKS_BACK, ("async", "nodes")),
    "rank killed in a sync": Fault(nothing, rf"because: Megatron rank \d died.*{RANKS_BACK}", ("sync", "async"), words=in_sync("rank")),
    "rank stopped": Fault(
        hit(STOP, RANK), rf"Megatron rank \d does not answer.*{RANKS_BACK}", ("partial", "colocated"), words=("model.deadline_s=120",)
    ),
    "engine killed": Fault(hit(KILL, SERVER), ENGINE_BACK, ("async", "sync", "turns")),
    "engine stopped": Fault(hit(STOP, SCHEDULER), HANGS, ("async", "partial")),
    "engine stopped before a sync": Fault(nothing, f"a weight sync it {HANGS}", ("async",), words=in_sync("engine")),
    "engine stopped in a sync": Fault(nothing, f"a weight sync it {HANGS}", ("sync",), words=in_sync("receiving")),
    "server stopped": Fault(hit(STOP, SERVER), f"did not answer.*{ENGINE_BACK}", ("turns", "sync")),
    "engine's actor killed": Fault(hit(KILL, "ray::EngineWorker"), ENGINE_BACK, ("sync", "nodes")),
    "engine out of memory": Fault(limit_memory(SCHEDULER), ENGINE_BACK, ("sync", "partial")),
    "port stolen": Fault(steal_port, ENGINE_BACK, ("partial", "turns")),
    "reward workers killed": Fault(hit(KILL, "multiprocessing.spawn", all_of_them=True), "", ("sync", "async")),
    "tools killed": Fault(kill_tools, "", ("turns",)),
    "clock jumps": Fault(jump, NO_FAULT, ("async", "partial"), words=("reward.args.seconds=8",)),
    "buffer locked": Fault(lock_buffer, "", ("async", "partial")),
    "network slow": Fault(nothing, "", ("colocated", "sync"), words=network("slow")),
    "network cut": Fault(nothing, "", ("sync", "async"), words=network("cut")),
    "network garbled": Fault(nothing, ENGINE_BACK, ("partial", "sync"), words=network("garbled")),
    "disk full": Fault(fill_disk, f"megatron-rl: .*{NO_ROOM}", ("turns", "sync"), status=2),
    "read-only": Fault(forbid_writes, "megatron-rl: .*Read-only file system", ("async", "partial"), status=2),
    "driver killed": Fault(lambda run, *_: run.process.kill(), "", ("colocated", "turns", "nodes"), status=-KILL),
    "raylet killed": Fault(
        hit(KILL, "/raylet/raylet "), "megatron-rl: a library has ended the main process with status 1", ("sync", "async"), status=1
    ),
    "Ray's control service killed": Fault(
        hit(KILL, "gcs/gcs_server"),
        "Ray's control service at .* is gone;",
        ("partial", "colocated"),
        status=75,
        words=("reward.args.seconds=6",),  # else the run ends before it is sure, after 10 s
    ),
    "node of the engine lost": Fault(lose_node("ray::EngineWorker"), ENGINE_BACK, ("nodes",)),
    "node of the ranks lost": Fault(lose_node(RANK), RANKS_BACK, ("nodes",)),
}
PLACES = {"disk full": "disk", "read-only": "disk", "clock jumps": "clock"}
SOAKED = ("rank killed", "engine killed", "engine's actor killed", "port stolen", "reward workers killed", "buffer locked")
GATE = ("reward workers killed", "buffer locked", "rank killed", "engine killed", "engine's actor killed")


def needs_its_own(name: str) -> bool:
    """True of a fault that needs other settings or another place of a run, ends it, or takes a node away."""
    return bool(FAULTS[name].words or FAULTS[name].status) or name in PLACES or name.startswith("node of")


def cases() -> list[Any]:
    """The faults that need a run of their own, in their modes."""
    pairs = [(name, mode) for name, fault in FAULTS.items() for mode in fault.modes if needs_its_own(name)]
    return [pytest.param(name, mode, id=f"{name}, {mode}") for name, mode in pairs]


def chains() -> list[Any]:
    """The other faults of each mode, and those of the gate."""
    by_mode = {mode: [name for name, fault in FAULTS.items() if mode in fault.modes and not needs_its_own(name)] for mode in MODES}
    slow = [pytest.param(mode, names, id=mode, marks=pytest.mark.slow) for mode, names in by_mode.items() if names]
    return [pytest.param("async", GATE, id="gate"), *slow]


def number_line(step: int, num_steps: int) -> str:
    """What the line of a step begins with."""
    return f"\n{step:>{len(str(num_steps))}}/{num_steps} "


def arguments(task: Path, chat_task: Path, directory: Path, *, mode: str, words: Sequence[str]) -> list[str]:
    if mode == "turns":
        return chat_arguments(chat_task, directory, "rollout.args={seconds: 0.3}", f"run.num_steps={NUM_STEPS}", *words)
    return rl_arguments(task, directory, *SMALL, *SLOW_REWARD, *MODES[mode], *words)


def assert_nothing_lost_or_twice(directory: Path, *, mode: str, num_steps: int = NUM_STEPS, per_step: int = 16) -> None:
    """A full batch for each step, all prompts in turn, each once, no token too old, and the current version in each step's row."""
    rows, (per_step, samples) = metrics(directory), (4, 2) if mode == "turns" else (per_step, 4)
    assert list(rows) == list(range(num_steps + 1)), "no step twice, none missing"
    assert [rows[step]["weights/version"] for step in rows] == list(range(num_steps + 1))
    assert all(0 <= value < 3600 for row in rows.values() for name, value in row.items() if name.startswith("time/"))
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
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wall clock of all processes of a run, Ray's own among them, for `set_clock`; the monotonic one is left alone, as by an operator."""
    if shutil.which("cc") is None:
        pytest.skip("a C compiler is missing, for wall_clock.c")
    library = tmp_path / "wall_clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, Path(__file__).with_name("wall_clock.c")], check=True)
    (tmp_path / "clock").write_bytes(bytes(8))
    monkeypatch.setenv("WALL_CLOCK", str(tmp_path / "clock"))
    monkeypatch.setenv("LD_PRELOAD", str(library))
    return tmp_path


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


def left(run: Any, **timeout: float) -> list[str]:
    """What a run has left behind of its own."""
    return [each for each in run.survivors(**timeout) if not (run.roots and any(words in each for words in CLUSTERS_OWN))]


@pytest.fixture
def begin(
    task: Path, chat_task: Path, tmp_path: Path, start: Callable[..., Any], cluster: Callable[..., str]
) -> Callable[..., Callable[..., Any]]:
    """`begin(mode, *words)` returns what starts a run in that mode, with further words at each call."""

    def prepare(mode: str, *words: str, place: Path = tmp_path) -> Callable[..., Any]:
        command, roots = arguments(task, chat_task, place / "run", mode=mode, words=words), list[int]()
        if mode == "nodes":
            # The first one, without slots, is the driver's, whose loss would be that of the driver.
            command += ["--ray-address", cluster("0,0", "2,0", "2,0", "2,0")]
            roots += [each.pid for each in psutil.Process().children() if "ray.cluster_utils" in " ".join(each.cmdline())]

        def run(*more: str) -> Any:
            begun = start(*command, *more)
            begun.roots = roots
            return begun

        return run

    return prepare


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("name", "mode"), cases())
def test_a_fault_loses_nothing(
    begin: Callable[..., Callable[..., Any]],
    tmp_path: Path,
    request: pytest.FixtureRequest,
    name: str,
    mode: str,
) -> None:
    """It comes after the first step of a run, which is seen to its end."""
    fault, place = FAULTS[name], request.getfixturevalue(PLACES.get(name, "tmp_path"))
    starting = begin(mode, *fault.words, place=place)
    with ExitStack() as stack:
        run = starting()
        run.wait_for(number_line(1, NUM_STEPS), timeout_s=WAIT_S)
        fault.do(run, place / "run", stack)
        assert run.wait(WAIT_S) == fault.status, run.output
    said = " ".join(run.output.split())
    assert re.search(fault.says, said), run.output
    assert_clean(run)
    if fault.status:
        again = starting("--resume")
        assert again.wait(WAIT_S) == 0, again.output
        assert left(again) == []
    assert_nothing_lost_or_twice(place / "run", mode=mode)
    if fault.says.endswith(ENGINE_BACK):
        assert_returns(run, place / "run", num_engines=1)


@pytest.mark.timeout(2400)
@pytest.mark.parametrize(("mode", "names"), chains())
def test_faults_one_after_the_other_lose_nothing(
    begin: Callable[..., Callable[..., Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, names: Sequence[str]
) -> None:
    """Each comes three steps after the one before, when what the run says of that one is said."""
    # The kernel is asked for a bucket of weights. Else an engine that gets no more memory has freed enough of it.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "16384")
    every = 3
    num_steps = every * len(names) + 1
    run, took_s = begin(mode, f"run.num_steps={num_steps}", "rollout.engine_restarts=100", "runtime.restarts=100")(), dict[str, float]()
    for number, name in enumerate(names):
        run.wait_for(number_line(every * number + 1, num_steps), timeout_s=WAIT_S)
        before, begun_s = len(run.output), time.monotonic()
        with ExitStack() as stack:
            FAULTS[name].do(run, tmp_path / "run", stack)
            says = lambda name=name, before=before: re.search(FAULTS[name].says, " ".join(run.output[before:].split()))  # noqa: E731
            run.wait_until(says, what=FAULTS[name].says, timeout_s=WAIT_S)
        run.wait_for(number_line(every * number + 2, num_steps), timeout_s=WAIT_S)
        took_s[name] = time.monotonic() - begun_s
    # A Ray that is not the run's own listens on all addresses.
    assert run.roots or beyond_loopback(listeners(run)) == {}
    assert run.wait(WAIT_S) == 0, run.output
    print(f"{mode}: {', '.join(f'{name} {seconds:.0f} s' for name, seconds in took_s.items())}")
    assert_clean(run)
    assert_nothing_lost_or_twice(tmp_path / "run", mode=mode, num_steps=num_steps)
    assert_returns(run, tmp_path / "run", num_engines=sum(FAULTS[name].says.endswith(ENGINE_BACK) for name in names))
    assert run.output.count("the ranks are back") == sum(FAULTS[name].says.endswith(RANKS_BACK) for name in names)


def assert_clean(run: Any) -> None:
    """No process is left, and nothing was said but sentences."""
    assert "Traceback" not in run.output and "(raylet)" not in run.output.replace("] (raylet) ", ""), run.output
    assert left(run, timeout_s=30) == []


def assert_returns(run: Any, directory: Path, *, num_engines: int) -> None:
    """As many engines were started again, and are told of."""
    counted = sum(row.get("engine/restarts", 0) for row in metrics(directory).values())
    assert counted == len(re.findall(ENGINE_BACK, " ".join(run.output.split()))) == num_engines, run.output


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_soak_leaves_the_curve_of_a_run_without_faults(
    task: Path, tmp_path: Path, start: Callable[..., Any], request: pytest.FixtureRequest
) -> None:
    """Deterministic engines: every reward and loss of every step is that of the run that nothing disturbs."""
    num_steps, every = request.config.getoption("--soak", 60), 15
    words = (*SMALL, f"run.num_steps={num_steps}", "rollout.sglang.enable_deterministic_inference=true", "run.keep_checkpoints=2")
    words += ("runtime.restarts=1000", "rollout.engine_restarts=1000", "data.prompts_per_step=4", SLOW_REWARD[0], "reward.args.seconds=0")
    # So slow that there is something to learn to the end.
    words += ("training.optimizer.lr=1e-5", "training.optimizer.min_lr=1e-5")
    # Side by side: one has work while the other waits for what comes back.
    whole, run = (start(*rl_arguments(task, tmp_path / name, *words)) for name in ("whole", "run"))
    rng, done = random.Random(0), list[str]()
    for step in range(every, num_steps, every):
        run.wait_for(number_line(step, num_steps), timeout_s=1200)
        name = rng.choice(SOAKED)
        time.sleep(rng.uniform(0, 2))
        with ExitStack() as stack:
            FAULTS[name].do(run, tmp_path / "run", stack)
        done.append(name)
    for each in (run, whole):
        assert each.wait(3600) == 0, each.output
        assert each.survivors() == []
    assert_nothing_lost_or_twice(tmp_path / "run", mode="sync", num_steps=num_steps, per_step=4)
    got, wanted = metrics(tmp_path / "run"), metrics(tmp_path / "whole")
    names = ("rollout/reward", "train/loss", "train/grad_norm", "train/entropy")
    assert {step: [got[step][each] for each in names] for step in got if step} == {
        step: [wanted[step][each] for each in names] for step in wanted if step
    }
    took = [sum(row.get("time/rollout", 0) + row.get("time/train", 0) for row in rows.values()) for rows in (got, wanted)]
    print(f"{num_steps} steps with {len(done)} faults ({', '.join(done)}): the same curve; {run.output.count('are back after')} ranks' and "
          f"{run.output.count('is back after')} engines' returns; steps took {took[0]:.0f} s, without faults {took[1]:.0f} s")  # fmt: skip
