"""Worker processes that end with all descendants: on a time limit, with the run, after a kill."""

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

from megatron_rl.system.leftovers import adopt_orphans
from megatron_rl.system.stacks import answer_stack_requests


class WorkerProcess(SpawnProcess):
    """A worker that leads a session, killed as a whole, with processes that left the session."""

    def terminate(self) -> None:
        """Kill the worker and all descendants."""
        if self.pid is not None:
            _kill_descendants(self.pid)
            kill_session(self.pid)
        # The worker may have been too young to lead a session.
        self.kill()

    def is_alive(self) -> bool:
        """Return as for any process; kill the rest of a session whose worker ended by itself."""
        alive = super().is_alive()
        # The kernel does not reuse the number while the session has members, and hardly within the
        # tenth of a second otherwise.
        if not alive and self.pid is not None:
            kill_session(self.pid)
        return alive


class WorkerContext(SpawnContext):
    """Spawns, because a fork of the driver would inherit the driver's threads and memory."""

    Process = WorkerProcess


def worker_states() -> list[tuple[int, str]]:
    """Return this process's workers by number, each with psutil's name of the state."""
    found = []
    for worker in multiprocessing.active_children():
        if isinstance(worker, WorkerProcess) and worker.pid is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append((worker.pid, psutil.Process(worker.pid).status()))
    return found


def start_tracker() -> None:
    """Start Python's tracker of semaphores, if not running yet, without the tracker's one warning.

    The tracker outlives a killed driver, and reports removed semaphores as a leak on the terminal.
    """
    # The flags of this process, inherited by the tracker.
    sys.warnoptions.append("ignore:resource_tracker:UserWarning")
    try:
        resource_tracker.ensure_running()
    finally:
        sys.warnoptions.pop()


def lead_session(log_path: Path | None) -> None:
    """Begin a session in a worker, to end with the parent; print to `log_path` or standard error."""
    os.setsid()
    # A worker ends before trainer and engines where the machine's memory does; some containers forbid it.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    # A holder of it commands the run's Ray.
    os.environ.pop("RAY_AUTH_TOKEN", None)
    # A daemon made by the reward function becomes a child of this worker, not of init, and ends
    # with the worker.
    adopt_orphans()
    answer_stack_requests()
    # The driver finishes the step first when a signal is sent to every process of a job. Processes
    # started by a worker have no such handler.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    # Both, because an idle worker ends by itself when the parent is gone, and a busy one does not.
    Finalize(None, _end_session, exitpriority=10)
    threading.Thread(target=_follow_parent, daemon=True, name="follow-parent").start()
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    # The driver's standard output is for what the command was asked for.
    log = os.dup(sys.stderr.fileno()) if log_path is None else os.open(log_path, flags, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log, stream.fileno())
        # A killed worker has no chance to flush.
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.close(log)


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker is spawned by the driver"
    wait([parent.sentinel])
    _end_session()


def _end_session() -> None:
    _kill_descendants(os.getpid())
    kill_session(os.getpid())


def kill_session(leader: int) -> None:
    """Kill the processes of the session led by `leader`."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _kill_descendants(pid: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
