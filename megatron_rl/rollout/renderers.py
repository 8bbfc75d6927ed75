"""The renderer of a model: messages to tokens and back, chosen by model type and chat template.

The library `renderers` has the families. A renderer that agrees with the tokenizer's chat template
on PROBES is used, else the template: then a turn is a branch where it changes an earlier token.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError

from megatron_rl.data.tokenizer import model_type
from megatron_rl.errors import UserError
from megatron_rl.types import Ints, Message

if TYPE_CHECKING:
    from renderers import Renderer
    from transformers import PreTrainedTokenizerBase

_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "qwen3": ("qwen3", "prime-qwen3"),
    "qwen3_moe": ("qwen3", "prime-qwen3"),
    "qwen3_next": ("qwen3.5", "qwen3"),
    "qwen2": ("qwen3",),
    "llama": ("llama-3", "deepseek-r1"),
    "deepseek_v3": ("deepseek-v3", "deepseek-r1", "kimi-k2"),
    "kimi_k2": ("kimi-k2",),
    "glm4_moe": ("glm-4.5", "glm-5"),
    "gpt_oss": ("gpt-oss",),
    "minimax_m2": ("minimax-m2",),
})  # fmt: skip
"""Renderers to try for a `model_type` of config.json, the likeliest first."""

REFUSALS = (TemplateError, TypeError, ValueError, AttributeError, ArithmeticError, LookupError, RecursionError)
"""Errors of a template, or of a renderer, for messages that it cannot render."""
_TOOL = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]}}
_CALL = {"type": "function", "id": "call_0", "function": {"name": "add", "arguments": {"a": 1}}}
PROBES: tuple[tuple[Sequence[Mapping[str, Any]], bool], ...] = (
    (({"role": "user", "content": "Hi."},), False),
    (({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}), True),
    (
        (
            {"role": "user", "content": "Add."},
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "content": "3", "tool_call_id": "call_0", "name": "add"},
        ),
        True,
    ),
)
"""Conversations of which renderer and chat template make the same tokens; True: with a tool."""


KEPT_TEXTS, KEPT_CHARACTERS = 512, 2**15
"""Latest texts whose tokens are kept, and the longest of them."""


class _KeepingTokenizer:
    """A tokenizer for a renderer, with the tokens of recent texts: trajectories repeat those of their group and of earlier turns.

    It cannot be called. So a renderer does not look for the message that each token comes from,
    which takes longer than the tokens. With `only`, all other tokens are left out.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", *, only: Collection[int] | None = None) -> None:
        self._tokenizer, self._only = tokenizer, only
        self._kept = lru_cache(maxsize=KEPT_TEXTS)(self._encode)

    def __getattr__(self, name: str) -> Any:
        if name == "__call__":
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of a part of a conversation."""
        assert not add_special_tokens, "renderers write them themselves"
        return list((self._kept if len(text) <= KEPT_CHARACTERS else self._encode)(text))

    def _encode(self, text: str) -> tuple[int, ...]:
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return tuple(ids if self._only is None else [token for token in ids if token in self._only])


_NO_BRIDGE = "no renderer of its own: a turn is a branch wherever the chat template changes a token of the turns before"


@dataclass(frozen=True, slots=True)
class ChosenRenderer:
    """A renderer by `name`, with its `note` on later turns and earlier reasoning, for --check.

    `outline` renders the `markers` alone: the tokenizer's added tokens but those of reasoning,
    which templates drop.
    """

    name: str
    renderer: "Renderer"
    note: str
    outline: "Renderer"
    markers: Mapping[int, str]


def choose_renderer(tokenizer: "PreTrainedTokenizerBase", *, model_type: str | None, name: str | None = None) -> ChosenRenderer:
    """Return the renderer `name`, or the first that renders as the chat template does.

    Raises UserError for an unknown name, and for a tokenizer without the tokens of `name`.
    """
    # Imported here: half a second that runs without an environment need not wait for.
    from renderers import DefaultRendererConfig, config_from_name, create_renderer

    markers = {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if "think" not in token.content}
    keeping, outlining = _KeepingTokenizer(tokenizer), _KeepingTokenizer(tokenizer, only=markers)
    if name is None:
        for candidate in _NAMES.get(model_type or "", ()):
            try:
                renderer = create_renderer(keeping, config_from_name(candidate))
            except (ValueError, KeyError, TypeError, AssertionError):
                continue  # a token of the family is missing
            if _agrees(renderer, tokenizer):
                outline = create_renderer(outlining, config_from_name(candidate))
                return ChosenRenderer(candidate, renderer, _note(renderer), outline, markers)
        if tokenizer.chat_template is None:
            raise UserError(
                "the tokenizer has no chat template, which an environment's conversation needs; add one to the model's directory, or name "
                "a renderer in rollout.renderer"
            )
        name = "default"
    try:
        # The template's own markers of calls are Hermes's in most families without a renderer.
        config = DefaultRendererConfig(tool_parser="qwen3", reasoning_parser="think") if name == "default" else config_from_name(name)
        renderer = create_renderer(keeping, config)
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        raise UserError(
            f"rollout.renderer is {name!r}, which cannot be used with this tokenizer ({error}); name one of the library `renderers` for "
            "this model's family, or leave it out"
        ) from error
    note = _NO_BRIDGE if name == "default" else _note(renderer)
    return ChosenRenderer(name, renderer, note, create_renderer(outlining, config), markers)


def _agrees(renderer: "Renderer", tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Return True when the renderer and the chat template turn PROBES into the same tokens."""
    for messages, with_tool in PROBES:
        tools: list[Any] | None = [{"type": "function", "function": _TOOL}] if with_tool else None
        try:
            expected = tokenizer.apply_chat_template(
                [dict(message) for message in messages], tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False
            )
            if renderer.render_ids([dict(message) for message in messages], tools=tools, add_generation_prompt=True) != list(expected):
                return False
        except REFUSALS:
            return False  # a template that refuses a probe
    return True


