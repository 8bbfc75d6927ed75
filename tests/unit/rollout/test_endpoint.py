"""The endpoint over real HTTP: who is answered, what is refused, retries, branches and clients that go away."""

import asyncio
import gzip
import json
import socket
import threading
from typing import Any

import aiohttp
import numpy as np
import psutil
import pytest
from chat_parts import PLAIN_TEMPLATE, call
from endpoint_parts import ADD, RETRY, USER, error_of, run, served, until

from megatron_rl.engines.sampling import Sampling
from megatron_rl.errors import EngineError
from megatron_rl.rollout import endpoint as module
from megatron_rl.rollout.renderers import _KeepingTokenizer
from megatron_rl.rollout.sample_checks import check_samples
from megatron_rl.types import Ints


def test_only_keys_of_open_sessions_are_served_on_loopback() -> None:
    async def work() -> None:
        async with served(["A", "B"]) as one:
            listening = [link.laddr.ip for link in psutil.Process().net_connections("tcp") if link.status == psutil.CONN_LISTEN]
            assert listening and set(listening) == {"127.0.0.1"}
            assert (await one.chat())[0] == 200
            assert error_of(await one.post("/v1/chat/completions", {}, key="wrong"), "the key is none of a trajectory") == 401
            status, answer = await one.post("/v1/messages", {}, key="wrong")
            assert (status, answer["type"], answer["error"]["type"]) == (401, "error", "authentication_error")
            async with one.client.get(f"{one.url}/v1/models", headers={"x-api-key": one.key}) as response:
                assert [model["id"] for model in (await response.json())["data"]] == ["policy"]
            assert error_of(await one.post("/v1/embeddings", {}), "POST /v1/embeddings is not served", "/v1/completions") == 404

    run(work())


def test_a_key_ends_with_its_trajectory() -> None:
    async def work() -> None:
        async with served(["A", "B"]) as one:
            async with one.endpoint.open(one.session.conversation, Sampling(max_tokens=5)) as other:
                assert other.key != one.key and len(other.key) >= 32
                body = {"model": "policy", "messages": [USER]}
                assert (await one.post("/v1/chat/completions", body, key=other.key))[0] == 200
            assert error_of(await one.post("/v1/chat/completions", body, key=other.key), "needs the one that this agent was given") == 401

    run(work())

    async def ended() -> None:
        async with served(["A"]) as one:
            one.policy.opened.clear()
            waiting = asyncio.create_task(one.chat())
            await until(lambda: one.policy.num_running == 1)
            await one.session.close()
            assert error_of(await waiting, "the trajectory of this key has ended") == 401
            assert one.policy.num_cancelled == 1 and not one.session.conversation.turns

    run(ended())


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"model": "gpt-4o"}, 404, ["model is 'gpt-4o'", 'needs "policy"']),
        ({"temperature": 0.7}, 400, ["temperature is 0.7", "needs 1.0, or to be left out", "rollout.agent.sampling"]),
        ({"top_p": 0.9}, 400, ["top_p is 0.9, needs 1"]),
        ({"top_p": True}, 400, ["top_p is True"]),
        ({"seed": 1}, 400, ["seed is 1, needs to be left out"]),
        ({"logprobs": True}, 400, ["logprobs is True"]),
        ({"top_logprobs": 10**6}, 400, ["top_logprobs is 1000000"]),
        ({"logit_bias": {"7": 5}}, 400, ["logit_bias is {'7': 5}"]),
        ({"response_format": {"type": "json_object"}}, 400, ["response_format", "json_object"]),
        ({"tool_choice": "required", "tools": [{"type": "function", "function": ADD}]}, 400, ["tool_choice is 'required'", "auto or none"]),
        ({"custom_logit_processor": "x"}, 400, ["custom_logit_processor is not known", "leave it out"]),
        ({"max_tokens": 0}, 400, ["max_tokens is 0, needs an integer of at least 1"]),
        ({"max_tokens": 5.0}, 400, ["max_tokens is 5.0"]),
        ({"n": True}, 400, ["n is True"]),
        ({"n": 65}, 400, ["had 0 answers and 65 more", "rollout.max_turns"]),
        ({"stop": [""]}, 400, ["stop is ['']"]),
        ({"stop": ["x"] * 17}, 400, ["needs at most 16 texts"]),
        ({"stop": "x" * 257}, 400, ["stop is ['xxx", "of 1 to 256 characters"]),
        ({"messages": [{"role": "assistant", "content": None, "function_call": {"name": "a"}}, USER]}, 400, ["[0] has function_call"]),
        ({"stream": "yes"}, 400, ["stream is 'yes'"]),
        ({"tools": [{"type": "web_search"}]}, 400, ["tools[0] is {'type': 'web_search'}"]),
        ({"messages": []}, 400, ["need a message to answer"]),
        ({"messages": [USER, {"role": "assistant", "content": "A"}]}, 400, ["end with the assistant's"]),
        ({"messages": [{"role": "robot", "content": "A"}]}, 400, ["messages[0]", "needs a role"]),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, 400, ["'image_url'", "needs text"]),
        ({"messages": [{"role": "tool", "content": "A"}]}, 400, ["tool_call_id None"]),
        ({"messages": [{"role": "user", "content": "A" * 5000}]}, 400, ["too long", "has 4096", "shorten"]),
    ],
)
def test_what_no_turn_can_be_is_refused(fields: dict[str, Any], status: int, words: list[str]) -> None:
    async def work() -> None:
        async with served(["A"]) as one:
            assert error_of(await one.chat(**fields), *words) == status
            assert not one.policy.asked and not one.session.conversation.turns
            assert one.session.num_refused == 1

    run(work())


