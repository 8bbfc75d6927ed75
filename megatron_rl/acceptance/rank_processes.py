"""Objects in processes of their own, and the Megatron ranks of the acceptance among them."""

import multiprocessing
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from megatron_rl.config.settings import Settings
from megatron_rl.errors import DeadlineError, WorkerDiedError
from megatron_rl.weights.interface import SenderPlan

LOG_TAIL_LINES = 12
CALL_TIMEOUT_S = 300.0
CLOSE_TIMEOUT_S = 30.0
DYING_S = 0.5
"""From a rank's last message, or a connection that it closes, to its end."""


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


class Ranks:
    """`count` Megatron ranks in processes of their own, rank r on GPU r where there are GPUs; `open` gives them a model and a layout.

    They are what a weight sync and `runtime.colocation` take for the trainer's ranks.
    """

    def __init__(self, count: int, *, directory: Path) -> None:
        # Imported here: only what a rank runs on needs megatron-core.
        from megatron_rl.acceptance.tried_rank import Rank

        # Of these ranks alone: a file at which others met would make new ones wait for them.
        self._meetings = Path(tempfile.mkdtemp(prefix="ranks-", dir=directory))
        logs = [directory / f"rank-{number}.log" for number in range(count)]
        self._all = [Remote(partial(Rank, number), name=f"Megatron rank {number}", log=log) for number, log in enumerate(logs)]
        self._open = self._all
        self._num_opened = 0

    @property
    def count(self) -> int:
        """Processes, whether the layout has all of them or not."""
        return len(self._all)

    def open(self, settings: Settings) -> None:
        """Let the first ranks build the model in the layout of `settings`, in place of what they have."""
        for future in [rank.call("close") for rank in self._open]:
            _result(future, what="closing a rank")
        self._num_opened += 1
        self._open = self._all[: settings.training.topology.num_ranks]
        self.call("open", settings=settings, init_method=f"file://{self._meetings}/rendezvous-{self._num_opened}")

    def begin(self, method: str, /, **arguments: Any) -> "list[Future[Any]]":
        """Start a call on every rank of the layout."""
        return [rank.call(method, **arguments) for rank in self._open]

    def call(self, method: str, /, **arguments: Any) -> list[Any]:
        """What every rank of the layout answers. Raises WorkerDiedError and DeadlineError."""
        return [_result(future, what=f"{method} on the ranks") for future in self.begin(method, **arguments)]

    def all_reduce(self, *, num_bytes: int, repeats: int) -> list[float]:
        """Seconds of an all-reduce of so many bytes over all processes, as each of them measured it."""
        init_method = f"file://{self._meetings}/all-reduce"
        arguments = {"world": self.count, "init_method": init_method, "num_bytes": num_bytes, "repeats": repeats}
        futures = [rank.call("all_reduce", **arguments) for rank in self._all]
        return [_result(future, what="the all-reduce") for future in futures]

    def begin_open_sender(self, plan: SenderPlan) -> "list[Future[Any]]":
        """Open every rank's end of a transport."""
        return self.begin("open_sender", plan=plan)

    def begin_close_sender(self) -> "list[Future[Any]]":
        """Close it."""
        return self.begin("close_sender")

    def begin_send(self, *, version: int) -> "list[Future[Any]]":
        """Send the weights."""
        return self.begin("send", version=version)

    def put_away(self, parts: Any) -> None:
        """Move parts of the models to host memory."""
        self.call("put_away", parts=parts)

    def take_back(self, parts: Any) -> None:
        """Move parts of the models back."""
        self.call("take_back", parts=parts)

    def deaths(self) -> list[str]:
        """What is said of those that have died; one that is dying is waited for."""
        time.sleep(DYING_S)
        return [said for rank in self._all if (said := rank.death()) is not None]

    def close(self) -> None:
        """End all processes."""
        for rank in self._all:
            rank.close()


def _result(future: "Future[Any]", *, what: str) -> Any:
    try:
        return future.result(timeout=CALL_TIMEOUT_S)
    except FutureTimeoutError as error:
        raise DeadlineError(f"{what} took longer than {CALL_TIMEOUT_S:g} s") from error


def free_address() -> tuple[str, int]:
    """An address of this machine and a free port on it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return "127.0.0.1", int(probe.getsockname()[1])
