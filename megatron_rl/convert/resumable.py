"""A directory of large files that is written beside its place, file by file in several threads, and goes on where a killed attempt stopped.

A file that is complete has a record beside it in the journal, so that the next attempt of the same conversion leaves it alone.
"""

import fcntl
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from megatron_rl.errors import UserError
from megatron_rl.files import commit_partial, disk_errors, partial_path, sync_file, write_atomic

_JOURNAL = ".journal"
_PIECE = 2**18
"""Bytes that are summed and written at once. The second of the two finds them in the processor's cache, and Linux caches pages of files
several times as fast as in writes of megabytes."""
NUM_THREADS = 2
"""Tensors in memory at once. One thread waits for the disk while the other works."""
Report = Callable[[int], None]


class Summed:
    """A file that is written from its start to its end: bytes and SHA-256 so far, and a report of each piece."""

    def __init__(self, stream: BinaryIO, report: Report) -> None:
        self._stream, self._report = stream, report
        self.num_bytes, self.digest = 0, hashlib.sha256()

    def write(self, data: Any) -> int:
        """Write bytes of any buffer."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _PIECE):
            piece = view[start : start + _PIECE]
            self.digest.update(piece)
            self._stream.write(piece)
            self._report(len(piece))
        self.num_bytes += len(view)
        return len(view)

    def flush(self) -> None:
        """torch asks for it; the file is flushed at its end."""

    def write_tensor(self, tensor: Tensor) -> None:
        """Write the numbers of `tensor`, of any shape, as they are in memory."""
        self.write(raw_bytes(tensor))


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of `tensor`, of any shape."""
    array: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


@dataclass(frozen=True, slots=True)
class FileJob:
    """A file to write: its name below the directory, about how many bytes, and what writes it and says what is worth recording."""

    name: str
    num_bytes: int
    write: Callable[[Summed], Any]


@contextmanager
def locked_partial(path: Path, identity: Mapping[str, Any]) -> Iterator[Path]:
    """The directory in which `path` is written, for this process alone; at the end it becomes `path`.

    What an attempt with the same `identity` has left there is kept, everything else removed. When the body raises, it stays for the next
    attempt. Raises UserError when `path` exists or another process writes it.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path} exists already; remove it or give another target")
    partial = partial_path(path)
    with disk_errors(path):
        partial.mkdir(parents=True, exist_ok=True)
    with (partial.parent / f"{partial.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"another process is writing {path}; wait for it or give another target") from error
        _start(partial, identity)
        yield partial
        shutil.rmtree(partial / _JOURNAL)
        commit_partial(path)
        os.unlink(lock.name)


def _start(partial: Path, identity: Mapping[str, Any]) -> None:
    text = json.dumps(identity, sort_keys=True)
    digest = partial / _JOURNAL / f"{hashlib.sha256(text.encode()).hexdigest()}.identity"
    if digest.exists():
        return
    shutil.rmtree(partial)
    write_atomic(digest, text)


def write_files(partial: Path, jobs: Sequence[FileJob], *, report: Report, keep: Report) -> dict[str, dict[str, Any]]:
    """Write what is not there yet and return the record of each file: its bytes, its SHA-256 and what its job says.

    `report` is called with every number of bytes that is written, `keep` with those that were there. Raises UserError before the first byte
    when the disk has too little room.
    """
    records = {job.name: _finished(partial, job) for job in jobs}
    for job in jobs:
        if records[job.name] is not None:
            keep(job.num_bytes)
    left = [job for job in jobs if records[job.name] is None]
    _check_room(partial, sum(job.num_bytes for job in left))
    lock = threading.Lock()

    def count(num_bytes: int) -> None:
        with lock:
            report(num_bytes)

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        futures = {job.name: pool.submit(_write, partial, job, count) for job in left}
        wait(futures.values(), return_when=FIRST_EXCEPTION)
        for future in futures.values():
            if not future.done():
                future.cancel()
    return {name: record if record is not None else futures[name].result() for name, record in records.items()}


def _write(partial: Path, job: FileJob, report: Report) -> dict[str, Any]:
    path = partial / job.name
    unfinished = path.with_name(f"{path.name}.unfinished")
    with disk_errors(path):
        path.parent.mkdir(exist_ok=True)
        with unfinished.open("wb") as stream:
            summed = Summed(stream, report)
            told = job.write(summed)
        sync_file(unfinished)
        os.replace(unfinished, path)
    record = {"num_bytes": summed.num_bytes, "sha256": summed.digest.hexdigest(), "content": told}
    write_atomic(_record_path(partial, job), json.dumps(record))
    return record


def _finished(partial: Path, job: FileJob) -> dict[str, Any] | None:
    """The record of a file that an earlier attempt has completed."""
    file, record = partial / job.name, _record_path(partial, job)
    if not record.exists() or not file.exists():
        return None
    found: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
    return found if file.stat().st_size == found["num_bytes"] else None


def _record_path(partial: Path, job: FileJob) -> Path:
    return partial / _JOURNAL / f"{job.name.replace('/', '--')}.json"


def _check_room(partial: Path, needed: int) -> None:
    free = shutil.disk_usage(partial).free
    if needed > free:
        raise UserError(
            f"the target needs {needed / 1e9:,.2f} GB more, but {partial.parent} has {free / 1e9:,.2f} GB free; free space on this disk or "
            "give another target"
        )