@pytest.mark.parametrize(
    "body", ["", "[1]", "{", b"\xff", '{"model": "\\ud800"}', "[" * 100_000, '{"top_k": 1' + "0" * 5000 + "}", '{"temperature": NaN}']
)
def test_a_body_that_is_no_object_is_refused(body: str | bytes) -> None:
    async def work() -> None:
        async with served(["A"]) as one:
            assert error_of(await one.post("/v1/chat/completions", body), "needs") == 400

    run(work())


def test_no_body_is_decompressed() -> None:
    async def work() -> None:
        async with served(["A"]) as one:
            body = gzip.compress(json.dumps({"model": "policy", "messages": [USER]}).encode())
            assert error_of(await one.post("/v1/chat/completions", body, Content_Encoding="gzip"), "no JSON") == 400

    run(work())


def test_an_oversized_body_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BODY_BYTES", 1000)

    async def work() -> None:
        async with served(["A"]) as one:
            assert error_of(await one.chat({"role": "user", "content": "A" * 1000}), "more than 1000 bytes") == 413
            status, answer = await one.post("/v1/messages", "A" * 1001)
            assert (status, answer["error"]["type"]) == (413, "request_too_large")
            assert one.session.cause is not None and one.session.cause.cause == "context"

    run(work())


def test_the_runs_sampling_is_what_an_engine_gets() -> None:
    async def work() -> None:
        async with served(["One two.", "A", "B"], max_tokens=50) as one:
            status, answer = await one.chat(
                temperature=1, top_p=1.0, frequency_penalty=0, user="me", store=False, metadata={}, stop="wo", max_completion_tokens=40, n=1
            )
            assert status == 200 and answer["choices"][0]["message"] == {"role": "assistant", "content": "One t"}
            assert answer["choices"][0]["finish_reason"] == "stop"
            await one.chat(max_tokens=10**6)
            end = one.policy.tokenizer.eos_token_id
            first, second = one.policy.samplings
            assert first == Sampling(max_tokens=40, stop=("wo",), stop_token_ids=first.stop_token_ids) and end in first.stop_token_ids
            assert second.max_tokens == 50 and second.stop == ()

    run(work())


def test_requests_may_repeat_how_the_run_draws_tokens() -> None:
    async def work() -> None:
        async with served(["A"], top_p=0.9) as one:
            assert error_of(await one.chat(top_p=1.0), "top_p is 1.0, needs 0.9, or to be left out") == 400
            assert (await one.chat(top_p=0.9, top_k=-1))[0] == 200

    run(work())


