"""Ray sessions: a local session, started and ended with all processes, or an existing cluster."""

import functools
import os
import secrets
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from megatron_rl.config.settings import RuntimeSettings
from megatron_rl.errors import DeadlineError, UserError, WorkerDiedError, counted
from megatron_rl.runtime.grace import ENDING
from megatron_rl.system.deadlines import RAY_ANSWER_S, RAY_JOIN_S, RAY_LEAVE_S, RAY_SILENT_S, RAY_START_S, RAY_STOP_S
from megatron_rl.system.leftovers import scratch_directory, shared_memory_of

OBJECT_STORE_BYTES = 256 * 1024 * 1024
POLL_S = 0.1
CONTROL_POLL_S = 2.0
LONGEST_SOCKET = "/session_2026-12-31_23-59-59_999999_4194304/sockets/plasma_store.1"
"""Of Ray, below the directory that it is given. The whole path of a socket may have 107 characters (unix(7))."""


def prepare_environment(settings: RuntimeSettings) -> None:
    """Set the variables that Ray reads at import: no usage reports, a local Ray on loopback only."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Ray's notes about GPU variables and token authentication would be the first lines a new user reads.
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    # Ray gives workers the lowest priority by default: on a shared machine a train step then takes
    # ten times as long.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
    # New memory of torch on the CPU in pages of 2 MB: writing a bucket of weights takes 1.4 memcpys instead of 5.8.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if settings.ray_address is None:
        # Makes Ray use 127.0.0.1 instead of looking up the machine's own address.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        # Ray's own deadlines, 30 to 60 s, for processes to find each other. `_waiting_for_the_node`
        # waits for the node: a longer raylet_start_wait_time_s would let one question take all of
        # the time, even after the node has ended. The last one is the time for a checkpoint in
        # progress: Ray ends driver and ranks when its control service is gone for so long.
        for name in (
            "gcs_server_port_wait_time_s",
            "worker_register_timeout_seconds",
            "gcs_rpc_server_reconnect_timeout_s",
        ):
            os.environ[f"RAY_{name}"] = f"{RAY_START_S:.0f}"


@contextmanager
def ray_cluster(*, address: str | None, num_processes: int, logs: Path) -> "Iterator[Future[None]]":
    """Open a Ray session: a local one, or the running cluster at `address`.

    All processes of a local session end with the block. A local session without a GPU has room for
    `num_processes`, however many CPUs the machine has. The session directory is private and removed
    at the end; the logs are moved to `logs` when the block fails. The future fails when Ray's
    control service is gone.

    Raises:
        UserError: nothing answers at `address`.
        DeadlineError: Ray did not come up, or there is no Ray at `address`.
        WorkerDiedError: a process of a local Ray ended during the start.
    """
    with ExitStack() as stack:
        before = set(psutil.Process().children())
        if address is None:
            scratch = stack.enter_context(scratch_directory(max_length=107 - len(LONGEST_SOCKET)))
            stack.enter_context(_kept_logs(scratch.path, logs))
            session = _Session(partial(_start_local, num_processes, scratch.path, before), timeout_s=None)
        else:
            check_answers(address)
            session = _Session(partial(_join, address), timeout_s=RAY_JOIN_S)
        try:
            with _own_signals():
                session.open()
            if address is None:
                scratch.note(shared_memory_of([os.getpid()]))
            yield session.lost
        finally:
            session.close(_started(before))


def check_answers(address: str) -> None:
    """Raise UserError when nothing listens at the `address` of a Ray cluster."""
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=RAY_ANSWER_S).close()
    except (OSError, UnicodeError) as error:
        reason = error.strerror or error if isinstance(error, OSError) else error
        raise UserError(
            f"runtime.ray_address is {address}, but nothing answers there ({reason}); start Ray on that node "
            f"(`ray start --head`), or give the address that it printed"
        ) from error


class _Session(threading.Thread):
    """Ray in a separate thread, from start to end.

    Ray's processes inherit the signals blocked by this thread. So a signal to all processes of a
    job ends no Ray process before the driver has made a checkpoint. Ray's processes also end with
    this thread, because the kernel sees the thread as their parent.
    """

    def __init__(self, begin: Callable[[], None], *, timeout_s: float | None) -> None:
        super().__init__(name="ray", daemon=True)
        self._begin, self._timeout_s = begin, timeout_s
        self._begun: Future[str] = Future()
        self._closing = threading.Event()
        self.lost: Future[None] = Future()

    def open(self) -> None:
        """Start Ray; raise the errors of the start, and DeadlineError when the start takes too long."""
        self.start()
        # Not by the result, whose own error may be one of a deadline.
        if not wait([self._begun], timeout=self._timeout_s).done:
            raise DeadlineError(
                f"joining Ray did not finish within {RAY_JOIN_S:.0f} s; look whether a Ray of this version runs at runtime.ray_address"
            )
        self._begun.result()

    def close(self, processes: list[psutil.Process]) -> None:
        """Let Ray end the `processes` of the session, and kill the processes still left."""
        self._closing.set()
        if not (processes or self._begun.done()):
            # A cluster that has not answered knows nothing of this process.
            return
        # Ray's processes do not receive the signal that Ray would end them with.
        self.join(timeout=RAY_LEAVE_S if processes else RAY_STOP_S)
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=RAY_STOP_S)
        self.join(timeout=RAY_STOP_S)

    def run(self) -> None:
        """Start Ray, watch its control service, and leave Ray at the end."""
        import ray
        from ray._private import worker

        # A paragraph of Ray's on each dead process would stand before the run's own sentence (2.9 to 2.60 at least).
        worker.listen_error_messages = lambda *_: None
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        try:
            self._begin()
            address = ray.get_runtime_context().gcs_address
        except BaseException as error:  # raised again by who waits
            self._begun.set_exception(error)
            return
        self._begun.set_result(address)
        silent_since = time.monotonic()
        while not self._closing.wait(CONTROL_POLL_S):
            try:
                check_answers(address)
                silent_since = time.monotonic()
            except UserError:
                if time.monotonic() - silent_since > RAY_SILENT_S and not self.lost.done():
                    self.lost.set_exception(WorkerDiedError(f"Ray's control service at {address} is gone"))
        ray.shutdown()


@contextmanager
def _kept_logs(directory: Path, logs: Path) -> Iterator[None]:
    """When the body fails, copy the logs of the Ray session in `directory` to `logs`, in place of earlier ones."""
    try:
        yield
    except Exception:
        with suppress(OSError):
            shutil.rmtree(logs, ignore_errors=True)
            shutil.copytree(directory / "session_latest" / "logs", logs)
        raise


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep this process's signal handlers: Ray's core replaces them, prints C++ stacks and aborts."""
    handlers = {number: signal.getsignal(number) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            # None is a handler that was not set by Python code.
            if handler is not None:
                signal.signal(number, handler)


def _join(address: str) -> None:
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except ConnectionError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"runtime.ray_address is {address}, but no Ray is there ({reason}); give HOST:PORT of a running one") from error


