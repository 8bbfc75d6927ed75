"""All settings with type, default and description, read from pydantic's JSON schema of the classes."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from megatron_rl.algorithms.objective import PRESETS, Objective
from megatron_rl.config.settings import Settings
from megatron_rl.config.yaml_text import format_value

_TYPES = {"string": "string", "integer": "integer", "number": "number", "boolean": "true or false", "object": "mapping", "null": "null"}
_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
_REFERENCE = "#/$defs/"


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingField:
    """One setting: dotted path, type in words, default as YAML text and description.

    The default is None for a required setting. `kinds` of a choice have the setting as an argument,
    such as `("sapo",)`; `kinds` is empty for every other setting.
    """

    path: str
    type: str
    default: str | None
    description: str
    kinds: tuple[str, ...] = ()

    @property
    def meaning(self) -> str:
        """Description, after the kinds with this argument."""
        return f"({', '.join(self.kinds)}) {self.description}" if self.kinds else self.description

    @property
    def required(self) -> bool:
        """True without a default."""
        return self.default is None

    def belongs_to(self, kind: str | None) -> bool:
        """Return True for a setting of this kind or of every kind; None stands for any kind."""
        return kind is None or not self.kinds or kind in self.kinds


@functools.cache
def _schema(owner: Any) -> Mapping[str, Any]:
    schema: Mapping[str, Any] = TypeAdapter(owner).json_schema()
    return schema


@functools.cache
def setting_fields(owner: type = Settings) -> tuple[SettingField, ...]:
    """Return all settings below the class `owner` (a pydantic model or a dataclass), as declared.

    A section with null as a value appears itself too, before its fields. Of a choice come the kind,
    then the arguments of each kind.
    """
    schema = _schema(owner)
    return tuple(_fields(schema, schema.get("$defs", {}), prefix=""))


def _fields(section: Mapping[str, Any], classes: Mapping[str, Any], *, prefix: str) -> Iterator[SettingField]:
    if prefix and section.get("title") == Objective.__name__:
        # The one key that is no field of a class: validation replaces the key by fields.
        words = "A published combination; it fills the fields of this section that are not set."
        yield SettingField(path=f"{prefix}preset", type=f"one of {', '.join(PRESETS)}, or null", default="null", description=words)
    for name, value in section["properties"].items():
        path, kinds = f"{prefix}{name}", _kinds(value, classes)
        members, may_be_null = list(dict.fromkeys(kinds.values())), {"type": "null"} in value.get("anyOf", ())
        if not members or may_be_null:
            # A default made by a call is an empty mapping, and not in the schema.
            default = None if name in section.get("required", ()) else format_value(value.get("default", {}))
            yield SettingField(path=path, type=_words(value), default=default, description=value.get("description", ""))
        if kinds and "" not in kinds:
            chosen = None if may_be_null else str(value["default"]["kind"])
            yield from _choice(path, kinds, classes, default=chosen, description=value["description"])
        elif members:
            yield from _fields(classes[members[0]], classes, prefix=f"{path}.")


def _choice(
    path: str, members: Mapping[str, str], classes: Mapping[str, Any], *, default: str | None, description: str
) -> Iterator[SettingField]:
    """Yield the kind of a choice, then each argument, once for all `members` in which it means the same."""
    yield SettingField(path=f"{path}.kind", type=f"one of {', '.join(members)}", default=default, description=description)
    found: dict[SettingField, tuple[str, ...]] = {}
    for kind, name in members.items():
        for field in _fields(classes[name], classes, prefix=f"{path}."):
            if field.path != f"{path}.kind":
                found[field] = (*found.get(field, ()), kind)
    yield from (dataclasses.replace(field, kinds=owners) for field, owners in found.items())


def _kinds(value: Mapping[str, Any], classes: Mapping[str, Any]) -> dict[str, str]:
    """Return the class of a section by "", or the classes of a choice by kind; nothing for other settings."""
    for member in (value, *value.get("anyOf", ())):
        if "$ref" in member:
            return {"": member["$ref"].removeprefix(_REFERENCE)}
        if "oneOf" in member:
            names = [one["$ref"].removeprefix(_REFERENCE) for one in member["oneOf"]]
            return {kind: name for name in names for kind in _literals(classes[name]["properties"]["kind"])}
    return {}


def _literals(value: Mapping[str, Any]) -> list[Any]:
    return list(value["enum"]) if "enum" in value else [value["const"]]


@functools.cache
def sections() -> Mapping[str, str]:
    """Return the first sentence on every section and choice by dotted path, outer sections first."""
    return dict(_described(_schema(Settings), prefix=""))


def _described(section: Mapping[str, Any], *, prefix: str) -> Iterator[tuple[str, str]]:
    classes = _schema(Settings)["$defs"]
    for name, value in section["properties"].items():
        members = list(dict.fromkeys(_kinds(value, classes).values()))
        if members:
            text = value["description"] if len(members) > 1 else classes[members[0]]["description"]
            yield f"{prefix}{name}", text.split("\n\n")[0].replace("\n", " ")
        for member in members:
            yield from _described(classes[member], prefix=f"{prefix}{name}.")


def _words(value: Mapping[str, Any]) -> str:
    """Return a type in a YAML user's words: "integer >= 0", "one of a, b", "list of string, or null"."""
    if "anyOf" in value:
        return ", or ".join(_words(member) for member in value["anyOf"])
    if "enum" in value or "const" in value:
        return "one of " + ", ".join(format_value(each) for each in _literals(value))
    if "$ref" in value or "oneOf" in value:
        return "section"
    if value.get("type") == "array":
        pair = value.get("prefixItems")
        return f"pair of {_words(pair[0])}" if pair else f"list of {_words(value['items'])}"
    kind = "path" if value.get("format") == "path" else _TYPES[value["type"]] if "type" in value else "any"
    limits = ", ".join(f"{sign} {format_value(value[name])}" for name, sign in _BOUNDS.items() if name in value)
    return f"{kind} {limits}" if limits else kind
