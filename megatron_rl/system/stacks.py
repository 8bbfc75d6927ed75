"""Python stacks of the processes of a run on this machine, also of those that hang.

py-spy reads a process from outside where it is installed and allowed. Otherwise the asking process
reads its own stacks, and another one that has called `answer_stack_requests` writes them from a signal
handler in C, also while it holds the interpreter's lock. Such a handler can crash a process whose
threads run meanwhile: that ended one driver in 300 steps with 19 faults.
"""

import faulthandler
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from megatron_rl.system.deadlines import STACK_S

STACKS_VARIABLE = "MEGATRON_RL_STACKS"
"""File to which processes of a run write their stacks; inherited by every process of this machine."""
STACKS_FILE = "stacks.txt"
STACKS_SIGNAL = signal.SIGRTMIN + 7
"""A signal that neither Ray nor torch, SGLang or Python handles; it would end a process without a handler."""
_POLL_S = 0.02


@contextmanager
def stacks_to(path: Path) -> Iterator[None]:
    """Let processes started in the block append their stacks to `path` when asked."""
    os.environ[STACKS_VARIABLE] = str(path.absolute())
    try:
        yield
    finally:
        del os.environ[STACKS_VARIABLE]


def answer_stack_requests() -> None:
    """Let STACKS_SIGNAL append the stacks of all threads to the file of STACKS_VARIABLE, where there is one."""
    path = os.environ.get(STACKS_VARIABLE)
    if path is None:
        return
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except OSError:
        # The directory of a run may be on another node's disk; py-spy may still read this process.
        return
    faulthandler.register(STACKS_SIGNAL, file=descriptor, all_threads=True)


def write_stacks(path: Path, *, title: str, others: Sequence[str] = ()) -> None:
    """Append `title`, the stacks of this process and all below, and `others` to `path`. Raises OSError."""
    process = psutil.Process()
    path.parent.mkdir(parents=True, exist_ok=True)
    _append(path, f"\n===== {time.strftime('%Y-%m-%d %H:%M:%S')} {title}\n")
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            _write_stack(path, each)
    for text in others:
        _append(path, f"\n{text}\n")


def _write_stack(path: Path, process: psutil.Process) -> None:
    """Append the stacks of a Python process; the state of one that does not give them."""
    if not Path(process.exe()).name.startswith("python"):
        return
    # Ray and SGLang pad the titles of their processes.
    command = " ".join(" ".join(process.cmdline()).split()) or process.name()
    state = f"{process.status()}, {sum(process.cpu_times()[:2]):.1f} s of CPU"
    _append(path, f"\n== process {process.pid}: {command[:100]} ({state})\n")
    if (found := _spied(process.pid)) is not None:
        _append(path, found)
    elif process.pid == os.getpid():
        _append(path, _own_stacks())
    elif not _answers(process.pid):
        _append(path, "no Python stack: it has no handler, and py-spy is not installed or not allowed here\n")
    else:
        size, until_s = path.stat().st_size, time.monotonic() + STACK_S
        process.send_signal(STACKS_SIGNAL)
        while path.stat().st_size == size and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        time.sleep(_POLL_S)
        if path.stat().st_size == size:
            _append(path, f"no Python stack within {STACK_S:.0f} s: it is stopped, or waits for a device\n")


def _spied(pid: int) -> str | None:
    """Return the stacks that py-spy reads, None where it cannot."""
    program = shutil.which("py-spy")
    if program is None:
        return None
    try:
        done = subprocess.run([program, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=STACK_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if not done.returncode else None


def _own_stacks() -> str:
    """Return the stacks of all threads of this process."""
    names, texts = {thread.ident: thread.name for thread in threading.enumerate()}, list[str]()
    for ident, frame in sys._current_frames().items():
        calls = "".join(reversed(traceback.format_stack(frame)))
        texts.append(f"Thread {names.get(ident, ident)} (most recent call first):\n{calls}\n")
    return "".join(texts)


def _answers(pid: int) -> bool:
    """Return True where the process has a handler for STACKS_SIGNAL (SigCgt of proc(5))."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (STACKS_SIGNAL - 1) & 1)


def _append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)
