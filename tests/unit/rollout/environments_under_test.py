"""Environments for tests: right, slow and broken ones. No test of its own."""

import asyncio
import os
import subprocess
import sys
import time
from typing import Annotated

from pydantic import Field

from megatron_rl import Environment, Reply, ToolError
from megatron_rl.types import Message


class Shop(Environment):
    """Two tools with a state; the answer is the prompt's label."""

    def __init__(self, *, bonus: float = 0.0) -> None:
        self.bonus = bonus
        self.values: dict[str, str] = {}

    def put(self, key: str, value: Annotated[str, Field(description="a text")], twice: bool = False) -> str:
        """Store a value."""
        self.values[key] = value * (1 + twice)
        return "stored"

    def get(self, key: str) -> Reply:
        """Return a stored value."""
        if key not in self.values:
            raise ToolError(f"no key {key}")
        return Reply(content=self.values[key], reward={"get": 0.25})

    tools = (put, get)

    def step(self, *, message: Message) -> Reply:
        return Reply(done=True, reward={"answer": float(message["content"] == self.prompt.label), "bonus": self.bonus})


class AsyncShop(Shop):
    """The same on an event loop, with its own first messages."""

    async def reset(self, *, prompt: object) -> list[Message]:
        await asyncio.sleep(0)
        return [{"role": "user", "content": "Shop."}]


class Slow(Environment):
    """Tools that take 0.3 s each."""

    def wait(self) -> str:
        """Wait."""
        time.sleep(0.3)
        return f"{time.monotonic():.3f}"

    tools = (wait,)


class Endless(Environment):
    """Asks on and on."""

    def step(self, *, message: Message) -> str:
        return "And?"


class Silent(Environment):
    """Ends without a reward, as the base class does."""


class Broken(Environment):
    """Breaks as the prompt's label says."""

    def step(self, *, message: Message) -> Reply | str:
        kind = self.prompt.label
        if kind == "raise":
            return str({}["missing"])
        if kind == "exit":
            sys.exit(3)
        if kind == "crash":
            os.kill(os.getpid(), 11)
        if kind == "hang":
            time.sleep(1000)
        if kind == "memory":
            bytearray(10 * 2**30)
        if kind == "child":
            child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            return Reply(done=True, content=str(child.pid), reward={str(child.pid): 0.0})
        if kind == "infinite":
            return Reply(done=True, reward=float("inf"))
        if kind == "empty":
            return ""
        return 4  # type: ignore[return-value]


class Unwilling(Environment):
    """Has a first message of no use."""

    def reset(self, *, prompt: object) -> list[Message]:
        return [{"role": "user"}]


class Untyped(Environment):
    """A tool that says nothing of its argument."""

    def look(self, where):  # type: ignore[no-untyped-def]
        """Look."""

    tools = (look,)