def test_other_settings_may_be_overridden() -> None:
    async def work() -> None:
        async with served(["A", "B"], sampling="override") as one:
            status, answer = await one.chat(model="gpt-4o", temperature=0.2, seed=3)
            assert (status, answer["model"]) == (200, "policy")
            assert (await one.chat())[0] == 200
            count = {"model": "claude", "messages": [USER]}
            assert (await one.post("/v1/messages/count_tokens", count))[0] == 200, "which asks for no answer"
            assert (one.session.num_overridden, one.session.num_refused) == (1, 0)
            assert {sampling.temperature for sampling in one.policy.samplings} == {1.0}
            assert error_of(await one.chat(custom_logit_processor="x"), "not known") == 400

    run(work())


def test_an_answer_cut_by_length_is_never_extended() -> None:
    async def work() -> None:
        async with served(["A" * 30, "B", "C" * 30], max_tokens=20) as one:
            _, answer = await one.chat()
            choice = answer["choices"][0]
            assert choice["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 20
            await one.chat(USER, choice["message"], USER)
            assert one.session.conversation.turns[1].parent is None
            status, message = await one.post("/v1/messages", {"model": "policy", "messages": [USER], "max_tokens": 9})
            assert (status, message["stop_reason"], message["usage"]["output_tokens"]) == (200, "max_tokens", 9)

    run(work())


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_a_client_that_goes_away_aborts_its_request(streams: bool, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEEP_ALIVE_S", 0.01)

    async def work() -> None:
        async with served(["A", "B"]) as one:
            one.policy.opened.clear()
            waiting = asyncio.create_task(one.chat(stream=streams, n=count))
            await until(lambda: one.policy.num_running == count)
            waiting.cancel()
            await until(lambda: one.policy.num_cancelled == count)
            assert not one.session.conversation.turns
            # Its retry is a request of its own, and the budget has none of the first.
            one.policy.opened.set()
            assert (await one.chat(headers=RETRY))[0] == 200
            assert len(one.session.conversation.turns) == 1 and one.session._num_asked == 1

    run(work())


def test_concurrent_requests_are_branches_with_each_token_once() -> None:
    async def work() -> None:
        async with served(lambda text: "Q" if text.count("user") == 1 else text[-60:][:30]) as one:
            _, answer = await one.chat()
            begun = [USER, answer["choices"][0]["message"]]
            asked = [[*begun, {"role": "user", "content": f"Branch {number}"}] for number in range(3)]
            one.policy.opened.clear()
            tasks = [asyncio.create_task(one.chat(*messages)) for messages in asked]
            await until(lambda: one.policy.num_running == 3)
            one.policy.opened.set()
            assert all(status == 200 for status, _ in await asyncio.gather(*tasks))
            first, *branches = one.session.conversation.turns
            assert [turn.parent for turn in branches] == [first] * 3
            samples = check_samples(one.samples(), prompt=one.samples()[0].prompt, num_samples=1, vocab_size=300, max_tokens=4096)
            assert len(samples) == 3 and {sample.trajectory for sample in samples} == {0}
            trained = np.concatenate([sample.rollout_log_probs[sample.loss_mask] for sample in samples])
            assert len(trained) == len(set(trained.tolist())) == one.policy.num_made
            assert {"s"} == set(one.policy.sessions)

    run(work())


def test_several_choices_are_branches() -> None:
    async def work() -> None:
        async with served(["A", "Bb", "C"]) as one:
            _, answer = await one.chat(n=3)
            assert [choice["message"]["content"] for choice in answer["choices"]] == ["A", "Bb", "C"]
            assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
            asked = len(one.policy.asked[0])
            assert answer["usage"] == {"prompt_tokens": asked, "completion_tokens": 2 + 3 + 2, "total_tokens": asked + 7}
            assert len(one.samples()) == 3

    run(work())


def test_the_budget_of_turns_is_kept() -> None:
    async def work() -> None:
        async with served(["A", "B", "C"], max_turns=3) as one:
            assert (await one.chat(n=2))[0] == 200
            assert error_of(await one.chat(n=2), "had 2 answers and 2 more", "at most 3", "rollout.max_turns") == 400
            assert one.session.cause is not None and one.session.cause.cause == "budget"
            assert (await one.chat())[0] == 200
            assert len(one.session.conversation.turns) == 3

    run(work())


def test_a_refused_template_is_a_cause() -> None:
    async def work() -> None:
        template = PLAIN_TEMPLATE + "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        async with served(["A"], template=template) as one:
            assert error_of(await one.chat({"role": "system", "content": "Be."}, USER), "the chat template refuses", "no system") == 400
            assert one.session.cause is not None and one.session.cause.cause == "template"
            deep = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "add", "arguments": "[" * 3000}}]}
            assert (await one.chat(USER, deep, USER))[0] == 200, "which no JSON reader takes"

    run(work())


