"""Checked rows that stay on the disk: an index of places in files of any size, and the files behind it."""

import hashlib
import io
import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, BinaryIO, overload

import numpy as np
import pyarrow
import pyarrow.parquet
from numpy.typing import NDArray

from megatron_rl.config.data_settings import DataFiles, DataSettings
from megatron_rl.data.row_files import TOO_DEEP, Row, check_row, data_paths
from megatron_rl.errors import UserError, counted
from megatron_rl.system.files import disk_errors
from megatron_rl.types import Ints

_SMALL_BYTES = 2**26
"""Files of a source that are no larger together are kept in memory, where nobody changes them during a run."""
_ROWS_AT_ONCE = 1024  # of a table
_INDEX = np.dtype([("file", "<i4"), ("number", "<i8"), ("place", "<i8"), ("key", "<u8"), ("labelled", "?")])
"""29 bytes of a row: file, number in it from 1, place in the words of the file, digest of the prompt, and whether it has a label."""
_EMPTY: NDArray[Any] = np.empty(0, _INDEX)
_PACKED = struct.Struct("<iqqQ?")


class BadRows:
    """Rows that are left out, with their reasons; more than `limit` are an error."""

    def __init__(self, limit: int = 0) -> None:
        self.limit = limit
        self.reasons: list[str] = []

    def add(self, error: UserError) -> None:
        """Leave a row out because of `error`. Raises it without a limit, and UserError beyond the limit."""
        if not self.limit:
            raise error
        self.reasons.append(str(error))
        if len(self.reasons) > self.limit:
            raise UserError(
                f"{len(self.reasons)} rows cannot be used, data.max_bad_rows is {self.limit}; mend them, or raise it; the first: "
                f"{self.reasons[0]}; the last: {error}"
            )


