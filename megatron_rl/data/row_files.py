"""Rows of a data file, JSON lines or parquet, each with its origin, `FILE:LINE`, for error messages."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from megatron_rl.config.settings import DataSettings
from megatron_rl.errors import UserError

Message = Mapping[str, str]
_JSON_TYPES = (str, int, float, bool, list, dict, type(None))


@dataclass(frozen=True, slots=True)
class Row:
    """One checked row: a prompt (text, or chat messages), its label, a target response, all other fields, and its origin, `FILE:LINE`."""

    origin: str
    prompt: str | tuple[Message, ...]
    label: str | None
    response: str | None
    metadata: Mapping[str, Any]


def read_rows(path: Path, *, settings: DataSettings, need_response: bool = False) -> list[Row]:
    """Read and check every row of a `.jsonl` or `.parquet` file.

    `need_response`, for supervised training, makes a row without settings.response_key an error; otherwise a label_key that was set and
    that no row has is one. Raises UserError with the line (the row, counted from 1, in parquet), what was found and what is needed.
    """
    check_is_data_file(path)
    records = _parquet_records(path) if path.suffix == ".parquet" else _json_records(path)
    rows = [check_row(record, origin, settings=settings, need_response=need_response) for origin, record in records]
    if not rows:
        raise UserError(f"data file {path} has no rows, needs at least one")
    named = settings.label_key != DataSettings.model_fields["label_key"].default
    if named and not need_response and all(row.label is None for row in rows):
        raise UserError(f"{path}: no row has the field {settings.label_key!r}; name the right one in data.label_key, or leave it out")
    return rows


def check_is_data_file(path: Path) -> None:
    """Raise UserError when there is no file at `path`, or one with an ending that is not read. Does not open it."""
    if not path.is_file():
        raise UserError(f"data file {path} {'is a directory' if path.is_dir() else 'does not exist'}; give a .jsonl or .parquet file")
    if path.suffix not in (".parquet", ".jsonl", ".json"):
        raise UserError(f"data file {path} ends in {path.suffix!r}, needs .jsonl or .parquet; convert or rename it")


def _json_records(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            origin = f"{path}:{number}"
            try:
                record = json.loads(line)
            except UnicodeDecodeError as error:
                raise UserError(f"{origin}: not UTF-8 ({error.reason} at byte {error.start}); save the file as UTF-8") from error
            except json.JSONDecodeError as error:
                raise UserError(
                    f"{origin}: not a JSON object ({error.msg} at column {error.colno}); each line needs one complete object"
                ) from error
            if not isinstance(record, dict):
                raise UserError(f'{origin}: is a JSON {type(record).__name__}, needs an object like {{"prompt": ...}}')
            yield origin, record


def _parquet_records(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise UserError(f"data file {path} is not a parquet file ({error}); write it again or use .jsonl") from error
    number = 0
    with file:
        for batch in file.iter_batches():
            for record in batch.to_pylist():
                number += 1
                yield f"{path}:{number}", record


def check_row(record: Mapping[str, Any], origin: str, *, settings: DataSettings, need_response: bool) -> Row:
    """A row from the fields of a line. Raises UserError, which begins with `origin`, for one that cannot be used."""
    wanted = {settings.prompt_key: "data.prompt_key"} | ({settings.response_key: "data.response_key"} if need_response else {})
    for key, setting in wanted.items():
        if key in record and record[key] is None:
            raise UserError(f"{origin}: {key!r} is null, needs {'a string or chat messages' if key == settings.prompt_key else 'a string'}")
        if key not in record:
            raise UserError(f"{origin}: no field {key!r}, only {', '.join(map(repr, record)) or 'none'}; name the right one in {setting}")
    response = record.get(settings.response_key)
    if response is not None and not isinstance(response, str):
        raise UserError(f"{origin}: {settings.response_key!r} has type {type(response).__name__}, needs a string")
    taken = (settings.prompt_key, settings.label_key, settings.response_key)
    metadata = {key: value for key, value in record.items() if key not in taken}
    for key, value in metadata.items():
        if not isinstance(value, _JSON_TYPES):
            raise UserError(f"{origin}: {key!r} has type {type(value).__name__}, which JSON cannot hold; drop or convert that column")
    return Row(
        origin=origin,
        prompt=_prompt(record[settings.prompt_key], origin, settings.prompt_key),
        label=_label(record.get(settings.label_key), origin, settings.label_key),
        response=response,
        metadata=metadata,
    )


def _prompt(value: Any, origin: str, key: str) -> str | tuple[Message, ...]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise UserError(f"{origin}: {key!r} is {_shown(value)}, needs a string or a list of chat messages")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise UserError(f"{origin}: chat message {_shown(message)} needs the strings 'role' and 'content'")
    # Parquet gives every message every field that any message has; None stands for a field that is not there.
    return tuple({name: part for name, part in message.items() if part is not None} for message in value)


def _label(value: Any, origin: str, key: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UserError(f"{origin}: {key!r} is {_shown(value)}, needs a string or a number; reward functions get other fields as metadata")
    return str(value)


def _shown(value: Any) -> str:
    """A value as it fits into an error message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
