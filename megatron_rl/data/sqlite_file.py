"""A SQLite file with one writing process, in which every error of the user's is one sentence."""

import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from megatron_rl.errors import UserError
from megatron_rl.system.deadlines import BUFFER_LOCK_S, NAMED_S
from megatron_rl.system.files import claim, disk_errors, sync

_MAGIC = b"SQLite format 3\0"  # the first bytes of every database that is not empty
LOCKED = "database is locked"
# SQLite's words, and what the user can do.
_FIXES = {
    "database or disk is full": "free space on this disk",
    "disk I/O error": "check the disk and its quota",
    "file is not a database": "choose another run.directory, or move this file away: groups since the checkpoint are made again",
    "database disk image is malformed": "restore the file from a copy, or move it away: groups since the checkpoint are made again",
    "attempt to write a readonly database": "give yourself write permission or choose another run.directory",
    "unable to open database file": "give yourself write permission or choose another run.directory",
    LOCKED: "end the other program's transaction on this file",
}


class SqliteFile:
    """The database of a buffer at `path`, new or with the tables of `schema`, claimed by this process.

    `identity` are application id and schema version. `note` is called when another program keeps
    the file locked.
    """

    def __init__(self, path: Path, *, schema: str, identity: tuple[int, int], note: Callable[[str], None]) -> None:
        self.path, self._note = path, note
        # Reason why no write succeeds any more: one wait for a lock, not one for every group.
        self._locked: UserError | None = None
        with ExitStack() as undo:
            try:
                lock = undo.enter_context(closing(claim(path.with_name(f"{path.name}.lock"), what=f"the buffer {path}")))
            except OSError as error:
                reason = f"cannot be locked ({error.strerror}), needs a file system with locks; choose another run.directory"
                raise UserError(f"the buffer {path} {reason}") from error
            with database_errors(path):
                self._connection = undo.enter_context(closing(self._connected()))
                self._open(schema, identity)
            self._lock = lock
            undo.pop_all()

    def _connected(self) -> sqlite3.Connection:
        """Return a connection to the file, for one thread."""
        connection = sqlite3.connect(self.path, timeout=NAMED_S, isolation_level=None)
        # Debian's SQLite would fill what is deleted with zeros, which takes 20 times as long.
        connection.execute("PRAGMA secure_delete = FAST")
        return connection

    def _open(self, schema: str, identity: tuple[int, int]) -> None:
        # On file systems without WAL, SQLite stays with the rollback journal: as safe, but slower.
        self._read("PRAGMA journal_mode = WAL")
        self._read("PRAGMA synchronous = NORMAL")
        if self._read("SELECT count(*) FROM sqlite_master") == [(0,)]:
            self._connection.executescript(f"BEGIN IMMEDIATE; {schema} COMMIT;")
        else:
            check_identity(self.path, self._read, identity)

    def flush(self) -> None:
        """Write all moves so far to the disk, so that no power failure can undo them."""
        log = self.path.with_name(f"{self.path.name}-wal")
        # A checkpoint of SQLite would wait for readers of the file.
        if log.exists():
            with disk_errors(log):
                sync(log)
                sync(log.parent)

    def close(self) -> None:
        """Flush and let another process open the file."""
        self.flush()
        self._connection.close()
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _read(self, query: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> list[Any]:
        with database_errors(self.path):
            return self._connection.execute(query, values).fetchall()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Write all of the body, or nothing where it raises; one in another's body is a part of that."""
        if self._connection.in_transaction:
            yield self._connection
        else:
            yield from self._own_transaction()

    def _own_transaction(self) -> Iterator[sqlite3.Connection]:
        with database_errors(self.path):
            self._begin()
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                # A full disk ends the transaction by itself.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def _begin(self) -> None:
        """Begin to write. Raises UserError for a lock of BUFFER_LOCK_S seconds, and from then on."""
        if self._locked is not None:
            raise self._locked
        for wait_s in (NAMED_S, BUFFER_LOCK_S):
            self._connection.execute(f"PRAGMA busy_timeout = {1000 * wait_s:.0f}")
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                if str(error) != LOCKED:
                    raise
            locked = f"another program has kept the buffer {self.path} locked for {wait_s:g} s; {_FIXES[LOCKED]}"
            if wait_s == NAMED_S:
                self._note(f"{locked}, or this run ends after {BUFFER_LOCK_S:g} s")
        self._locked = UserError(locked)
        raise self._locked


def check_database(path: Path) -> None:
    """Raise UserError for a file at `path` that is no database, by the file's first bytes.

    SQLite would write the write-ahead log of a killed run, or, read-only, see broken pages.
    """
    if not path.exists():
        return
    with disk_errors(path), path.open("rb") as file:
        head = file.read(len(_MAGIC))
    if head and head != _MAGIC:
        with database_errors(path):
            raise sqlite3.DatabaseError("file is not a database")


def check_identity(path: Path, read: Callable[[str], list[Any]], identity: tuple[int, int]) -> None:
    """Raise UserError for a database of another application id or schema version; `read` runs a query."""
    ((application,),), ((version,),) = (read(f"PRAGMA {name}") for name in ("application_id", "user_version"))
    if application != identity[0]:
        raise UserError(f"{path} is the database of another program; choose another run.directory")
    if version != identity[1]:
        raise UserError(
            f"{path} has schema version {version}, this release reads {identity[1]}: choose another run.directory "
            "or use the release that wrote it"
        )


@contextmanager
def database_errors(path: Path) -> Iterator[None]:
    """Raise UserError for errors of the database at `path` that the user can mend."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        if str(error) not in _FIXES:
            raise
        raise UserError(f"cannot use the buffer {path}: {error}; {_FIXES[str(error)]}") from error
