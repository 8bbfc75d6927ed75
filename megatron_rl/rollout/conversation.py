"""Conversations with the policy as an append-only tree of turns, exact in every token.

A request continues the deepest finished turn that its messages extend, and keeps all its tokens.
Where the renderer cannot keep the tokens, the request begins a branch. Every leaf of the tree is a
sample of one trajectory. Each sampled token is trained on in one of the samples.

Legend: P tokens before an answer, R tokens of an answer.
"""

import asyncio
import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_rl.engines.answers import Generation, first_recorded
from megatron_rl.engines.sampling import Sampling
from megatron_rl.errors import TrajectoryError
from megatron_rl.plugins.kinds import Generator
from megatron_rl.rollout.renderers import REFUSALS, ChosenRenderer, bridge, offered
from megatron_rl.system.frozen_arrays import Candidates
from megatron_rl.types import Ints, Message, Prompt, Sample, StopReason

if TYPE_CHECKING:
    from renderers import Renderer
    from transformers import PreTrainedTokenizerBase


LONG_CHARACTERS = 2**16
"""Texts beyond become tokens in a thread."""


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One sampled answer to `prompt_ids` [P], as a node of the tree.

    `history` has the messages before and the answer, each as JSON text. A turn without `parent`
    begins a branch. `num_known` answers had ended when the turn was asked for. `message` is the
    answer as read by the renderer, cut at `stop`, the stop string of the request that ended the answer.
    `num_unread` calls of it could not be read and are text.
    """

    parent: "Turn | None"
    prompt_ids: Ints
    generation: Generation
    message: Message
    history: tuple[str, ...]
    num_known: int = 0
    stop: str | None = None
    num_unread: int = 0

    @property
    def token_ids(self) -> Ints:
        """Return all tokens so far, [P + R]."""
        return np.concatenate([self.prompt_ids, self.generation.token_ids])


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A request in tokens [P], behind the turn `parent`, if any; a text to continue has no messages."""

    parent: Turn | None
    prompt_ids: Ints
    history: tuple[str, ...]
    tools: Any = None
    is_text: bool = False