def _note(renderer: "Renderer") -> str:
    """Return a sentence about later turns and earlier reasoning under this renderer."""
    # The example of a finished turn: prompt, an answer with reasoning, and the next message.
    said: Any = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Yes.", "reasoning_content": "So."}]
    prompt = renderer.render_ids(said[:1], add_generation_prompt=True)
    answer = renderer.render_ids(said)[len(prompt) :]
    keeps = {
        role: renderer.bridge_to_next_turn(prompt, answer, [{"role": role, "content": "3", "tool_call_id": "call_0"}]) is not None
        for role in ("tool", "user")
    }
    if all(keeps.values()):
        return "every turn keeps the tokens before, earlier reasoning too"
    if keeps["tool"]:
        return "turns after tools keep the tokens before; a further user message drops earlier reasoning, and begins a branch"
    return _NO_BRIDGE


def between_turns(
    tokenizer: "PreTrainedTokenizerBase",
    *,
    prompt_ids: Ints,
    response_ids: Ints,
    messages: Sequence[Message],
    tools: Sequence[Message] = (),
    renderer: str | None = None,
) -> Ints | None:
    """Return the token ids between an answer and the next one, for a rollout of several turns.

    `response_ids` [R] are the answer to `prompt_ids` [P], as sampled, and `messages` follow it, of
    tools or a user. None where the model's template keeps not every token before, or its family has
    no renderer: the next turn is then a sample with a prompt of its own. `tools` are descriptions
    with name, description and parameters; `renderer` a name, as rollout.renderer.

    Example: `ids = between_turns(tokenizer, prompt_ids=before, response_ids=answer.token_ids,
    messages=[{"role": "tool", "content": "3"}])`
    """
    chosen = _renderer_of(tokenizer, renderer)
    return bridge(chosen, prompt_ids, response_ids, [dict(message) for message in messages], tools=offered(tools))


@lru_cache(maxsize=4)
def _renderer_of(tokenizer: "PreTrainedTokenizerBase", name: str | None) -> "Renderer":
    return choose_renderer(tokenizer, model_type=model_type(Path(tokenizer.name_or_path)), name=name).renderer


def bridge(renderer: "Renderer", prompt_ids: Ints, response_ids: Ints, messages: Sequence[Any], *, tools: Any) -> Ints | None:
    """Return the tokens [E] from an answer [R] to `prompt_ids` [P] to the next one, or None."""
    bridged = renderer.bridge_to_next_turn(prompt_ids.tolist(), response_ids.tolist(), list(messages), tools=tools)
    before = [*prompt_ids.tolist(), *response_ids.tolist()]
    # A bridge may cut what was sampled behind a marker of the turn's end.
    if bridged is None or bridged.token_ids[: len(before)] != before:
        return None
    return np.array(bridged.token_ids[len(before) :], np.int64)


def offered(tools: Sequence[Message]) -> list[dict[str, Any]] | None:
    """Return tools in the form of a request, None for none."""
    return [{"type": "function", "function": dict(tool)} for tool in tools] or None