class _LineFile:
    """JSON lines, or the elements of one JSON array, which is kept in memory; a place is the offset of a line in bytes."""

    def __init__(self, path: Path, *, in_memory: bool) -> None:
        self.path, self._state, self._kept = path, _state(path), b""
        with path.open("rb") as file:
            begin = file.read(1024).lstrip()[:1] if path.suffix == ".json" else b""
            file.seek(0)
            if begin == b"[":
                self._kept = _array_lines(file)
            elif in_memory:
                self._kept = file.read()

    def _opened(self) -> BinaryIO:
        return io.BytesIO(self._kept) if self._kept else self.path.open("rb")

    def scan(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield number from 1, place and content of each row."""
        place = 0
        with self._opened() as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, place, line
                place += len(line)

    def at(self, place: int) -> bytes:
        """Return the content of the row at `place`. Raises UserError for a changed file."""
        if not self._kept and _state(self.path) != self._state:
            raise UserError(f"data file {self.path} was changed while the run reads it; restore it, and write new rows to another file")
        with self._opened() as file:
            file.seek(place)
            return file.readline()

    def record(self, content: bytes, origin: str) -> Mapping[str, Any]:
        """Return the fields of a row. Raises UserError, beginning with `origin`."""
        try:
            record = json.loads(content, object_pairs_hook=_object)
        except UnicodeDecodeError as error:
            raise UserError(f"{origin}: not UTF-8 ({error.reason} at byte {error.start}); save the file as UTF-8") from error
        except json.JSONDecodeError as error:
            reason = f"{error.msg} at column {error.colno}"
            raise UserError(f"{origin}: not a JSON object ({reason}); each line needs one complete object") from error
        except ValueError as error:
            raise UserError(f"{origin}: {error}") from error
        except RecursionError:
            raise UserError(f"{origin}: {TOO_DEEP}") from None
        if not isinstance(record, dict):
            raise UserError(f'{origin}: is a JSON {type(record).__name__}, needs an object like {{"prompt": ...}}')
        return record


class _TableFile:
    """A parquet or Arrow file; a place is a row, from 0. Parquet is written once as Arrow to TMPDIR, to read rows in any order."""

    def __init__(self, path: Path) -> None:
        self.path, self._is_parquet = path, path.suffix == ".parquet"
        self._batch: Callable[[int], Any]
        self._starts = [0]

    def scan(self) -> Iterator[tuple[int, int, Mapping[str, Any]]]:
        """Yield number from 1, place and content of each row. Raises UserError for a broken file."""
        number = 0
        try:
            for batch in self._parquet_batches() if self._is_parquet else self._arrow_batches():
                self._starts.append(self._starts[-1] + batch.num_rows)
                for first in range(0, batch.num_rows, _ROWS_AT_ONCE):
                    for record in batch.slice(first, _ROWS_AT_ONCE).to_pylist():
                        number += 1
                        yield number, number - 1, record
        except UserError:
            raise
        except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
            kind = "a parquet" if self._is_parquet else "an Arrow"
            words = f"data file {self.path} is not {kind} file that can be read, behind row {number} ({error})"
            raise UserError(f"{words}; write it again or use .jsonl") from error

    def _arrow_batches(self) -> Iterator[Any]:
        file = pyarrow.ipc.open_stream(pyarrow.memory_map(str(self.path)))
        _check_names(file.schema)
        batches = list(file)
        self._batch = batches.__getitem__
        yield from batches

    def _parquet_batches(self) -> Iterator[Any]:
        with NamedTemporaryFile(prefix="megatron-rl-", suffix=".arrow") as copy:
            with pyarrow.parquet.ParquetFile(self.path, buffer_size=2**20, pre_buffer=False) as file:
                _check_names(file.schema_arrow)
                with disk_errors(Path(copy.name)), pyarrow.ipc.new_file(copy.name, file.schema_arrow) as target:
                    for batch in file.iter_batches(_ROWS_AT_ONCE):
                        target.write_batch(batch)
                        yield batch
            # It is there as long as it is mapped.
            self._batch = pyarrow.ipc.open_file(pyarrow.memory_map(copy.name)).get_batch

    def at(self, place: int) -> Mapping[str, Any]:
        """Return the content of the row at `place`."""
        number = int(np.searchsorted(self._starts, place, side="right")) - 1
        (record,) = self._batch(number).slice(place - self._starts[number], 1).to_pylist()
        return dict(record)

    def record(self, content: Mapping[str, Any], origin: str) -> Mapping[str, Any]:
        """Return the fields of a row."""
        return content


class Rows(Sequence[Row]):
    """Rows of `files`, read whenever asked for and checked by the file's own of `checks`, by an `index` of _INDEX [rows]."""

    def __init__(self, files: Sequence[Any] = (), index: NDArray[Any] = _EMPTY, checks: Sequence[Callable[..., Row]] = ()) -> None:
        self.keys, self.is_labelled = index["key"], index["labelled"]
        """Digests of the prompts [rows], and which rows have a label [rows]."""
        self._files, self._index, self._checks = files, index, checks

    def __len__(self) -> int:
        return len(self._index)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        file, number, place, *_ = self._index[index].item()
        return _checked(self._files[file], number, self._files[file].at(place), self._checks[file])

    def take(self, kept: slice | Ints) -> "Rows":
        """Return the rows of a slice or of indices [n], of the same files."""
        return Rows(self._files, self._index[kept], self._checks)

    @classmethod
    def joined(cls, parts: Sequence["Rows"]) -> "Rows":
        """Return the rows of all parts, one after the other."""
        files, checks, indices = list[Any](), list[Callable[..., Row]](), []
        for part in parts:
            indices.append(part._index.copy())
            indices[-1]["file"] += len(files)
            files += part._files
            checks += part._checks
        return cls(files, np.concatenate(indices), checks)


def read_rows(files: DataFiles, *, settings: DataSettings, need_response: bool = False, bad: BadRows | None = None) -> Rows:
    """Check all rows of `files`, and return the chosen ones, in the order of names and lines.

    Raises UserError with the line (in a table the row, counted from 1), also for a row without a
    target where supervised training will `need_response`, and for a label_key found in no row.
    `bad` gets the rows that may be left out.
    """
    opened, index, bad = _open(data_paths(files.path)), bytearray(), bad or BadRows()
    settings = settings.model_copy(update=files.keys)
    check = partial(check_row, settings=settings, need_response=need_response)
    for file_number, file in enumerate(opened):
        number = 0
        for number, place, content in file.scan():
            try:
                row = _checked(file, number, content, check)
            except UserError as error:
                bad.add(error)
            else:
                index += _PACKED.pack(file_number, number, place, _prompt_key(row), row.label is not None)
        if not number:
            raise UserError(f"data file {file.path} has no rows, needs at least one")
    kept = Rows(opened, np.frombuffer(index, _INDEX), [check] * len(opened))
    rows = kept.take(files.chosen)
    if not len(rows):
        raise UserError(f"data file {files.path} has {counted(len(kept), 'row')}, of which rows {files.rows} are none; choose others")
    if settings.label_key is not None and not need_response and not rows.is_labelled.any():
        raise UserError(f"{files.path}: no row has the field {settings.label_key!r}; name the right one in data.label_key, or leave it out")
    return rows


def read_first_row(files: DataFiles, *, settings: DataSettings) -> Row:
    """Read and check the first row that `read_rows` keeps, and none behind it. Raises UserError as it does."""
    settings = settings.model_copy(update=files.keys)
    bad, check = BadRows(settings.max_bad_rows), partial(check_row, settings=settings, need_response=False)
    for path in data_paths(files.path):
        (file,) = _open([path])
        for number, _, content in file.scan():
            try:
                return _checked(file, number, content, check)
            except UserError as error:
                bad.add(error)
    raise UserError(
        f"data file {files.path} has no rows that can be used, needs at least one{''.join(f'; {why}' for why in bad.reasons[:1])}"
    )


def _checked(file: Any, number: int, content: Any, check: Callable[..., Row]) -> Row:
    origin = f"{file.path}:{number}"
    return check(file.record(content, origin), origin)


def _open(paths: Sequence[Path]) -> list[Any]:
    """Return the files at `paths`, in memory where all of them are small together."""
    in_memory = sum(path.stat().st_size for path in paths) <= _SMALL_BYTES
    return [_LineFile(path, in_memory=in_memory) if path.suffix in (".jsonl", ".json") else _TableFile(path) for path in paths]


def _state(path: Path) -> tuple[int, ...]:
    """Return what changes with a file: its inode, size and time; nothing of one that is gone."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _array_lines(file: BinaryIO) -> bytes:
    """Return a line for each element of one JSON array. Raises UserError."""
    try:
        return b"".join(json.dumps(element).encode() + b"\n" for element in json.loads(file.read(), object_pairs_hook=_object))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file.name}: not an array of JSON objects ({error}); correct it, or write one object in each line") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raise ValueError for a repeated key: json keeps only the last."""
    record = dict(pairs)
    if len(record) < len(pairs):
        twice = next(key for index, (key, _) in enumerate(pairs) if key in dict(pairs[:index]))
        raise ValueError(f"the key {twice!r} appears twice in one object; keep the one that is meant")
    return record


def _check_names(schema: Any) -> None:
    """Raise ValueError for two columns of a name, of which a row would keep the last."""
    if len(set(schema.names)) < len(schema.names):
        raise ValueError(f"of its columns {', '.join(map(repr, schema.names))} two have one name")


def _prompt_key(row: Row) -> int:
    """Return a digest of a row's prompt without differences of case and white space."""
    if isinstance(row.prompt, str):
        text = _plain(str(row.token_ids or row.prompt))
    else:
        # Text by text: JSON would write the end of a line, and letters beyond ASCII, as marks that no rule of case or space knows.
        plain = [{key: _plain(part) if isinstance(part, str) else part for key, part in message.items()} for message in row.prompt]
        text = json.dumps(plain, sort_keys=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())
