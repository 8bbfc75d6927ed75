"""Requests to end this process by a signal: the first lets a step or checkpoint finish, the second
not.

One request may come twice: sent to every process of a job (Slurm's scancel, a terminal's Ctrl-C),
and passed on by the supervisor with separate signals. So requests are counted for each of the two
ways, and the higher count holds.
"""

import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import NoReturn

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PASSED_ON = {number: signal.SIGRTMIN + index for index, number in enumerate(ENDING)}
"""The signal by which the supervisor passes a request on."""
_REQUESTS: dict[int, int] = dict(zip((*ENDING, *PASSED_ON.values()), (*ENDING, *ENDING), strict=True))


class Grace:
    """Handler of the signals in ENDING, in the main thread and in a `with` block.

    Ignored signals stay ignored. A request raises SystemExit with the status 128 + signal, so that
    every `finally` stops the processes started there.
    """

    def __init__(self) -> None:
        self._counts: Counter[bool] = Counter()
        self._depth = 0
        self._waiting: int | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> "Grace":
        for number, request in _REQUESTS.items():
            if signal.getsignal(request) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Record a signal; raise SystemExit for a first request without deferral and for a second one."""
        known = max(self._counts.values(), default=0)
        self._counts[number in ENDING] += 1
        if max(self._counts.values()) == known or known > 1:
            return
        if self._depth and not known:
            self._waiting = _REQUESTS[number]
            return
        _leave(_REQUESTS[number])

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Let the first request wait until the body is done."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            number, self._waiting = (None, self._waiting) if self._depth else (self._waiting, None)
        if number is not None:
            _leave(number)


def _leave(number: int) -> NoReturn:
    raise SystemExit(128 + number)


@contextmanager
def finishing_first() -> Iterator[None]:
    """Defer the first request to end while the body runs, in the main thread of a process with a Grace."""
    grace = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or not isinstance(grace, Grace):
        yield
        return
    with grace.deferring():
        yield
