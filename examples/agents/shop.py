"""Two tools: the prices of a shop, and a calculator. What do two of its goods cost together?

The rows have the prices, which the prompt does not tell: only who asks for both and adds them can know.
"""

import random
from collections.abc import Iterator
from typing import Any

from megatron_rl import Environment, Reply, ToolError
from megatron_rl.types import Message

GOODS = ("apple", "bread", "candle", "drum", "egg", "fork", "glass", "hat")


class Shop(Environment):
    """Tools with the prices of one row."""

    replayable = True

    def price(self, good: str) -> str:
        """Return the price of a good."""
        if good not in self.prompt.metadata["prices"]:
            raise ToolError(f"no {good} here")
        return str(self.prompt.metadata["prices"][good])

    def add(self, a: int, b: int) -> str:
        """Return the sum of two numbers."""
        return str(a + b)

    tools = (price, add)

    def step(self, *, message: Message) -> Reply:
        """End with 1 for the right sum."""
        return Reply(done=True, reward=float(message["content"] == self.prompt.label))


def rows(seed: int) -> Iterator[dict[str, Any]]:
    """Endless questions, each with prices from 1 to 9."""
    draw = random.Random(seed)
    while True:
        first, second = draw.sample(GOODS, 2)
        prices = {good: draw.randint(1, 9) for good in GOODS}
        question = f"What do {first} and {second} cost?"
        yield {"prompt": [{"role": "user", "content": question}], "label": str(prices[first] + prices[second]), "prices": prices}
