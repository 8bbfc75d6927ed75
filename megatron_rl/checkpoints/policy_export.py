"""The policy as a Hugging Face directory, written by a thread of rank 0: the ranks wait for the gathering alone."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import psutil
import torch
from torch import Tensor, distributed

from megatron_rl.checkpoints.host_copies import host_copy
from megatron_rl.checkpoints.hugging_face import save_hf
from megatron_rl.checkpoints.rank_zero import on_rank_zero

Weights = SimpleQueue[tuple[str, Tensor] | None]
"""Named tensors on their way from one thread to the next; None behind the last."""


class Exporting:
    """An export in progress. All ranks have to call `finish`."""

    def __init__(
        self,
        directory: Path,
        weights: Iterator[tuple[str, Tensor]],
        *,
        source: Path,
        stale: Iterable[tuple[str, Tensor]],
        max_shard_bytes: int,
        durable: bool,
        staged: bool,
    ) -> None:
        """Gather `weights` on rank 0, to be written with the other files of `source`. Collective.

        See ``save_hf`` for the other arguments. Gathered weights wait in at most half of the host
        memory free at the start; beyond this limit, gathering waits for the disk. A thread copies
        weights in memory shared with the model, into memory for large copies if `staged`. The model
        may change after `wait_for_copies`.
        """
        self._directory = directory
        self._gathered: SimpleQueue[tuple[str, Tensor, bool] | None] = SimpleQueue()
        self._copied: Weights = SimpleQueue()
        self._held_bytes = 0
        self._complete = False
        # Constant weights are copied too: safetensors makes memory non-resizable, and putting a model away
        # resizes memory.
        self._duplicate = host_copy if staged else torch.clone
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []
        if distributed.get_rank() != 0:
            for _ in weights:
                pass
            return
        self._limit_bytes = psutil.virtual_memory().available // 2
        options = {"source": source, "stale": stale, "max_shard_bytes": max_shard_bytes, "durable": durable}
        self._copier = threading.Thread(target=self._copy, name="export copier", daemon=True)
        self._writer = threading.Thread(target=self._write, kwargs=options, name="export writer", daemon=True)
        self._threads = [self._copier, self._writer]
        for thread in self._threads:
            thread.start()
        try:
            self._gather(weights)
        finally:
            self._gathered.put(None)

    def _gather(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            with self._changed:
                self._changed.wait_for(lambda: self._held_bytes <= self._limit_bytes or self._error is not None)
                self._held_bytes += tensor.nbytes
            # The rest is still gathered after an error, because the other ranks take part.
            if self._error is None:
                here = tensor.detach().cpu()
                self._gathered.put((name, here, here.data_ptr() == tensor.data_ptr()))
        self._complete = True

    def _copy(self) -> None:
        """Body of the first thread."""
        with self._noting_errors():
            for name, tensor, is_shared in iter(self._gathered.get, None):
                self._copied.put((name, self._duplicate(tensor) if is_shared else tensor))
        self._copied.put(None)

    def _next_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in iter(self._copied.get, None):
            with self._changed:
                self._held_bytes -= tensor.nbytes
                self._changed.notify_all()
            yield name, tensor
        if not self._complete or self._error is not None:
            raise RuntimeError("the weights could not all be gathered, so that none are written")

    def _write(self, **options: Any) -> None:
        """Body of the second thread: no collective, as in the first."""
        with self._noting_errors():
            save_hf(self._directory, self._next_weights(), **options)

    @contextmanager
    def _noting_errors(self) -> Iterator[None]:
        """Keep the first error of a thread for the waiting thread."""
        try:
            yield
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def wait_for_copies(self) -> None:
        """Return when this rank has stopped reading the weights, or has failed. Not collective.

        `finish` raises the error of a failure.
        """
        if self._threads:
            self._copier.join()

    @property
    def is_written(self) -> bool:
        """Return true when this rank's files are written. Not collective."""
        return not any(thread.is_alive() for thread in self._threads)

    def finish(self) -> None:
        """Wait for rank 0's files. Collective. Raises UserError, on every rank, when the directory could not be written."""
        on_rank_zero(self._join, self._directory)

    def _join(self, _: Path) -> None:
        for thread in self._threads:
            thread.join()
        if self._error is not None:
            raise self._error
