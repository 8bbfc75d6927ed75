"""The largest memory that all processes of a run take together."""

import threading
import time
from collections.abc import Iterable
from types import TracebackType

import psutil


class PeakMemory:
    """Watches process trees from a background thread and keeps the largest sum of their memory.

    What is summed is the proportional set size: a page that n processes share counts 1/n in each, so shared libraries, forked
    workers and shared memory are counted once. A tree is a root process and all its descendants; daemons that detach themselves
    from the tree (Ray's) are further roots. The kernel walks every page for it, about 20 ms per GiB, so a sample that costs
    much postpones the next one: the thread takes at most a hundredth of a core, and a peak of a few seconds can be missed.
    """

    def __init__(self, root_pids: Iterable[int], *, interval_s: float = 2.0) -> None:
        self._roots = set(root_pids)
        self._interval_s = interval_s
        self._peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)

    @property
    def peak_bytes(self) -> int:
        """The largest sum seen so far, in bytes."""
        return self._peak

    def sample(self) -> int:
        """Measure now, in bytes, and remember the sum if it is the largest. Processes that end meanwhile count nothing."""
        total = sum(_proportional_bytes(process) for process in _trees(self._roots))
        self._peak = max(self._peak, total)
        return total

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            before_s = time.thread_time()
            self.sample()
            if self._stop.wait(max(self._interval_s, 100 * (time.thread_time() - before_s))):
                return


def _trees(roots: Iterable[int]) -> set[psutil.Process]:
    """The living processes of all trees, each once; psutil reads the table of processes once per root."""
    found: set[psutil.Process] = set()
    for pid in roots:
        try:
            root = psutil.Process(pid)
            found |= {root, *root.children(recursive=True)}
        except psutil.NoSuchProcess:
            continue
    return found


def _proportional_bytes(process: psutil.Process) -> int:
    try:
        return process.memory_full_info().pss
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0
