"""A game with state: two players take one to three stones in turns, and the last stone wins. The opponent moves at random.

The methods are `async`: games share the driver's event loop, and no process is started for any of them.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_rl import Environment, Reply
from megatron_rl.types import Message, Prompt

MOST = 3
"""Stones that a move may take."""


class Nim(Environment):
    """The stones that are left of one game, and an opponent with a seed of its own."""

    async def reset(self, *, prompt: Prompt) -> Sequence[Message] | None:
        """Lay out the stones of the row."""
        self.stones: int = prompt.metadata["stones"]
        self.opponent = random.Random(prompt.metadata["seed"])
        return None

    async def step(self, *, message: Message) -> Reply:
        """Take as many as the policy says, then the opponent's; 1 for the last stone, 0 for a loss or an illegal move."""
        move = message["content"]
        if move not in map(str, moves(self.stones)):
            return Reply(done=True, reward=0.0)
        self.stones -= int(move)
        if self.stones == 0:
            return Reply(done=True, reward=1.0)
        self.stones -= self.opponent.choice(moves(self.stones))
        return Reply(content=f"{self.stones} left.") if self.stones else Reply(done=True, reward=0.0)


def moves(stones: int) -> Sequence[int]:
    """Return the numbers of stones that a player may take."""
    return range(1, min(MOST, stones) + 1)


def rows(seed: int) -> Iterator[dict[str, Any]]:
    """Yield endless games, which a player who always leaves a multiple of four wins."""
    draw = random.Random(seed)
    while True:
        stones = 4 * draw.randint(1, 3) + draw.randint(1, MOST)
        yield {"prompt": [{"role": "user", "content": f"{stones} left."}], "stones": stones, "seed": draw.getrandbits(32)}
