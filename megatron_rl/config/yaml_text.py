"""YAML 1.2 text to plain values and back.

PyYAML follows YAML 1.1, where `1e-6` is a string, `off` is a boolean and `12:30` is 750. Settings
are full of such values.
"""

import io
import math
from collections.abc import Mapping
from typing import Any

from ruamel.yaml import YAML, SafeConstructor, SafeRepresenter
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from megatron_rl.errors import UserError

_MOST_VALUES = 10_000
"""Values in one text, aliases expanded: ten lines of aliases can stand for billions."""


class _Constructor(SafeConstructor):
    """Constructor that leaves a date as text."""


class _Representer(SafeRepresenter):
    """Representer without aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


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


def _written(value: Any, *, flow: bool, width: int) -> str:
    writer, text = YAML(typ="safe", pure=True), io.StringIO()
    writer.Representer, writer.default_flow_style, writer.width, writer.allow_unicode = _Representer, flow, width, False
    writer.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # ruamel declares None alone
    writer.dump(value, text)
    return text.getvalue()


def format_yaml(value: Mapping[str, Any]) -> str:
    """Return `value` as ASCII YAML text; `parse_yaml` returns an equal value.

    Keys keep their order.
    """
    return _written(dict(value), flow=False, width=140)


def format_value(value: Any) -> str:
    """Return one value as on the command line: `0.2`, `cosine`, `[a, b]`, `null`."""
    if isinstance(value, float) and math.isfinite(value):
        return repr(value)
    return _written(value, flow=True, width=10**6).removesuffix("\n").removesuffix("\n...")


def by_path(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values inside of nested mappings by their dotted paths, such as `rollout.sampling.top_p`."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= by_path(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found
