"""Objects in processes of their own, for the two ends of a transport."""

import multiprocessing
import os
import signal
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import torch

from megatron_rl.errors import WorkerDiedError

LOG_TAIL_LINES = 12
CLOSE_TIMEOUT_S = 30.0


def serve(make: Callable[[], Any], connection: Any, log: Path | None) -> None:
    """Be an object of another process: call its methods as asked. What is printed goes to `log`."""
    if log is not None:
        with log.open("ab") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
    torch.set_num_threads(1)
    target = make()
    connection.send(None)
    while True:
        name, arguments = connection.recv()
        connection.send(getattr(target, name)(**arguments))


class Remote:
    """An object in a process of its own; calls run one after the other. A call that raises ends the process. Made by the main thread."""

    def __init__(self, make: Callable[[], Any], *, name: str = "process", log: Path | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._thread, self._name, self._log = ThreadPoolExecutor(1), name, log
        self._process = context.Process(target=serve, args=(make, other, log), daemon=True)
        # A terminal interrupts all processes at once; this one ends the other, which has nothing to say about it.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._process.start()
        signal.signal(signal.SIGINT, before)
        other.close()
        self.processes = [psutil.Process(self._process.pid)]
        self._started = self._thread.submit(self._receive)

    def call(self, method: str, /, **arguments: Any) -> "Future[Any]":
        """Start a call. Its future raises WorkerDiedError, with the end of the log, when the process has died."""

        def work() -> Any:
            self._started.result()
            return self._receive((method, arguments))

        return self._thread.submit(work)

    def _receive(self, order: Any = None) -> Any:
        try:
            if order is not None:
                self._connection.send(order)
            return self._connection.recv()
        except (EOFError, BrokenPipeError) as error:
            raise WorkerDiedError(self._death()) from error

    def _death(self) -> str:
        lines = [] if self._log is None else self._log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join([f"{self._name} died{f', the end of {self._log}:' if lines else ''}", *lines])

    def death(self) -> str | None:
        """That the process died, with the end of its log; None while it lives."""
        return None if self._process.is_alive() else self._death()

    def close(self) -> None:
        """End the process; it has nothing to save, and may wait for one that has gone already."""
        self._process.kill()
        self._process.join(CLOSE_TIMEOUT_S)
        self._thread.shutdown(wait=False)


def free_address() -> tuple[str, int]:
    """An address of this machine and a free port on it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return "127.0.0.1", int(probe.getsockname()[1])
