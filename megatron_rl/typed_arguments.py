"""Arguments from settings, read by the annotations of a function or a class."""

import difflib
import functools
import inspect
import json
import sys
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PydanticSchemaGenerationError, ValidationError, create_model
from pydantic_core import ErrorDetails

from megatron_rl.errors import UserError

_Record = TypeVar("_Record")


def read_arguments(kind: type[_Record], args: Mapping[str, Any], *, owner: str, setting: str) -> _Record:
    """Return `args` as a record of the dataclass `kind`, by its annotations.

    A plug-in's arguments are read the same way. Raises UserError for an unknown name, a wrong type,
    and refusals by the record in a ValueError that begins with `CLASS.`. The error names `setting`
    and `owner`, the owner of the arguments.
    """
    own, model = _model_of_record(kind)  # type: ignore[arg-type]  # a class is hashable
    values = _values(model, own, args, owner=owner, setting=setting)
    try:
        return kind(**values)
    except ValueError as error:
        raise UserError(f"{setting}.{str(error).partition('.')[2]}") from None


def argument_values(
    own: Mapping[str, inspect.Parameter], args: Mapping[str, Any], *, function: Callable[..., Any], owner: str, setting: str, named: str
) -> dict[str, Any]:
    """Return `args` as read by the annotations of the `own` parameters; defaults stay away.

    `setting` gives `args`, `owner` is the arguments' owner in errors, `named` the setting with the
    owner's name.
    """
    try:
        model = _own_model(own, function)
    except (NameError, PydanticSchemaGenerationError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"{named} {owner} has an annotation that no setting can be checked by ({reason}), needs plain types such as float"
        ) from error
    return _values(model, own, args, owner=owner, setting=setting)


def _values(
    model: type[BaseModel], own: Mapping[str, inspect.Parameter], args: Mapping[str, Any], *, owner: str, setting: str
) -> dict[str, Any]:
    try:
        # Through JSON, as settings are: strict mode then takes strings as paths and lists as tuples.
        read = model.model_validate_json(json.dumps(dict(args)), strict=True)
    except ValidationError as error:
        raise UserError(
            "; ".join(_sentence(details, own, owner=owner, setting=setting) for details in error.errors(include_url=False))
        ) from None
    return {name: vars(read)[f"own_{name}"] for name in own if f"own_{name}" in read.model_fields_set}


@functools.cache
def _model_of_record(kind: type[Any]) -> tuple[Mapping[str, inspect.Parameter], type[BaseModel]]:
    """Return the model of a record's class, made once per class.

    Making a model takes longer than everything else about settings.
    """
    own = inspect.signature(kind).parameters
    return own, _own_model(own, kind)


def _own_model(own: Mapping[str, inspect.Parameter], function: Callable[..., Any]) -> type[BaseModel]:
    # Only the own annotations, because the kind's may name imports for type checkers only.
    holder = type("Own", (), {"__annotations__": {name: parameter.annotation for name, parameter in own.items()}})
    hints = typing.get_type_hints(holder, globalns=vars(sys.modules[function.__module__]), include_extras=True)
    fields: dict[str, Any] = {}
    for name, parameter in own.items():
        required = parameter.default is inspect.Parameter.empty
        # Prefixed to differ from a model's own attributes, such as `copy`.
        fields[f"own_{name}"] = (hints[name], Field(... if required else parameter.default, alias=name))
    return create_model("Own", __config__=ConfigDict(extra="forbid", allow_inf_nan=False), **fields)


def _sentence(details: ErrorDetails, own: Mapping[str, inspect.Parameter], *, owner: str, setting: str) -> str:
    name = str(details["loc"][0])
    path = ".".join([setting, *map(str, details["loc"])])
    if details["type"] == "extra_forbidden" and name not in own:
        close = difflib.get_close_matches(name, list(own), n=1)
        meant = f"did you mean {setting}.{close[0]}?" if close else f"its own arguments are: {', '.join(own) or 'none'}"
        return f"{path} is no argument of {owner}; {meant}"
    annotation = own[name].annotation
    # A module with postponed annotations has strings.
    wanted = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    if details["type"] == "missing" and len(details["loc"]) == 1:
        return f"{path} is missing, {owner} needs {name}: {wanted}; set {path}=VALUE"
    message, got = details["msg"], details["input"]
    fix = ""
    if details["type"] == "string_type" and isinstance(got, bool | int | float) and len(details["loc"]) == 1:
        fix = f"; put quotes around it if it is meant as text: {name}='\"{json.dumps(got)}\"'"
    return f"{path} is {got!r}, {owner} needs {name}: {wanted} ({message[0].lower()}{message[1:]}){fix}"
