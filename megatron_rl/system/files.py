"""Files and directories that appear whole or not at all: written aside, synced to disk, renamed.

Several processes write one directory so: one calls `start_partial`, each writes into `partial_path`, then the
first calls `commit_partial`. A kill at any moment leaves the old content, and a half-written sibling for
removal by the next attempt.
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError

from megatron_rl.errors import UserError

T = TypeVar("T")
MEBIBYTE = 2**20
MANIFEST = "manifest.json"
"""In a directory of weights: what is to be known of its files and tensors."""
_TORCH_WRITER = ("inline_container", "iostream error")
"""In messages of torch's file writer. It fails after a short write, and by then what it had written may be gone again."""

# Mistakes within the user's reach, by the operating system's error number. Other numbers pass through.
_FIXES = {
    errno.ENOSPC: "free space on this disk or choose another directory",
    errno.EDQUOT: "free space in your quota or choose another directory",
    errno.EFBIG: "raise the file size limit (ulimit -f) or choose another file system",
    errno.EACCES: "give yourself write permission or choose another directory",
    errno.EPERM: "give yourself write permission or choose another directory",
    errno.EROFS: "choose a directory on a writable file system",
    errno.ENOTDIR: "a part of this path is a file: choose another directory",
    errno.EEXIST: "a part of this path is a file: choose another directory",
    errno.EISDIR: "a directory of this name is in the way: remove it or choose another name",
    errno.ENAMETOOLONG: "choose a shorter path",
}


def write_atomic(path: Path, content: bytes | str) -> None:
    """Write `content` (text as UTF-8) to the file `path` as a whole; make missing parents. Raises UserError."""
    data = content.encode() if isinstance(content, str) else content
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        sync(path.parent)


@contextmanager
def atomic_directory(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Give an empty directory to fill, and replace `path` by it at the end; see `commit_partial`.

    When the body raises, nothing is left and `path` is as before. Raises UserError as `disk_errors`.
    """
    partial = start_partial(path)
    try:
        with disk_errors(path):
            yield partial
        commit_partial(path, durable=durable)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def partial_path(path: Path) -> Path:
    """Return the sibling of `path` for the directory in progress, the same for every process."""
    return path.with_name(f".{path.name}.partial")


def start_partial(path: Path) -> Path:
    """Make an empty `partial_path(path)`, without leftovers of a killed attempt, and return it. Raises UserError."""
    partial = partial_path(path)
    with disk_errors(path):
        if path.exists() and not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
    return partial


def commit_partial(path: Path, *, durable: bool = True) -> None:
    """Sync `partial_path(path)` to disk and rename it to `path`, in place of the old content. Raises UserError.

    A directory that is not `durable` is not synced: it need not survive a power failure. A kill between the two
    renames leaves the old content in `.NAME.previous` and the new one, complete, in `.NAME.partial`: no call
    replaces a directory that is not empty.
    """
    partial, previous = partial_path(path), path.with_name(f".{path.name}.previous")
    with disk_errors(path):
        for written in (*partial.rglob("*"), partial) if durable else ():
            sync(written)
        if previous.exists():
            shutil.rmtree(previous)
        if path.exists():
            os.rename(path, previous)
        os.rename(partial, path)
        if durable:
            sync(path.parent)
        if previous.exists():
            shutil.rmtree(previous)


def read_record(path: Path, kind: type[T]) -> T:
    """Return the record of the class `kind` that the file `path` holds as JSON.

    Raises ValueError in one line for any other content, OSError for an unreadable file.
    """
    try:
        return TypeAdapter(kind).validate_json(path.read_bytes(), strict=True)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        raise ValueError(": ".join([*map(str, wrong["loc"]), wrong["msg"]])) from error


def claim(file: Path, *, what: str) -> TextIOWrapper:
    """Claim `what` by the lock `file`, until the result is closed or this process ends in any way.

    Raises UserError where another process has the lock, OSError where the file system has no locks.
    """
    # Forked children do not inherit POSIX record locks: a worker alive after a killed run cannot hold this one.
    with disk_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = file.open("a+")
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.seek(0)
        owner = lock.read().strip()
        lock.close()
        if not isinstance(error, BlockingIOError | PermissionError):
            raise
        raise UserError(f"{what} is in use by process {owner}; wait for that run or choose another run.directory") from error
    with disk_errors(file):
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
    return lock


def remove_directory(path: Path) -> None:
    """Remove a directory, under its name all or nothing, or a link to one without its content. Raises OSError."""
    if path.is_symlink():
        path.unlink()
        return
    going = partial_path(path)
    if going.exists():
        shutil.rmtree(going)
    os.rename(path, going)
    shutil.rmtree(going)


def sync(path: Path) -> None:
    """Sync the content of a file, or the entries of a directory (new names, renames), to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn refusals to write below `path` into a UserError of one sentence; other errors pass through.

    torch and safetensors report a failed write by exceptions of their own, without the reason: one of torch's
    file writer, or any while less than a mebibyte is free, is reported as a full disk, with the library's words.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        # torch ends a file written by Python with a failure of its own.
        refused = error if isinstance(error, OSError) else error.__context__
        free = free_bytes(path)
        if isinstance(refused, OSError) and refused.errno in _FIXES:
            # Of a copy and a renaming the second is what is written.
            place = refused.filename2 or refused.filename or path
            raise UserError(
                f"cannot write {place}: {os.strerror(refused.errno)} ({free / MEBIBYTE:,.0f} MiB free); {_FIXES[refused.errno]}"
            ) from error
        if isinstance(error, OSError) or (free >= MEBIBYTE and not any(words in str(error) for words in _TORCH_WRITER)):
            raise
        reason = str(error).strip().splitlines()[-1]
        raise UserError(
            f"cannot write {path}: the disk is full, {free / MEBIBYTE:,.0f} MiB are free now ({reason}); {_FIXES[errno.ENOSPC]}"
        ) from error


def check_room(path: Path, num_bytes: int) -> None:
    """Raise UserError when the disk of `path` has less room than `num_bytes`."""
    free = free_bytes(path)
    if num_bytes > free:
        words = f"the target needs {num_bytes / 1e9:,.2f} GB, but {path.parent} has {free / 1e9:,.2f} GB free"
        raise UserError(f"{words}; free space on this disk or give another target")


def runs_of_bytes(items: Iterable[T], num_bytes: Callable[[T], int], *, max_bytes: int) -> Iterator[list[T]]:
    """Divide `items` in order into runs of at most `max_bytes` bytes; a larger item is alone."""
    run: list[T] = []
    held = 0
    for item in items:
        size = num_bytes(item)
        if run and held + size > max_bytes:
            yield run
            run, held = [], 0
        run.append(item)
        held += size
    if run:
        yield run


def free_bytes(path: Path) -> int:
    """Bytes free for this user where `path` is or would be."""
    place = path.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free
