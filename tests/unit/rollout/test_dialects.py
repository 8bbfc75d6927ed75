"""Unmodified clients at the endpoint: the openai and anthropic packages, and curl."""

import asyncio
import json
import subprocess
from typing import Any

import openai
import pytest
from chat_parts import call
from endpoint_parts import ADD, USER, Served, run, served
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from megatron_rl.rollout.anthropic_dialect import Messages
from megatron_rl.rollout.dialects import Fields

SAID = "<think>\nso\n</think>\n\nWell. " + call("add", '{"a":  1}')
OPENAI_TOOL: Any = {"type": "function", "function": ADD}
ANTHROPIC_TOOL: Any = {"name": "add", "description": "Add.", "input_schema": ADD["parameters"]}


async def events(one: Served, path: str, body: dict[str, Any]) -> list[str]:
    """The events of a stream as they are sent."""
    headers = {"x-api-key": one.key}
    async with one.client.post(one.url + path, json={"model": "policy", "stream": True, **body}, headers=headers) as response:
        assert (response.status, response.headers["Content-Type"]) == (200, "text/event-stream")
        return (await response.text()).removesuffix("\n\n").split("\n\n")


def test_the_openai_package_talks_with_tools() -> None:
    async def work() -> None:
        async with served([SAID, "Four.", "Four."]) as one:
            client = openai.AsyncOpenAI(base_url=f"{one.url}/v1", api_key=one.key, max_retries=0)
            messages: list[Any] = [{"role": "developer", "content": "Add."}, USER]
            first = await client.chat.completions.create(model="policy", messages=messages, tools=[OPENAI_TOOL])
            (choice,) = first.choices
            assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Well. ".strip())
            assert choice.message.tool_calls and choice.message.tool_calls[0].function.arguments == '{"a": 1}'  # type: ignore[union-attr]
            # As agents keep it: the package's own object, and a dump with every empty field.
            answer = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "4"}
            for kept in (choice.message, choice.message.model_dump()):
                last = await client.chat.completions.create(model="policy", messages=[*messages, kept, answer], tools=[OPENAI_TOOL])
                assert last.choices[0].message.content == "Four." and last.usage and last.usage.completion_tokens == 6
            root, *others = one.session.conversation.turns
            assert [turn.parent for turn in others] == [root, root]
            with pytest.raises(openai.BadRequestError, match="temperature is 0"):
                await client.chat.completions.create(model="policy", messages=[USER], temperature=0.0)
            with pytest.raises(openai.AuthenticationError, match="none of a trajectory"):
                await client.with_options(api_key="x").models.list()
            assert (await client.models.retrieve("policy")).id == "policy"
            with pytest.raises(openai.NotFoundError, match="is not served"):
                await client.models.retrieve("gpt-4o")
            await client.close()

    run(work())


def test_the_openai_package_reads_streams() -> None:
    async def work() -> None:
        async with served([SAID, "Four.", "Text"]) as one:
            client = openai.AsyncOpenAI(base_url=f"{one.url}/v1", api_key=one.key, max_retries=0)
            async with client.chat.completions.stream(
                model="policy",
                messages=[{"role": "user", "content": "Hi."}],
                # The package's own reader takes no others.
                tools=[{"type": "function", "function": {**ADD, "strict": True, "parameters": {}}}],
                stream_options={"include_usage": True},
            ) as stream:
                final = await stream.get_final_completion()
            message = final.choices[0].message
            assert (message.content, final.choices[0].finish_reason) == ("Well.", "tool_calls")
            assert message.tool_calls and message.tool_calls[0].function.arguments == '{"a": 1}'
            assert final.usage and final.usage.completion_tokens == one.policy.num_made
            chunks = [chunk async for chunk in await client.completions.create(model="policy", prompt="ab", stream=True)]
            assert "".join(chunk.choices[0].text for chunk in chunks) == "Four."
            assert chunks[-1].choices[0].finish_reason == "stop"
            await client.close()

    run(work())


