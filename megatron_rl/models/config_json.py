"""Reading of a Hugging Face `config.json`: the file and single keys, with errors naming the file."""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.errors import UserError


def read_config(path: Path) -> dict[str, Any]:
    """Return config.json of the directory `path`. Raises UserError when missing or malformed."""
    if not path.is_dir():
        raise UserError(f"model.path is {path}, which is not a directory; give a Hugging Face model directory")
    if not (path / "config.json").exists():
        raise UserError(f"model directory {path} has no config.json; {_what_to_give(path)}")
    return read_object(path / "config.json", fix="download or save the model again")


def read_object(file: Path, *, fix: str) -> dict[str, Any]:
    """Return the JSON object in `file`. Raises UserError, which ends in `fix`, for anything else."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}); {fix}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not valid JSON ({error}); {fix}") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} holds a {type(content).__name__}, needs a JSON object; {fix}")
    return content


def _what_to_give(path: Path) -> str:
    """Suggest the intended model for a run, a run's checkpoint, or another program's."""
    for name in ("hf", "huggingface"):
        if (path / name / "config.json").is_file():
            return f"give {path / name}"
    if any((path / name).exists() for name in (".metadata", "latest_checkpointed_iteration.txt")):
        return f"convert the checkpoint first: megatron-rl convert {path} TARGET --config HUGGING_FACE_DIRECTORY"
    return "give a Hugging Face model directory"


MOST_PARTS = 10_000
"""Of layers in a model and of experts in a layer: each has its rows in the table of weights."""


def _required(key: str) -> None:
    """Return no value for any absent key."""


@dataclass(frozen=True, slots=True)
class JsonObject:
    """An object of a config.json: `values` by key, and `origin`, the name of the object in errors.

    null is an absent key. Methods return the value of a key or raise UserError for another type.
    `default` is the value of an absent key; without one, `absent` gives transformers' value for
    keys read as `optional`.
    """

    values: Mapping[str, Any]
    origin: str
    absent: Callable[[str], Any] = _required

    def _value(self, key: str, default: Any, optional: bool) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        return self.absent(key) if value is None and optional else value

    def _refuse(self, key: str, value: Any, needed: str) -> UserError:
        return UserError(f"{self.origin} has {key} = {value!r}, needs {needed}; correct the file")

    def integer(self, key: str, *, least: int = 1, most: int = sys.maxsize, default: int | None = None, optional: bool = False) -> int:
        """Return the integer at `key`, at least `least` (0 or 1) and at most `most`."""
        value = self._value(key, default, optional)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            words = "a positive integer" if least else "an integer >= 0"
            raise self._refuse(key, value, words if most == sys.maxsize else f"{words} of at most {most}")
        return value

    def number(self, key: str, *, optional: bool = False, or_zero: bool = False) -> float:
        """Return the finite number above 0 at `key`; with `or_zero` 0 is allowed."""
        value = self._value(key, None, optional)
        # Python's JSON also reads NaN, Infinity and integers of any length.
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max and (value > 0 or or_zero):
            return float(value)
        raise self._refuse(key, value, "a number >= 0" if or_zero else "a positive number")

    def numbers(self, key: str) -> list[float]:
        """Return the list of finite numbers above 0 at `key`."""
        value = self.values.get(key)
        if not isinstance(value, list):
            raise self._refuse(key, value, "a list of positive numbers")
        return [JsonObject({key: number}, self.origin).number(key) for number in value]

    def boolean(self, key: str, *, default: bool = False, optional: bool = False) -> bool:
        """Return the JSON boolean at `key`; null is false, as in transformers."""
        value = self.values[key] if key in self.values else self.absent(key) if optional else default
        if value is not None and not isinstance(value, bool):
            raise self._refuse(key, value, "true or false")
        return bool(value)

    def names(self, key: str) -> list[str]:
        """Return the list of strings at `key`, empty when absent."""
        value = self.values.get(key)
        if value is not None and (not isinstance(value, list) or not all(isinstance(name, str) for name in value)):
            raise self._refuse(key, value, "a list of strings")
        return value or []

    def section(self, key: str) -> "JsonObject":
        """Return the JSON object at `key`, empty when absent."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self._refuse(key, value, "a JSON object")
        return JsonObject(value or {}, f"{key} in {self.origin}")
