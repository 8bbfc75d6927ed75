"""The policy as a Hugging Face directory, written by a thread of rank 0: the ranks wait for the gathering alone."""

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
from torch import Tensor, distributed

from megatron_rl.models.hf_files import save_hf
from megatron_rl.training.host_copies import host_copy
from megatron_rl.training.rank_zero import on_rank_zero


class Exporting:
    """An export that is being written. `finish` has to be called by all ranks."""

    def __init__(
        self,
        directory: Path,
        weights: Iterator[tuple[str, Tensor]],
        *,
        source: Path,
        stale: Iterable[tuple[str, Tensor]],
        max_shard_bytes: int,
        durable: bool,
        stage: bool,
    ) -> None:
        """Gather `weights` on rank 0, to be written with the other files of `source`; see `hf_files.save_hf` for the rest. Collective.

        What is gathered waits in half of the host memory that is free now; where that is not enough, gathering waits for the disk. With
        `stage` all of it is copies, so that the weights may change before `finish`.
        """
        self._directory = directory
        self._stage = stage
        self._waiting: deque[tuple[str, Tensor]] = deque()
        self._held_bytes = 0
        self._gathered = self._complete = False
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        if distributed.get_rank() != 0:
            for _ in weights:
                pass
            return
        self._limit_bytes = psutil.virtual_memory().available // 2
        options = {"source": source, "stale": stale, "max_shard_bytes": max_shard_bytes, "durable": durable}
        self._thread = threading.Thread(target=self._write, kwargs=options, name="export writer", daemon=True)
        self._thread.start()
        try:
            self._gather(weights)
        finally:
            with self._changed:
                self._gathered = True
                self._changed.notify_all()

    def _gather(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            with self._changed:
                self._changed.wait_for(lambda: self._held_bytes <= self._limit_bytes or self._error is not None)
                # The rest is still gathered, because the other ranks take part.
                if self._error is None:
                    self._waiting.append((name, host_copy(tensor) if self._stage else tensor.detach().cpu()))
                    self._held_bytes += tensor.nbytes
                    self._changed.notify_all()
        self._complete = True

    def _next_weights(self) -> Iterator[tuple[str, Tensor]]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting) or self._gathered)
                if not self._waiting:
                    break
                name, tensor = self._waiting.popleft()
                self._held_bytes -= tensor.nbytes
                self._changed.notify_all()
            yield name, tensor
        if not self._complete:
            raise RuntimeError("the weights could not all be gathered, so that none are written")

    def _write(self, **options: Any) -> None:
        """Body of the thread: no collective, and no error that nobody would see."""
        try:
            save_hf(self._directory, self._next_weights(), **options)
        except BaseException as error:  # handed to the thread that waits
            with self._changed:
                self._error = error
                self._changed.notify_all()

    @property
    def is_written(self) -> bool:
        """Whether `finish` would find this rank's files written. Not collective."""
        return distributed.get_rank() != 0 or not self._thread.is_alive()

    def finish(self) -> None:
        """Wait for rank 0's files. Collective. Raises UserError, on every rank, when the directory could not be written."""
        on_rank_zero(self._join, self._directory)

    def _join(self, _: Path) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error
