"""Environments for tests: right, slow and broken ones. No test of its own."""

import asyncio
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from megatron_rl import Environment, Reply, ToolError
from megatron_rl.types import Message, Prompt


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


class AsyncSlow(Environment):
    """Never begins."""

    async def reset(self, *, prompt: Prompt) -> None:
        await asyncio.Event().wait()


class Meeting(Environment):
    """A tool of one trajectory waits for that of another one."""

    met = threading.Event()

    def wait(self) -> str:
        """Wait."""
        return str(self.met.wait(20))

    def meet(self) -> str:
        """Meet."""
        self.met.set()
        return "met"

    async def leave(self) -> str:
        """Leave."""
        sys.exit(3)

    tools = (wait, meet, leave)


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
        if kind == "print":
            print(f"{os.getpid()} says so")
            return "said"
        if kind == "two lines":
            raise ValueError("two\nlines")
        if kind == "surrogate":
            return "a\ud800"
        if kind == "large":
            return "x" * 2**20
        if kind == "larger":
            return "x" * 2**17
        if kind == "bytes":
            return Reply(content=b"x")  # type: ignore[arg-type]
        if kind == "text":
            return Reply(done=True, reward="much")  # type: ignore[arg-type]
        if kind == "infinite":
            return Reply(done=True, reward=float("inf"))
        if kind == "empty":
            return ""
        return 4  # type: ignore[return-value]


class Mortal(Environment):
    """Sums up numbers. Its process ends at the first 13, `always` at each; the file of its label says that one has ended.

    With `forgets` another one does not say the same.
    """

    replayable = True

    def __init__(self, *, always: bool = False, forgets: bool = False) -> None:
        self.always, self.forgets, self.sum = always, forgets, 0

    def add(self, number: int) -> str:
        """Add a number."""
        has_ended = Path(str(self.prompt.label)).exists()
        if number == 13 and (self.always or not has_ended):
            Path(str(self.prompt.label)).touch()
            os._exit(1)
        self.sum += number
        return f"{self.sum}{' again' if self.forgets and has_ended else ''}"

    tools = (add,)

    def step(self, *, message: Message) -> Reply:
        return Reply(done=True, reward=self.sum)


class Lost(Mortal):
    """The same, which is not given all again."""

    replayable = False


class Unwilling(Environment):
    """Has first messages of no use."""

    def reset(self, *, prompt: Prompt) -> list[Message]:
        said: Message = {"role": "user", "content": "Hi."}
        found: dict[str, Any] = {
            "bare": [{"role": "user"}], "role": [{"content": "Hi."}], "parts": [{"role": "user", "content": ["Hi."]}], "words": "Hi.",
            "none": [], "number": 5, "bytes": [said | {"name": b"x"}], "set": [said | {"name": {1}}], "nan": [said | {"score": math.nan}],
            "surrogate": [said | {"content": "\udcff"}],
        }  # fmt: skip
        return found[str(prompt.label)]  # type: ignore[no-any-return]


class AsyncUnwilling(Unwilling):
    """The same on an event loop."""

    async def step(self, *, message: Message) -> str:
        return "more"


class Point(BaseModel):
    """A place."""

    x: int
    y: int = 7


class Wide(Environment):
    """Takes arguments of all forms."""

    def place(
        self, points: list[Point], *, name: str | None = None, kind: Literal["a", "b"] = "a", _hidden: int = 3, copy: bool = False
    ) -> str:
        """Say the arguments as they came."""
        return f"{[(point.x, point.y) for point in points]} {name} {kind} {_hidden} {copy}"

    def both(self, end: bool = False) -> Reply:
        """Reward twice, and end where asked to."""
        return Reply(content="ja, schön: \0 \u2028 \U0001f600", reward={"both": 0.5}, done=end)

    def fail(self) -> str:
        """Fail."""
        raise ValueError("no ToolError")

    tools = (place, both, fail)


def _numbered(number: int) -> Callable[[object], str]:
    def tool(self: object) -> str:
        return str(number)

    tool.__name__ = f"tool_{number}"
    return tool


Thirty = type("Thirty", (Environment,), {f"tool_{number}": _numbered(number) for number in range(30)})
Thirty.tools = tuple(vars(Thirty)[f"tool_{number}"] for number in range(30))  # type: ignore[attr-defined]


def _with_tools(*tools: Any) -> type[Environment]:
    return type("Odd", (Environment,), {getattr(tool, "__name__", "x"): tool for tool in tools} | {"tools": tools})


def reset(self: object) -> str: ...  # type: ignore[empty-body]
def prompt(self: object) -> str: ...  # type: ignore[empty-body]
def many(self: object, *words: str) -> str: ...  # type: ignore[empty-body]
def placed(self: object, word: str, /) -> str: ...  # type: ignore[empty-body]
def same(self: object) -> str: ...  # type: ignore[empty-body]


class Outside(Environment):
    """A tool that is no method."""

    tools = (same,)


class Text(Environment):
    """A name in place of a method."""

    tools = ("look",)  # type: ignore[assignment]


class One(Environment):
    """A method in place of a tuple."""

    def look(self) -> str: ...  # type: ignore[empty-body]

    tools = look  # type: ignore[assignment]


Reset, PromptTool, Many, Placed, Twice = (_with_tools(*tools) for tools in ((reset,), (prompt,), (many,), (placed,), (same, same)))


class Counting(Environment):
    """A tool whose result is no text."""

    def count(self) -> int:
        """Count."""
        return 1

    tools = (count,)


class Untyped(Environment):
    """A tool that says nothing of its argument."""

    def look(self, where):  # type: ignore[no-untyped-def]
        """Look."""

    tools = (look,)
