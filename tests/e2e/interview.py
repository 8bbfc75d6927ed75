"""An environment that asks three times, keeps count, and ends; its answers' lengths decide the reward."""

import os
import time

from megatron_rl import Environment, Reply
from megatron_rl.types import Message


class Interview(Environment):
    """Prints its process, turn and prompt. What it says depends on all answers before, and on nothing else."""

    def __init__(self, *, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.lengths: list[int] = []

    def step(self, *, message: Message) -> Reply:
        time.sleep(self.seconds)
        self.lengths.append(len(message["content"]))
        # One write, because all environments print to one file.
        print(f"interview {os.getpid()} {len(self.lengths)} {self.prompt.id}\n", end="")
        parts = {"even": float(self.lengths[-1] % 2 == 0)}
        if len(self.lengths) == 3:
            return Reply(done=True, reward=parts | {"sum": sum(self.lengths) / 100})
        return Reply(content=f"{sum(self.lengths)}: and then?", reward=parts)
