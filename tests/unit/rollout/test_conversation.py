"""Conversations: earlier tokens stay, what cannot stay is a branch, each sampled token is trained on once."""

import asyncio
from collections import Counter

import numpy as np
import pytest
from chat_parts import PLAIN_TEMPLATE, THINKING_TEMPLATE, Policy, call, chat_tokenizer

from megatron_rl.engines.sampling import Sampling
from megatron_rl.errors import TrajectoryError, UserError
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
        renderer = choose_renderer(self.tokenizer, model_type="qwen3")
        self.conversation = Conversation(renderer, self.policy, tokenizer=self.tokenizer, session="s")

    def ask(self, *messages: Message, max_tokens: int = 200, tool: Message = TOOL) -> Turn:
        turn = self.try_ask(*messages, max_tokens=max_tokens, tool=tool)
        assert turn is not None
        return turn

    def try_ask(self, *messages: Message, max_tokens: int = 200, tool: Message = TOOL) -> Turn | None:
        sampling = Sampling(max_tokens=max_tokens, stop_token_ids=(7,), top_k=2, records_candidates=True)
        return asyncio.run(self.conversation.ask(messages, sampling=sampling, tools=[tool]))

    def check_each_token_once(self, samples: tuple[Sample, ...]) -> None:
        """Every sampled token is trained on in exactly one sample, with its candidates, behind the tokens that the engine saw."""
        trained = Counter()
        for sample in samples:
            ids = np.concatenate([sample.prompt.token_ids, sample.response_ids])
            for place in np.flatnonzero(sample.loss_mask):
                trained[float(sample.rollout_log_probs[place])] += 1
                assert sample.weight_versions[place] == 3
                token, counts = int(sample.response_ids[place]), sample.candidates.counts
                start = int(counts[:place].sum())
                assert sample.candidates.ids[start : start + counts[place]].tolist() == [token, token + 1]
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


@pytest.mark.parametrize("tools", [True, False], ids=["bridge", "template"])
def test_the_deepest_turn_is_continued(tools: bool) -> None:
    # Blanks that no template would write again.
    texts = [call("add", "{  }"), call("add", '{"a":  12}'), "Done, at last."] if tools else ["Yes.", "Well, no.", "Done."]
    talk = Talk(texts, template=THINKING_TEMPLATE if tools else PLAIN_TEMPLATE)
    messages: list[Message] = [USER]
    turns: list[Turn] = []
    for answer in ("1", "22", "333"):
        turns.append(talk.ask(*messages))
        assert turns[-1].parent is (turns[-2] if turns[1:] else None)
        more = tool_result(turns[-1], answer) if "tool_calls" in turns[-1].message else {"role": "user", "content": answer}
        messages += [turns[-1].message, more]
    (sample,) = talk.conversation.samples(PROMPT, trajectory=4)
    talk.check_each_token_once((sample,))
    assert sample.trajectory is None and sample.routed_experts is not None
    # Each token as routed by the request that computed it first; the last of an answer is computed by the next request.
    ends = [0, *(len(turn.token_ids) - 1 for turn in turns)]
    routed = [number for number in (1, 2, 3) for _ in range(ends[number] - ends[number - 1])]
    assert sample.routed_experts.ravel().tolist() == routed
    assert len(turns[0].generation.token_ids) < len(turns[1].generation.token_ids)


def test_other_tools_begin_a_branch() -> None:
    talk = Talk([call("add", "{}"), "A"])
    first = talk.ask(USER)
    second = talk.ask(USER, first.message, tool_result(first, "1"), tool=TOOL | {"name": "subtract"})
    assert second.parent is None and "subtract" in talk.tokenizer.decode(second.prompt_ids)


@pytest.mark.parametrize(("thought", "is_continued"), [("hm", True), (" hm\n", True), (None, True), ("mh", False)])
def test_an_edited_thought_begins_a_branch(thought: str | None, is_continued: bool) -> None:
    talk = Talk([f"<think>\nhm\n</think>\n\n{call('add', '{}')}", call("add", "{}"), "A"])
    messages: list[Message] = [USER]
    for number in range(2):
        turn = talk.ask(*messages)
        messages += [turn.message, tool_result(turn, str(number))]
    messages[1] = {**messages[1], "reasoning_content": thought}
    last = talk.ask(*messages)
    assert last.parent is (turn if is_continued else None)
    assert ("mh" in talk.tokenizer.decode(last.prompt_ids)) is not is_continued
    talk.check_each_token_once(talk.conversation.samples(PROMPT, trajectory=0))


