"""An environment that asks three times, keeps count, and ends; its answers' lengths decide the reward."""

import os

from megatron_rl import Environment, Reply
from megatron_rl.types import Message


class Interview(Environment):
    """Says the number of its process, which has to be the same in every turn and in no other trajectory."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def step(self, *, message: Message) -> Reply:
        self.lengths.append(len(message["content"]))
        parts = {"even": float(self.lengths[-1] % 2 == 0)}
        if len(self.lengths) == 3:
            return Reply(done=True, reward=parts | {"sum": sum(self.lengths) / 100})
        return Reply(content=f"{os.getpid()}: and then?", reward=parts)