class Conversation:
    """Turns of one trajectory, answered by `generator`; `session` prefers one engine."""

    def __init__(
        self, chosen: ChosenRenderer, generator: Generator, *, tokenizer: "PreTrainedTokenizerBase", session: str | None = None
    ) -> None:
        self._chosen, self._renderer = chosen, chosen.renderer
        self._generator, self._tokenizer, self._session = generator, tokenizer, session
        self.turns: list[Turn] = []
        self._num_ended = 0

    @property
    def context(self) -> int:
        """Tokens that an answer and all before may have."""
        return self._generator.context

    async def ask(self, messages: Sequence[Message], *, sampling: Sampling, tools: Sequence[Message] = ()) -> Turn | None:
        """Return the policy's answer to `messages`, or None where the context has no room for one.

        `sampling.max_tokens` bounds the answer. A turn that ended without a stop is never extended.
        Raises TrajectoryError for messages that the template refuses.
        """
        asked = await self.rendered(messages, tools=tools)
        if len(asked.prompt_ids) >= self.context:
            return None
        turn = await self.answer(asked, sampling=sampling)
        self.turns.append(turn)
        return turn

    async def answer(self, asked: Asked, *, sampling: Sampling, stop: Sequence[str] = (), as_served: bool = False) -> Turn:
        """Return an answer that is no turn of the tree yet, within `sampling.max_tokens` and the context.

        The answer also ends at a string of `stop`, shown without it. `as_served`, calls that cannot be read
        and those without offered tools stay text, as vLLM's Hermes parser leaves them.
        """
        stops = tuple(dict.fromkeys((*sampling.stop_token_ids, *self._renderer.get_stop_token_ids())))
        max_tokens = min(sampling.max_tokens, self.context - len(asked.prompt_ids))
        sampling = replace(sampling, max_tokens=max_tokens, stop=(*sampling.stop, *stop), stop_token_ids=stops)
        num_known, num_unread = self._num_ended, 0
        try:
            (generation,) = await self._generator.generate(asked.prompt_ids, sampling=sampling, session=self._session)
        finally:
            self._num_ended += 1
        if asked.is_text:
            text = self._tokenizer.decode(generation.token_ids, skip_special_tokens=True)
            message: Message = {"role": "assistant", "content": text}
        else:
            message = self._read(generation, asked.prompt_ids, asked.tools)
            calls = message.get("tool_calls", ())
            failed = sum("error" in call for call in calls)
            if as_served and calls and (failed or not asked.tools):
                num_unread = failed if asked.tools else 0
                said = {name: value for name, value in message.items() if name != "tool_calls"}
                message = said | {"content": self._text_of(generation)}
        content = message["content"]
        found, ended_by = min(((content.find(each), each) for each in stop if each in content), default=(len(content), None))
        message = {**message, "content": content[:found]}
        return Turn(asked.parent, asked.prompt_ids, generation, message, (*asked.history, _key(message)), num_known, ended_by, num_unread)

    async def rendered(self, messages: Sequence[Message], *, tools: Sequence[Message] = ()) -> Asked:
        """Return the request behind the deepest turn that `messages` extend. Raises TrajectoryError."""
        # The event loop of all trajectories would stand still for seconds at a text of megabytes.
        if sum(len(message.get("content") or "") for message in messages) > LONG_CHARACTERS:
            return await asyncio.to_thread(self._asked, messages, tools)
        return self._asked(messages, tools)

    def _asked(self, messages: Sequence[Message], tools: Sequence[Message]) -> Asked:
        known = offered(tools)
        try:
            history = (_key({"tools": known}), *map(_key, messages))
            return Asked(*self._rendered(messages, history, known), history, known)
        except REFUSALS as error:
            raise TrajectoryError("template", f"the chat template refuses the messages: {type(error).__name__}: {error}") from error

    async def continued(self, text: str) -> Asked:
        """Return the request to continue `text`, behind the deepest turn whose whole text it begins with."""
        return await asyncio.to_thread(self._continued, text) if len(text) > LONG_CHARACTERS else self._continued(text)

    def _continued(self, text: str) -> Asked:
        begun = {turn: self._tokenizer.decode(turn.token_ids) for turn in self.finished}
        parent = max((turn for turn, each in begun.items() if text.startswith(each)), key=lambda turn: len(turn.token_ids), default=None)
        kept, rest = (np.empty(0, np.int64), text) if parent is None else (parent.token_ids, text[len(begun[parent]) :])
        ids = np.concatenate([kept, np.array(self._tokenizer.encode(rest, add_special_tokens=False), np.int64)])
        return Asked(parent, ids, (_key({"text": text}),), is_text=True)

    @property
    def finished(self) -> list[Turn]:
        """The turns that can be extended."""
        return [turn for turn in self.turns if turn.generation.stop_reason is StopReason.STOP]

    def _rendered(self, messages: Sequence[Message], history: tuple[str, ...], tools: Any) -> tuple[Turn | None, Ints]:
        """Return the turn that is continued, and all tokens [P] before the answer."""
        finished = self.finished
        extended = [turn for turn in finished if history[: len(turn.history)] == turn.history]
        deepest = sorted(extended, key=lambda each: (len(each.history), each.token_ids.tolist()), reverse=True)
        if (turn := next((each for each in deepest if _has_thoughts_of(messages, each)), None)) is not None:
            new = [dict(message) for message in messages[len(turn.history) - 1 :]]
            between = bridge(self._renderer, turn.prompt_ids, turn.generation.token_ids, new, tools=tools)
            if between is not None:
                return turn, np.concatenate([turn.token_ids, between])
        ids = np.array(_render(self._renderer, messages, tools=tools, add_generation_prompt=True), np.int64)
        # A template that changes nothing before the new messages keeps the tokens, too.
        kept = [turn for turn in finished if np.array_equal(ids[: len(turn.token_ids)], turn.token_ids)]
        return max(kept, key=lambda turn: len(turn.token_ids), default=None), ids

    def _read(self, generation: Generation, prompt_ids: Ints, tools: Any) -> Message:
        """Return the answer as a message; each call that cannot be read has its `error`."""
        # Imported here: see `choose_renderer`.
        from renderers.base import ParsedResponse, ParsedToolCall, ToolCallParseStatus

        ids = generation.token_ids.tolist()
        # Templates may write the names of calls, so that they follow tokens alone.
        unique = hashlib.blake2b(np.concatenate([prompt_ids, generation.token_ids]).tobytes(), digest_size=4).hexdigest()
        try:
            parsed = self._renderer.parse_response(ids, tools=tools, prompt_ids=prompt_ids.tolist())
        except (ValueError, RecursionError):
            # Python reads no number of 4300 digits, and no list of a thousand levels.
            raw = self._tokenizer.decode(ids, skip_special_tokens=True)
            parsed = ParsedResponse(content="", tool_calls=[ParsedToolCall(raw, status=ToolCallParseStatus.INVALID_JSON)])
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning_content:
            message["reasoning_content"] = parsed.reasoning_content
        calls = list[dict[str, Any]]()
        for call in parsed.tool_calls:
            called = call.name if isinstance(call.name, str) and _is_json(call.name) else ""
            readable = call.status == "ok" and call.name == called and isinstance(call.arguments, dict) and _is_json(call.arguments)
            function = {"name": called, "arguments": call.arguments if readable else call.raw}
            name = call.id or f"call_{unique}_{len(calls)}"
            fault = {} if readable else {"error": "malformed_structure" if call.status == "ok" else str(call.status)}
            calls.append({"id": name, "type": "function", "function": function} | fault)
        return message | ({"tool_calls": calls} if calls else {})

    def _text_of(self, generation: Generation) -> str:
        """Return the text of an answer behind its reasoning, with all markers but the end's."""
        ids = generation.token_ids.tolist()
        text = self._tokenizer.decode(ids[:-1] if ids[-1] in self._renderer.get_stop_token_ids() else ids)
        return (text.partition("</think>")[2] or text).strip()

    def structure_difference(self, messages: Sequence[Message], *, tools: Sequence[Message]) -> str | None:
        """Return the first difference between the markers of the last turn's tokens and those of rendered `messages`."""
        markers = self._chosen.markers
        try:
            ids = _render(self._chosen.outline, messages, tools=offered(tools))
        except REFUSALS as error:
            return f"the chat template refuses the whole: {type(error).__name__}: {error}"
        needed = [markers[token] for token in ids if token in markers]
        got = [markers[token] for token in self.turns[-1].token_ids.tolist() if token in markers]
        # A family whose next message begins with the end of an answer has sampled this marker already.
        if len(got) > len(needed) and self.turns[-1].generation.token_ids[-1] in self._renderer.get_stop_token_ids():
            got.pop()
        # What the template adds behind the last message was not sampled.
        for number, (one, other) in enumerate(itertools.zip_longest(got, needed[: max(len(got), len(needed) - 1)])):
            if one != other:
                return f"marker {number} is {one or 'missing'}, the chat template has {other or 'none'}"
        return None

    def order(self) -> None:
        """Order turns by tokens instead of the times of their ends, those asked for last behind all others.

        These have no answer between their requests.
        """
        most = max((turn.num_known for turn in self.turns), default=0)
        self.turns.sort(key=lambda turn: (turn.num_known == most, turn.token_ids.tolist()))

    def samples(self, prompt: Prompt, *, first_index: int = 0, trajectory: int | None = None) -> tuple[Sample, ...]:
        """Return a sample for each leaf, in the order of their last turns.

        A turn shared by leaves is trained on in the first one, and part of the prompt of others.
        """
        parents = {turn.parent for turn in self.turns}
        leaves = [turn for turn in self.turns if turn not in parents]
        trained: set[Turn] = set()
        samples = []
        for number, leaf in enumerate(leaves):
            path = [leaf]
            while (parent := path[0].parent) is not None and parent not in trained:
                path.insert(0, parent)
            trained.update(path)
            samples.append(self._sample(prompt, path, index=first_index + number, trajectory=trajectory if len(leaves) > 1 else None))
        return tuple(samples)

    def _sample(self, prompt: Prompt, path: Sequence[Turn], *, index: int, trajectory: int | None) -> Sample:
        first, last = path[0], path[-1]
        ids = last.token_ids[len(first.prompt_ids) :]
        mask, log_probs, versions = np.zeros(len(ids), np.bool_), np.zeros(len(ids), np.float32), np.full(len(ids), -1)
        candidates: list[Candidates] = []
        for turn in path:
            begin = len(turn.prompt_ids) - len(first.prompt_ids)
            span = slice(begin, begin + len(turn.generation.token_ids))
            mask[span], log_probs[span], versions[span] = True, turn.generation.log_probs, turn.generation.weight_versions
            if turn.generation.candidates is not None:
                candidates += [Candidates.none(begin - sum(map(len, candidates))), turn.generation.candidates]
        text = self._tokenizer.decode(first.prompt_ids)
        return Sample(
            group_id=prompt.id,
            index=index,
            prompt=replace(prompt, token_ids=first.prompt_ids, text=text),
            response_ids=ids,
            loss_mask=mask,
            rollout_log_probs=log_probs,
            weight_versions=versions,
            stop_reason=last.generation.stop_reason,
            response_text=self._tokenizer.decode(ids),
            routed_experts=first_recorded([turn.generation.routed_experts for turn in path]),
            trajectory=trajectory,
            candidates=Candidates.joined(candidates) if candidates else None,
        )


