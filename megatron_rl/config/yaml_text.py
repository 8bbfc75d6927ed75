"""YAML text to plain values and back, by the YAML 1.2 core schema.

PyYAML follows YAML 1.1, in which `1e-6` is a string, `off` is a boolean and `12:30` is 750. Settings are full of such
values, so this module reads numbers, booleans and null by the 1.2 core schema and everything else as a string. A key that
appears twice in one mapping is an error: silently keeping the last one hides half of a merge.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import yaml

from megatron_rl.errors import UserError

_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^[-+]?[0-9]+$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_MERGE = re.compile(r"^<<$")
_RESOLVERS = (
    ("tag:yaml.org,2002:bool", _BOOL, "tTfF"),
    ("tag:yaml.org,2002:int", _INT, "-+0123456789"),
    ("tag:yaml.org,2002:float", _FLOAT, "-+0123456789."),
    ("tag:yaml.org,2002:null", _NULL, ("~", "n", "N", "")),
    ("tag:yaml.org,2002:merge", _MERGE, "<"),
)

_MOST_DIGITS = 400
"""Python refuses to read integers of thousands of digits; nothing here has as many."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  (PyYAML reads a plain class attribute)

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
                raise yaml.MarkedYAMLError(problem=f"key {key_node.value!r} is not a string", problem_mark=key_node.start_mark)
            if key_node.value in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key_node.value!r} appears twice in one mapping", problem_mark=key_node.start_mark)
            seen.add(key_node.value)
        return node


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    if len(node.value) > _MOST_DIGITS:
        raise yaml.MarkedYAMLError(problem=f"a number of {len(node.value)} digits", problem_mark=node.start_mark)
    return int(node.value)


def _construct_float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    text = node.value.lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


for _tag, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(_tag, _pattern, _first)
    _Dumper.add_implicit_resolver(_tag, _pattern, _first)
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)


def parse_yaml(text: str, *, origin: str) -> Any:
    """The value of one YAML document.

    `origin` names the text in errors: a path, or the override it came from.
    Raises UserError with line and column for bad syntax, a key that is not a string, and a key given twice.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{origin}, line {mark.line + 1}, column {mark.column + 1}" if mark is not None else origin
        problem = " ".join(str(part) for part in (error.context, error.problem) if part)
        raise UserError(
            f"{where}: not valid YAML ({problem}); correct that line, or put quotes around a value with special characters"
        ) from None
    except RecursionError:
        raise UserError(f"{origin}: not valid YAML (nested too deeply); no setting has so many levels") from None
    except yaml.YAMLError as error:
        raise UserError(f"{origin}: not valid YAML ({error}); save the file as UTF-8 text without control characters") from None


def format_yaml(value: Mapping[str, Any]) -> str:
    """`value` as ASCII YAML text that `parse_yaml` reads back to an equal value; keys keep their order."""
    return yaml.dump(dict(value), Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=140)


def format_value(value: Any) -> str:
    """One value as it would be written on the command line: `0.2`, `cosine`, `[a, b]`, `null`."""
    if isinstance(value, float) and math.isfinite(value):
        return repr(value)
    return yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=10**6).removesuffix("\n").removesuffix("\n...")


def by_path(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values inside of nested mappings, by their dotted paths, such as `rollout.sampling.top_p`."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= by_path(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found
