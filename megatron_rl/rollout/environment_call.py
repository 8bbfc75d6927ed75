"""One trajectory's environment: reset, tools and steps, from messages to plain values.

Used in an environment's process and on the event loop of async ones. Imports nothing of torch.
"""

import asyncio
import inspect
import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from megatron_rl.errors import UserError
from megatron_rl.plugins.environment import Environment, Reply, ToolError
from megatron_rl.plugins.loader import arguments_model
from megatron_rl.types import Message, Prompt

Answer = dict[str, Any]
"""A reply in plain values: messages, done, parts of the reward, num_calls and num_errors of tools; or cause, headline and trace."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool: its description for the policy, and the model of its arguments."""

    description: Message
    arguments: type[BaseModel]


def tools_of(environment: type[Environment]) -> dict[str, Tool]:
    """Return the tools by name. Raises UserError for an argument without a usable annotation."""
    found = {}
    for function in environment.tools:
        parameters = {name: each for name, each in inspect.signature(function).parameters.items() if name != "self"}
        owner = f"the tool {function.__qualname__}"
        if bare := [name for name, each in parameters.items() if each.annotation is inspect.Parameter.empty]:
            raise UserError(
                f"{owner} takes {bare[0]}, which has no annotation, needs one such as `{bare[0]}: str`, which the policy is shown"
            )
        model = arguments_model(parameters, function, owner=owner)
        schema = model.model_json_schema(by_alias=True)
        for each in schema.get("properties", {}).values():
            each.pop("title", None)
        shape = {"type": "object", "properties": schema.get("properties", {}), "required": schema.get("required", [])}
        definitions = {"$defs": schema["$defs"]} if "$defs" in schema else {}
        text = inspect.cleandoc(function.__doc__ or "")
        description = {"name": function.__name__, "description": text, "parameters": shape | definitions}
        found[function.__name__] = Tool(description, model)
    return found


class EnvironmentCall:
    """An environment with its tools, whose every failure becomes an answer with a cause."""

    def __init__(self, make: Callable[[], Environment], tools: Mapping[str, Tool], *, shares_loop: bool) -> None:
        self._make, self._tools, self._shares_loop = make, tools, shares_loop
        self._environment: Environment | None = None

    async def reset(self, prompt: Prompt) -> Answer:
        """Make the environment and return the first messages."""

        async def begin() -> Answer:
            self._environment = self._make()
            self._environment.prompt = prompt
            messages = await self._result(self._environment.reset, alone=True, prompt=prompt)
            messages = prompt.messages if messages is None else messages
            for message in messages:
                if (
                    not isinstance(message, Mapping)
                    or not isinstance(message.get("role"), str)
                    or not isinstance(message.get("content"), str)
                ):
                    raise TypeError(f"reset returned the message {message!r:.60}, needs the strings 'role' and 'content'")
            return {"messages": [dict(message) for message in messages]}

        return await _guarded(begin())

    async def answer(self, message: Message) -> Answer:
        """Call the tools that `message` asks for, at the same time, or else `step`."""
        return await _guarded(self._answer(message))

    async def _answer(self, message: Message) -> Answer:
        assert self._environment is not None, "reset comes first"
        calls = message.get("tool_calls") or []
        if not calls:
            reply = _as_reply(await self._result(self._environment.step, alone=True, message=message), owner="step")
            said: list[Message] = [{"role": "user", "content": reply.content}] if reply.content else []
            return _merged([reply], said, num_errors=0)
        replies = await asyncio.gather(*(self._call(call, alone=len(calls) == 1) for call in calls))
        shown: list[Message] = [
            {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": reply.content}
            for call, (reply, _) in zip(calls, replies, strict=True)
        ]
        merged = _merged([reply for reply, _ in replies], shown, num_errors=sum(failed for _, failed in replies))
        return merged | {"num_calls": len(calls)}

    async def _call(self, call: Mapping[str, Any], *, alone: bool) -> tuple[Reply, bool]:
        """Return the result of one call of a tool, and True where it is an error for the policy."""
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if "error" in call:
            return Reply(content=f"error: this call cannot be read ({call['error']})"), True
        if name not in self._tools:
            return Reply(content=f"error: there is no tool {name!r}, only {', '.join(self._tools) or 'none'}"), True
        try:
            read = self._tools[name].arguments.model_validate(arguments)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            return Reply(content=f"error: {'.'.join(map(str, first['loc']))}: {first['msg']}"), True
        given = {field.removeprefix("own_"): getattr(read, field) for field in read.model_fields_set}
        try:
            return _as_reply(await self._result(getattr(self._environment, name), alone=alone, **given), owner=f"tool {name}"), False
        except ToolError as error:
            return Reply(content=f"error: {error}"), True

    async def _result(self, function: Callable[..., Any], *, alone: bool, **arguments: Any) -> Any:
        """Call `function` here, or in a thread where others would wait for it."""
        if not inspect.iscoroutinefunction(function) and (self._shares_loop or not alone):
            return await asyncio.to_thread(function, **arguments)
        result = function(**arguments)
        return await result if inspect.isawaitable(result) else result


async def _guarded(work: Any) -> Answer:
    """Return the answer, or the failure of the user's code: the boundary where it becomes an outcome."""
    try:
        return await work
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        headline = f"{type(error).__name__}: {error}".removesuffix(": ").replace("\n", " ")
        return {"cause": "environment", "headline": headline, "trace": "".join(traceback.format_exception(error)).rstrip()}


def _as_reply(result: object, *, owner: str) -> Reply:
    if isinstance(result, str):
        return Reply(content=result)
    if not isinstance(result, Reply) or not isinstance(result.content, str):
        raise TypeError(f"{owner} returned {result!r:.60} of type {type(result).__name__}, needs a string or a Reply")
    return result


def _merged(replies: list[Reply], messages: list[Message], *, num_errors: int) -> Answer:
    """Return several replies as one answer. Raises TypeError and ValueError for an unusable reward."""
    parts: dict[str, float] = {}
    for reply in replies:
        reward = reply.reward
        for name, value in ({} if reward is None else reward if isinstance(reward, Mapping) else {"environment": reward}).items():
            number = float(value)
            if not math.isfinite(number):
                raise ValueError(f"the reward {name!r} is {number}, needs a finite number")
            parts[name] = parts.get(name, 0.0) + number
    done = any(reply.done for reply in replies)
    if not messages and not done:
        raise ValueError("step returned an empty text without done=True, needs a message for the policy or the end")
    return {"messages": messages, "done": done, "parts": parts, "num_calls": 0, "num_errors": num_errors}