def test_a_bridge_that_cuts_what_was_sampled_is_not_taken() -> None:
    """An answer goes on behind a marker of the end, as sampled with ignored ends; the engine stopped for a token of the settings."""
    talk = Talk(["Yes<|im_end|>\nand", "No."])
    talk.policy.end = ""
    first = talk.ask(USER)
    second = talk.ask(USER, first.message, {"role": "tool", "tool_call_id": "c", "content": "1"})
    samples = talk.conversation.samples(PROMPT, trajectory=0)
    talk.check_each_token_once(samples)
    assert second.parent is None and len(samples) == 2


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


@pytest.mark.parametrize("function", [{"name": "sub", "arguments": {}}, {"name": "add", "arguments": {"a": 2}}])
def test_another_call_in_the_history_is_a_branch(function: Message) -> None:
    talk = Talk([call("add", "{}"), "A"])
    first = talk.ask(USER)
    edited = first.message | {"tool_calls": [each | {"function": function} for each in first.message["tool_calls"]]}
    assert talk.ask(USER, edited, tool_result(first, "1")).parent is None


def test_messages_compare_as_clients_write_them() -> None:
    talk = Talk(["<think>\nso\n</think>\n\n" + call("add", '{"a": 1, "b": 2}'), "A"])
    first = talk.ask(USER)
    assert "reasoning_content" in first.message
    calls = [each | {"function": {"name": "add", "arguments": '{ "b":2, "a":1 }'}} for each in first.message["tool_calls"]]
    echoed = {"tool_calls": calls, "content": None, "role": "assistant", "refusal": None, "id": "msg_1"}
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


@pytest.mark.parametrize("reason", [StopReason.LENGTH, StopReason.ABORT])
@pytest.mark.parametrize("template", [THINKING_TEMPLATE, PLAIN_TEMPLATE], ids=["bridge", "template"])
def test_a_cut_turn_is_never_extended(reason: StopReason, template: str) -> None:
    talk = Talk(["Yes, this is long.", "No."], template=template)
    talk.policy.reason = reason
    first = talk.ask(USER, max_tokens=5 if reason is StopReason.LENGTH else 200)
    assert first.generation.stop_reason is reason
    talk.policy.reason = StopReason.STOP
    second = talk.ask(USER, first.message, {"role": "tool", "tool_call_id": "c", "content": "Sure?"})
    assert second.parent is None
    reasons = [sample.stop_reason for sample in talk.conversation.samples(PROMPT, trajectory=0)]
    assert reasons == [reason, StopReason.STOP]


def test_the_last_turn_says_how_a_sample_ended() -> None:
    talk = Talk([call("add", "{}"), "Yes, this is long."])
    first = talk.ask(USER)
    talk.ask(USER, first.message, tool_result(first, "1"), max_tokens=5)
    (sample,) = talk.conversation.samples(PROMPT)
    assert sample.stop_reason is StopReason.LENGTH


def test_an_end_that_the_template_adds_is_no_difference() -> None:
    talk = Talk([call("add", "{}"), "A"])
    first = talk.ask(USER)
    talk.policy.end = ""
    last = talk.ask(USER, first.message, tool_result(first, "1"))
    messages = [USER, first.message, tool_result(first, "1"), last.message]
    assert talk.conversation.structure_difference(messages, tools=[TOOL]) is None
    found = talk.conversation.structure_difference([*messages, USER], tools=[TOOL])
    assert found is not None and "is missing, the chat template has <|im_end|>" in found


