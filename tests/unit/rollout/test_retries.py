"""Attempts at one request of an agent: known by their headers, and given up ones answered anew."""

import asyncio

from endpoint_parts import RETRY, USER, error_of, run, served, until


def test_a_retry_of_an_answered_request_gets_its_answer() -> None:
    async def work() -> None:
        async with served(["A", "B", "C"]) as one:
            first = (await one.chat())[1]["choices"]
            assert (await one.chat(headers=RETRY))[1]["choices"] == first
            assert (await one.chat(headers={"x_stainless_retry_count": "2"}))[1]["choices"] == first
            assert len(one.session.conversation.turns) == 1
            # Without a header an equal request is another one.
            assert (await one.chat())[1]["choices"][0]["message"]["content"] == "B"
            # The newest of equal requests is the one that is tried again.
            assert (await one.chat(headers=RETRY))[1]["choices"][0]["message"]["content"] == "B"
            # A retry of a request that never arrived is the first attempt at it.
            assert (await one.chat({"role": "user", "content": "New."}, headers=RETRY))[1]["choices"][0]["message"]["content"] == "C"
            assert len(one.session.conversation.turns) == 3

    run(work())


def test_retries_of_equal_requests_find_one_each() -> None:
    async def work() -> None:
        async with served(["A", "B", "C"]) as one:
            for _ in range(3):
                await one.chat()
            again = [(await one.chat(headers=RETRY))[1]["choices"][0]["message"]["content"] for _ in range(3)]
            assert again == ["C", "B", "A"] and len(one.session.conversation.turns) == 3

    run(work())


def test_an_idempotency_key_names_one_request() -> None:
    async def work() -> None:
        async with served(["A", "B"]) as one:
            key = {"idempotency_key": "k"}
            answers = [(await one.chat(headers=key))[1]["choices"][0]["message"]["content"] for _ in range(2)]
            assert answers == ["A", "A"] and len(one.session.conversation.turns) == 1
            assert error_of(await one.chat({"role": "user", "content": "No."}, headers=key), "idempotency-key k came with another") == 400
            assert (await one.chat(headers={"idempotency_key": "l"}))[1]["choices"][0]["message"]["content"] == "B"

    run(work())


def test_a_retry_is_at_a_request_of_its_own_dialect() -> None:
    async def work() -> None:
        async with served(["A", "B"]) as one:
            body = {"model": "policy", "messages": [USER], "max_tokens": 9}
            assert (await one.post("/v1/chat/completions", body))[1]["choices"][0]["message"]["content"] == "A"
            assert (await one.post("/v1/messages", body, **RETRY))[1]["content"][0]["text"] == "B"
            assert len(one.session.conversation.turns) == 2

    run(work())


def test_a_retry_joins_the_running_request() -> None:
    async def work() -> None:
        async with served(["A"]) as one:
            one.policy.opened.clear()
            first = asyncio.create_task(one.chat())
            await until(lambda: one.policy.num_running == 1)
            second = asyncio.create_task(one.chat(headers=RETRY))
            await asyncio.sleep(0.05)
            # The first client gives up: the second one still waits for the same answer.
            first.cancel()
            await asyncio.sleep(0.05)
            assert one.policy.num_cancelled == 0
            one.policy.opened.set()
            assert (await second)[1]["choices"][0]["message"]["content"] == "A"
            assert len(one.policy.asked) == len(one.session.conversation.turns) == 1

    run(work())


def test_a_retry_during_the_abort_is_answered_anew() -> None:
    """An engine takes a while to abort, and the client that gave up comes again meanwhile."""

    async def work() -> None:
        async with served(["A"]) as one:
            one.policy.opened.clear()
            one.policy.aborted.clear()
            first = asyncio.create_task(one.chat(headers={"idempotency_key": "k"}))
            second = asyncio.create_task(one.chat())
            await until(lambda: one.policy.num_running == 2)
            first.cancel()
            second.cancel()
            await until(lambda: one.policy.num_cancelled == 2)
            one.policy.opened.set()
            for headers in ({"idempotency_key": "k"}, RETRY):
                one.policy.texts = ["A", "B"]
                assert (await one.chat(headers=headers))[0] == 200
            one.policy.aborted.set()
            await until(lambda: one.policy.num_running == 0)
            assert len(one.session.conversation.turns) == one.session._num_asked == 2

    run(work())


def test_a_retry_is_at_the_request_that_was_given_up() -> None:
    """Two equal requests at the same time, of which one loses its client, are two answers."""

    async def work() -> None:
        async with served(["A", "B"]) as one:
            one.policy.opened.clear()
            first, second = (asyncio.create_task(one.chat()) for _ in range(2))
            await until(lambda: one.policy.num_running == 2)
            first.cancel()
            await until(lambda: one.policy.num_cancelled == 1)
            again = asyncio.create_task(one.chat(headers=RETRY))
            await until(lambda: one.policy.num_running == 2)
            one.policy.opened.set()
            said = [(await each)[1]["choices"][0]["message"]["content"] for each in (second, again)]
            assert sorted(said) == ["A", "B"] and len(one.session.conversation.turns) == 2

    run(work())
