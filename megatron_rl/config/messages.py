"""Pydantic's validation errors as sentences that name the setting, the value got, the value needed and the fix."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from megatron_rl.config.reference import section_names, setting_fields
from megatron_rl.config.yaml_text import format_value
from megatron_rl.errors import UserError

_UNKNOWN = frozenset({"extra_forbidden", "unexpected_keyword_argument"})
_NEEDS = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "dict_type": "a mapping of names to values",
    "model_type": "a section with settings inside",
    "model_attributes_type": "a section with settings inside",
    "dataclass_type": "a section with settings inside",
    "tuple_type": "a list, such as [a, b]",
    "list_type": "a list, such as [a, b]",
    "none_required": "null",
    "finite_number": "a finite number",
    "path_type": "a path",
}
_BOUNDS = {
    "greater_than_equal": ("a number >= {}", "ge"),
    "greater_than": ("a number > {}", "gt"),
    "less_than_equal": ("a number <= {}", "le"),
    "less_than": ("a number < {}", "lt"),
}


def settings_error(error: ValidationError, *, values: Mapping[str, Any], origin: str) -> UserError:
    """One UserError with a line for every setting that is wrong in `values`; `origin` says where they came from."""
    by_path: dict[str, list[ErrorDetails]] = {}
    for details in error.errors(include_url=False):
        by_path.setdefault(_path(details["loc"], values), []).append(details)
    return joined_error([_sentence(path, details) for path, details in by_path.items()], origin=origin)


def joined_error(sentences: Sequence[str], *, origin: str) -> UserError:
    """One sentence as it is, several as a headed list with one line each."""
    if len(sentences) == 1:
        return UserError(f"{origin}: {sentences[0]}")
    return UserError("\n  - ".join([f"{origin}: {len(sentences)} things are wrong", *sentences]))


def closest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate most like `name`, None when none is like it."""
    matches = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.6)
    return matches[0] if matches else None


def unknown_setting(path: str) -> str:
    """The sentence for a setting that does not exist, with the closest one that does.

    A misspelled name is looked for in its own section first, then, by its last part, everywhere: `run.temperature` finds
    `rollout.sampling.temperature`.
    """
    section, _, name = path.rpartition(".")
    paths = [field.path for field in setting_fields()] + list(section_names())
    siblings = [known.rpartition(".")[2] for known in paths if known.rpartition(".")[0] == section]
    same_name = [known for known in paths if known.rpartition(".")[2] == name]
    sibling = closest(name, siblings)
    if sibling is not None:
        guess: str | None = f"{section}.{sibling}" if section else sibling
    elif same_name:
        guess = same_name[0]
    else:
        leaf = closest(name, [known.rpartition(".")[2] for known in paths])
        guess = next((known for known in paths if known.rpartition(".")[2] == leaf), None) or closest(path, paths)
    if guess:
        return f"unknown setting {path}; did you mean {guess}? (`megatron-rl train --help` lists all)"
    known_names = f"known in {section or 'the settings'}: {', '.join(siblings)}" if siblings else f"there is no section {section}"
    return f"unknown setting {path}; {known_names}"


def _path(location: tuple[int | str, ...], values: Any) -> str:
    """The dotted path of an error's location, without the parts by which pydantic tells the members of a union apart."""
    parts: list[str] = []
    for part in location:
        inside = isinstance(values, Mapping) and isinstance(part, str)
        if isinstance(values, Sequence) and not isinstance(values, str) and isinstance(part, int):
            parts.append(str(part))
            values = values[part] if part < len(values) else None
        elif inside:
            parts.append(str(part))
            values = values.get(part)
    return ".".join(parts)


def _sentence(path: str, details: Sequence[ErrorDetails]) -> str:
    """What is wrong at one path; several details are the alternatives of a union, none of which fits."""
    first = details[0]
    if first["type"] in _UNKNOWN:
        return unknown_setting(path)
    if first["type"] == "missing":
        described = [field.description.rstrip(".") for field in setting_fields() if field.path == path]
        meaning = f" ({described[0]})" if described else ""
        return f"{path} is missing{meaning}; set it in the file, or with {path}=VALUE"
    if first["type"] == "value_error":
        return f"{path}: {first['ctx']['error']}"
    got = first["input"]
    shown = format_value(got) if first["type"] in _BOUNDS or got is None else f"{format_value(got)} ({_kind(got)})"
    needs = ", or ".join(dict.fromkeys(_need(detail) for detail in details))
    return f"{path} is {shown}, needs {needs}{_fix(path, details, got)}"


def _need(details: ErrorDetails) -> str:
    kind = details["type"]
    if kind in _NEEDS:
        return _NEEDS[kind]
    if kind in _BOUNDS:
        words, key = _BOUNDS[kind]
        return words.format(details["ctx"][key])
    if kind == "literal_error":
        return f"one of {details['ctx']['expected']}"
    message = details["msg"]
    return message[0].lower() + message[1:]


def _fix(path: str, details: Sequence[ErrorDetails], got: Any) -> str:
    """How to mend it, where that is more than giving the value that is needed."""
    for detail in details:
        if detail["type"] == "literal_error" and isinstance(got, str):
            names = [name.strip(" '") for name in detail["ctx"]["expected"].replace(" or ", ",").split(",")]
            guess = closest(got, names)
            return f"; did you mean {path}={guess}?" if guess else ""
        if detail["type"] == "string_type" and isinstance(got, bool | int | float):
            return f"; put quotes around it if it is meant as text: {path}='\"{format_value(got)}\"'"
    return ""


def _kind(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "list", dict: "mapping", type(None): "null"}
    return kinds[type(value)]