def test_the_events_of_a_chat_are_openais() -> None:
    async def work() -> None:
        async with served([call("add", "{}")]) as one:
            body = {"messages": [USER], "tools": [OPENAI_TOOL], "stream_options": {"include_usage": True}}
            *data, end = await events(one, "/v1/chat/completions", body)
            assert end == "data: [DONE]" and all(each.startswith("data: {") for each in data)
            said, finished, usage = [json.loads(each.removeprefix("data: ")) for each in data]
            assert said["object"] == "chat.completion.chunk" and said["id"] == finished["id"] == usage["id"]
            (tool_call,) = said["choices"][0]["delta"].pop("tool_calls")
            assert said["choices"][0] == {
                "index": 0,
                "delta": {"role": "assistant", "content": None},
                "logprobs": None,
                "finish_reason": None,
            }
            assert tool_call.pop("id").startswith("call_")
            assert tool_call == {"index": 0, "type": "function", "function": {"name": "add", "arguments": "{}"}}
            assert finished["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "tool_calls"}]
            assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == one.policy.num_made

    run(work())


def test_answers_are_of_the_types_of_openai() -> None:
    """The package builds its objects from any JSON, so that its clients notice no other field or word."""

    async def work() -> None:
        async with served([SAID, "Four.", *["Well."] * 4]) as one:
            for given, number in (({"tools": [OPENAI_TOOL]}, 1), ({}, 1), ({}, 2)):
                body = {"model": "policy", "messages": [USER], "n": number, **given}
                _, answer = await one.post("/v1/chat/completions", body)
                assert len(ChatCompletion.model_validate(answer, strict=True).choices) == number
            _, answer = await one.post("/v1/completions", {"model": "policy", "prompt": "ab"})
            Completion.model_validate(answer, strict=True)
            async with one.client.get(f"{one.url}/v1/models/policy", headers={"x-api-key": one.key}) as response:
                Model.model_validate(await response.json(), strict=True)
            whole = await events(one, "/v1/chat/completions", {"messages": [USER], "stream_options": {"include_usage": True}})
            for event in whole[:-1]:
                ChatCompletionChunk.model_validate_json(event.removeprefix("data: "))

    run(work())


def test_the_events_of_a_message_are_anthropics() -> None:
    async def work() -> None:
        async with served([SAID]) as one:
            body = {
                "max_tokens": 100,
                "messages": [USER],
                "tools": [ANTHROPIC_TOOL],
                "thinking": {"type": "enabled", "budget_tokens": 1024},
            }
            found = await events(one, "/v1/messages", body)
            read = []
            for event in found:
                name, data = event.split("\n")
                read.append(json.loads(data.removeprefix("data: ")))
                assert name == f"event: {read[-1]['type']}"
            block = ["content_block_start", "content_block_delta", "content_block_stop"]
            thinking = ["content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"]
            assert [each["type"] for each in read] == ["message_start", *thinking, *block, *block, "message_delta", "message_stop"]
            assert [each["index"] for each in read if "index" in each] == [0] * 4 + [1] * 3 + [2] * 3
            start, asked = read[0]["message"], len(one.policy.asked[0])
            assert (start["role"], start["content"], start["stop_reason"], start["usage"]["input_tokens"]) == ("assistant", [], None, asked)
            assert read[1]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
            assert read[2]["delta"] == {"type": "thinking_delta", "thinking": "so"}
            assert read[5]["content_block"] == {"type": "text", "text": ""} and read[6]["delta"] == {"type": "text_delta", "text": "Well."}
            assert read[8]["content_block"].pop("id").startswith("call_")
            assert read[8]["content_block"] == {"type": "tool_use", "name": "add", "input": {}}
            assert read[9]["delta"] == {"type": "input_json_delta", "partial_json": '{"a": 1}'}
            assert read[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
            assert read[-2]["usage"] == {"output_tokens": one.policy.num_made}

    run(work())


def test_messages_become_the_turns_of_a_chat() -> None:
    """Results, systems and thoughts of Anthropic's dialect give the tree that OpenAI's would."""

    async def work() -> None:
        async with served([SAID, call("add", "{}"), "It is 4. STOP and on"]) as one:
            messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Hi."}]}]
            body = {"model": "policy", "max_tokens": 100, "system": [{"type": "text", "text": "Be."}], "tools": [ANTHROPIC_TOOL]}
            for _ in range(2):
                status, answer = await one.post("/v1/messages", {**body, "messages": messages})
                assert (status, answer["stop_reason"]) == (200, "tool_use")
                use = answer["content"][-1]
                result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "4"}]}
                messages += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]
            assert use["input"] == {}
            assert [block["type"] for block in messages[1]["content"]] == ["text", "tool_use"]
            _, answer = await one.post("/v1/messages", {**body, "messages": messages, "stop_sequences": ["STOP"]})
            assert answer["content"] == [{"type": "text", "text": "It is 4. "}]
            assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "STOP")
            turns = one.session.conversation.turns
            assert [turn.parent for turn in turns] == [None, turns[0], turns[1]]
            assert one.policy.tokenizer.decode(turns[0].prompt_ids.tolist()).startswith("<|im_start|>system\nBe.")
            # Results come before what is said with them, as the calls are before both.
            both = {"role": "user", "content": [{"type": "text", "text": "So?"}, result]}
            read = Messages().read(Fields({"messages": [*messages[:-1], both]}, sampling={})).messages[-2:]
            assert [(message["role"], message["content"]) for message in read] == [("tool", "4"), ("user", "So?")]
            counted = await one.post("/v1/messages/count_tokens", {"model": "policy", "messages": messages[:1]})
            _, answer = await one.post("/v1/messages", {"model": "policy", "messages": messages[:1], "max_tokens": 0})
            assert counted[0] == 200 and counted[1]["input_tokens"] > 10
            # Beyond the context, too: clients count to know when to shorten.
            long = {"model": "policy", "messages": [{"role": "user", "content": "A" * 5000}]}
            assert (await one.post("/v1/messages/count_tokens", long))[1]["input_tokens"] > 5000
            assert (answer["type"], answer["error"]["type"]) == ("error", "invalid_request_error")
            assert len(one.session.conversation.turns) == 3

    run(work())


