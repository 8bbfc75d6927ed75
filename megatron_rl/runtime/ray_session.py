"""A Ray session: a local one that is started, waited for and ended with every process of it, or a cluster that is joined."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from megatron_rl.config.settings import RuntimeSettings
from megatron_rl.deadlines import RAY_START_S, RAY_STOP_S
from megatron_rl.errors import DeadlineError, WorkerDiedError, counted
from megatron_rl.leftovers import scratch_directory, shared_memory_of
from megatron_rl.runtime import ray_reaper

OBJECT_STORE_BYTES = 256 * 1024 * 1024
POLL_S = 0.1
OUR_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def prepare_environment(settings: RuntimeSettings) -> None:
    """Set what Ray reads when it is imported: call before. No usage reports, and a local Ray talks over loopback only."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Ray's notes about GPU variables and token authentication would be the first lines a new user reads.
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    # Ray gives its workers the lowest priority by default: on a shared machine a train step then takes ten times as long.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
    if settings.ray_address is None:
        # Makes ray use 127.0.0.1 where it would look up the machine's own address.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        # Ray's own deadlines, 30 to 60 s, within which its parts have to find each other. For the node it is `_waiting_for_the_node` that
        # waits: with a longer raylet_start_wait_time_s one question would take all of that time, although the node has ended.
        for name in ("gcs_server_port_wait_time_s", "worker_register_timeout_seconds"):
            os.environ[f"RAY_{name}"] = f"{RAY_START_S:.0f}"


@contextmanager
def ray_cluster(*, address: str | None, num_processes: int) -> Iterator[None]:
    """A Ray session: a local one that ends with the block, every process of it gone, or the cluster at `address`, which goes on.

    Where there is no GPU, a local one has room for `num_processes`, however many CPUs the machine has. It also ends where this process is
    killed.
    """
    import ray

    with ExitStack() as stack:
        scratch = stack.enter_context(scratch_directory())
        if address is None:
            # Before Ray: a start can be killed, too.
            stack.enter_context(_reaper())
        before = set(psutil.Process().children())
        try:
            with _own_signals():
                if address is None:
                    _start_local(num_processes, before)
                    session = Path(ray._private.worker._global_node.get_session_dir_path())
                    scratch.note([session, *shared_memory_of([os.getpid()])])
                else:
                    ray.init(address=address, log_to_driver=False, logging_level="error")
            yield
        finally:
            _stop_ray(before)


@contextmanager
def _reaper() -> Iterator[None]:
    """Run `ray_reaper` beside this process, as long as the block."""
    # Without site-packages it takes 8 MiB; a session of its own keeps it from the terminal's signals.
    command = [sys.executable, "-I", "-S", ray_reaper.__file__, str(os.getpid()), str(RAY_STOP_S)]
    null = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=null, stdout=null, stderr=null, cwd="/", start_new_session=True)
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep this process's handlers of signals. Ray's core puts its own in their place, which prints stacks of C++ and ends in abort()."""
    handlers = {number: signal.getsignal(number) for number in OUR_SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            # None is a handler that no Python code has set.
            if handler is not None:
                signal.signal(number, handler)


def _start_local(num_processes: int, before: set[psutil.Process]) -> None:
    """Start Ray on this machine.

    Raises DeadlineError when it did not come up within RAY_START_S, WorkerDiedError when a process of it ended.
    """
    import ray

    with _waiting_for_the_node(before):
        ray.init(
            # Without it Ray joins a cluster that somebody else runs on this machine.
            address="local",
            num_cpus=max(os.cpu_count() or 1, num_processes),
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
        )


class _EndedError(Exception):
    """A process of Ray ended. No RuntimeError, which tells Ray that its node is not there yet."""


@contextmanager
def _waiting_for_the_node(before: set[psutil.Process]) -> Iterator[None]:
    """Let Ray's node come up as late as RAY_START_S, and notice at once when a process of it, a child not in `before`, has ended.

    Ray (2.9 to 2.60 at least) asks for its node with `services.get_node` and gives up after 30 s, which no setting changes; a machine
    with a load of 20 takes longer. So this answers late instead of telling Ray that the node is not there yet.
    """
    from ray._private import services

    ask, deadline = services.get_node, time.monotonic() + RAY_START_S

    def get_node(*arguments: Any) -> Any:
        while True:
            try:
                return ask(*arguments)
            except RuntimeError as error:
                ended = _ended_names(set(psutil.Process().children()) - before)
                if ended:
                    raise _EndedError(ended[0]) from error
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
        raise WorkerDiedError(f"Ray did not start: {error} ended; see the logs below {_ray_directory()}/session_latest") from error
    finally:
        services.get_node = ask


def _ray_directory() -> Path:
    """Where Ray keeps its sessions. Not `tempfile.gettempdir()`, which reads other variables."""
    return Path(os.environ.get("RAY_TMPDIR", os.environ.get("TMPDIR", "/tmp")), "ray")


def _ended_names(children: "set[psutil.Process]") -> Sequence[str]:
    return [child.name() for child in children if child.is_running() and child.status() == psutil.STATUS_ZOMBIE]


def _stop_ray(before: set[psutil.Process]) -> None:
    """Leave Ray, and end all of its processes that are not among the children `before`."""
    import ray

    roots = set(psutil.Process().children()) - before
    started = [process for root in roots for process in (root, *_descendants(root))]
    ray.shutdown()
    _, alive = psutil.wait_procs(started, timeout=RAY_STOP_S)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=RAY_STOP_S)


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
