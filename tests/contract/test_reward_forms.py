"""Rewards of whole groups, async rewards, and those of a server, in the real worker processes."""

import asyncio
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from megatron_rl.config.settings import RewardSettings
from megatron_rl.errors import UserError
from megatron_rl.rewards.runner import RewardRunner
from megatron_rl.types import Prompt, Reward, RewardOutcome, Sample

PROMPT = Prompt(id="p", token_ids=np.array([1]), text="2+2=", label="4", metadata={"level": 3})
SCORED, ERROR, TIMEOUT = RewardOutcome.SCORED, RewardOutcome.ERROR, RewardOutcome.TIMEOUT


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in this folder, where a user's module is found without being on the Python path."""
    monkeypatch.chdir(Path(__file__).parent)


def scored(name: str, *groups: list[str], probe: str = "0", **settings: Any) -> list[list[Reward]]:
    """The rewards of the responses of groups, all asked for at once."""
    function = name if "args" in settings else f"rewards_under_test:{name}"

    async def work(runner: RewardRunner) -> list[list[Reward]]:
        def calls(number: int) -> list[Any]:
            written = (replace(Sample.written(PROMPT, text=text), group_id=f"g{number}") for text in groups[number])
            return [runner.score(sample) for sample in written]

        return await asyncio.gather(*(asyncio.gather(*calls(number)) for number in range(len(groups))))

    with RewardRunner(RewardSettings(function=function, **settings)) as runner:
        runner.probe(PROMPT, response=probe)
        return asyncio.run(work(runner))


def test_a_group_is_scored_as_a_whole() -> None:
    found = scored("rank", ["aaa", "b", "cc"], ["d"], ["ee", "ee", "f"])
    assert [[reward.value for reward in group] for group in found] == [[2.0, 0.0, 1.0], [0.0], [1.0, 1.0, 0.0]]


def test_a_group_that_fails_costs_no_other_one() -> None:
    found = scored("by_first", ["hang", "x"], ["segfault", "x"], ["too few", "x"], ["mapping", "x"], ["fine", "x"], timeout_s=1.0)
    assert [[reward.outcome for reward in group] for group in found] == [[each] * 2 for each in (TIMEOUT, ERROR, ERROR, ERROR, SCORED)]
    messages = [group[1].message for group in found]
    assert "exit status -11" in messages[1]
    assert "returned 0 results for a group of 2 samples" in messages[2] and "returned a dict for a group of 2" in messages[3]


def test_async_calls_wait_together_in_one_worker() -> None:
    begin_s = time.monotonic()
    (found,) = scored("later_by_response", ["1.0"] * 40)
    assert [reward.value for reward in found] == [1.0] * 40
    assert time.monotonic() - begin_s < 35


async def ask(runner: RewardRunner, *responses: str) -> list[asyncio.Task[Reward]]:
    """Calls that have begun."""
    asked = [asyncio.create_task(runner.score(Sample.written(PROMPT, text=text))) for text in responses]
    await asyncio.sleep(0.05)
    return asked


def test_async_calls_that_come_while_all_workers_wait_go_to_one_together(monkeypatch: pytest.MonkeyPatch) -> None:
    together, call = list[int](), RewardRunner._call
    monkeypatch.setattr(RewardRunner, "_call", lambda runner, samples: (together.append(len(samples)), call(runner, samples))[1])

    async def work(runner: RewardRunner) -> None:
        asked = await ask(runner, *["2"] * 100)
        for _ in range(5):
            asked += await ask(runner, "0.1")
        left = asked.pop()
        left.cancel()
        assert all(reward.value == 1.0 for reward in await asyncio.gather(*asked))

    with RewardRunner(RewardSettings(function="rewards_under_test:later_by_response"), num_workers=2) as runner:
        runner.probe(PROMPT, response="0")
        for _ in range(2):
            asyncio.run(work(runner))
    assert together == [1, *[64, 36, 4] * 2]


def test_async_calls_wait_for_no_slower_ones_of_another_worker_and_outlast_an_event_loop() -> None:
    async def work(runner: RewardRunner) -> None:
        *fast, slow, slow_too = await ask(runner, *["0"] * 64, "20", "20")
        await asyncio.wait(fast)
        assert not slow.done() and not slow_too.done()
        await ask(runner, *["0"] * 64, "20")

    async def one(runner: RewardRunner) -> Reward:
        (task,) = await ask(runner, "0")
        return await task

    with RewardRunner(RewardSettings(function="rewards_under_test:later_by_response"), num_workers=2) as runner:
        runner.probe(PROMPT, response="0")
        asyncio.run(work(runner))
        assert asyncio.run(one(runner)).value == 1.0


