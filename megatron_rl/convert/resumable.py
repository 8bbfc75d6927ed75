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
from typing import Any

from megatron_rl.errors import UserError
from megatron_rl.files import commit_partial, disk_errors, partial_path, write_atomic
from megatron_rl.models.checkpoint_manifest import HashedFile

_JOURNAL = ".journal"
NUM_THREADS = 2
"""Tensors in memory at once. One thread waits for the disk while the other works."""
Report = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class FileJob:
    """A file to write: its name below the directory, about how many bytes, and what writes it and says what is worth recording."""

    name: str
    num_bytes: int
    write: Callable[[HashedFile], Any]


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
        try:
            partial.mkdir(parents=True, exist_ok=True)
        except FileNotFoundError as error:
            # The kernel's own file systems, such as /proc, have no place for a directory.
            raise UserError(f"cannot write {path}: no directory can be made there; give another target") from error
        opened = (partial.parent / f"{partial.name}.lock").open("w")
    with opened as lock:
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
    """Write what is not there yet and return the record of each file: what a manifest says of it, and what its job says.

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
        with unfinished.open("wb", buffering=0) as stream:
            file = HashedFile(stream, report)
            told = job.write(file)
            os.fsync(stream.fileno())
        os.replace(unfinished, path)
    record = {"file": file.entry, "content": told}
    write_atomic(_record_path(partial, job), json.dumps(record))
    return record


def _finished(partial: Path, job: FileJob) -> dict[str, Any] | None:
    """The record of a file that an earlier attempt has completed."""
    file, record = partial / job.name, _record_path(partial, job)
    if not record.exists() or not file.exists():
        return None
    found: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
    return found if file.stat().st_size == found["file"]["bytes"] else None


def _record_path(partial: Path, job: FileJob) -> Path:
    return partial / _JOURNAL / f"{job.name.replace('/', '--')}.json"


def _check_room(partial: Path, needed: int) -> None:
    free = shutil.disk_usage(partial).free
    if needed > free:
        raise UserError(
            f"the target needs {needed / 1e9:,.2f} GB more, but {partial.parent} has {free / 1e9:,.2f} GB free; free space on this disk or "
            "give another target"
        )
