"""Environments in processes and on an event loop: tools, replies, rewards, and failures that cost one trajectory."""

import asyncio
import contextlib
import importlib
import multiprocessing
import os
import socket
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack
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
        ("two lines", "ValueError: two lines"),
        ("larger", "its answer has more than 0.0625 MiB, needs less"),
    ],
)
def test_a_failure_costs_its_trajectory_alone(label: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_rl.rollout.environment_host._LINE_BYTES", 2**16)
    with Environments("environments_under_test:Broken", {}) as environments:

        async def work() -> tuple[Answer, Answer]:
            async with environments.open() as broken, environments.open() as other:
                await broken.reset(prompt_of(label))
                failed = await broken.answer(said("4"))
                return failed, await other.reset(prompt_of("4"))

        failed, other = asyncio.run(work())
    assert failed["cause"] == "environment" and words in failed["headline"]
    assert "messages" in other


@pytest.mark.parametrize(
    ("label", "words"),
    [
        ("infinite", "'environment' is inf, needs a finite number"),
        ("text", "'environment' is 'much', needs a finite number"),
        ("empty", "needs a message for the policy or the end"),
        ("number", "step returned 4 of type int, needs a string or a Reply"),
        ("bytes", "content=b'x'"),
        ("surrogate", "a message or a reward is nothing that JSON can hold ('utf-8' codec can't encode character"),
    ],
)
def test_a_reply_of_no_use_is_against_the_contract(label: str, words: str) -> None:
    with Environments("environments_under_test:Broken", {}) as environments:
        _, failed = play(environments, [said("4")], label=label)
    assert (failed["cause"], failed["trace"]) == ("contract", "") and words in failed["headline"]


@pytest.mark.parametrize("name", ["Unwilling", "AsyncUnwilling"])
def test_first_messages_of_no_use_are_against_the_contract(name: str) -> None:
    with Environments(f"environments_under_test:{name}", {}) as environments:
        for label, words in (
            ("bare", "reset returned the message {'role': 'user'}, needs the strings 'role' and 'content'"),
            ("role", "needs the strings 'role' and 'content'"),
            ("parts", "needs the strings 'role' and 'content'"),
            ("words", "reset returned 'Hi.', needs"),
            ("number", "reset returned 5, needs a list of messages, or None"),
            ("bytes", "JSON can hold (Object of type bytes is not JSON serializable), needs text, finite numbers"),
            ("set", "Object of type set"),
            ("nan", "Out of range float values"),
            ("surrogate", "surrogates not allowed"),
        ):
            (failed,) = play(environments, [], label=label)
            assert failed["cause"] == "contract" and words in failed["headline"], label


def test_a_large_text_and_what_is_printed_arrive(tmp_path: Path) -> None:
    with Environments("environments_under_test:Broken", {}, log_path=tmp_path / "logs" / "environments.log") as environments:
        _, large = play(environments, [said("4")], label="large")
        play(environments, [said("4")], label="print")
    assert large["messages"] == [{"role": "user", "content": "x" * 2**20}]
    assert "says so\n" in (tmp_path / "logs" / "environments.log").read_text()


def test_arguments_of_all_forms_are_checked_and_passed() -> None:
    with Environments("environments_under_test:Wide", {}) as environments:
        place = environments.tools[0]["parameters"]
        assert place["required"] == ["points"] and list(place["properties"]) == ["points", "name", "kind", "_hidden", "copy"]
        assert place["properties"]["points"]["items"] == {"$ref": "#/$defs/Point"} and place["$defs"]["Point"]["required"] == ["x"]
        given = {"points": [{"x": 1}, {"x": 2, "y": 3}], "name": "é\u2028", "kind": "b", "_hidden": 4, "copy": True}
        wrong = [given | {"kind": "c"}, {"points": [{"y": 1}]}, {"points": 1}, [], "text", None, {"points": [], "own_copy": True}]
        _, right, short, refused = play(
            environments, [said("", ("place", given)), said("", ("place", {"points": []})), said("", *[("place", each) for each in wrong])]
        )
    assert right["messages"][0]["content"] == "[(1, 7), (2, 3)] é\u2028 b 4 True"
    assert short["messages"][0]["content"] == "[] None a 3 False"
    assert refused["num_errors"] == refused["num_calls"] == len(wrong)
    shown = [message["content"] for message in refused["messages"]]
    assert shown[0].startswith("error: kind: Input should be 'a' or 'b'") and shown[1] == "error: points.0.x: Field required"
    assert [message["tool_call_id"] for message in refused["messages"]] == [f"c{number}" for number in range(len(wrong))]


def test_replies_to_one_message_are_one_answer() -> None:
    with Environments("environments_under_test:Wide", {}) as environments:
        _, going, ended = play(environments, [said("", *[("both", {})] * 3), said("", ("both", {"end": True}), ("both", {}), ("sell", {}))])
        _, failed = play(environments, [said("", ("both", {}), ("fail", {}))])
    assert (going["done"], going["parts"], going["num_calls"], going["num_errors"]) == (False, {"both": 1.5}, 3, 0)
    assert (ended["done"], ended["parts"], ended["num_calls"], ended["num_errors"]) == (True, {"both": 1.0}, 3, 1)
    assert going["messages"][0]["content"] == "ja, schön: \0 \u2028 \U0001f600"
    assert (failed["cause"], failed["headline"]) == ("tool", "ValueError: no ToolError")
    assert "raise ValueError" in failed["trace"]


def test_no_tools_and_thirty() -> None:
    with Environments("environments_under_test:Endless", {}) as environments:
        assert environments.tools == []
        assert play(environments, [said("", ("look", {}))])[1]["messages"][0]["content"] == "error: there is no tool 'look', only none"
    with Environments("environments_under_test:Thirty", {}) as environments:
        _, answer = play(environments, [said("", *[(f"tool_{number}", {}) for number in range(30)])])
    assert [message["content"] for message in answer["messages"]] == [str(number) for number in range(30)]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Reset", r"the tool reset has the name of .* an attribute of every Environment, .* rename it"),
        ("PromptTool", r"the tool prompt has the name"),
        ("Twice", r"the tool same has the name of another tool"),
        ("Outside", r"Outside\.tools has <function same.*>, needs methods of the class"),
        ("Text", r"Text\.tools has 'look', needs methods of the class"),
        ("One", r"One\.tools is <function One\.look.*>, needs a tuple of methods"),
        ("Many", r"the tool many takes \*words: str, a variadic positional argument, needs each by a name"),
        ("Placed", r"the tool placed takes word: str, a positional-only argument"),
    ],
)
def test_odd_tools_are_refused(name: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Environments(f"environments_under_test:{name}", {})


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


def test_the_sweep_leaves_what_still_has_an_owner() -> None:
    """The helper of the module, and the daemon of an environment that is still open."""
    with Environments("helped_environment:Helped", {}) as environments:

        async def work() -> tuple[list[int], list[int]]:
            async with environments.open() as home:
                await home.reset(prompt_of("4"))
                kept = [int(pid) for pid in (await home.answer(said("4")))["messages"][0]["content"].split()]
                # The first sweep is over when the second has begun.
                for _ in range(2):
                    _, other = await asyncio.to_thread(play, environments, [said("4")])
                    await asyncio.to_thread(wait_until_gone, int(other["messages"][0]["content"].split()[1]))
                assert "messages" in await home.answer(said("4"))
                return kept, [pid for pid in kept if not is_gone(pid)]

        kept, alive = asyncio.run(work())
        assert len(kept) == 2 and alive == kept
    for pid in kept:
        wait_until_gone(pid)
    importlib.import_module("helped_environment").HELPER.kill()


def test_sync_tools_hold_up_no_other_trajectory() -> None:
    with Environments("environments_under_test:Meeting", {}) as environments:
        # More than the threads of any pool of asyncio's.
        calls = [said("", *[("wait", {})] * 40), said("", ("meet", {}))]

        async def work() -> list[Answer]:
            async with environments.open() as one, environments.open() as other:
                await asyncio.gather(one.reset(prompt_of("4")), other.reset(prompt_of("4")))
                return await asyncio.gather(one.answer(calls[0]), other.answer(calls[1]))

        waited, _ = asyncio.run(asyncio.wait_for(work(), 60))
    assert [message["content"] for message in waited["messages"]] == ["True"] * 40


def test_an_exit_in_one_of_several_calls_costs_its_trajectory() -> None:
    with Environments("environments_under_test:Meeting", {}) as environments:
        _, failed = play(environments, [said("", ("leave", {}), ("meet", {}))])
        _, answer = play(environments, [said("", ("meet", {}))])
    assert failed["cause"] == "tool" and "SystemExit: 3" in failed["headline"]
    assert answer["messages"][0]["content"] == "met"


def test_a_killed_server_is_started_again() -> None:
    with Environments("environments_under_test:Shop", {}) as environments:
        play(environments, [])
        server = environments._server.process  # type: ignore[union-attr]
        os.kill(server.pid, 9)
        server.join()

        async def together() -> list[Answer]:
            async with AsyncExitStack() as stack:
                homes = await asyncio.gather(*(stack.enter_async_context(environments.open()) for _ in range(4)))
                return await asyncio.gather(*(home.reset(prompt_of("4")) for home in homes))

        assert all("messages" in answer for answer in asyncio.run(together()))
        assert len([each for each in multiprocessing.active_children() if each.name == "environments"]) == 1, "one new one for all"


def test_a_server_that_does_not_read_stops_nobody_else() -> None:
    with Environments("environments_under_test:Shop", {}) as environments:
        # Room for a few requests.
        environments._server._control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # type: ignore[union-attr]
        server = psutil.Process(environments._server.process.pid)  # type: ignore[union-attr]

        async def while_it_stands(*calls: Coroutine[Any, Any, Any]) -> list[Any]:
            server.suspend()
            waiting = [asyncio.create_task(call) for call in calls]
            # Every call comes to its request, and this goes on.
            await asyncio.sleep(0)
            server.resume()
            return await asyncio.gather(*waiting)

        async def work() -> None:
            stacks = [AsyncExitStack() for _ in range(12)]
            opening = [stack.enter_async_context(environments.open()) for stack in stacks]
            homes = await while_it_stands(*opening)
            # The number of a process is known with the first answer.
            await asyncio.gather(*(home.reset(prompt_of("4")) for home in homes))
            await while_it_stands(*(stack.aclose() for stack in stacks))

        asyncio.run(asyncio.wait_for(work(), 60))
        server.suspend()
    wait_until_gone(server.pid)


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


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 20
    while not is_gone(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.05)


def test_unusable_classes_are_refused() -> None:
    with pytest.raises(UserError, match=r"the tool Untyped\.look.*where.*no annotation"):
        Environments("environments_under_test:Untyped", {})
    with pytest.raises(UserError, match=r"the tool Counting\.count returns int, needs a string or a Reply; write `-> str`"):
        Environments("environments_under_test:Counting", {})
    with pytest.raises(UserError, match=r"rollout\.environment environments_under_test:said.*does not exist"):
        load("environments_under_test:said", kind="environment")
    with pytest.raises(UserError, match=r"rollout\.environment pathlib:Path.*subclass of megatron_rl\.Environment"):
        load("pathlib:Path", kind="environment")
    with pytest.raises(UserError, match=r"rollout\.args\.bonus is 'x', .*needs bonus: float"):
        Environments("environments_under_test:Shop", {"bonus": "x"})
    assert kind_of("environments_under_test:Shop") == "environment"


def test_a_trajectory_that_was_given_up_is_over_on_the_loop() -> None:
    with Environments("environments_under_test:AsyncSlow", {}) as environments:
        loop = environments._loop.loop  # type: ignore[union-attr]

        async def work() -> None:
            async with environments.open() as home:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(home.reset(prompt_of("4")), 0.01)

        asyncio.run(work())
        asyncio.run_coroutine_threadsafe(asyncio.Event().wait(), loop)
    assert not asyncio.all_tasks(loop) and not loop.is_running()
