"""Real processes: a command below its supervisor, with an orphan in a session of its own and a child that is stopped."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from megatron_rl.errors import UserError
from megatron_rl.runtime import supervisor
from megatron_rl.runtime.supervisor import begin_command, run_command

START = """
import os, signal, subprocess, sys, time
from megatron_rl.runtime.grace import Grace, finishing_first
from megatron_rl.runtime.supervisor import supervise

def nap():
    return subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid

def orphan():
    read, write = os.pipe()
    if not os.fork():
        os.setsid()
        if not os.fork():
            os.write(write, b"%d" % nap())
        os._exit(0)
    os.wait()
    return int(os.read(read, 20))

with Grace():
    supervise()
    stopped = nap()
    os.kill(stopped, signal.SIGSTOP)
    print(os.getppid(), os.getpid(), stopped, orphan(), flush=True)
"""
WAIT = """
    try:
        time.sleep(600)
    except SystemExit as error:
        time.sleep(0.5)
        print("asked", error.code, flush=True)
    sys.exit(75)
"""
DEFER = """
    while True:
        try:
            with finishing_first():
                time.sleep(600)
        except SystemExit:
            continue
"""


HANGS = """
import sys, threading
from megatron_rl import cli
from megatron_rl.runtime import supervisor

supervisor.EXIT_S = 0.5
cli._command = lambda words: threading.Thread(target=threading.Event().wait, name="of a plug-in").start() or 3
sys.exit(cli.main())
"""


def test_a_thread_that_never_ends_does_not_keep_the_process() -> None:
    ended = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 3
    (said,) = ended.stderr.splitlines()
    assert said.startswith("megatron-rl: the thread of a plug-in has not ended and is cut off in wait (")


class Command:
    """A command under its supervisor: `front` is the process that was started."""

    def __init__(self, program: str, output: Path) -> None:
        self.output = output
        with output.open("wb") as file:
            self.front = subprocess.Popen(
                [sys.executable, "-c", START + program], stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        while "\n" not in output.read_text():
            assert self.front.poll() is None, output.read_text()
            time.sleep(0.01)
        self.supervisor, self.command, *self.others = (psutil.Process(int(pid)) for pid in output.read_text().split()[:4])

    @property
    def below(self) -> list[psutil.Process]:
        return [self.supervisor, self.command, *self.others]

    def check_ended(self, status: int) -> str:
        """Check that nothing is left; return the last line."""
        assert self.front.wait(timeout=20) == status
        assert psutil.wait_procs(self.below, timeout=20)[1] == []
        return self.output.read_text().splitlines()[-1]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Command]]:
    started: list[Command] = []

    def make(program: str) -> Command:
        started.append(Command(program, tmp_path / f"{len(started)}.txt"))
        return started[-1]

    yield make
    for command in started:
        command.front.kill()
        command.front.wait()
        for process in command.below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.mark.parametrize("end", ["front", "command", "group"])
def test_nothing_outlives_a_command_that_is_killed(start: Callable[[str], Command], end: str) -> None:
    command = start(WAIT)
    assert len(command.others) == 2
    if end == "group":
        os.killpg(command.front.pid, signal.SIGKILL)
    else:
        (command.front if end == "front" else command.command).kill()
    last = command.check_ended(128 + signal.SIGKILL if end == "command" else -signal.SIGKILL)
    assert end != "command" or "killed by SIGKILL" in last


@pytest.mark.parametrize("to", ["front", "command", "group", "all"])
def test_who_is_asked_to_end_does_not_matter(start: Callable[[str], Command], to: str) -> None:
    command = start(WAIT)
    if to == "group":
        os.killpg(command.front.pid, signal.SIGTERM)
    for process in {"front": [command.front], "command": [command.command], "all": [command.front, *command.below]}.get(to, []):
        process.send_signal(signal.SIGTERM)
    assert command.check_ended(75) == f"asked {128 + signal.SIGTERM}"
    assert command.output.read_text().count("asked") == 1


def test_nothing_outlives_a_command_that_ends(start: Callable[[str], Command]) -> None:
    command = start("    sys.exit(7)")
    command.check_ended(7)


def test_ctrl_c_without_end_ends_also_what_defers_it(start: Callable[[str], Command]) -> None:
    command = start(DEFER)
    for _ in range(12):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(command.front.pid, signal.SIGINT)
        time.sleep(0.1)
    assert command.check_ended(128 + signal.SIGINT) == "megatron-rl: interrupted"
    assert "Traceback" not in command.output.read_text()


def test_a_command_of_its_own_says_why_it_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"^\S+/metrics\.jsonl does not exist, so there is nothing to report"):
        run_command("report", tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 0.5}\n')
    run_command("report", tmp_path)
    assert (tmp_path / "report.html").exists()
    monkeypatch.setattr(supervisor, "REPORT_S", 0.05)
    with pytest.raises(UserError, match=r"it did not end within 0\.05 s and was killed"):
        run_command("report", tmp_path)
    with begin_command("report", tmp_path) as behind:
        assert os.getpriority(os.PRIO_PROCESS, behind.pid) == 19
        behind.kill()


def test_an_exit_of_a_library_is_told(tmp_path: Path) -> None:
    for program, said in (("    time.sleep(1)\n    os._exit(1)\n", True), ("    time.sleep(1)\n    sys.exit(1)\n", False)):
        command = Command(program, tmp_path / f"{said}.txt")
        assert ("a library has ended the main process with status 1" in command.check_ended(1)) == said
