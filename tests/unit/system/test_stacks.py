"""Stacks of processes that hang, written by a signal handler in C."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_rl.system import stacks
from megatron_rl.system.stacks import STACKS_VARIABLE, stacks_to, write_stacks

HANGING = """
import sys, time
from megatron_rl.system.stacks import answer_stack_requests
answers = sys.argv[1] == "answers"
if answers:
    answer_stack_requests()
def hanging_here():
    print("ready", flush=True)
    time.sleep(600)
hanging_here()
"""


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """The file of stacks."""
    path = tmp_path / "logs" / "stacks.txt"
    with stacks_to(path):
        yield path
    assert STACKS_VARIABLE not in os.environ


@pytest.fixture(params=["answers", "does not"])
def child(request: pytest.FixtureRequest, path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A Python process that hangs, with a handler or without one."""
    command = [sys.executable, "-c", HANGING, request.param]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def test_stacks_of_this_process_and_its_children(child: "subprocess.Popen[str]", path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "_spied", lambda pid: None)
    write_stacks(path, title="training of step 3 has taken 40 s", others=["rank 7\nfar away"])
    text = path.read_text()
    assert "training of step 3 has taken 40 s" in text and text.endswith("\nrank 7\nfar away\n")
    own, _, rest = text.partition(f"process {os.getpid()}")[2].partition("== process")
    assert "Thread MainThread (most recent call first)" in own and "in test_stacks_of_this_process" in own and rest
    assert own.index("in write_stacks") < own.index("in test_stacks_of_this_process")
    assert not stacks._answers(os.getpid()), "its threads run, so that a handler in C could crash it"
    part = text.partition(f"process {child.pid}")[2]
    assert "sleeping" in part and "s of CPU" in part
    # A process without a handler gets no signal, which would end it.
    expected = "hanging_here" if child.args[-1] == "answers" else "no Python stack: it has no handler"  # type: ignore[index]
    assert expected in part and child.poll() is None


def test_a_stopped_process_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "_spied", lambda pid: None)
    monkeypatch.setattr(stacks, "STACK_S", 0.2)
    with subprocess.Popen([sys.executable, "-c", HANGING, "answers"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        write_stacks(path, title="late")
        process.kill()
    part = path.read_text().partition(f"process {process.pid}")[2]
    assert "no Python stack within 0 s: it is stopped" in part and "(stopped," in part


def test_py_spy_is_asked_first(tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "py-spy"
    program.write_text('#!/bin/sh\necho "spied $1 $2 $3"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    write_stacks(path, title="late")
    assert f"spied dump --pid {os.getpid()}" in path.read_text() and "Current thread" not in path.read_text()


def test_py_spy_that_is_not_allowed_is_passed_over(tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "py-spy"
    program.write_text("#!/bin/sh\necho Permission denied\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    write_stacks(path, title="late")
    assert "most recent call first" in path.read_text() and "Permission" not in path.read_text()