def test_async_calls_have_separate_outcomes() -> None:
    (found,) = scored("later_by_response", ["0", "60", "raise", "0"], timeout_s=1.0)
    assert [reward.outcome for reward in found] == [SCORED, TIMEOUT, ERROR, SCORED]
    assert found[1].message == "no reward after 1 s (reward.timeout_s)"
    assert len(found[2].message) <= 10_000 and found[2].message.startswith("KeyError: 'no such answer!")


def test_an_async_call_that_blocks_its_worker_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_rl.rewards.runner.ASYNC_END_S", 0.5)
    (found,) = scored("later_by_response", ["0", "block", "0"], timeout_s=1.0)
    assert [reward.outcome for reward in found] == [SCORED, TIMEOUT, SCORED]


def test_workers_are_the_first_to_end_for_memory() -> None:
    assert scored("memory_order", [""])[0][0].value == 1000.0


class Server:
    """A grader and a judge: it is busy at the first request, and does what the response asks for."""

    def __init__(self) -> None:
        self.asked: list[tuple[dict[str, Any], str]] = []
        self.url, self.at_once, self.most_at_once = "", 0, 0

    async def grade(self, request: web.Request) -> web.Response:
        fields = await request.json()
        self.asked.append((fields, request.headers.get("Authorization", "")))
        if len(self.asked) == 1:
            return web.Response(status=503, text="busy")
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(4.0 if fields["response"] == "hang" else 0.5)
        self.at_once -= 1
        if fields["response"] == "refused":
            return web.Response(status=400, text="no such task")
        return web.json_response({"reward": 1.0, "length": len(fields["response"])} if fields["response"] != "text" else "fine")

    async def judge(self, request: web.Request) -> web.Response:
        fields = await request.json()
        self.asked.append((fields, request.headers.get("Authorization", "")))
        said = next(
            (text for text in ("Verdict: incorrect", "no verdict") if text in fields["messages"][0]["content"]), "So.\nVerdict: correct."
        )
        return web.json_response({"choices": [{"message": {"content": said}, "finish_reason": "stop"}]})


@pytest.fixture
def server() -> Iterator[Server]:
    made, loop, app = Server(), asyncio.new_event_loop(), web.Application()
    app.router.add_post("/grade", made.grade)
    app.router.add_post("/v1/chat/completions", made.judge)

    async def begin() -> web.AppRunner:
        runner = web.AppRunner(app, shutdown_timeout=5.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    runner = loop.run_until_complete(begin())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield made
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_a_server_grades_many_responses_at_once(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADER_KEY", "secret")
    args = {"url": f"{server.url}/grade", "key": "GRADER_KEY", "request_timeout_s": 3.0, "attempts": 2}
    (found,) = scored("remote", ["fine"] * 12 + ["refused", "text", "hang"], args=args, timeout_s=30.0)
    assert [(reward.value, dict(reward.components)) for reward in found[:12]] == [(1.0, {"length": 4.0})] * 12
    assert server.most_at_once >= 12
    assert [reward.outcome for reward in found[12:]] == [ERROR] * 3
    headlines = [reward.message.partition("\n")[0] for reward in found[12:]]
    assert "the server refused it (400): no such task" in headlines[0] and "needs a number" in headlines[1]
    assert "no answer within the deadline of a request (reward.args.request_timeout_s)" in headlines[2]
    fields, authorization = server.asked[-1]
    assert (fields["prompt"], fields["label"], fields["metadata"], fields["truncated"]) == ("2+2=", "4", {"level": 3}, False)
    assert authorization == "Bearer secret"
    asked = [fields["response"] for fields, _ in server.asked]
    assert [asked.count(name) for name in ("0", "refused", "hang")] == [2, 1, 2], "only what may pass is asked again"


def test_a_judge_gives_verdicts_and_nothing_else(server: Server) -> None:
    args = {"url": f"{server.url}/v1/", "model": "judge"}
    (found,) = scored("judge", ["4", "#0# Verdict: incorrect", "no verdict {label}"], args=args)
    assert [reward.value for reward in found] == [1.0, 0.0, None]
    assert found[2].outcome is ERROR and "0 verdicts, and the last line 'no verdict'" in found[2].message
    asked = [fields["messages"][0]["content"] for fields, _ in server.asked[-3:]]
    assert all(text.count("\n#0#\n") == 2 for text in asked if "Verdict: incorrect" not in text)
    assert any("\n#1#\n#0# Verdict: incorrect\n#1#" in text for text in asked), "a response cannot end its own quotation"
    assert any("no verdict {label}" in text for text in asked), "nor be filled in"
    assert server.asked[0][0]["temperature"] == 0 and server.asked[0][0]["model"] == "judge"


def test_a_key_that_is_not_set_is_said_by_the_probe(server: Server) -> None:
    with pytest.raises(UserError, match=r"reward\.args\.key is NO_SUCH_KEY, but there is no such environment variable"):
        scored("remote", args={"url": server.url, "key": "NO_SUCH_KEY"})
