"""Arrays of records: of one type and shape, read-only, not shared with the giver.

Legend: L mixture layers, K experts of a token.
"""

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray


def freeze(owner: object, fields: Mapping[str, type[np.generic]], *, length: int | None = None) -> None:
    """Replace each of `fields` by a private, read-only one-dimensional array of the given type.

    Raises ValueError for another `length` or more dimensions.
    """
    for name, dtype in fields.items():
        array = np.array(getattr(owner, name), dtype=dtype)
        if array.ndim != 1:
            raise ValueError(f"{type(owner).__name__}.{name} has {array.ndim} dimensions, needs 1")
        if length is not None and len(array) != length:
            raise ValueError(f"{type(owner).__name__}.{name} has length {len(array)}, needs {length}")
        _put(owner, name, array)


def freeze_table(owner: object, name: str, *, num_rows: int, num_columns: int) -> None:
    """Replace the field `name` by a read-only float64 array [num_rows, num_columns].

    An empty one of any shape stands for no columns.
    """
    array = np.array(getattr(owner, name), dtype=np.float64)
    if not array.size and not num_rows * num_columns:
        array = array.reshape(num_rows, num_columns)
    if array.shape != (num_rows, num_columns):
        raise ValueError(f"{type(owner).__name__}.{name} has shape {array.shape}, needs ({num_rows}, {num_columns})")
    _put(owner, name, array)


def freeze_experts(owner: Any, *, length: int | None = None) -> None:
    """Replace the field `routed_experts` by a read-only array [tokens, L, K].

    A read-only array is not copied. Raises ValueError for another type, shape or `length`.
    """
    array, name = np.asarray(owner.routed_experts), f"{type(owner).__name__}.routed_experts"
    if array.dtype not in (np.uint8, np.uint16) or array.ndim != 3 or 0 in array.shape[1:]:
        raise ValueError(f"{name} has type {array.dtype}, shape {array.shape}, needs uint8 or uint16 [tokens, layers, experts of a token]")
    if length is not None and len(array) != length:
        raise ValueError(f"{name} has length {len(array)}, needs {length}")
    _put(owner, "routed_experts", array.copy() if array.flags.writeable else array)


def _put(owner: object, name: str, array: NDArray[Any]) -> None:
    array.setflags(write=False)
    object.__setattr__(owner, name, array)


def check_distinct(owner: object, experts: NDArray[Any]) -> None:
    """Raise ValueError where `experts` [tokens, L, K] name one expert twice."""
    _, num_layers, top_k = experts.shape
    # Pairs of whole columns, to avoid sorting.
    columns = np.ascontiguousarray(experts.reshape(-1, top_k).T)
    for column, other in itertools.combinations(range(top_k), 2):
        twice = columns[column] == columns[other]
        if twice.any():
            token, layer = divmod(int(twice.argmax()), num_layers)
            raise ValueError(
                f"{type(owner).__name__}.routed_experts names expert {experts[token, layer, other]} twice for token {token} in mixture "
                f"layer {layer}, needs {top_k} different ones"
            )
