"""Grouping of a batch's sequences into trajectories. Legend: B sequences, J trajectories."""

from dataclasses import dataclass

import numpy as np

from megatron_rl.types import Ints


@dataclass(frozen=True, slots=True, eq=False)
class Trajectories:
    """Trajectories numbered by first sequence: `first` [J], its rows; `index` [B] in [0, J)."""

    first: Ints
    index: Ints

    @classmethod
    def of(cls, trajectory_ids: Ints) -> "Trajectories":
        """Number the trajectories of ids [B], equal for the sequences of one."""
        _, first, by_id = np.unique(trajectory_ids, return_index=True, return_inverse=True)
        order = np.argsort(first)
        number = np.empty_like(order)
        number[order] = np.arange(len(order))
        return cls(first[order], number[by_id])

    @property
    def single(self) -> bool:
        """Return True when each sequence is a trajectory: `first` and `index` count the rows."""
        return len(self.first) == len(self.index)

    def sum(self, values: Ints) -> Ints:
        """Return integers [B] added over each trajectory's sequences, [J]."""
        total = np.zeros(len(self.first), np.int64)
        np.add.at(total, self.index, values)
        return total