def _start_local(num_processes: int, directory: Path, before: set[psutil.Process]) -> None:
    """Start Ray on this machine, with the session in `directory`. Raises DeadlineError and WorkerDiedError."""
    import ray

    # For a plug-in that has imported Ray before `prepare_environment`: engines would listen on the machine's own address.
    ray._private.ray_constants.ENABLE_RAY_CLUSTER = False
    with _waiting_for_the_node(before), _token():
        ray.init(
            # Without this setting Ray joins a cluster of another user on this machine.
            address="local",
            num_cpus=max(os.cpu_count() or 1, num_processes),
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            _temp_dir=str(directory),
        )


@functools.cache
def _own_token() -> str:
    return secrets.token_hex(32)  # Ray reads it once in a process


@contextmanager
def _token() -> Iterator[None]:
    """Let Ray's processes inherit a token; plug-ins, and processes started before or after, have none to command Ray with."""
    if "RAY_AUTH_TOKEN" in os.environ:
        yield
        return
    # Without, Ray writes one into the home directory, for every Ray of this user.
    os.environ["RAY_AUTH_TOKEN"] = _own_token()
    try:
        yield
    finally:
        del os.environ["RAY_AUTH_TOKEN"]


class _EndedError(Exception):
    """A process of Ray ended. No RuntimeError, because Ray takes a RuntimeError for "no node yet"."""


@contextmanager
def _waiting_for_the_node(before: set[psutil.Process]) -> Iterator[None]:
    """Let Ray's node come up as late as RAY_START_S; notice at once when one of its processes ends.

    Processes of the node are the children not in `before`. Ray (2.9 to 2.60 at least) asks for the
    node with `services.get_node` and gives up after 30 s. No setting changes the 30 s, and a
    machine with a load of 20 takes longer. So the patched call answers late instead of reporting no
    node.
    """
    from ray._private import services

    ask, deadline = services.get_node, time.monotonic() + RAY_START_S

    def get_node(*arguments: Any) -> Any:
        while True:
            try:
                return ask(*arguments)
            except RuntimeError as error:
                for child in set(psutil.Process().children()) - before:
                    if child.is_running() and child.status() == psutil.STATUS_ZOMBIE:
                        raise _EndedError(child.name()) from error
                if time.monotonic() > deadline:
                    raise DeadlineError(
                        f"Ray's node did not come up within {RAY_START_S:.0f} s; the machine has a load of {os.getloadavg()[0]:.0f} on "
                        f"{counted(os.cpu_count() or 1, 'CPU')}: start the run again when it has less to do"
                    ) from error
            time.sleep(POLL_S)

    services.get_node = get_node
    try:
        yield
    except _EndedError as error:
        raise WorkerDiedError(f"Ray did not start: {error} ended; see its logs in logs/ray of the run directory") from error
    finally:
        services.get_node = ask


def _started(before: set[psutil.Process]) -> list[psutil.Process]:
    """Return the children of this process that are not in `before`, with all their descendants."""
    found = []
    for root in set(psutil.Process().children()) - before:
        found.append(root)
        with suppress(psutil.NoSuchProcess):
            found += root.children(recursive=True)
    return found