def test_an_answer_that_cannot_be_made_fails_the_trajectory() -> None:
    async def work() -> None:
        async with served(["A"]) as one:

            async def failing(token_ids: Ints, **options: Any) -> Any:
                raise EngineError("the engine returned 3 tokens and the log-probs of 2 others")

            one.policy.generate = failing  # type: ignore[method-assign]
            assert error_of(await one.chat(), "the trajectory failed: EngineError") == 500
            assert isinstance(one.session.failed.exception(), EngineError) and not one.session.conversation.turns

    run(work())


def test_completions_continue_behind_their_own_tokens() -> None:
    async def work() -> None:
        async with served(["cd STOP", "gh", "x"]) as one:
            fields = {"model": "policy", "stop": ["STOP"]}
            status, answer = await one.post("/v1/completions", {"prompt": "ab", **fields})
            assert (status, answer["object"], answer["choices"][0]["text"]) == (200, "text_completion", "cd ")
            assert answer["choices"][0]["finish_reason"] == "stop"
            first = one.session.conversation.turns[0]
            # The client sees no end of turn, so that the whole text is not what it goes on with: a branch.
            await one.post("/v1/completions", {"prompt": "abcd STOP ef", **fields})
            assert one.session.conversation.turns[1].parent is None
            whole = one.policy.tokenizer.decode(first.token_ids.tolist())
            await one.post("/v1/completions", {"prompt": whole + "ij", **fields})
            last = one.session.conversation.turns[2]
            assert last.parent is first and last.prompt_ids.tolist()[: len(first.token_ids)] == first.token_ids.tolist()
            assert one.policy.tokenizer.decode(last.prompt_ids.tolist()) == whole + "ij"
            assert error_of(await one.post("/v1/completions", {"prompt": [1, 2], **fields}), "prompt is [1, 2]", "one text") == 400
            assert error_of(await one.post("/v1/completions", {"prompt": "", **fields}), "prompt is missing") == 400

    run(work())


