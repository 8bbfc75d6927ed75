"""Sums made by code: training rows without a file."""

import numpy as np


class Sums:
    """Row n follows from the seed and n alone, so that n is all of its state."""

    state = 0

    def __init__(self, *, seed: int, largest: int = 99) -> None:
        self.seed, self.largest = seed, largest

    def next_rows(self, count: int) -> list[dict[str, str]]:
        """`count` sums, each with its result as the label."""
        numbers, self.state = range(self.state, self.state + count), self.state + count
        pairs = [np.random.default_rng([self.seed, number]).integers(0, self.largest + 1, 2) for number in numbers]
        return [{"prompt": f"{first}+{second}=", "label": str(first + second)} for first, second in pairs]
