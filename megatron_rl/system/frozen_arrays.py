"""Arrays of records: of one type and shape, read-only, not shared with the giver.

Legend: L mixture layers, K experts of a token.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Token ids that a sampler could have drawn for each of n tokens, the drawn one included.

    `ids` [sum of `counts`] are those of one token after another's, `counts` [n]; 0: no record.
    """

    ids: NDArray[np.int32]
    counts: NDArray[np.int32]

    def __post_init__(self) -> None:
        freeze(self, {"ids": np.int32, "counts": np.int32})
        if (self.counts < 0).any() or self.counts.sum() != len(self.ids):
            raise ValueError(f"Candidates.counts add up to {self.counts.sum()}, needs numbers >= 0 for all {len(self.ids)} ids")

    def __len__(self) -> int:
        return len(self.counts)

    @classmethod
    def of(cls, rows: Iterable[Sequence[int]]) -> "Candidates":
        """Return the candidates `rows`, those of each token."""
        rows = list(rows)
        return cls(np.fromiter(itertools.chain(*rows), np.int32), np.array([len(row) for row in rows], np.int32))

    @classmethod
    def none(cls, num_tokens: int) -> "Candidates":
        """Return no record of `num_tokens` tokens."""
        return cls(np.empty(0, np.int32), np.zeros(num_tokens, np.int32))

    @classmethod
    def joined(cls, parts: Iterable["Candidates"]) -> "Candidates":
        """Return the candidates of all tokens of `parts`, in order."""
        parts = [cls.none(0), *parts]
        return cls(np.concatenate([part.ids for part in parts]), np.concatenate([part.counts for part in parts]))

    def take(self, tokens: NDArray[np.int64] | slice) -> "Candidates":
        """Return the candidates of `tokens`, positions or a slice."""
        starts, counts = (np.cumsum(self.counts) - self.counts)[tokens], self.counts[tokens]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return Candidates(self.ids[np.repeat(starts, counts) + within], counts)

    def hold(self, drawn: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return True for each of the n `drawn` tokens that is among its candidates."""
        token = np.repeat(np.arange(len(self)), self.counts)
        held = np.zeros(len(self), np.bool_)
        held[token[self.ids == drawn[token]]] = True
        return held

    def packed(self) -> NDArray[np.int32]:
        """Return one array: `counts`, then `ids`."""
        return np.concatenate([self.counts, self.ids])

    @classmethod
    def unpacked(cls, packed: NDArray[np.int32], num_tokens: int) -> "Candidates":
        """Return the candidates of `num_tokens` tokens from `packed()`."""
        return cls(packed[num_tokens:], packed[:num_tokens])


def check_candidates(owner: Any, drawn: NDArray[np.int64], *, name: str = "") -> None:
    """Raise ValueError unless `owner.candidates` hold each of the `drawn` tokens [n] that `owner.loss_mask` trains on."""
    kind, candidates = name or type(owner).__name__, owner.candidates
    if len(candidates) != len(drawn):
        raise ValueError(f"{kind} has candidates for {len(candidates)} tokens, needs those of {len(drawn)}")
    lacking = owner.loss_mask & ~candidates.hold(drawn)
    if lacking.any():
        token = int(lacking.argmax())
        raise ValueError(
            f"{kind} has {candidates.counts[token]} candidates for trainable token {token} without the token {drawn[token]} itself, needs "
            "the record of the engine that drew it: without one its log-prob is that of another distribution"
        )
