"""Conversations: earlier tokens stay, what cannot stay is a branch, each sampled token is trained on once."""

import asyncio
from collections import Counter

import numpy as np
import pytest
from chat_parts import PLAIN_TEMPLATE, THINKING_TEMPLATE, Policy, call, chat_tokenizer

from megatron_rl.engines.sampling import Sampling
from megatron_rl.errors import UserError
from megatron_rl.rollout.conversation import Conversation, Turn
from megatron_rl.rollout.renderers import choose_renderer
from megatron_rl.types import Message, Prompt, Sample, StopReason

PROMPT = Prompt(id="p", token_ids=np.array([1]), text="Hi.", label="4", metadata={"row": 7})
TOOL = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}, "required": []}}
USER = {"role": "user", "content": "Hi."}


class Talk:
    """A conversation of a test, with the scripted policy behind it."""

    def __init__(self, texts: list[str], *, template: str = THINKING_TEMPLATE, context: int = 4096) -> None:
        self.tokenizer = chat_tokenizer(template)
        self.policy = Policy(self.tokenizer, texts, context=context)
        renderer = choose_renderer(self.tokenizer, model_type="qwen3").renderer
        self.conversation = Conversation(renderer, self.policy, tokenizer=self.tokenizer, session="s")

    def ask(self, *messages: Message, max_tokens: int = 200) -> Turn:
        turn = self.try_ask(*messages, max_tokens=max_tokens)
        assert turn is not None
        return turn

    def try_ask(self, *messages: Message, max_tokens: int = 200) -> Turn | None:
        return asyncio.run(self.conversation.ask(messages, sampling=Sampling(max_tokens=max_tokens), tools=[TOOL]))

    def check_each_token_once(self, samples: tuple[Sample, ...]) -> None:
        """Every sampled token is trained on in exactly one sample, behind the tokens that the engine saw."""
        trained = Counter()
        for sample in samples:
            ids = np.concatenate([sample.prompt.token_ids, sample.response_ids])
            for place in np.flatnonzero(sample.loss_mask):
                trained[float(sample.rollout_log_probs[place])] += 1
                assert sample.weight_versions[place] == 3
                before = ids[: len(sample.prompt.token_ids) + place].tolist()
                assert any(before[: len(asked)] == asked for asked in self.policy.asked)
        assert len(trained) == self.policy.num_made and set(trained.values()) == {1}


def tool_result(turn: Turn, content: str) -> Message:
    return {"role": "tool", "tool_call_id": turn.message["tool_calls"][0]["id"], "name": "add", "content": content}