def test_answers_stay_within_the_context() -> None:
    talk = Talk(["Yes, this is long."] * 2)
    length = len(talk.ask(USER).prompt_ids)
    for room in (3, 1):
        small = Talk(["Yes, this is long."], context=length + room)
        turn = small.ask(USER)
        assert len(turn.generation.token_ids) == room and small.policy.samplings[0].max_tokens == room
    assert Talk([], context=length).try_ask(USER) is None
    ends = {talk.tokenizer.convert_tokens_to_ids(marker) for marker in ("<|im_end|>", "<|endoftext|>")}
    assert set(talk.policy.samplings[0].stop_token_ids) == {7, *ends} and talk.policy.sessions == ["s"]


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("<tool_call>\n{oops\n</tool_call>", "invalid_json"),
        ('<tool_call>\n{"name": "add"', "unclosed_block"),
        ('<tool_call>\n{"arguments": {}}\n</tool_call>', "missing_name"),
        (call("add", "[1]"), "malformed_structure"),
        (call("add", '{"a": "\\ud800"}'), "malformed_structure"),
        (call("add", '{"a": NaN}'), "malformed_structure"),
        (call("\\ud800", "{}"), "malformed_structure"),
        ('<tool_call>\n{"name": ["add"], "arguments": {}}\n</tool_call>', "malformed_structure"),
        # More than Python's own reader of JSON takes.
        (call("add", "[" * 2000), "invalid_json"),
        (call("add", '{"a": %s}' % ("1" * 5000)), "invalid_json"),
    ],
)
def test_unreadable_calls_are_named(text: str, cause: str) -> None:
    message = Talk([text], context=2**14).ask(USER, max_tokens=2**13).message
    assert message["tool_calls"][0]["error"] == cause
    assert isinstance(message["tool_calls"][0]["function"]["name"], str)


# As Qwen3-Coder's: the arguments of every call are a mapping. No text of a policy may end a trajectory by it.
NAMES = "{% for call in message.tool_calls or [] %}{{ call.function.arguments.keys() | list }}{% endfor %}"
REFUSES = "{% if messages[0].content == 'No.' and not add_generation_prompt %}{{ raise_exception('no') }}{% endif %}"
MAPPING_TEMPLATE = REFUSES + PLAIN_TEMPLATE.replace("<|im_end|>", NAMES + "<|im_end|>")


@pytest.mark.parametrize("said", [call("add", "{a}"), "<tool_call>\n" + "[" * 3000 + "\n</tool_call>"])
def test_calls_that_a_template_refuses_are_text(said: str) -> None:
    talk = Talk([said, "Sorry."], template=MAPPING_TEMPLATE, context=10_000)
    first = talk.ask(USER, max_tokens=5000)
    (failed,) = first.message["tool_calls"]
    messages = [USER, first.message, tool_result(first, "error")]
    difference = talk.conversation.structure_difference(messages[:2], tools=[TOOL])
    assert difference is not None and "<tool_call>" in difference
    second = talk.ask(*messages)
    assert second.parent is None, "the template shows it otherwise"
    assert f"assistant:{failed['function']['arguments']}<|im_end|>" in talk.tokenizer.decode(second.prompt_ids)
    talk.check_each_token_once(talk.conversation.samples(PROMPT, trajectory=0))


def test_a_whole_that_the_template_refuses_is_a_difference() -> None:
    talk = Talk(["Yes."], template=MAPPING_TEMPLATE)
    asked = {"role": "user", "content": "No."}
    found = talk.conversation.structure_difference([asked, talk.ask(asked).message], tools=[TOOL])
    assert found == "the chat template refuses the whole: TemplateError: no"


def test_messages_that_the_template_refuses_are_a_cause() -> None:
    template = PLAIN_TEMPLATE + "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    with pytest.raises(TrajectoryError, match="the chat template refuses the messages: TemplateError: no system") as raised:
        Talk([], template=template).ask({"role": "system", "content": "Be."}, USER)
    assert raised.value.cause == "template"


def test_each_call_has_an_id_of_its_own() -> None:
    talk = Talk([call("add", "{}") * 2, call("add", "{}")])
    first = talk.ask(USER)
    second = talk.ask(
        USER, first.message, *[{"role": "tool", "tool_call_id": each["id"], "content": "1"} for each in first.message["tool_calls"]]
    )
    names = [each["id"] for turn in (first, second) for each in turn.message["tool_calls"]]
    assert len(names) == len(set(names)) == 3


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
