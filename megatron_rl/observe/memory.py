"""The peak memory of all processes of a run together, and the memory that is left."""

import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil


class PeakMemory:
    """Watch the process `pid` and all descendants from a background thread; keep their largest memory in `peak_bytes`.

    The sum is of proportional set sizes, so that a page shared by processes counts once. The kernel
    takes 20 ms per GiB for a sample. The thread takes at most a hundredth of a core, and can miss a
    peak of a few seconds.
    """

    def __init__(self, pid: int, *, interval_s: float = 2.0) -> None:
        self._pid, self._interval_s = pid, interval_s
        self.peak_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)

    def sample(self) -> int:
        """Measure now, in bytes, and keep the largest sum."""
        total = 0
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(self._pid)
            total = sum(_proportional_bytes(process) for process in (root, *root.children(recursive=True)))
        self.peak_bytes = max(self.peak_bytes, total)
        return total

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            before_s = time.thread_time()
            self.sample()
            if self._stop.wait(max(self._interval_s, 100 * (time.thread_time() - before_s))):
                return


def _proportional_bytes(process: psutil.Process) -> int:
    try:
        return process.memory_full_info().pss
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0


def available_memory_bytes() -> int:
    """Return the bytes of memory that this process may still use.

    The limit is the machine's available memory, or the rest of the control group when lower.
    """
    available = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    for limit_file, usage_file in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        if (group / limit_file).is_file() and (group / usage_file).is_file():
            limit = (group / limit_file).read_text().strip()
            if limit != "max":
                available = min(available, max(0, int(limit) - int((group / usage_file).read_text())))
    return available
