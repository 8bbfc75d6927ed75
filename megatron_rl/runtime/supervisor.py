"""The processes above a command. When one of the three ends, all started processes are ended.

    process known to the user           passes requests to end on, returns the command's status
    └ the supervisor                    kills every process below when child or parent has ended
      └ the command                     and below Ray, ranks, engines, reward workers and children

The supervisor is a sub-reaper (prctl(2)): the kernel makes the supervisor the parent of every
orphan below. So no process escapes: neither a stopped process nor one that leads a session or hides
the command line. Only processes on other nodes escape.
"""

import atexit
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Collection
from contextlib import suppress
from typing import Any, NoReturn

import psutil

from megatron_rl.errors import UserError
from megatron_rl.runtime.grace import ENDING, PASSED_ON
from megatron_rl.system.deadlines import EXIT_S, REPORT_S
from megatron_rl.system.leftovers import adopt_orphans, die_with_parent

_PARENT_DIED = signal.SIGUSR1
_PATIENCE = 2
"""Ctrl-C so many times waits for the command; the next one kills it."""
_LAST = 19
"""Of the kernel's priorities."""
_ENDED = mmap.mmap(-1, 1)
"""Memory that the three processes share: not zero when Python has ended the command, not an exit of a library."""


def supervise() -> None:
    """Return in a new process below a supervisor. Call while this process has one thread.

    The present process exits with the new process's status when no descendant is left.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    heard = {number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*heard, signal.SIGCHLD})
    front = os.getpid()
    supervisor = os.fork()
    if supervisor:
        _stand_in_front(supervisor, heard)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    die_with_parent(_PARENT_DIED)
    adopt_orphans()
    command = os.fork()
    if command:
        # A signal to the command's process group, also SIGKILL, must not end the process that
        # cleans up.
        os.setsid()
        _guard(command, front=front, heard=heard)
    die_with_parent()
    atexit.register(_ENDED.__setitem__, 0, 1)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave(status: int) -> int:
    """Return `status`, with which the process ends within EXIT_S seconds, though a thread of the user's code goes on for ever."""

    def end() -> None:
        time.sleep(EXIT_S)
        for thread in threading.enumerate():
            frame = sys._current_frames().get(thread.ident or 0)
            if not thread.daemon and thread is not threading.main_thread() and frame is not None:
                call = traceback.extract_stack(frame)[-1]
                place = f"{call.name} ({call.filename}:{call.lineno})"
                print(f"megatron-rl: the thread {thread.name} has not ended and is cut off in {place}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        _ENDED[0] = 1
        os._exit(status)

    threading.Thread(target=end, name="end", daemon=True).start()
    return status


def run_command(*words: object) -> None:
    """Run another command of this program in a process of its own. Raises UserError with its sentence."""
    command = [sys.executable, "-m", "megatron_rl", *map(str, words)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=REPORT_S)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"it did not end within {REPORT_S:g} s and was killed; try `megatron-rl {words[0]}` by hand") from error
    if done.returncode:
        raise UserError((done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1].removeprefix("megatron-rl: "))


def begin_command(*words: object) -> subprocess.Popen[bytes]:
    """Start another command of this program in a process of its own, behind all others, without output."""
    quiet: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    process = subprocess.Popen([sys.executable, "-m", "megatron_rl", *map(str, words)], **quiet)
    with suppress(OSError):  # it has ended
        os.setpriority(os.PRIO_PROCESS, process.pid, _LAST)
    return process


def _stand_in_front(supervisor: int, heard: Collection[int]) -> NoReturn:
    """Pass the signals in `heard` on to the supervisor until the supervisor ends; exit with its status."""
    while True:
        number = signal.sigwait({*heard, signal.SIGCHLD})
        if number != signal.SIGCHLD:
            os.kill(supervisor, number)
            continue
        ended, status = os.waitpid(supervisor, os.WNOHANG)
        if ended:
            os._exit(_exit_status(status))


def _guard(command: int, *, front: int, heard: Collection[int]) -> NoReturn:
    """Pass on signals of `front` until `front` or the command ends; then kill all below, exit."""
    code, sentence = 1, ""
    try:
        status, interrupts = _until_one_ends(command, front=front, heard=heard)
        code = 0 if status is None else _exit_status(status)
        if interrupts > _PATIENCE:
            code, sentence = 128 + signal.SIGINT, "interrupted"
        elif status is not None and os.WIFSIGNALED(status):
            sentence = f"the main process was killed by {signal.Signals(os.WTERMSIG(status)).name}; every other one has been stopped"
        elif status is not None and not _ENDED[0]:
            sentence = f"a library has ended the main process with status {code}, as Ray does without its raylet; --resume goes on"
    finally:
        _kill_all()
        if sentence:
            # The reader may be gone.
            with suppress(OSError):
                print(f"megatron-rl: {sentence}", file=sys.stderr, flush=True)
        os._exit(code)


def _until_one_ends(command: int, *, front: int, heard: Collection[int]) -> tuple[int | None, int]:
    """Return the status of the command, None where `front` ended first, and the SIGINT count."""
    status, interrupts = None, 0
    while status is None and os.getppid() == front:
        found = signal.sigwaitinfo({*heard, signal.SIGCHLD, _PARENT_DIED})
        if found.si_signo == signal.SIGCHLD:
            status = _reap(command)
        elif found.si_signo in heard and found.si_pid == front:
            interrupts += found.si_signo == signal.SIGINT
            os.kill(command, PASSED_ON[signal.Signals(found.si_signo)] if interrupts <= _PATIENCE else signal.SIGKILL)
    return status, interrupts


def _reap(command: int) -> int | None:
    """Reap ended children; return the status of the command when the command is among them."""
    status = None
    while True:
        try:
            ended, found = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if not ended:
            return status
        if ended == command:
            status = found


def _kill_all() -> None:
    """Kill and reap every process below this one. Orphans of killed processes become children here."""
    while True:
        for child in psutil.Process().children():
            child.kill()
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _exit_status(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code