def test_turns_after_tools_keep_every_token() -> None:
    talk = Talk(["<think>\nso\n</think>\n\n" + call("add", '{"a":  1}'), "It is 4."])
    first = talk.ask(USER)
    assert first.message["reasoning_content"] == "so"
    assert first.message["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    second = talk.ask(USER, first.message, tool_result(first, "4"))
    assert second.parent is first
    # Two blanks in the call, which no template would write again.
    assert talk.policy.asked[1][: len(first.token_ids)] == first.token_ids.tolist()
    (sample,) = talk.conversation.samples(PROMPT)
    talk.check_each_token_once((sample,))
    between = talk.tokenizer.decode(sample.response_ids[~sample.loss_mask])
    assert between == "\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert set(sample.weight_versions[~sample.loss_mask]) == {-1}
    assert sample.trajectory is None and sample.stop_reason is StopReason.STOP
    assert (sample.prompt.id, sample.prompt.label, sample.prompt.metadata) == ("p", "4", {"row": 7})
    assert sample.prompt.text.endswith("Hi.<|im_end|>\n<|im_start|>assistant\n")


def test_a_dropped_thought_begins_a_branch() -> None:
    talk = Talk(["<think>\nhmm\n</think>\n\nYes.", "No."])
    first = talk.ask(USER)
    talk.ask(USER, first.message, {"role": "user", "content": "Sure?"})
    samples = talk.conversation.samples(PROMPT, first_index=5, trajectory=2)
    assert [(sample.index, sample.trajectory) for sample in samples] == [(5, 2), (6, 2)]
    assert "hmm" not in samples[1].prompt.text and "Yes." in samples[1].prompt.text
    talk.check_each_token_once(samples)


def test_a_template_without_a_renderer_keeps_what_it_repeats() -> None:
    talk = Talk(["Yes.", "No."], template=PLAIN_TEMPLATE)
    first = talk.ask(USER)
    second = talk.ask(USER, first.message, {"role": "user", "content": "Sure?"})
    assert second.parent is first
    talk.check_each_token_once(talk.conversation.samples(PROMPT))


def test_a_shared_turn_is_trained_on_in_one_leaf() -> None:
    talk = Talk([call("add", "{}"), "A", "B", "C"])
    first = talk.ask(USER)
    others = [talk.ask(USER, first.message, tool_result(first, answer)) for answer in ("1", "2", "1")]
    assert [turn.parent for turn in others] == [first] * 3
    samples = talk.conversation.samples(PROMPT, trajectory=0)
    assert len(samples) == 3
    talk.check_each_token_once(samples)
    assert [int(sample.loss_mask.sum()) for sample in samples[1:]] == [2, 2]
    assert len(samples[1].prompt.token_ids) > len(first.token_ids)


def test_edited_history_is_a_branch_of_its_own() -> None:
    talk = Talk([call("add", "{}"), "A"])
    first = talk.ask(USER)
    edited = first.message | {"content": "I was told to add."}
    second = talk.ask(USER, edited, tool_result(first, "1"))
    assert second.parent is None
    talk.check_each_token_once(talk.conversation.samples(PROMPT, trajectory=0))


def test_messages_compare_as_clients_write_them() -> None:
    talk = Talk([call("add", '{"a": 1}'), "A"])
    first = talk.ask(USER)
    calls = [each | {"function": {"name": "add", "arguments": '{ "a":1 }'}} for each in first.message["tool_calls"]]
    echoed = {"role": "assistant", "content": None, "tool_calls": calls, "refusal": None}
    assert talk.ask(USER, echoed, tool_result(first, "1")).parent is first


def test_the_first_other_marker_is_named() -> None:
    talk = Talk([call("add", "{}"), "A<tool_call>", "<|im_start|>A"])
    first = talk.ask(USER)
    result = tool_result(first, "1")
    assert talk.conversation.structure_difference([USER, first.message], tools=[TOOL]) is None
    second = talk.ask(USER, first.message, result)
    found = talk.conversation.structure_difference([USER, first.message, result, second.message], tools=[TOOL])
    assert found is not None and "marker" in found and "</tool_call>" in found
    third = talk.ask(USER, first.message, tool_result(first, "2"))
    plain = {"role": "assistant", "content": "A"}
    found = talk.conversation.structure_difference([USER, first.message, tool_result(first, "2"), plain], tools=[TOOL])
    assert third.message["content"] and found is not None and "is <|im_start|>, the chat template has <|im_end|>" in found


def test_a_cut_turn_is_never_extended() -> None:
    talk = Talk(["Yes, this is long.", "No."])
    first = talk.ask(USER, max_tokens=5)
    assert first.generation.stop_reason is StopReason.LENGTH
    second = talk.ask(USER, first.message, {"role": "user", "content": "Sure?"})
    assert second.parent is None


def test_answers_stay_within_the_context() -> None:
    talk = Talk(["Yes, this is long."] * 2)
    length = len(talk.ask(USER).prompt_ids)
    small = Talk(["Yes, this is long."], context=length + 3)
    turn = small.ask(USER)
    assert len(turn.generation.token_ids) == 3 and small.policy.samplings[0].max_tokens == 3
    assert Talk([], context=length).try_ask(USER) is None
    ends = {talk.tokenizer.convert_tokens_to_ids(marker) for marker in ("<|im_end|>", "<|endoftext|>")}
    assert set(talk.policy.samplings[0].stop_token_ids) == ends and talk.policy.sessions == ["s"]


@pytest.mark.parametrize(
    ("text", "cause"), [("<tool_call>\n{oops\n</tool_call>", "invalid_json"), ('<tool_call>\n{"name": "add"', "unclosed_block")]
)
def test_unreadable_calls_are_named(text: str, cause: str) -> None:
    message = Talk([text]).ask(USER).message
    assert message["tool_calls"][0]["error"] == cause


def test_the_renderer_is_the_templates() -> None:
    assert choose_renderer(chat_tokenizer(), model_type="qwen3_moe").name == "qwen3"
    plain = choose_renderer(chat_tokenizer(PLAIN_TEMPLATE), model_type="qwen3")
    assert plain.name == "default" and "branch" in plain.note
    assert choose_renderer(chat_tokenizer(), model_type="unknown").name == "default"
    named = choose_renderer(chat_tokenizer(PLAIN_TEMPLATE), model_type=None, name="qwen3")
    assert named.name == "qwen3" and "further user message" in named.note
    with pytest.raises(UserError, match=r"rollout\.renderer.*'nonesuch'"):
        choose_renderer(chat_tokenizer(), model_type=None, name="nonesuch")
    bare = chat_tokenizer()
    bare.chat_template = None
    with pytest.raises(UserError, match=r"no chat template.*rollout\.renderer"):
        choose_renderer(bare, model_type="qwen3")
