"""Every setting with its type, default and description, read from the classes that declare them."""

import dataclasses
import enum
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megatron_rl.algorithms.objective import Objective
from megatron_rl.algorithms.presets import PRESETS
from megatron_rl.config.settings import Settings
from megatron_rl.config.yaml_text import format_value

_NAMES = {Path: "path", str: "string", int: "integer", float: "number", bool: "true or false", type(None): "null", Any: "any"}

_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingField:
    """One setting: its dotted path, type in words, default as YAML text (None when it must be given) and description.

    `owners` have it as an argument that belongs to them alone, such as `("policy_loss sapo",)`; empty for every other setting.
    """

    path: str
    type: str
    default: str | None
    description: str
    owners: tuple[str, ...] = ()

    @property
    def meaning(self) -> str:
        """The description, after whose argument it is."""
        chosen, _, _ = self.owners[0].partition(" ") if self.owners else ("", "", "")
        names = ", ".join(owner.partition(" ")[2] for owner in self.owners)
        return f"({chosen} {names}) {self.description}" if self.owners else self.description

    @property
    def required(self) -> bool:
        """True when there is no default."""
        return self.default is None


def setting_fields(owner: type = Settings, *, prefix: str = "") -> Iterator[SettingField]:
    """All settings below the class `owner` (a pydantic model or a dataclass), in the order of their declaration.

    A section that may be null appears itself too, before what is inside.
    """
    for name, annotation, default, description, limits in _declared(owner):
        path, section = f"{prefix}{name}", _section(annotation)
        if section is not annotation:
            yield SettingField(path=path, type=_limited(type_in_words(annotation), limits), default=default, description=description)
        yield from _arguments(owner, name, path)
        if section is Objective:
            yield _preset_field(f"{path}.preset")
        if section is not None:
            yield from setting_fields(section, prefix=f"{path}.")


def _arguments(owner: type, name: str, path: str) -> Iterator[SettingField]:
    """What the mapping of arguments `owner.name` at `path` can hold, by whose argument it is; nothing where it is no such mapping."""
    fields = dataclasses.fields(owner) if dataclasses.is_dataclass(owner) else ()
    metadata: Mapping[str, Any] = next((field.metadata for field in fields if field.name == name), {})
    found: dict[str, SettingField] = {}
    for chosen, kind in metadata.get("owners", {}).items():
        for field in setting_fields(kind, prefix=f"{path}."):
            owners = found[field.path].owners if field.path in found else ()
            found[field.path] = dataclasses.replace(field, owners=(*owners, f"{metadata['named_by']} {chosen}"))
    yield from found.values()


def section_names(owner: type = Settings, *, prefix: str = "") -> Iterator[str]:
    """Dotted paths of all sections below `owner`, outer ones first."""
    for name, annotation, *_ in _declared(owner):
        section = _section(annotation)
        if section is not None:
            yield f"{prefix}{name}"
            yield from section_names(section, prefix=f"{prefix}{name}.")


def section_description(path: str) -> str:
    """First sentence of the docstring of the section at the dotted `path`; "" for the settings as a whole."""
    owner: type = Settings
    for part in path.split(".") if path else ():
        owner = next(section for name, annotation, *_ in _declared(owner) if name == part and (section := _section(annotation)))
    return (owner.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")


def type_in_words(annotation: Any) -> str:
    """A type as a user of YAML names it: "integer", "one of a, b", "list of string, or null"."""
    if annotation in _NAMES:
        return _NAMES[annotation]
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_in_words(arguments[0])
    if origin is Literal:
        return "one of " + ", ".join(format_value(argument) for argument in arguments)
    if origin in (typing.Union, types.UnionType):
        return ", or ".join(type_in_words(argument) for argument in arguments)
    if origin in (dict,) or annotation is dict or getattr(origin, "__name__", "") == "Mapping":
        return "mapping"
    if origin in (tuple, list):
        if len(arguments) == 2 and arguments[1] is not Ellipsis:
            return f"pair of {type_in_words(arguments[0])}"
        return f"list of {type_in_words(arguments[0])}"
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return "one of " + ", ".join(format_value(member.value) for member in annotation)
    if _section(annotation) is not None:
        return "section"
    raise TypeError(f"Settings have no words for the type {annotation!r}; add them to type_in_words")


def _section(annotation: Any) -> type | None:
    """The class of a section, also of one that may be null; None when the annotation is no section."""
    members = [member for member in typing.get_args(annotation) if member is not type(None)] or [annotation]
    only = members[0] if len(members) == 1 else None
    if isinstance(only, type) and (issubclass(only, BaseModel) or dataclasses.is_dataclass(only)):
        return only
    return None


def _declared(owner: type) -> Iterator[tuple[str, Any, str | None, str, str]]:
    """Name, annotation, default as text, description and limits of each field that the class itself declares."""
    if issubclass(owner, BaseModel):
        for name, info in owner.model_fields.items():
            yield name, info.annotation, _model_default(info), info.description or "", _limits(info.metadata)
        return
    hints = typing.get_type_hints(owner)
    for field in dataclasses.fields(owner):  # type: ignore[arg-type]  # known to be a dataclass by _section
        yield (
            field.name,
            hints[field.name],
            _dataclass_default(field),
            field.metadata.get("description", ""),
            _stated_limits(field.metadata),
        )


def _model_default(info: FieldInfo) -> str | None:
    return None if info.is_required() else _default_text(info.get_default(call_default_factory=True, validated_data={}))


def _dataclass_default(field: dataclasses.Field[Any]) -> str | None:
    if field.default is not dataclasses.MISSING:
        return _default_text(field.default)
    return None if field.default_factory is dataclasses.MISSING else _default_text(field.default_factory())


def _default_text(value: Any) -> str:
    if isinstance(value, BaseModel) or dataclasses.is_dataclass(value):
        return "section"
    if isinstance(value, enum.Enum):
        return format_value(value.value)
    return format_value(list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value)


def _limits(constraints: list[Any]) -> str:
    """Bounds as pydantic keeps them, annotated_types records: ">= 1", "> 0, <= 1"."""
    return _stated_limits(
        {name: getattr(bound, name) for bound in constraints for name in _SIGNS if type(bound).__name__.lower() == name},
    )


def _stated_limits(bounds: Mapping[str, Any]) -> str:
    """Bounds by the names that dataclass metadata and pydantic share."""
    return ", ".join(f"{sign} {format_value(bounds[name])}" for name, sign in _SIGNS.items() if name in bounds)


def _limited(kind: str, limits: str) -> str:
    """The bounds beside the type that they are for: "number >= 0, or null"."""
    first, comma, others = kind.partition(", or ")
    return f"{first} {limits}{comma}{others}" if limits else kind


def _preset_field(path: str) -> SettingField:
    """The one key that is no field of its class: it is replaced by fields before validation."""
    words = "A published combination; it fills the fields of this section that are not set."
    return SettingField(path=path, type=f"one of {', '.join(PRESETS)}, or null", default="null", description=words)
