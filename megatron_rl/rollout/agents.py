"""Agents in the places of environments: a command in a process, or an async function on a loop.

One message plays the whole trajectory; the reply has the reward.
"""

import json
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from megatron_rl.errors import UserError
from megatron_rl.plugins.environment import Environment, Reply
from megatron_rl.plugins.loader import load
from megatron_rl.rollout.environment_call import Answer
from megatron_rl.rollout.environment_host import Environments
from megatron_rl.types import Message, Prompt

COMMAND = "megatron_rl.rollout.agents:CommandAgent"
FUNCTION = "megatron_rl.rollout.agents:FunctionAgent"

LOST_S = 30.0
"""Time without a new trajectory for a node that lost one: all attempts would end there."""
KEPT_LINES = 20
"""Last lines of a failed command's output in the log."""
_LINE_BYTES = 2**16
_EXIT_S = 1.0  # for the last output of a command that has ended
_OWN = ("OPENAI_", "ANTHROPIC_", "WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
"""Beginnings of variables with keys of the run, or of other endpoints, that no agent gets."""


@dataclass(slots=True, eq=False)
class AgentNode:
    """A node with `num_cores` for agents, from which the endpoint is reached at `url`.

    `play` gives a fresh one a prompt and its message; an answer with `lost` says that node or process
    are gone.
    """

    play: Callable[[Prompt, Message], Awaitable[Answer]]
    num_cores: int
    url: str = ""
    num_playing: int = 0
    lost_s: float = -math.inf  # on the clock

    @property
    def load(self) -> tuple[bool, float]:
        """Return the agents for each core with one more; a node that lost one lately comes last."""
        return time.monotonic() < self.lost_s + LOST_S, (self.num_playing + 1) / self.num_cores


def check_program(program: str) -> None:
    """Raise UserError where this node has no `program`."""
    if shutil.which(program) is None:
        raise UserError(
            f"rollout.agent.command begins with {program}, which is no program here ({socket.gethostname()}), needs one on PATH or a path "
            "to one, on every node of the run"
        )


async def play(agents: Environments, prompt: Prompt, message: Message, *, scratch: Path | None) -> Answer:
    """Return the reply of a fresh one of `agents` here; a command's prompt is a file in `scratch`."""
    with _written(prompt, scratch) as path:
        if path is not None:
            message = {**message, "variables": {**message["variables"], "MEGATRON_RL_PROMPT": str(path)}}
        async with agents.open() as home:
            begun = await home.reset(prompt)
            return begun if "cause" in begun else await home.answer(message)


@contextmanager
def _written(prompt: Prompt, scratch: Path | None) -> Iterator[Path | None]:
    """Yield a file in `scratch` with the prompt in JSON, None without `scratch`."""
    if scratch is None:
        yield None
        return
    values = {name: getattr(prompt, name) for name in ("id", "messages", "text", "label", "metadata")}
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=scratch, suffix=".json") as file:
        json.dump(values, file, default=dict)
        file.flush()
        yield Path(file.name)


class CommandAgent(Environment):
    """A process for the trajectory, which reads its variables and the file with the prompt."""

    def __init__(self, command: tuple[str, ...]) -> None:
        self._command = command

    def reset(self, *, prompt: object) -> list[Message]:
        """Return no message."""
        return []

    def step(self, *, message: Message) -> Reply:
        """Run the command with the message's variables to its end. Raises RuntimeError for a failure."""
        variables = {name: value for name, value in os.environ.items() if not name.startswith(_OWN)}
        process = subprocess.Popen(
            self._command,
            env={**variables, **message["variables"]},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None and process.stderr is not None, "both are pipes"
        followed = [_Followed(process.stdout, sys.stdout), _Followed(process.stderr, sys.stderr)]
        status = process.wait()
        for each in followed:
            # What it left running may keep the pipe open.
            each.thread.join(_EXIT_S)
        if status:
            ended = f"ended with status {status}" if status > 0 else f"was killed by signal {-status}"
            tail = "".join(line for each in followed for line in each.last).rstrip()
            raise RuntimeError(f"the command {ended}" + (f"\n{tail}" if tail else ""))
        lines = [line for line in followed[0].last if line.strip()]
        return Reply(done=True, reward=_reward_in(lines[-1]) if lines else None)


class FunctionAgent(Environment):
    """A call of the user's function for the trajectory, on the event loop of all."""

    def __init__(self, function: str, args: dict[str, Any]) -> None:
        self._path, self._play = function, load(function, kind="rollout", args=args, as_agent=True)

    def reset(self, *, prompt: object) -> list[Message]:
        """Return no message."""
        return []

    async def step(self, *, message: Message) -> Reply:
        """Call the function to its end. Raises TypeError for a result that is no reward."""
        result = await self._play(prompt=self.prompt, base_url=message["base_url"], api_key=message["api_key"])
        return Reply(done=True, reward=None if result is None else _reward(result, owner=self._path))


class _Followed:
    """A pipe that is copied to `sink` line by line, in a thread; `last` are its last lines."""

    def __init__(self, pipe: IO[bytes], sink: IO[str]) -> None:
        self.last: deque[str] = deque(maxlen=KEPT_LINES)
        self.thread = threading.Thread(target=self._follow, args=(pipe, sink), daemon=True)
        self.thread.start()

    def _follow(self, pipe: IO[bytes], sink: IO[str]) -> None:
        while line := pipe.readline(_LINE_BYTES):
            self.last.append(line.decode(errors="replace"))
            sink.write(self.last[-1])


def _reward_in(line: str) -> Mapping[str, float] | None:
    """Return the reward in the last line of output, `{"reward": ..}`. None for any other: a harness may end with what it found."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    marked = isinstance(value, dict) and set(value) == {"reward"}
    return _reward(value["reward"], owner="the last line of output") if marked else None


def _reward(value: object, *, owner: str) -> Mapping[str, float]:
    """Return parts of the reward. Raises TypeError for other values than numbers."""
    parts: dict[Any, Any] = dict(value) if isinstance(value, Mapping) else {"agent": value}
    for name, part in parts.items():
        if not isinstance(name, str) or not isinstance(part, int | float):
            raise TypeError(f"{owner} gave {value!r:.60}, needs a number, or an object of named numbers")
    return parts
