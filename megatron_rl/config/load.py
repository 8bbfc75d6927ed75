"""From a YAML file and command line overrides to validated settings, and back to text.

Order: file, then overrides `key.path=value` (a later one wins), then the objective's preset fills
open values, then validation, then decisions on open settings (`config/decided.py`), then the
cross-checks of `config/checks.py`. Types are strict: an integer is no number in quotes and no
boolean. Paths are relative to the directory in which the command runs.

PyYAML follows YAML 1.1, where `1e-6` is a string, `off` is a boolean and `12:30` is 750; ruamel.yaml
follows YAML 1.2.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from ruamel.yaml import YAML, SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from megatron_rl.algorithms.objective import expand_preset
from megatron_rl.config.checks import contradictions
from megatron_rl.config.decided import Decision, decide
from megatron_rl.config.eval_sets import expand_sets
from megatron_rl.config.messages import closest, joined_error, settings_error, unknown_setting
from megatron_rl.config.settings import Settings
from megatron_rl.config.yaml_text import format_yaml
from megatron_rl.errors import UserError

_ADAPTER = TypeAdapter(Settings)
_KEY = re.compile(r"^[A-Za-z_][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*$")
_MOST_VALUES = 10_000
"""Values in one text, aliases expanded: ten lines of aliases can stand for billions."""
_MOST_BYTES = 2**20
"""Of a settings file: reading the YAML of a data file or a tokenizer would take minutes."""


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


def _check_option(key: str, *, options: Collection[str]) -> None:
    """Raise UserError for an option in neither the command's nor a setting's form."""
    if "." in key or key in Settings.model_fields:
        return
    option = closest(key, options)
    advice = f"unknown option --{key}; did you mean --{option}?" if option else unknown_setting(key)
    raise UserError(f"Command line: {advice}")


def load_settings(path: Path | None, overrides: Sequence[str] = (), *, on_gpus: bool | None = None) -> Settings:
    """Load settings from the YAML file `path`, with `key.path=value` overrides set on top.

    `path` None takes the overrides alone. Raises UserError for an unreadable file, bad YAML,
    unknown or misspelled settings, wrong types or ranges, and contradictions between settings.
    Several mistakes are reported together, one line each.
    """
    return load_decided(path, overrides, on_gpus=on_gpus)[0]


def load_decided(path: Path | None, overrides: Sequence[str] = (), *, on_gpus: bool | None = None) -> tuple[Settings, tuple[Decision, ...]]:
    """Return settings as `load_settings`, with the decisions on open settings.

    `on_gpus` None takes GPUs where `runtime.cluster.gpu` names some or this machine has some; False
    decides nothing about GPUs.
    """
    origin = " and ".join([str(path)] * (path is not None) + ["overrides"] * bool(overrides)) or "settings"
    values = apply_overrides({} if path is None else read_yaml(path), overrides)
    validated = _validated(values, origin=origin)
    # Asking torch would take seconds.
    has_gpus = (validated.runtime.cluster.gpu is not None or Path("/dev/nvidia0").exists()) if on_gpus is None else on_gpus
    settings, decisions = decide(validated, has_gpus=has_gpus)
    if wrong := contradictions(settings):
        raise joined_error(wrong, origin=origin)
    return settings, decisions


def validate_settings(values: Mapping[str, Any], *, origin: str) -> Settings:
    """Return settings from nested plain values from `origin`, as YAML gives them. Raises UserError."""
    settings = _validated(values, origin=origin)
    if wrong := contradictions(settings):
        raise joined_error(wrong, origin=origin)
    return settings


def _validated(values: Mapping[str, Any], *, origin: str) -> Settings:
    # With a section data, which names its missing values.
    values = {**values, "data": values.get("data", {})}
    try:
        if isinstance(objective := values.get("objective"), Mapping):
            values["objective"] = expand_preset(objective)
        if isinstance(evaluation := values.get("eval"), Mapping):
            values["eval"] = expand_sets(evaluation)
    except ValueError as error:
        raise UserError(f"{origin}: objective.preset: {error}") from None
    try:
        text = json.dumps(values, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{origin}: the settings cannot be written as JSON ({error}); remove half characters and a YAML alias that contains itself"
        ) from None
    try:
        # Through JSON, because pydantic's strict mode takes JSON strings as paths and lists as tuples, but no Python ones.
        return _ADAPTER.validate_json(text, strict=True)
    except ValidationError as error:
        if error.errors(include_url=False)[0]["type"] == "json_invalid":
            raise UserError(f"{origin}: the settings are nested too deeply; no setting has so many levels") from None
        raise settings_error(error, values=values, origin=origin) from None


def dump_settings(settings: Settings) -> str:
    """Return all settings, defaults included, as YAML text; `load_settings` makes equal settings from it."""
    return format_yaml(_ADAPTER.dump_python(settings, mode="json"))


def read_yaml(path: Path) -> Mapping[str, Any]:
    """Return the values of a settings file; an empty one has none. Raises UserError."""
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise UserError(
                f"Settings file {path} has more than {_MOST_BYTES:,} bytes, which no settings need; give the path of a YAML file"
            )
        text = content.decode("utf-8")
    except OSError as error:
        raise UserError(f"Settings file {path} cannot be read ({error.strerror}); give the path of a YAML file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"Settings file {path} is not UTF-8 text (byte {error.start}); give the path of a YAML file") from None
    values = parse_yaml(text, origin=str(path))
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise UserError(f"{path} holds {type(values).__name__}, needs a mapping of sections; start with a line such as `run:`")
    return values


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


class _Constructor(SafeConstructor):
    """Constructor that leaves a date as text."""


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", lambda constructor, node: node.value)


def parse_yaml(text: str, *, origin: str) -> Any:
    """Return the value of one YAML document: mappings, lists, texts, numbers, booleans and null.

    `origin` names the text in errors: a path, or an override. Raises UserError with line and column
    for bad syntax and for a repeated key. Raises UserError for a key that is not a string, a value
    of another kind, and aliases that expand too far.
    """
    reader = YAML(typ="safe", pure=True)
    reader.Constructor = _Constructor
    try:
        value = reader.load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{origin}, line {mark.line + 1}, column {mark.column + 1}" if mark is not None else origin
        problem = " ".join(str(part) for part in (error.context, error.problem) if part)
        fix = "correct that line, or put quotes around a value with special characters"
        raise UserError(f"{where}: not valid YAML ({problem}); {fix}") from None
    except RecursionError:
        raise UserError(f"{origin}: not valid YAML (nested too deeply); no setting has so many levels") from None
    except YAMLError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{origin}: not valid YAML ({reason}); save the file as UTF-8 text without control characters") from None
    except ValueError as error:
        raise UserError(f"{origin}: not valid YAML ({error}); no setting is so long a number") from None
    _check_plain(value, origin)
    return value


def _check_plain(value: Any, origin: str) -> None:
    """Raise UserError for a value without a form in JSON, and for too many values."""
    waiting, count = [value], 0
    while waiting:
        value = waiting.pop()
        count += 1
        if count > _MOST_VALUES:
            raise UserError(f"{origin}: has more than {_MOST_VALUES} values, many by aliases; write out what is meant")
        if isinstance(value, dict):
            strange = next((key for key in value if not isinstance(key, str)), None)
            if strange is not None:
                raise UserError(f"{origin}: the key {strange!r} is not a string; put quotes around it")
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
        elif value is not None and not isinstance(value, str | bool | int | float):
            raise UserError(f"{origin}: {value!r:.60} has the type {type(value).__name__}, which no setting has; write it as text")
