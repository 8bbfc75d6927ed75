"""All settings with type, default and description, read from the declaring classes."""

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

from megatron_rl.algorithms.objective import PRESETS, Objective
from megatron_rl.config.settings import Settings
from megatron_rl.config.yaml_text import format_value

_NAMES = {Path: "path", str: "string", int: "integer", float: "number", bool: "true or false", type(None): "null", Any: "any"}

_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


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


def setting_fields(owner: type = Settings, *, prefix: str = "") -> Iterator[SettingField]:
    """Yield all settings below the class `owner` (a pydantic model or a dataclass), as declared.

    A section with null as a value appears itself too, before its fields. Of a choice come the kind,
    then the arguments of each kind.
    """
    for name, annotation, default, description, limits in _declared(owner):
        path, sections = f"{prefix}{name}", _sections(annotation)
        if not sections or type(None) in typing.get_args(annotation):
            yield SettingField(path=path, type=_limited(type_in_words(annotation), limits), default=default, description=description)
        if len(sections) > 1:
            yield from _choice(path, sections, default=owner_default(owner, name), description=description)
            continue
        if Objective in sections:
            yield _preset_field(f"{path}.preset")
        for section in sections:
            yield from setting_fields(section, prefix=f"{path}.")


def owner_default(owner: type, name: str) -> str | None:
    """Return the default kind of the dataclass field `name` of `owner`; None without one."""
    field = next(field for field in dataclasses.fields(owner) if field.name == name)
    return None if field.default_factory is dataclasses.MISSING else str(field.default_factory().kind)


def _choice(path: str, members: tuple[type, ...], *, default: str | None, description: str) -> Iterator[SettingField]:
    """Yield the kind of a choice between `members`, then each argument.

    Kinds with an argument of the same meaning share one entry.
    """
    kinds = {kind: member for member in members for kind in typing.get_args(typing.get_type_hints(member)["kind"])}
    yield SettingField(path=f"{path}.kind", type=f"one of {', '.join(kinds)}", default=default, description=description)
    found: dict[SettingField, tuple[str, ...]] = {}
    for kind, member in kinds.items():
        for field in setting_fields(member, prefix=f"{path}."):
            if field.path != f"{path}.kind":
                found[field] = (*found.get(field, ()), kind)
    yield from (dataclasses.replace(field, kinds=owners) for field, owners in found.items())


def section_names(owner: type = Settings, *, prefix: str = "") -> Iterator[str]:
    """Yield the dotted paths of all sections below `owner`, outer sections first."""
    for name, annotation, *_ in _declared(owner):
        sections = _sections(annotation)
        if sections:
            yield f"{prefix}{name}"
            yield from dict.fromkeys(path for section in sections for path in section_names(section, prefix=f"{prefix}{name}."))


def section_description(path: str) -> str:
    """Return the first sentence of the docstring of the section at the dotted `path`; "" for "".

    For a choice, return its description, as stated at its kind.
    """
    owner: type = Settings
    for part in path.split(".") if path else ():
        description, sections = next(
            (description, sections)
            for name, annotation, _, description, _ in _declared(owner)
            if name == part and (sections := _sections(annotation))
        )
        if len(sections) > 1:
            return description
        owner = sections[0]
    return (owner.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")


def type_in_words(annotation: Any) -> str:
    """Return a type in a YAML user's words: "integer", "one of a, b", "list of string, or null"."""
    if annotation in _NAMES:
        return _NAMES[annotation]
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_in_words(arguments[0])
    if origin is Literal:
        return "one of " + ", ".join(format_value(argument) for argument in arguments)
    if _sections(annotation):
        return "section, or null" if type(None) in arguments else "section"
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
    raise TypeError(f"Settings have no words for the type {annotation!r}; add them to type_in_words")


def _sections(annotation: Any) -> tuple[type, ...]:
    """Return the classes of a section, also of a section that may be null.

    Several for a choice; none for other annotations.
    """
    members = [member for member in typing.get_args(annotation) if member is not type(None)] or [annotation]
    members = [inner for member in members for inner in (typing.get_args(member) if _is_union(member) else (member,))]
    return tuple(members) if all(isinstance(m, type) and (issubclass(m, BaseModel) or dataclasses.is_dataclass(m)) for m in members) else ()


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def _declared(owner: type) -> Iterator[tuple[str, Any, str | None, str, str]]:
    """Yield name, annotation, default as text, description and limits of the class's own fields."""
    if issubclass(owner, BaseModel):
        for name, info in owner.model_fields.items():
            yield name, info.annotation, _model_default(info), info.description or "", _limits(info.metadata)
        return
    hints = typing.get_type_hints(owner)
    for field in dataclasses.fields(owner):  # type: ignore[arg-type]  # known to be a dataclass by _sections
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
    """Return bounds in pydantic's form, annotated_types records, as text: ">= 1", "> 0, <= 1"."""
    return _stated_limits(
        {name: getattr(bound, name) for bound in constraints for name in _SIGNS if type(bound).__name__.lower() == name},
    )


def _stated_limits(bounds: Mapping[str, Any]) -> str:
    """Return bounds as text, by the names shared by dataclass metadata and pydantic."""
    return ", ".join(f"{sign} {format_value(bounds[name])}" for name, sign in _SIGNS.items() if name in bounds)


def _limited(kind: str, limits: str) -> str:
    """Return a kind with the bounds beside its type: "number >= 0, or null"."""
    first, comma, others = kind.partition(", or ")
    return f"{first} {limits}{comma}{others}" if limits else kind


def _preset_field(path: str) -> SettingField:
    """Return the one key that is no field of a class: validation replaces the key by fields."""
    words = "A published combination; it fills the fields of this section that are not set."
    return SettingField(path=path, type=f"one of {', '.join(PRESETS)}, or null", default="null", description=words)
