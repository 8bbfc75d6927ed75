"""Reading a Hugging Face `config.json`: the file, and single keys of it with errors that name the file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rl.errors import UserError


def read_config(path: Path) -> dict[str, Any]:
    """The content of config.json in the Hugging Face directory `path`. Raises UserError when it is missing or malformed."""
    file = path / "config.json"
    if not path.is_dir():
        raise UserError(f"model.path is {path}, which is not a directory; give a Hugging Face model directory")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"model directory {path} has no config.json; give a Hugging Face model directory") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is not valid JSON ({error}); download or save the model again") from error
    if not isinstance(config, dict):
        raise UserError(f"{file} holds a {type(config).__name__}, needs a JSON object; download or save the model again")
    return config


def positive_int(config: Mapping[str, Any], key: str, origin: str, *, default: int | None = None) -> int:
    """The value of `key`, or `default` where it is absent or null. Raises UserError, naming `origin`, for anything else."""
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{origin} has {key} = {value!r}, needs a positive integer; correct the file")
    return value
