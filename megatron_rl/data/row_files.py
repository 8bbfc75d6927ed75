"""The files behind a path, and the check of one row, with its origin, `FILE:LINE`, for error messages.

JSON lines, a JSON array, parquet, or the directory of a dataset that Hugging Face's `datasets` saved.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config.data_settings import DataSettings
from megatron_rl.errors import UserError
from megatron_rl.types import Message

# Of lists and objects in a row: each is walked by calls of Python in the driver, the reward workers and the buffer.
_MOST_LEVELS = 64
TOO_DEEP = f"is nested in more than {_MOST_LEVELS} levels of lists and objects; flatten it, or write it as a string of JSON"
_MOST_BITS = 1024  # of an integer: Python refuses to write those of some thousand digits


@dataclass(frozen=True, slots=True)
class Row:
    """One checked row; the prompt is text, chat messages or `token_ids`, the origin `FILE:LINE`."""

    origin: str
    prompt: str | tuple[Message, ...]
    label: str | None
    response: str | None
    metadata: Mapping[str, Any]
    token_ids: tuple[int, ...] = ()


def data_paths(path: Path) -> list[Path]:
    """Return the files behind `path`, which may be a pattern such as `rows-*.jsonl` or a saved dataset.

    Raises UserError for a missing file, an unknown ending or a pattern without a file. Opens no data file.
    """
    if path.is_dir():
        return _saved_dataset(path)
    if not path.is_file():
        # Only the file's name is a pattern: a directory may have brackets in its name.
        found = sorted(path.parent.glob(path.name)) if any(letter in path.name for letter in "*?[") else []
        if not found:
            raise UserError(f"data file {path} does not exist; give a .jsonl, .json or .parquet file, or a pattern that fits some")
        return [each for one in found for each in data_paths(one)]
    if path.suffix not in (".parquet", ".jsonl", ".json"):
        raise UserError(f"data file {path} ends in {path.suffix!r}, needs .jsonl, .json or .parquet; convert or rename it")
    return [path]


def _saved_dataset(path: Path) -> list[Path]:
    """Return the Arrow files of a dataset that `datasets` saved in the directory `path`."""
    if (path / "dataset_dict.json").is_file():
        splits = ", ".join(sorted(each.name for each in path.iterdir() if each.is_dir()))
        raise UserError(f"data file {path} is a dataset of several splits ({splits}), needs one of them; add its name to the path")
    try:
        names = [entry["filename"] for entry in json.loads((path / "state.json").read_text())["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"data file {path} is a directory, needs a file, or what `datasets` wrote with save_to_disk; name the files, as {path}/*.jsonl"
        ) from None
    return [path / name for name in names]


def check_row(record: Mapping[str, Any], origin: str, *, settings: DataSettings, need_response: bool) -> Row:
    """Return a row from the fields of a line. Raise UserError, beginning with `origin`."""
    for key, value in record.items():
        _check_value({key: value}, f"{origin}: {key!r}", level=0)
    if isinstance(record.get("tools"), str):
        record = {**record, "tools": _tools(record["tools"], origin)}
    values = {key: _field(record, key) for key in (settings.prompt_key, settings.label_field, settings.response_field)}
    wanted = {settings.prompt_key: "data.prompt_key"} | ({settings.response_field: "data.label_key"} if need_response else {})
    for key, setting in wanted.items():
        if values[key] is _MISSING:
            raise UserError(f"{origin}: no field {key!r}, only {', '.join(map(repr, record)) or 'none'}; name the right one in {setting}")
        if values[key] is None:
            raise UserError(f"{origin}: {key!r} is null, needs {'a string or chat messages' if key == settings.prompt_key else 'a string'}")
    values = {key: None if value is _MISSING else value for key, value in values.items()}
    # Without a supervised target the field of data.label_key is a label.
    response = values[settings.response_field] if need_response or settings.label_key is None else None
    if response is not None and not isinstance(response, str):
        raise UserError(f"{origin}: {settings.response_field!r} has type {type(response).__name__}, needs a string")
    prompt = values[settings.prompt_key]
    given = tuple(prompt) if isinstance(prompt, list) and all(type(each) is int and each >= 0 for each in prompt) else ()
    return Row(
        origin=origin,
        prompt="" if given else _prompt(prompt, origin, settings.prompt_key),
        token_ids=given,
        label=_label(values[settings.label_field], origin, settings.label_field),
        response=response,
        metadata={key: value for key, value in record.items() if key not in values},
    )


_MISSING = object()


def _field(record: Mapping[str, Any], key: str) -> Any:
    """Return the value of `key`, or of nested objects behind a path such as `reward_model.ground_truth`."""
    if key in record:
        return record[key]
    value: Any = record
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _MISSING
        value = value[part]
    return value


def _check_value(value: Any, origin: str, *, level: int) -> None:
    """Raise UserError, beginning with `origin`, for a value beyond UTF-8, JSON or Python limits."""
    if isinstance(value, str):
        if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
            raise UserError(f"{origin} has half a character (a lone surrogate), which UTF-8 cannot hold; write the whole character")
    elif isinstance(value, dict | list):
        if level > _MOST_LEVELS:
            raise UserError(f"{origin} {TOO_DEEP}")
        for inner in (*value, *value.values()) if isinstance(value, dict) else value:
            _check_value(inner, origin, level=level + 1)
    elif isinstance(value, int):
        if value.bit_length() > _MOST_BITS:
            raise UserError(f"{origin} has an integer of {value.bit_length()} bits, needs at most {_MOST_BITS}; write it as a string")
    elif value is not None and not isinstance(value, float):
        raise UserError(f"{origin} has type {type(value).__name__}, which JSON cannot hold; drop or convert that column")


def _tools(text: str, origin: str) -> list[Any]:
    """Return the tools in a text of JSON."""
    try:
        tools = json.loads(text)
    except (ValueError, RecursionError):
        tools = None
    if not isinstance(tools, list):
        raise UserError(f"{origin}: 'tools' is {_shown(text)}, needs a list, or a text of JSON with one")
    return tools


def _prompt(value: Any, origin: str, key: str) -> str | tuple[Message, ...]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise UserError(f"{origin}: {key!r} is {_shown(value)}, needs a string, a list of chat messages, or token ids")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise UserError(f"{origin}: chat message {_shown(message)} needs the strings 'role' and 'content'")
    # Parquet gives every message all fields of any message; None stands for a missing field.
    return tuple({name: part for name, part in message.items() if part is not None} for message in value)


def _label(value: Any, origin: str, key: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UserError(f"{origin}: {key!r} is {_shown(value)}, needs a string or a number; reward functions get other fields as metadata")
    if not math.isfinite(value):
        raise UserError(f"{origin}: {key!r} is {value}, which is no reference answer; leave the field out, or write it as a string")
    return str(value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
