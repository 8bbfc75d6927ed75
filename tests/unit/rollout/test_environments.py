"""Environments in processes and on an event loop: tools, replies, rewards, and failures that cost one trajectory."""

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from megatron_rl.errors import UserError
from megatron_rl.plugins.loader import kind_of, load
from megatron_rl.rollout.environment_call import Answer
from megatron_rl.rollout.environment_host import Environments
from megatron_rl.types import Message, Prompt


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)


def prompt_of(label: str) -> Prompt:
    return Prompt(id="p", token_ids=np.array([1]), text="Hi.", label=label)


def said(content: str = "", *calls: tuple[str, Any]) -> Message:
    asked = [
        {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": content} | ({"tool_calls": asked} if asked else {})


def play(environments: Environments, messages: Sequence[Message], *, label: str = "4") -> list[Answer]:
    """Reset, and answer the messages one after the other."""

    async def work() -> list[Answer]:
        async with environments.open() as home:
            return [await home.reset(prompt_of(label)), *[await home.answer(message) for message in messages]]

    return asyncio.run(asyncio.wait_for(work(), 60))


@pytest.fixture(params=["Shop", "AsyncShop"])
def shop(request: pytest.FixtureRequest) -> Iterator[Environments]:
    with Environments(f"environments_under_test:{request.param}", {"bonus": 0.5}) as environments:
        yield environments


def test_tools_and_rewards(shop: Environments) -> None:
    calls = (("put", {"key": "a", "value": "x", "twice": True}), ("get", {"key": "a"}), ("get", {"key": "q"}), ("get", {}), ("sell", {}))
    first, stored, _, end = play(shop, [said("", calls[0]), said("", *calls[1:]), said("4")])
    assert first == {"messages": [{"role": "user", "content": "Shop." if shop.asynchronous else "Hi."}]}
    assert stored["messages"] == [{"role": "tool", "tool_call_id": "c0", "name": "put", "content": "stored"}]
    assert (stored["done"], stored["parts"], stored["num_calls"], stored["num_errors"]) == (False, {}, 1, 0)
    assert end == {"messages": [], "done": True, "parts": {"answer": 1.0, "bonus": 0.5}, "num_calls": 0, "num_errors": 0}


def test_errors_of_calls_are_shown_to_the_policy(shop: Environments) -> None:
    unreadable = said("", ("get", "{oops"))
    unreadable["tool_calls"][0]["error"] = "invalid_json"
    _, answer, other = play(shop, [said("", ("get", {"key": "q"}), ("get", {}), ("sell", {}), ("get", {"key": "q", "x": 1})), unreadable])
    shown = [message["content"] for message in answer["messages"]]
    assert shown[:3] == ["error: no key q", "error: key: Field required", "error: there is no tool 'sell', only put, get"]
    assert shown[3].startswith("error: x: Extra inputs") and answer["num_errors"] == 4
    assert other["messages"][0]["content"] == "error: this call cannot be read (invalid_json)"


def test_the_schema_is_the_signatures() -> None:
    with Environments("environments_under_test:Shop", {}) as environments:
        put, get = environments.tools
    assert put == {
        "name": "put",
        "description": "Store a value.",
        "parameters": {
            "type": "object",
            "properties": {
                "key": {"type": "string"},
                "value": {"type": "string", "description": "a text"},
                "twice": {"type": "boolean", "default": False},
            },
            "required": ["key", "value"],
        },
    }
    assert get["parameters"]["required"] == ["key"]


def test_each_trajectory_has_a_state_of_its_own(shop: Environments) -> None:
    put, get = said("", ("put", {"key": "a", "value": "x"})), said("", ("get", {"key": "a"}))

    async def work() -> list[Answer]:
        async with shop.open() as one, shop.open() as other:
            await asyncio.gather(one.reset(prompt_of("4")), other.reset(prompt_of("4")))
            await one.answer(put)
            return [await one.answer(get), await other.answer(get)]

    mine, others = asyncio.run(work())
    assert (mine["messages"][0]["content"], mine["parts"], others["num_errors"]) == ("x", {"get": 0.25}, 1)


def test_tools_of_one_message_run_at_the_same_time() -> None:
    with Environments("environments_under_test:Slow", {}) as environments:
        _, answer = play(environments, [said("", ("wait", {}), ("wait", {}), ("wait", {}))])
    ends = [float(message["content"]) for message in answer["messages"]]
    assert max(ends) - min(ends) < 0.3


@pytest.mark.parametrize(
    ("label", "words"),
    [
        ("raise", "KeyError: 'missing'"),
        ("exit", "SystemExit: 3"),
        ("crash", "its process ended before it answered"),
        ("memory", "MemoryError"),
        ("infinite", "'environment' is inf, needs a finite number"),
        ("empty", "needs a message for the policy or the end"),
        ("number", "step returned 4 of type int, needs a string or a Reply"),
    ],
)
def test_a_failure_costs_its_trajectory_alone(label: str, words: str) -> None:
    with Environments("environments_under_test:Broken", {}) as environments:

        async def work() -> tuple[Answer, Answer]:
            async with environments.open() as broken, environments.open() as other:
                await broken.reset(prompt_of(label))
                failed = await broken.answer(said("4"))
                return failed, await other.reset(prompt_of("4"))

        failed, other = asyncio.run(work())
    assert failed["cause"] == "environment" and words in failed["headline"]
    assert "messages" in other


def test_a_hang_ends_with_its_trajectory() -> None:
    with Environments("environments_under_test:Broken", {}) as environments:

        async def work() -> int:
            async with environments.open() as home:
                await home.reset(prompt_of("hang"))
                pid = home.pid
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(home.answer(said("4")), 0.2)
            return pid

        wait_until_gone(asyncio.run(work()))


def test_what_an_environment_started_ends_with_it() -> None:
    with Environments("environments_under_test:Broken", {}) as environments:
        _, answer = play(environments, [said("4")], label="child")
        wait_until_gone(int(next(iter(answer["parts"]))))


def test_a_killed_server_is_started_again() -> None:
    with Environments("environments_under_test:Shop", {}) as environments:
        play(environments, [])
        server = environments._server.process  # type: ignore[union-attr]
        os.kill(server.pid, 9)
        server.join()
        assert "messages" in play(environments, [])[0]


def test_nothing_is_left_of_closed_environments() -> None:
    with Environments("environments_under_test:Shop", {}) as environments:
        server = psutil.Process(environments._server.process.pid)  # type: ignore[union-attr]

        held: list[object] = []

        async def work() -> list[psutil.Process]:
            opened = environments.open()
            home = await opened.__aenter__()
            await home.reset(prompt_of("4"))
            held.append(opened)
            return server.children()

        children = asyncio.run(work())
    assert children
    for process in (server, *children):
        wait_until_gone(process.pid)


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 20
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.05)


def test_unusable_classes_are_refused() -> None:
    with pytest.raises(UserError, match=r"the tool Untyped\.look.*where.*no annotation"):
        Environments("environments_under_test:Untyped", {})
    with pytest.raises(UserError, match=r"rollout\.environment environments_under_test:said.*does not exist"):
        load("environments_under_test:said", kind="environment")
    with pytest.raises(UserError, match=r"rollout\.environment pathlib:Path.*subclass of megatron_rl\.Environment"):
        load("pathlib:Path", kind="environment")
    with pytest.raises(UserError, match=r"rollout\.args\.bonus is 'x', .*needs bonus: float"):
        Environments("environments_under_test:Shop", {"bonus": "x"})
    assert kind_of("environments_under_test:Shop") == "environment"
    with Environments("environments_under_test:Unwilling", {}) as environments:
        assert "needs the strings 'role' and 'content'" in play(environments, [])[0]["headline"]
