"""Tensors with all experts of a layer, as in the files of some families.

Everywhere else an expert's part has a name of its own: the name of the stack with the expert's
number inside, such as `...experts.3.down_proj_bias` for `...experts.down_proj_bias`. Tensors of
single experts in other families end in `.weight`.
"""

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

Value = TypeVar("Value")
_PART = re.compile(r"(.+\.experts)\.\d+\.((?:gate_up|down)_proj(?:_bias)?)")


def part_name(stack: str, expert: int) -> str:
    """Return the name of one expert's part of the tensor `stack`."""
    module, _, own = stack.rpartition(".")
    return f"{module}.{expert}.{own}"


def stored_name(name: str) -> str:
    """Return the name of the tensor in the files that holds `name`: of its stack, if any."""
    part = _PART.fullmatch(name)
    return name if part is None else f"{part[1]}.{part[2]}"


def as_stored(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield `tensors`, of any shape, with consecutive parts of a stack as one tensor."""
    for name, parts, stacked in stored_tensors(tensors):
        yield name, torch.stack(parts) if stacked else parts[0]


def stored_tensors(tensors: Iterable[tuple[str, Value]]) -> Iterator[tuple[str, list[Value], bool]]:
    """Yield each name in the files, the values of its consecutive parts, and true for a stack."""
    for name, members in itertools.groupby(tensors, key=lambda member: stored_name(member[0])):
        parts = list(members)
        yield name, [value for _, value in parts], parts[0][0] != name
