"""A choice with arguments: a record with the name of a kind, the arguments, and the maths.

The objective is unions of such records, distinguished by `kind`: arguments of other kinds cannot be
set. Arguments of one name have one meaning everywhere. The configuration room validates these plain
dataclasses as settings.
"""

import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

Load = Callable[..., Callable[..., Any]]
"""From `package.module:function`, `kind` of plug-in and `args` to the user's function, as `loader.load`."""

_LARGEST = 2**31 - 1
"""Squares and products of such numbers are still finite in float32. Neither infinities nor NaN are below it."""

_BOUNDS = {"ge": (">=", operator.ge), "gt": (">", operator.gt), "le": ("<=", operator.le), "lt": ("<", operator.lt)}


def doc(description: str, default: Any = MISSING, **bounds: float) -> Any:
    """Return a dataclass field with help text and numeric bounds (ge, gt, le, lt), required without a default."""
    return field(default=default, metadata={"description": description, **bounds})


def own_arguments(description: str) -> Any:
    """Return the field of the arguments of a plug-in; left out of the hash, because a mapping has none."""
    return field(default_factory=dict, hash=False, metadata={"description": description})


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A frozen group of settings in which an unknown key is an error; bounds are checked at construction."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        check_fields(self)


@functools.cache
def _hints(owner: type) -> Mapping[str, Any]:
    return get_type_hints(owner)


def check_fields(owner: Any) -> None:
    """Raise ValueError for a value outside Literal or bounds, also without a settings library."""
    name, hints = type(owner).__name__, _hints(type(owner))  # type: ignore[arg-type]  # a class is hashable
    for item in fields(owner):
        value, hint = getattr(owner, item.name), hints[item.name]
        if get_origin(hint) is Literal and value not in get_args(hint):
            raise ValueError(f"{name}.{item.name} is {value!r}, needs one of {', '.join(get_args(hint))}")
        numbers = value if isinstance(value, tuple) else (value,)
        if not all(abs(number) <= _LARGEST for number in numbers if isinstance(number, (int, float))):
            raise ValueError(f"{name}.{item.name} is {value}, needs finite numbers of at most {_LARGEST}; null leaves a bound out")
        if value is None or isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        limits = [(*_BOUNDS[key], limit) for key, limit in item.metadata.items() if key in _BOUNDS]
        if not all(holds(value, limit) for _, holds, limit in limits):
            raise ValueError(f"{name}.{item.name} is {value}, needs a number {', '.join(f'{sign} {limit}' for sign, _, limit in limits)}")
