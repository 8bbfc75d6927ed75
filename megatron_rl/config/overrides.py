"""Overrides from the command line: `key.path=value`, `--key.path value` and `--key.path=value`, values in YAML."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config.messages import closest, unknown_setting
from megatron_rl.config.settings import Settings
from megatron_rl.config.yaml_text import parse_yaml
from megatron_rl.errors import UserError

_KEY = re.compile(r"^[A-Za-z_][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*$")


@dataclass(frozen=True, slots=True)
class Words:
    """The settings file, and overrides `key.path=value` in the order of the command line."""

    config: Path | None
    overrides: tuple[str, ...]


def split_words(words: Sequence[str], *, options: Collection[str]) -> Words:
    """Separate the settings file from the overrides and bring every override into one form.

    `options` are the command's own options, for the advice on a misspelled option. A word whose
    part before "=" cannot be the name of a setting is taken as the file. Raises UserError for a
    second file, an unknown option and an option without a value.
    """
    config: Path | None = None
    overrides: list[str] = []
    rest = iter(words)
    for word in rest:
        dashed = word.startswith("--")
        key, equals, value = word.removeprefix("--").partition("=")
        if dashed:
            _check_option(key, options=options)
            following = value if equals else next(rest, None)
            if following is None or (not equals and following.startswith("--")):
                raise UserError(f"Option --{key} has no value; write --{key} VALUE or {key}=VALUE")
            overrides.append(f"{key}={following}")
        elif equals and _KEY.match(key):
            overrides.append(word)
        elif config is None:
            config = Path(word)
        else:
            raise UserError(f"Got {word!r} after the settings file {config}, needs at most one file; write overrides as key.path=value")
    return Words(config, tuple(overrides))


def apply_overrides(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a copy of the nested `values` with every override `key.path=value`; a later one wins.

    Raises UserError for a value that is not YAML, for a key without a value and for a path through
    a value without keys.
    """
    result = dict(values)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not _KEY.match(key):
            raise UserError(f"Override {override!r} is not of the form key.path=value; write for example run.seed=1")
        _set(result, key, parse_yaml(text, origin=f"override {override!r}"))
    return result


def _check_option(key: str, *, options: Collection[str]) -> None:
    """Raise UserError for an option in neither the command's nor a setting's form."""
    if "." in key or key in Settings.model_fields:
        return
    option = closest(key, options)
    advice = f"unknown option --{key}; did you mean --{option}?" if option else unknown_setting(key)
    raise UserError(f"Command line: {advice}")


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    """Set the dotted `key`; copied mappings leave the caller's values unchanged."""
    *sections, name = key.split(".")
    for depth, section in enumerate(sections):
        inner = values.get(section)
        if inner is not None and not isinstance(inner, Mapping):
            raise UserError(
                f"Override {key} goes through {'.'.join(sections[: depth + 1])}, which is {inner!r} and has no settings inside; "
                f"give the name of one of the settings that `megatron-rl train --help all` lists"
            )
        values[section] = dict(inner or {})
        values = values[section]
    if name == "kind" and values.get("kind", value) != value:
        # The old values are arguments of the kind named before.
        values.clear()
    values[name] = value
