"""OpenAI's dialects of the endpoint: requests to messages, and turns to answers and events.

A request is read in full or refused: a field that would change an answer is never dropped.
"""

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megatron_rl.errors import MegatronRLError
from megatron_rl.rollout.conversation import Turn, read_arguments
from megatron_rl.types import Message, StopReason

MODEL = "policy"
"""The name of the one model."""
MAX_STOPS, MAX_STOP_CHARACTERS = 16, 256
"""Stop strings of one request: for each token the engine decodes as many tokens again as the longest has."""
FIXED: Mapping[str, tuple[Any, ...]] = MappingProxyType({
    "top_p": (1,), "top_k": (-1, 0), "min_p": (0,), "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,),
    "seed": (), "logit_bias": ({},), "logprobs": (False,), "top_logprobs": (0,), "response_format": ({"type": "text"},), "best_of": (1,),
    "echo": (False,), "suffix": ("",), "parallel_tool_calls": (True,), "reasoning_effort": (), "verbosity": (), "output_config": (),
    "output_format": (), "context_management": (), "mcp_servers": ([],), "container": (),
})  # fmt: skip
"""Fields that change what is sampled or returned, with the values that mean what a run does anyway."""
HARMLESS = frozenset((
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "stream_options",
    "thinking", "cache_control", "inference_geo",
))  # fmt: skip
"""Fields without an effect on the tokens."""


class RequestRefusal(MegatronRLError, ValueError):
    """A request without an answer: HTTP `status`, a `code`, and the `cause` where it is a failure of the trajectory."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, cause: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.cause = status, code, cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request: `messages`, or a `text` to continue. `others` refuse what is not the run's in it."""

    messages: Sequence[Message] = ()
    text: str | None = None
    tools: Sequence[Message] = ()
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    count: int = 1
    streams: bool = False
    reports_usage: bool = False
    shows_reasoning: bool = True
    others: tuple[RequestRefusal, ...] = ()


class Fields:
    """The fields of a request's object, each taken once; a rest is refused. `sampling` has the run's values, as FIXED."""

    def __init__(self, values: object, *, sampling: Mapping[str, tuple[Any, ...]]) -> None:
        if not isinstance(values, dict):
            raise RequestRefusal(f"the request is {values!r:.60}, needs a JSON object")
        self._left = {name: value for name, value in values.items() if value is not None}
        self.thinking = self._left.get("thinking")
        self.stream_options = self._left.get("stream_options")
        self.others: list[RequestRefusal] = []
        """Refusals of what is not the run's."""
        for name, same in {**FIXED, **sampling}.items():
            value = self._left.pop(name, None)
            if value is not None and not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in same):
                needed = f"needs {' or '.join(map(json.dumps, same))}, or" if same else "needs"
                self.others.append(RequestRefusal(f"{name} is {value!r:.60}, {needed} to be left out, as the run fixes it"))

    def take(self, name: str, kind: Any, *, needs: str, default: Any = None) -> Any:
        """Return the field `name`, of this type; `default` where it is absent."""
        value = self._left.pop(name, None)
        if value is None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise RequestRefusal(f"{name} is {value!r:.60}, needs {needs}")
        return value

    def take_count(self, name: str, *, default: int | None = None) -> int | None:
        """Return the field `name`, an integer of at least 1."""
        value = self.take(name, int, needs="an integer of at least 1")
        if value is not None and value < 1:
            raise RequestRefusal(f"{name} is {value}, needs an integer of at least 1")
        return default if value is None else value

    def take_model(self) -> None:
        """Take the field `model`."""
        model = self.take("model", str, needs=f'the text "{MODEL}"', default="")
        if model != MODEL:
            sentence = f'model is {model!r:.60}, needs "{MODEL}", the only one'
            self.others.append(RequestRefusal(sentence, status=404, code="model_not_found"))

    def take_stop(self, name: str) -> tuple[str, ...]:
        """Return stop strings."""
        stop = self.take(name, list | str, needs="a text or a list of texts", default=[])
        stop = [stop] if isinstance(stop, str) else stop
        if len(stop) > MAX_STOPS or not all(isinstance(each, str) and 1 <= len(each) <= MAX_STOP_CHARACTERS for each in stop):
            raise RequestRefusal(f"{name} is {stop!r:.60}, needs at most {MAX_STOPS} texts of 1 to {MAX_STOP_CHARACTERS} characters")
        return tuple(stop)

    def take_tools(self, *, inside: str | None) -> list[dict[str, Any]]:
        """Return the tools, or their fields `inside`, as functions with a name."""
        functions = []
        for number, tool in enumerate(self.take("tools", list, needs="a list", default=[])):
            function = tool.get(inside) if inside and isinstance(tool, dict) else tool
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise RequestRefusal(f"tools[{number}] is {tool!r:.60}, needs a function with a name")
            functions.append(function)
        return functions

    def take_choice(self, name: Any) -> bool:
        """Take the field `tool_choice`, whose `name` is auto or none; return True where tools are offered."""
        self._left.pop("tool_choice", None)
        if name not in ("auto", "none"):
            self.others.append(RequestRefusal(f"tool_choice is {name!r:.60}, needs auto or none: a forced call is not the policy's"))
        return name != "none"

    def end(self) -> None:
        """Refuse what was not taken."""
        if unknown := sorted(self._left.keys() - HARMLESS):
            raise RequestRefusal(f"{', '.join(unknown)} is not known to this endpoint, which passes no field on; leave it out")