def _is_json(value: Any) -> bool:
    """Return True for a value that every reader of JSON takes: no NaN, no half of a surrogate pair."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return False
    return True


def _has_thoughts_of(messages: Sequence[Message], turn: Turn) -> bool:
    """Return True where `messages` have the reasoning of `turn` and those before; clients may leave it out."""
    node: Turn | None = turn
    while node is not None and node.history == turn.history[: len(node.history)]:
        # The history begins with the tools.
        thought = messages[len(node.history) - 2].get("reasoning_content")
        if thought and thought.strip() != node.message.get("reasoning_content", "").strip():
            return False
        node = node.parent
    return True


def _render(renderer: "Renderer", messages: Sequence[Message], *, tools: Any, add_generation_prompt: bool = False) -> list[int]:
    """Return messages in tokens, with calls as text where the template refuses those that cannot be read."""
    options = {"tools": tools, "add_generation_prompt": add_generation_prompt}
    try:
        return renderer.render_ids([dict(message) for message in messages], **options)
    except REFUSALS:
        return renderer.render_ids([_with_text(message) for message in messages], **options)


def _with_text(message: Message) -> dict[str, Any]:
    """Return a message whose unreadable calls are part of its text."""
    calls = message.get("tool_calls") or ()
    unread = [call["function"]["arguments"] for call in calls if not isinstance(call["function"]["arguments"], dict)]
    if not unread:
        return dict(message)
    left = [call for call in calls if isinstance(call["function"]["arguments"], dict)]
    said = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**said, "content": "\n".join(map(str, filter(None, [message["content"], *unread])))} | ({"tool_calls": left} if left else {})


def _key(message: Mapping[str, Any]) -> str:
    """Return a form of `message` in which equal ones compare equal, however clients write them."""
    calls = [[call["function"]["name"], read_arguments(call["function"]["arguments"])] for call in message.get("tool_calls") or ()]
    kept = {name: value for name, value in message.items() if name not in ("tool_calls", "reasoning_content", "id") and value is not None}
    return json.dumps([kept | {"content": message.get("content") or ""}, calls], sort_keys=True)


def read_arguments(arguments: Any) -> Any:
    """Return a call's arguments as an object, also where a client sends them as JSON text."""
    if not isinstance(arguments, str):
        return arguments
    try:
        read = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return read if _is_json(read) else arguments