def test_calls_keep_the_tokens_before() -> None:
    async def work() -> None:
        async with served([call("add", '{"a":  1}'), call("add", "{}"), "Four."]) as one:
            tools = [{"type": "function", "function": {**ADD, "strict": True}}]
            messages: list[Any] = [USER]
            for number in range(2):
                _, answer = await one.chat(*messages, tools=tools)
                said = answer["choices"][0]["message"]
                assert answer["choices"][0]["finish_reason"] == "tool_calls"
                messages += [
                    said,
                    {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": [{"type": "text", "text": "4"}]},
                ]
                if not number:
                    assert json.loads(said["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
            await one.chat(*messages, tools=tools)
            turns = one.session.conversation.turns
            assert [turn.parent for turn in turns] == [None, turns[0], turns[1]]
            (sample,) = one.samples()
            assert sample.loss_mask.sum() == one.policy.num_made

    run(work())


@pytest.mark.parametrize("said", ["\\ud800", "1", "a"])
def test_a_clients_copy_of_any_call_is_read(said: str) -> None:
    """Also of a call that no reader of JSON takes, which is text."""

    async def work() -> None:
        async with served([call("add", f'{{"a": "{said}"}}'), "Four."]) as one:
            tools = [{"type": "function", "function": ADD}]
            _, answer = await one.chat(tools=tools)
            message = answer["choices"][0]["message"]
            calls = message.get("tool_calls")
            result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "4"} if calls else USER
            assert (await one.chat(USER, message, result, tools=tools))[0] == 200
            first, second = one.session.conversation.turns
            assert second.parent is first

    run(work())


def test_a_stream_says_that_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEEP_ALIVE_S", 0.01)

    async def work() -> None:
        async with served(["A"]) as one:
            one.policy.opened.clear()
            body = {"model": "policy", "messages": [USER], "stream": True}
            headers = {"Authorization": f"Bearer {one.key}"}
            async with one.client.post(f"{one.url}/v1/chat/completions", json=body, headers=headers) as response:
                assert (response.status, response.content_type) == (200, "text/event-stream")
                assert await response.content.readline() == b": keep-alive\n"
                one.policy.opened.set()
                rest = [line async for line in response.content if line.startswith(b"data: ")]
            assert rest[-1] == b"data: [DONE]\n"
            # An early refusal has a status, a late one an event.
            assert error_of(await one.chat(stream=True, n=100), "rollout.max_turns") == 400
            one.policy.opened.clear()
            async with one.client.post(f"{one.url}/v1/chat/completions", json=body, headers=headers) as response:
                await response.content.readline()
                await one.session.close()
                rest = [line async for line in response.content if line.startswith(b"data: ")]
            assert json.loads(rest[-1].removeprefix(b"data: "))["error"]["code"] == "invalid_api_key"

    run(work())


def test_a_key_that_ends_while_the_body_comes_makes_no_turn() -> None:
    async def work() -> None:
        async with served(["A"]) as one:
            begun = asyncio.Event()

            async def slowly() -> Any:
                yield b'{"model": "policy", '
                begun.set()
                await until(lambda: not one.endpoint._sessions)
                yield b'"messages": [{"role": "user", "content": "Hi."}]}'

            headers = {"Authorization": f"Bearer {one.key}"}
            posting = asyncio.create_task(one.client.post(f"{one.url}/v1/chat/completions", data=slowly(), headers=headers))
            await begun.wait()
            await asyncio.sleep(0.05)
            del one.endpoint._sessions[one.key]
            async with await posting as response:
                assert response.status == 401
            assert not one.policy.asked
            one.endpoint._sessions[one.key] = one.session

    run(work())


def test_bytes_that_are_no_request_end_no_server() -> None:
    async def work() -> None:
        async with served(["A"]) as one:
            host, port = one.url.removeprefix("http://").split(":")
            with socket.create_connection((host, int(port))) as link:
                link.sendall(b"\x16\x03\x01\x00nonsense\r\n\r\n")
            with pytest.raises(aiohttp.ClientError):
                async with one.client.post(f"{one.url}/v1/chat/completions", headers={"x": "y" * 100_000}) as response:
                    response.raise_for_status()
            assert (await one.chat())[0] == 200

    run(work())


def test_long_texts_become_tokens_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    encode = _KeepingTokenizer.encode
    monkeypatch.setattr(
        _KeepingTokenizer, "encode", lambda *given, **options: threads.append(threading.get_ident()) or encode(*given, **options)
    )

    async def work() -> None:
        async with served(["A", "B"], context=2**18) as one:
            for content, is_long in (("x" * 2**16, False), ("y" * (2**16 + 1), True)):
                threads.clear()
                status, body = await one.chat({"role": "user", "content": content})
                assert status == 200 and body["usage"]["prompt_tokens"] > 2**16
                # Answers are read on the loop.
                assert (threads[0] != threading.get_ident()) is is_long
            status, body = await one.post("/v1/completions", {"model": "policy", "prompt": "z" * 2**18})
            assert error_of((status, body), "too long", "has 262144") == 400
            # A refusal is forgotten: its key may be used again.
            for number in range(2):
                answer = await one.chat({"role": "user", "content": f"{number}" * 2**18}, headers={"idempotency_key": "k"})
                assert error_of(answer, "too long") == 400
            assert len(one.session.conversation.turns) == 2 and one.session.num_refused == 3

    run(work())


def test_tools_are_not_offered_where_none_may_be_called() -> None:
    async def work() -> None:
        async with served(["A", "B"]) as one:
            for choice in ("auto", "none"):
                assert (await one.chat(tools=[{"type": "function", "function": ADD}], tool_choice=choice))[0] == 200
            shown = ["Add." in one.policy.tokenizer.decode(ids) for ids in one.policy.asked]
            assert shown == [True, False]

    run(work())