def text_of(content: Any, *, where: str) -> str:
    """Return a message's content as text: its parts are joined by line breaks."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise RequestRefusal(f"{where} has content {kind!r:.60}, needs text: the policy reads nothing else")
    return "\n".join(part["text"] for part in parts)


def check_messages(messages: list[dict[str, Any]]) -> list[Message]:
    """Return messages whose tool results have the names of their calls. Raises RequestRefusal for no question at the end."""
    if not messages or messages[-1]["role"] == "assistant":
        raise RequestRefusal("messages end with the assistant's, or are none, need a message to answer at the end")
    names: dict[str, str] = {}
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        if message["role"] == "tool" and (name := names.get(message["tool_call_id"])):
            message["name"] = name
    return list(messages)


def usage_of(turns: Sequence[Turn]) -> dict[str, int]:
    """Return the numbers of tokens; those of the prompt count once."""
    asked, made = len(turns[0].prompt_ids), sum(len(turn.generation.token_ids) for turn in turns)
    return {"prompt_tokens": asked, "completion_tokens": made, "total_tokens": asked + made}


class _OpenAI:
    """Errors and events of OpenAI's dialects."""

    def error(self, refusal: RequestRefusal) -> dict[str, Any]:
        """Return the error in OpenAI's form."""
        kind = "invalid_request_error" if refusal.status < 500 else "server_error"
        return {"error": {"message": str(refusal), "type": kind, "param": None, "code": refusal.code}}

    def error_event(self, refusal: RequestRefusal) -> bytes:
        """Return the error as an event."""
        return self._event(self.error(refusal))

    def _event(self, values: Mapping[str, Any]) -> bytes:
        return f"data: {json.dumps(values)}\n\n".encode()

    def _stream(self, prefix: str, kind: str, choices: list[dict[str, Any]], turns: Sequence[Turn], request: Request) -> Iterator[bytes]:
        head = _head(prefix, kind)
        for choice in choices:
            yield self._event({**head, "choices": [choice]})
        if request.reports_usage:
            yield self._event({**head, "choices": [], "usage": usage_of(turns)})
        yield b"data: [DONE]\n\n"

    def _options(self, fields: Fields) -> dict[str, Any]:
        """Return what both dialects have; the fields end here."""
        fields.take_model()
        limits = [limit for name in ("max_tokens", "max_completion_tokens") if (limit := fields.take_count(name)) is not None]
        options = {
            "stop": fields.take_stop("stop"),
            "max_tokens": min(limits, default=None),
            "count": fields.take_count("n", default=1),
            "streams": fields.take("stream", bool, needs="true or false", default=False),
            "reports_usage": isinstance(fields.stream_options, dict) and fields.stream_options.get("include_usage") is True,
        }
        fields.end()
        return options | {"others": tuple(fields.others)}


