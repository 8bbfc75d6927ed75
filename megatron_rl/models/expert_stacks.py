"""Tensors that hold all experts of a layer, as the files of some families have them.

Everywhere else an expert's part has a name of its own, that of the stack with the expert's number in it: `...experts.3.down_proj_bias` of
`...experts.down_proj_bias`. Tensors of single experts in other families end in `.weight`.
"""

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import TypeVar

Value = TypeVar("Value")
_PART = re.compile(r"(.+\.experts)\.\d+\.((?:gate_up|down)_proj(?:_bias)?)")


def part_name(stack: str, expert: int) -> str:
    """The name of what is one expert's in the tensor `stack`."""
    module, _, own = stack.rpartition(".")
    return f"{module}.{expert}.{own}"


def stored_name(name: str) -> str:
    """The name of the tensor in the files that holds the tensor `name`: that of the stack for a part of one, else its own."""
    part = _PART.fullmatch(name)
    return name if part is None else f"{part[1]}.{part[2]}"


def stored_tensors(tensors: Iterable[tuple[str, Value]]) -> Iterator[tuple[str, list[Value], bool]]:
    """The names of the files' tensors with what belongs to each, and whether it is a stack, whose parts come one after another."""
    for name, members in itertools.groupby(tensors, key=lambda member: stored_name(member[0])):
        parts = list(members)
        yield name, [value for _, value in parts], parts[0][0] != name
