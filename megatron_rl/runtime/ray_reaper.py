"""What ends Ray's last processes when the driver was killed: a script that `ray_session` runs beside it, and that does nothing else.

Ray's node and its control service die with the driver, and the node's workers with the node. Its agents stay: each first reports the death
to the control service, which is gone, for 60 s that no setting changes (`ray._private.process_watcher` of 2.60). Nobody needs that report.
Imports nothing that takes time or memory: it runs as long as the driver.
"""

import contextlib
import os
import re
import signal
import sys
import time

POLL_S = 0.5


def session_processes(driver: int) -> list[int]:
    """The processes that write into the logs of a Ray session of the process `driver`, whose id ends a session's name.

    Ray's agents hide their command line behind a title.
    """
    log = re.compile(rf"/session_[^/]*_{driver}/logs/[^/]+$")
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        files = f"/proc/{name}/fd"
        # Those that end at this moment, and those of other users.
        with contextlib.suppress(OSError):
            # In another container another process may have this id.
            here = os.readlink(f"/proc/{name}/ns/pid") == os.readlink("/proc/self/ns/pid")
            if here and any(_writes(f"{files}/{file}", log) for file in os.listdir(files)):
                found.append(int(name))
    return found


def _writes(file: str, log: "re.Pattern[str]") -> bool:
    """Whether `file`, one that a process has open, is a `log` that it does not only read; not where it is closed at this moment."""
    with contextlib.suppress(OSError):
        return log.search(os.readlink(file)) is not None and bool(os.lstat(file).st_mode & 0o200)
    return False


def main(driver: int, timeout_s: float) -> None:
    """Wait until the parent, `driver`, is dead, then kill what is left of its Ray sessions, for at most `timeout_s` seconds."""
    # A scheduler sends these to every process of a job, but the driver goes on until its checkpoint is written.
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    while os.getppid() == driver:
        time.sleep(POLL_S)
    deadline = time.monotonic() + timeout_s
    while (left := session_processes(driver)) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        time.sleep(POLL_S)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
