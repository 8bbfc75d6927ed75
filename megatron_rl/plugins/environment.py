"""The base of environments: tools and replies in a conversation with the policy, no tokens.

class Calculator(Environment):
    def add(self, a: float, b: float) -> str:
        '''Return the sum of two numbers.'''
        return str(a + b)

    tools = (add,)

    def step(self, *, message: Message) -> Reply:
        return Reply(done=True, reward=float(message["content"] == self.prompt.label))
"""

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from megatron_rl.types import Message, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer to a message of the policy: a user's message, or the result of a tool.

    `reward` is a number, or a mapping of named parts; all of a trajectory are summed. `done` ends
    the trajectory, and `content` is then not shown.
    """

    content: str = ""
    reward: float | Mapping[str, float] | None = None
    done: bool = False


class ToolError(Exception):
    """Refusal by a tool, shown to the policy as the result. Any other exception fails the trajectory."""


class Environment:
    """One trajectory's tools and state; a subclass with a constructor takes `rollout.args` there.

    Methods in `tools` are offered to the policy by name, docstring and annotations. They return a
    text or a `Reply`, and run at the same time where one message asks for several. With `async`
    methods an environment lives on an event loop shared with others, else in a separate process.

    `replayable` says that the prompt and the messages decide every answer, and that nothing outside
    is changed. Where the process of such an environment ends, another one is given all of them
    again, and the trajectory goes on; else it begins anew.
    """

    tools: ClassVar[Sequence[Callable[..., Any]]] = ()
    replayable: ClassVar[bool] = False
    prompt: "Prompt"  # set before `reset`

    def reset(self, *, prompt: "Prompt") -> "Sequence[Message] | Awaitable[Sequence[Message] | None] | None":
        """Prepare the state; return the first messages, or None for those of the prompt."""
        return None

    def step(self, *, message: "Message") -> "Reply | str | Awaitable[Reply | str]":
        """Answer a message of the policy without a call of a tool; by default the trajectory ends."""
        return Reply(done=True)


def environment_class(loaded: Callable[..., Any]) -> type[Environment]:
    """Return the class behind a loaded plug-in, with or without arguments of its own."""
    found = loaded.func if isinstance(loaded, functools.partial) else loaded
    assert inspect.isclass(found) and issubclass(found, Environment), "the loader takes no other"
    return found


def is_async(environment: type[Environment]) -> bool:
    """Return True where a method of the interface, or a tool, is an async function."""
    return any(map(inspect.iscoroutinefunction, (environment.reset, environment.step, *environment.tools)))
