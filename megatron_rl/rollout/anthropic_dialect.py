"""Anthropic's dialect of the endpoint, `/v1/messages`, over the same messages as OpenAI's."""

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_rl.rollout.conversation import Turn
from megatron_rl.rollout.dialects import MODEL, Fields, Request, RequestRefusal, check_messages, text_of, usage_of
from megatron_rl.types import Message, StopReason

_ERRORS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 500: "api_error"}


class Messages:
    """`/v1/messages`."""

    def read(self, fields: Fields) -> Request:
        """Return the request."""
        fields.take_model()
        system = text_of(fields.take("system", str | list, needs="a text"), where="system")
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        for number, message in enumerate(fields.take("messages", list, needs="a list of messages", default=[])):
            messages += _read_message(message, where=f"messages[{number}]")
        options = {
            "stop": fields.take_stop("stop_sequences"),
            "max_tokens": fields.take_count("max_tokens"),
            "streams": fields.take("stream", bool, needs="true or false", default=False),
        }
        # As in the API itself, reasoning is shown to clients that ask for it.
        shows = isinstance(fields.thinking, dict) and fields.thinking.get("type") in ("enabled", "adaptive")
        tools = _take_tools(fields)
        fields.end()
        read = check_messages(messages)
        return Request(messages=read, tools=tools, shows_reasoning=shows, others=tuple(fields.others), **options)

    def answer(self, turns: Sequence[Turn], request: Request) -> dict[str, Any]:
        """Return a message."""
        (turn,) = turns
        return {**_head(), "content": _blocks(turn, request), **_end(turn), "usage": _usage(turn)}

    def events(self, turns: Sequence[Turn], request: Request) -> Iterator[bytes]:
        """Yield the events of a message, each block with one delta."""
        (turn,) = turns
        start = {**_head(), "content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(turn) | {"output_tokens": 1}}
        yield _event("message_start", {"message": start})
        for index, block in enumerate(_blocks(turn, request)):
            begun, deltas = _parts(block)
            yield _event("content_block_start", {"index": index, "content_block": begun})
            for delta in deltas:
                yield _event("content_block_delta", {"index": index, "delta": delta})
            yield _event("content_block_stop", {"index": index})
        yield _event("message_delta", {"delta": _end(turn), "usage": {"output_tokens": _usage(turn)["output_tokens"]}})
        yield _event("message_stop", {})

    def error(self, refusal: RequestRefusal) -> dict[str, Any]:
        """Return the error in Anthropic's form."""
        return {"type": "error", "error": {"type": _ERRORS.get(refusal.status, "invalid_request_error"), "message": str(refusal)}}

    def error_event(self, refusal: RequestRefusal) -> bytes:
        """Return the error as an event."""
        return _event("error", self.error(refusal))


def _take_tools(fields: Fields) -> list[Message]:
    """Return the offered tools in OpenAI's form."""
    functions: list[Message] = []
    for tool in fields.take_tools(inside=None):
        if not isinstance(tool.get("input_schema"), dict):
            raise RequestRefusal(f"tools have {tool!r:.60}, need an input_schema: this endpoint has no tools of its own")
        description = {"description": tool["description"]} if tool.get("description") else {}
        functions.append({"name": tool["name"], **description, "parameters": tool["input_schema"]})
    choice = fields.take("tool_choice", dict, needs="an object with a type", default={"type": "auto"})
    if choice.get("disable_parallel_tool_use"):
        fields.others.append(RequestRefusal("disable_parallel_tool_use is true, needs false: the number of calls is the policy's"))
    return functions if fields.take_choice(choice.get("type")) else []


def _read_message(message: object, *, where: str) -> list[dict[str, Any]]:
    """Return one message as those of a conversation: results of tools are messages of their own."""
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant"):
        raise RequestRefusal(f"{where} is {message!r:.60}, needs the role user or assistant")
    role, content = message["role"], message.get("content")
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
    by_type: dict[Any, list[Any]] = {}
    for block in blocks:
        by_type.setdefault(block.get("type") if isinstance(block, dict) else None, []).append(block)
    known = {"assistant": ("text", "tool_use", "thinking", "redacted_thinking"), "user": ("text", "tool_result")}[role]
    if strange := [kind for kind in by_type if kind not in known]:
        raise RequestRefusal(f"{where} has content {strange[0]!r:.60}, needs {' or '.join(known)}")
    said = {"role": role, "content": text_of(by_type.get("text", []), where=where)}
    if role == "user":
        results = [
            {"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": text_of(block.get("content"), where=where)}
            for block in by_type.get("tool_result", ())
        ]
        return [*results, said] if "text" in by_type or not results else results
    if thoughts := [str(block.get("thinking")) for block in by_type.get("thinking", ())]:
        said["reasoning_content"] = "\n".join(thoughts)
    if uses := by_type.get("tool_use"):
        said["tool_calls"] = [_read_use(use, where=where) for use in uses]
    return [said]


def _read_use(use: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    given = use.get("input")
    if not isinstance(given, dict) or not isinstance(use.get("name"), str):
        raise RequestRefusal(f"{where} has the tool_use {use!r:.60}, needs a name and an input")
    return {"id": str(use.get("id")), "type": "function", "function": {"name": use["name"], "arguments": given}}


def _blocks(turn: Turn, request: Request) -> list[dict[str, Any]]:
    """Return the blocks of a message."""
    message, blocks = turn.message, list[dict[str, Any]]()
    if "reasoning_content" in message and request.shows_reasoning:
        blocks.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": ""})
    calls = message.get("tool_calls", ())
    if message["content"] or not calls:
        blocks.append({"type": "text", "text": message["content"]})
    for call in calls:
        blocks.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": call["function"]["arguments"]})
    return blocks


def _parts(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a block as a stream begins it, and its deltas."""
    if block["type"] == "thinking":
        deltas = [{"type": "thinking_delta", "thinking": block["thinking"]}, {"type": "signature_delta", "signature": ""}]
        return block | {"thinking": ""}, deltas
    if block["type"] == "text":
        return block | {"text": ""}, [{"type": "text_delta", "text": block["text"]}]
    return block | {"input": {}}, [{"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}]


def _head() -> dict[str, Any]:
    return {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": MODEL}


def _usage(turn: Turn) -> dict[str, int]:
    usage = usage_of([turn])
    return {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}


def _end(turn: Turn) -> dict[str, Any]:
    if turn.generation.stop_reason is not StopReason.STOP:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if turn.message.get("tool_calls"):
        return {"stop_reason": "tool_use", "stop_sequence": None}
    return {"stop_reason": "stop_sequence" if turn.stop else "end_turn", "stop_sequence": turn.stop}


def _event(name: str, values: Mapping[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'type': name, **values})}\n\n".encode()