@pytest.mark.parametrize("path", ["chat/completions", "messages"])
@pytest.mark.parametrize(("said", "tools"), [(call("add", "{a"), True), (SAID + call("add", "[1]"), True), (SAID, False)])
def test_what_is_no_offered_call_stays_text(path: str, said: str, tools: bool) -> None:
    """The request that repeats the text continues behind the tokens as sampled."""

    async def work() -> None:
        async with served([said, "Sorry."]) as one:
            chat = path != "messages"
            body = {"model": "policy", "max_tokens": 200, "tools": [OPENAI_TOOL if chat else ANTHROPIC_TOOL] * tools}
            status, answer = await one.post(f"/v1/{path}", {**body, "messages": [USER]})
            text = said.removeprefix("<think>\nso\n</think>\n\n")
            if chat:
                (choice,) = answer["choices"]
                message, end = choice["message"], choice["finish_reason"]
                assert message["content"] == text and "tool_calls" not in message
            else:
                message, end = {"role": "assistant", "content": answer["content"]}, answer["stop_reason"]
                assert answer["content"] == [{"type": "text", "text": text}]
            assert (status, end) == (200, "stop" if chat else "end_turn")
            await one.post(f"/v1/{path}", {**body, "messages": [USER, message, {"role": "user", "content": "Again."}]})
            first, second = one.session.conversation.turns
            assert first.num_unread == int(tools)
            if "<think>" not in said:
                assert second.parent is first
                assert one.policy.asked[1][: len(first.token_ids)] == first.token_ids.tolist()

    run(work())


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "no tools of its own"),
        ({"tool_choice": {"type": "any"}, "tools": [ANTHROPIC_TOOL]}, "tool_choice is 'any'"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "disable_parallel_tool_use"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"messages": [{"role": "system", "content": "A"}]}, "the role user or assistant"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "content 'image'"),
        ({"messages": [USER, {"role": "assistant", "content": [{"type": "tool_use", "name": "add"}]}, USER]}, "a name and an input"),
        ({"messages": [{"role": "user", "content": [{"type": []}]}]}, "cannot be read"),
    ],
)
def test_messages_that_have_no_exact_answer_are_refused(fields: dict[str, Any], word: str) -> None:
    async def work() -> None:
        async with served(["A"]) as one:
            status, answer = await one.post("/v1/messages", {"model": "policy", "messages": [USER], "max_tokens": 10, **fields})
            assert (status, answer["error"]["type"]) == (400, "invalid_request_error") and word in answer["error"]["message"]
            assert not one.policy.asked

    run(work())