class ChatCompletions(_OpenAI):
    """`/v1/chat/completions`."""

    def read(self, fields: Fields) -> Request:
        """Return the request."""
        messages = fields.take("messages", list, needs="a list of messages", default=[])
        read = check_messages([_chat_message(message, where=f"messages[{number}]") for number, message in enumerate(messages)])
        functions = fields.take_tools(inside="function")
        # Arguments are the policy's: no schema holds them by force.
        tools = [{name: value for name, value in function.items() if name != "strict"} for function in functions]
        offers = fields.take_choice(fields.take("tool_choice", str | dict, needs="auto or none", default="auto"))
        return Request(messages=read, tools=tools if offers else (), **self._options(fields))

    def answer(self, turns: Sequence[Turn], request: Request) -> dict[str, Any]:
        """Return a chat.completion."""
        choices = [
            {"index": index, "message": _chat_answer(turn.message), "logprobs": None, "finish_reason": _finish(turn)}
            for index, turn in enumerate(turns)
        ]
        return {**_head("chatcmpl", "chat.completion"), "choices": choices, "usage": usage_of(turns)}

    def events(self, turns: Sequence[Turn], request: Request) -> Iterator[bytes]:
        """Yield chat.completion.chunk events: each message, and its end."""
        choices: list[dict[str, Any]] = []
        for index, turn in enumerate(turns):
            delta = _chat_answer(turn.message)
            if calls := delta.get("tool_calls"):
                delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
            choices.append({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})
            choices.append({"index": index, "delta": {}, "logprobs": None, "finish_reason": _finish(turn)})
        return self._stream("chatcmpl", "chat.completion.chunk", choices, turns, request)


class Completions(_OpenAI):
    """`/v1/completions`: a text is continued behind the tokens of an earlier answer that it begins with."""

    def read(self, fields: Fields) -> Request:
        """Return the request."""
        prompt = fields.take("prompt", str, needs="one text", default="")
        if not prompt:
            raise RequestRefusal("prompt is missing or empty, needs one text")
        return Request(text=prompt, **self._options(fields))

    def answer(self, turns: Sequence[Turn], request: Request) -> dict[str, Any]:
        """Return a text_completion."""
        return {**_head("cmpl", "text_completion"), "choices": self._choices(turns), "usage": usage_of(turns)}

    def events(self, turns: Sequence[Turn], request: Request) -> Iterator[bytes]:
        """Yield text_completion events."""
        return self._stream("cmpl", "text_completion", self._choices(turns), turns, request)

    def _choices(self, turns: Sequence[Turn]) -> list[dict[str, Any]]:
        return [
            {"index": index, "text": turn.message["content"], "logprobs": None, "finish_reason": _finish(turn)}
            for index, turn in enumerate(turns)
        ]


def _head(prefix: str, kind: str) -> dict[str, Any]:
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": MODEL}


def _finish(turn: Turn) -> str:
    if turn.generation.stop_reason is not StopReason.STOP:
        return "length"
    return "tool_calls" if turn.message.get("tool_calls") else "stop"


def _chat_answer(message: Message) -> dict[str, Any]:
    """Return the policy's message in OpenAI's form, with its reasoning beside it."""
    answer: dict[str, Any] = {"role": "assistant", "content": message["content"]}
    if "reasoning_content" in message:
        answer["reasoning_content"] = message["reasoning_content"]
    if calls := message.get("tool_calls"):
        answer["content"] = message["content"] or None
        answer["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)}}
            for call in calls
        ]
    return answer


def _chat_message(message: object, *, where: str) -> dict[str, Any]:
    """Return a client's message in the form of a conversation."""
    if not isinstance(message, dict) or message.get("role") not in ("system", "developer", "user", "assistant", "tool"):
        raise RequestRefusal(f"{where} is {message!r:.60}, needs a role: system, developer, user, assistant or tool")
    role = message["role"].replace("developer", "system")
    read: dict[str, Any] = {"role": role, "content": text_of(message.get("content"), where=where)}
    if role == "tool":
        if not isinstance(message.get("tool_call_id"), str):
            raise RequestRefusal(f"{where} has tool_call_id {message.get('tool_call_id')!r:.60}, needs the id of a call")
        read["tool_call_id"] = message["tool_call_id"]
    if message.get("function_call"):
        raise RequestRefusal(f"{where} has function_call, needs the call in tool_calls")
    if role == "assistant":
        if isinstance(reasoning := message.get("reasoning_content"), str) and reasoning:
            read["reasoning_content"] = reasoning
        if calls := message.get("tool_calls"):
            read["tool_calls"] = [_call(call, where=where) for call in (calls if isinstance(calls, list) else [calls])]
    return read


def _call(call: object, *, where: str) -> dict[str, Any]:
    """Return a client's copy of a call."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestRefusal(f"{where} has the call {call!r:.60}, needs an id and a function with name and arguments")
    arguments = read_arguments(function.get("arguments") or {})
    return {"id": str(call.get("id")), "type": "function", "function": {"name": function["name"], "arguments": arguments}}
