"""Worker processes that end with everything that they have started: on their time limit, with the run, and when the run is killed."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.util import Finalize
from pathlib import Path

import psutil


class WorkerProcess(SpawnProcess):
    """A worker that leads a session of its own (`lead_session`), which is killed as a whole, with what has left it for another."""

    def terminate(self) -> None:
        """Kill the worker and its descendants."""
        if self.pid is not None:
            _kill_descendants(self.pid)
            _kill_session(self.pid)
        # It may have been too young to lead a session.
        self.kill()

    def is_alive(self) -> bool:
        """As for any process; what a worker that ended by itself has left in its session is killed.

        Its number is not given to another process while its session has members, and hardly within the tenth of a second otherwise.
        """
        alive = super().is_alive()
        if not alive and self.pid is not None:
            _kill_session(self.pid)
        return alive


class WorkerContext(SpawnContext):
    """Spawns, because a fork of the driver would inherit its threads and its memory."""

    Process = WorkerProcess


def start_tracker() -> None:
    """Start Python's tracker of semaphores, if it does not run yet, without its one warning.

    It outlives a driver that is killed, removes the semaphores of its workers, and calls that a leak in two lines on the terminal.
    """
    # The flags of this process, which it hands on.
    sys.warnoptions.append("ignore:resource_tracker:UserWarning")
    try:
        resource_tracker.ensure_running()
    finally:
        sys.warnoptions.pop()


def lead_session(log_path: Path | None) -> None:
    """In a worker: begin a session, which ends with the parent, and send what is printed to the file `log_path`, or to standard error."""
    os.setsid()
    # Both, for a worker that is idle ends by itself when the parent is gone, and one at work does not.
    Finalize(None, _end_session, exitpriority=10)
    threading.Thread(target=_follow_parent, daemon=True, name="follow-parent").start()
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    # The driver's standard output is for what the command was asked for.
    log = os.dup(sys.stderr.fileno()) if log_path is None else os.open(log_path, flags, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log, stream.fileno())
        # A worker that is killed has no chance to flush.
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.close(log)


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker is spawned by the driver"
    wait([parent.sentinel])
    _end_session()


def _end_session() -> None:
    _kill_descendants(os.getpid())
    _kill_session(os.getpid())


def _kill_session(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _kill_descendants(pid: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
