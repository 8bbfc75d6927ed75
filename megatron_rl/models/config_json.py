"""Reading of a Hugging Face `config.json`: the file and single keys, with errors naming the file."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rl.errors import UserError


def read_config(path: Path) -> dict[str, Any]:
    """Return the content of config.json in the Hugging Face directory `path`.

    Raises UserError when the file is missing or malformed.
    """
    file = path / "config.json"
    if not path.is_dir():
        raise UserError(f"model.path is {path}, which is not a directory; give a Hugging Face model directory")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"model directory {path} has no config.json; {_what_to_give(path)}") from error
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error}); give a Hugging Face model directory with a readable config.json") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not valid JSON ({error}); download or save the model again") from error
    if not isinstance(config, dict):
        raise UserError(f"{file} holds a {type(config).__name__}, needs a JSON object; download or save the model again")
    return config


def _what_to_give(path: Path) -> str:
    """Suggest the intended model when `path` is no model directory.

    `path` may be a run, a checkpoint of a run, or another program's checkpoint.
    """
    for name in ("hf", "huggingface"):
        if (path / name / "config.json").is_file():
            return f"give {path / name}"
    if any((path / name).exists() for name in (".metadata", "latest_checkpointed_iteration.txt")):
        return f"convert the checkpoint first: megatron-rl convert {path} TARGET --config HUGGING_FACE_DIRECTORY"
    return "give a Hugging Face model directory"


def positive_int(config: Mapping[str, Any], key: str, origin: str, *, default: int | None = None) -> int:
    """Return the value of `key`, or `default` when absent or null.

    Raises UserError, naming `origin`, for anything else.
    """
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= sys.maxsize:
        raise UserError(f"{origin} has {key} = {value!r}, needs a positive integer; correct the file")
    return value


def count(config: Mapping[str, Any], key: str, origin: str, *, default: int | None = None) -> int:
    """Return the integer >= 0 at `key`, or `default` when absent or null.

    Raises UserError, naming `origin`, for anything else.
    """
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= sys.maxsize:
        raise UserError(f"{origin} has {key} = {value!r}, needs an integer >= 0; correct the file")
    return value


def positive_number(config: Mapping[str, Any], key: str, origin: str, *, default: float | None = None, or_zero: bool = False) -> float:
    """Return the finite number above 0 at `key`, or `default` when absent or null.

    With `or_zero` the number is at least 0. Raises UserError, naming `origin`, for anything else.
    """
    value = config.get(key)
    if value is None:
        value = default
    # Python's JSON also reads NaN, Infinity and integers of any length.
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max and (value > 0 or or_zero):
        return float(value)
    needed = "a number >= 0" if or_zero else "a positive number"
    raise UserError(f"{origin} has {key} = {value!r}, needs {needed}; correct the file")


def positive_numbers(config: Mapping[str, Any], key: str, origin: str) -> tuple[float, ...]:
    """Return the list of finite numbers above 0 at `key`.

    Raises UserError, naming `origin`, for anything else.
    """
    value = config.get(key)
    if not isinstance(value, list):
        raise UserError(f"{origin} has {key} = {value!r}, needs a list of positive numbers; correct the file")
    return tuple(positive_number({key: number}, key, origin) for number in value)


def boolean(config: Mapping[str, Any], key: str, origin: str, *, default: bool = False) -> bool:
    """Return the JSON boolean at `key`, or `default` when absent.

    null is false, as in transformers. Raises UserError, naming `origin`, for anything else.
    """
    value = config.get(key, default)
    if value is not None and not isinstance(value, bool):
        raise UserError(f"{origin} has {key} = {value!r}, needs true or false; correct the file")
    return bool(value)


def names(config: Mapping[str, Any], key: str, origin: str) -> list[str]:
    """Return the list of strings at `key`, empty when absent or null.

    Raises UserError, naming `origin`, for anything else.
    """
    value = config.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise UserError(f"{origin} has {key} = {value!r}, needs a list of strings; correct the file")
    return value


def section(config: Mapping[str, Any], key: str, origin: str) -> dict[str, Any]:
    """Return the JSON object at `key`, empty when absent or null.

    Raises UserError, naming `origin`, for anything else.
    """
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError(f"{origin} has {key} = {value!r}, needs a JSON object; correct the file")
    return value