def test_the_anthropic_package_talks_and_streams() -> None:
    anthropic = pytest.importorskip("anthropic", reason="tools/setup_env.sh installs it")

    async def work() -> None:
        async with served([SAID, "Four.", "Five."]) as one:
            client = anthropic.AsyncAnthropic(base_url=one.url, api_key=one.key, max_retries=0)
            messages: list[Any] = [USER]
            async with client.messages.stream(model="policy", max_tokens=100, messages=messages, tools=[ANTHROPIC_TOOL]) as stream:
                first = await stream.get_final_message()
            assert [block.type for block in first.content] == ["text", "tool_use"] and first.stop_reason == "tool_use"
            assert first.content[1].input == {"a": 1} and first.usage.output_tokens == one.policy.num_made
            result = {"type": "tool_result", "tool_use_id": first.content[1].id, "content": "4"}
            messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
            last = await client.messages.create(model="policy", max_tokens=100, messages=messages, tools=[ANTHROPIC_TOOL])
            assert last.content[0].text == "Four." and last.stop_reason == "end_turn"
            turns = one.session.conversation.turns
            assert turns[1].parent is turns[0]
            tokens = await client.messages.count_tokens(model="policy", messages=messages, tools=[ANTHROPIC_TOOL])
            assert tokens.input_tokens == len(turns[1].prompt_ids)
            with pytest.raises(anthropic.NotFoundError, match=r"not_found_error.*the only one"):
                await client.messages.create(model="claude", max_tokens=100, messages=messages)
            assert [model.id async for model in await client.models.list()] == ["policy"]
            assert (await client.models.retrieve("policy")).id == "policy"
            await client.close()

    run(work())


def test_curl_gets_an_answer() -> None:
    async def work() -> None:
        async with served(["Hello."]) as one:
            body = json.dumps({"model": "policy", "messages": [USER]})
            command = [
                "curl",
                "-sS",
                "--noproxy",
                "*",
                f"{one.url}/v1/chat/completions",
                "-H",
                f"Authorization: Bearer {one.key}",
                "-d",
                body,
            ]
            made = await asyncio.to_thread(subprocess.run, command, capture_output=True, check=True, timeout=50)
            assert json.loads(made.stdout)["choices"][0]["message"]["content"] == "Hello."

    run(work())


def test_a_client_retries_by_itself_without_a_second_turn() -> None:
    """The openai package, whose first answer is lost on the way back."""

    async def work() -> None:
        async with served(["A", "B"]) as one:

            async def lossy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                content = await reader.readuntil(b"\r\n\r\n")
                length = int(next(line.split(b":")[1] for line in content.split(b"\r\n") if line.lower().startswith(b"content-length")))
                body = await reader.readexactly(length)
                header = content.split(b"x-stainless-retry-count: ")[1].split(b"\r\n")[0].decode()
                headers = {"Authorization": f"Bearer {one.key}", "x-stainless-retry-count": header}
                async with one.client.post(f"{one.url}/v1/chat/completions", data=body, headers=headers) as response:
                    answer = await response.read()
                seen.append(header)
                if len(seen) > 1:
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n" + answer)
                    await writer.drain()
                writer.close()

            seen: list[str] = []
            server = await asyncio.start_server(lossy, "127.0.0.1", 0)
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
            client = openai.AsyncOpenAI(base_url=url, api_key=one.key, max_retries=2)
            answer = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "Hi."}])
            assert answer.choices[0].message.content == "A" and seen == ["0", "1"]
            assert len(one.session.conversation.turns) == 1
            await client.close()
            server.close()

    run(work())
