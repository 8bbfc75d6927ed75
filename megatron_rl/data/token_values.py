"""Numbers of tokens when they were trained on, kept in the buffer for readers of the run."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from megatron_rl.types import Floats, Ints

TOKEN_VALUES = ("log_probs", "old_log_probs", "entropy", "advantages", "ref_log_probs", "clipped")
"""Rows of TokenValues."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenValues:
    """Numbers of n tokens when they were trained on; NaN where not known.

    `rows` [n] are sequences of the whole batch, `offsets` [n] the tokens' places in them. `values`
    [len(TOKEN_VALUES), n]: the policy's log-prob before the token's optimizer step and before the
    batch's first one, entropy, all in nats, advantage, the reference's log-prob, and 1 where the
    policy loss clipped the token, else 0. Given in any order; kept by ascending row.
    """

    rows: Ints
    offsets: Ints
    values: Floats

    def __post_init__(self) -> None:
        order = np.argsort(self.rows, kind="stable")
        for name in ("rows", "offsets", "values"):
            object.__setattr__(self, name, getattr(self, name)[..., order])

    @classmethod
    def joined(cls, parts: Iterable["TokenValues"]) -> "TokenValues":
        """Return the tokens of all `parts`, each of which has other ones."""
        found = list(parts)
        rows, offsets = (np.concatenate([getattr(part, name) for part in found]) for name in ("rows", "offsets"))
        return cls(rows, offsets, np.concatenate([part.values for part in found], axis=1))

    def of_row(self, row: int, *, begin: int, length: int) -> Floats | None:
        """Return the values [len(TOKEN_VALUES), length] of a sequence's tokens from `begin` on; None without any."""
        first, end = np.searchsorted(self.rows, (row, row + 1))
        if first == end:
            return None
        mine = slice(first, end)
        table = np.full((len(TOKEN_VALUES), length), np.nan, np.float32)
        table[:, self.offsets[mine] - begin] = self.values[:, mine]
        return table


NOTHING_RECORDED = TokenValues(np.empty(0, np.int64), np.empty(0, np.int64), np.empty((len(TOKEN_VALUES), 0), np.float32))
