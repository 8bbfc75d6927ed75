"""Call one trajectory's environment; turn messages, tools' results and failures into plain values.

Used in an environment's process and on the event loop of async ones. Imports nothing of torch.
"""

import asyncio
import inspect
import json
import math
import threading
import traceback
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import BaseModel, ValidationError

from megatron_rl.errors import TrajectoryError, UserError
from megatron_rl.plugins.environment import Environment, Reply, ToolError
from megatron_rl.plugins.loader import arguments_model
from megatron_rl.types import Message, Prompt

NO_TEXT = (int, float, bool, bytes, list, tuple, set, dict, None)
Answer = dict[str, Any]
"""A reply in plain values: messages, done, parts of the reward, num_calls and num_errors of tools; or cause, headline and trace."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool: its description for the policy, and the model of its arguments."""

    description: Message
    arguments: type[BaseModel]


def tools_of(environment: type[Environment]) -> dict[str, Tool]:
    """Return the tools by name. Raises UserError for no tool, and an unusable annotation, also of the result."""
    found: dict[str, Tool] = {}
    if not isinstance(environment.tools, Sequence):
        raise UserError(f"{environment.__qualname__}.tools is {environment.tools!r:.80}, needs a tuple of methods such as `(add,)`")
    for function in environment.tools:
        if not callable(function) or getattr(function, "__name__", None) not in dir(environment):
            raise UserError(f"{environment.__qualname__}.tools has {function!r:.80}, needs methods of the class, such as `tools = (add,)`")
        owner = f"the tool {function.__qualname__}"
        if function.__name__ in (*found, *dir(Environment), "prompt"):
            raise UserError(
                f"{owner} has the name of another tool, or of an attribute of every Environment, needs one of its own; rename it"
            )
        signature = inspect.signature(function)
        returned = signature.return_annotation
        if (typing.get_origin(returned) or returned) in NO_TEXT:
            raise UserError(f"{owner} returns {inspect.formatannotation(returned)}, needs a string or a Reply; write `-> str`")
        parameters = {name: each for name, each in signature.parameters.items() if name != "self"}
        for name, each in parameters.items():
            if each.annotation is each.empty:
                raise UserError(
                    f"{owner} takes {name}, which has no annotation, needs one such as `{name}: str`, which the policy is shown"
                )
            if each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
                raise UserError(
                    f"{owner} takes {each}, a {each.kind.description} argument, needs each by a name; write `{name}: list[str]`"
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

    async def reset(self, prompt: Prompt) -> bytes:
        """Make the environment and return the first messages, an Answer in JSON."""

        async def begin() -> Answer:
            self._environment = self._make()
            self._environment.prompt = prompt
            messages = await self._result(self._environment.reset, alone=True, prompt=prompt)
            messages = prompt.messages if messages is None else messages
            if isinstance(messages, str) or not isinstance(messages, Sequence):
                raise TrajectoryError("contract", f"reset returned {messages!r:.60}, needs a list of messages, or None")
            for message in messages:
                if (
                    not isinstance(message, Mapping)
                    or not isinstance(message.get("role"), str)
                    or not isinstance(message.get("content"), str)
                ):
                    raise TrajectoryError("contract", f"reset returned the message {message!r:.60}, needs the strings 'role' and 'content'")
            return {"messages": [dict(message) for message in messages]}

        return await _guarded(begin(), cause="environment")

    async def answer(self, message: Message) -> bytes:
        """Call the tools of `message` at the same time, else `step`; return an Answer in JSON."""
        return await _guarded(self._answer(message), cause="tool" if message.get("tool_calls") else "environment")

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
            return await _in_thread(partial(function, **arguments))
        result = function(**arguments)
        return await result if inspect.isawaitable(result) else result


async def _in_thread(call: Callable[[], Any]) -> Any:
    """Return the result of `call` from a thread of its own: a pool of them would be full of hanging ones, and keep the process alive."""
    done: Future[Any] = Future()
    done.set_running_or_notify_cancel()

    def work() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=work, daemon=True, name="environment").start()
    return await asyncio.wrap_future(done)


async def _guarded(work: Awaitable[Answer], *, cause: str) -> bytes:
    """Return the answer in JSON. Turn any exception of the user's code into a failure of this `cause`."""
    failure = {"cause": cause, "trace": ""}
    try:
        answer = await work
        try:
            return json.dumps(answer, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            needs = "needs text, finite numbers, booleans, lists and mappings"
            raise TrajectoryError("contract", f"a message or a reward is nothing that JSON can hold ({error}), {needs}") from error
    except asyncio.CancelledError:
        raise
    except TrajectoryError as error:
        failure |= {"cause": error.cause, "headline": str(error)}
    except BaseException as error:
        headline = f"{type(error).__name__}: {error}".removesuffix(": ").replace("\n", " ")
        failure |= {"headline": headline, "trace": "".join(traceback.format_exception(error)).rstrip()}
    return json.dumps(failure).encode()


def _as_reply(result: object, *, owner: str) -> Reply:
    if isinstance(result, str):
        return Reply(content=result)
    if not isinstance(result, Reply) or not isinstance(result.content, str):
        raise TrajectoryError("contract", f"{owner} returned {result!r:.60} of type {type(result).__name__}, needs a string or a Reply")
    return result


def _merged(replies: list[Reply], messages: list[Message], *, num_errors: int) -> Answer:
    """Return replies as one answer. TrajectoryError for a bad reward, or for no message."""
    parts: dict[str, float] = {}
    for reply in replies:
        reward = reply.reward
        for name, value in ({} if reward is None else reward if isinstance(reward, Mapping) else {"environment": reward}).items():
            try:
                number = float(value)
            except (TypeError, ValueError, OverflowError):
                number = math.nan
            if not math.isfinite(number):
                raise TrajectoryError("contract", f"the reward {name!r} is {value!r:.60}, needs a finite number")
            parts[name] = parts.get(name, 0.0) + number
    done = any(reply.done for reply in replies)
    if not messages and not done:
        raise TrajectoryError("contract", "step returned an empty text without done=True, needs a message for the policy or the end")
    return {"messages": messages, "done": done, "parts": parts, "num_calls": 0, "num_errors": num_errors}
