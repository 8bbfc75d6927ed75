"""A model behind an OpenAI-compatible server, here one of aiohttp on loopback, with the real reward workers."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from megatron_rl.config.load import load_settings
from megatron_rl.errors import UserError
from megatron_rl.evaluation.eval_words import UNTRAINED, with_options
from megatron_rl.evaluation.graded_answers import read_answers
from megatron_rl.evaluation.remote import evaluate_url

ROWS = [
    {"prompt": "1+1=", "label": "2"},
    {"prompt": [{"role": "user", "content": "1+2="}], "label": "3"},
    {"prompt": "refused", "label": "1"},
]


class Server:
    """Answers 2 to everything, refuses a prompt, and is busy at the first request."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any], str]] = []
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        fields = await request.json()
        self.asked.append((request.path, fields, request.headers.get("Authorization", "")))
        if len(self.asked) == 1:
            return web.Response(status=429, text="busy")
        if fields.get("prompt") == "refused":
            return web.Response(status=400, text="no such prompt")
        said = {"message": {"content": "so \\boxed{2}"}} if "messages" in fields else {"text": "so \\boxed{2}"}
        return web.json_response({"choices": [{**said, "finish_reason": "stop"}], "usage": {"completion_tokens": 5}})


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr("megatron_rl.rewards.servers._BACKOFF_S", 0.0)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    made, loop = Server(), asyncio.new_event_loop()
    app = web.Application()
    app.router.add_post("/v1/completions", made.answer)
    app.router.add_post("/v1/chat/completions", made.answer)

    async def begin() -> web.AppRunner:
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        made.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        return runner

    runner = loop.run_until_complete(begin())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield made
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.run_until_complete(runner.cleanup())
    loop.close()


def test_a_served_model_is_measured_by_the_same_code(server: Server, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    sets = (
        f"eval.sets.rows={{data: {tmp_path}/rows.jsonl, sampling: {{top_k: 7, logit_bias: {{'5': -3}}, stop: [x], stop_token_ids: [5]}}}}"
    )
    given = load_settings(None, [sets, "rollout.sampling.temperature=0.5", *UNTRAINED, "model.path=its/name"])
    (result,) = asyncio.run(evaluate_url(with_options(given, samples=2, out=tmp_path / "out"), url=server.url))
    assert (result.estimates["accuracy"].value, result.estimates["accuracy"].num) == (0.5, 2)
    assert (result.estimates["failed"].value, result.failures) == (pytest.approx(1 / 3), {"rollout_error": 2})
    assert (result.estimates["truncated"].value, result.estimates["maj@2"].value) == (0.0, 0.5)
    answers = read_answers(tmp_path / "out" / "rows.jsonl")
    assert {(each.text, each.answer, each.num_tokens, each.stop_reason) for each in answers if each.cause is None} == {
        ("so \\boxed{2}", "2", 5, "stop")
    }
    assert {each.message for each in answers if each.cause} == {"the server refused it (400): no such prompt"}
    assert len(server.asked) == 1 + 6 and {key for _, _, key in server.asked} == {"Bearer secret"}
    path, fields, _ = next(each for each in server.asked if "messages" in each[1])
    expected = {"model": "its/name", "temperature": 0.5, "top_p": 1.0, "top_k": 7, "stop": ["x"], "max_tokens": 1024}
    expected |= {"no_stop_trim": True, "include_stop_str_in_output": True, "stop_token_ids": [5], "logit_bias": {"5": -3.0}}
    assert path == "/v1/chat/completions" and expected.items() <= fields.items() and "min_p" not in fields
    assert json.loads(result.path.read_text())["facts"]["engine"] is None


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": [3, 4]}, "is a list of token ids, needs text or messages with --url"),
        ({"prompt": [{"role": "user", "content": "1"}], "tools": [{}]}, "has 'tools', which --url does not send"),
    ],
)
def test_rows_that_a_server_cannot_be_asked_are_refused(tmp_path: Path, row: dict[str, Any], words: str) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    given = load_settings(None, [f"eval.sets.a={tmp_path}/rows.jsonl", *UNTRAINED, "model.path=m"])
    with pytest.raises(UserError, match=rf"rows\.jsonl:1: .*{words}"):
        asyncio.run(evaluate_url(with_options(given, samples=None, out=tmp_path / "out"), url="http://127.0.0.1:9/v1"))


@pytest.mark.parametrize("reward", ["", ", reward: {function: exact}"])
def test_a_label_that_is_not_scored_is_found_before_a_request(server: Server, tmp_path: Path, reward: str) -> None:
    """By the function of the run, which is math, or by the set's own."""
    rows = [{"prompt": "1+1=", "label": "2"}, {"prompt": "1+2="}, {"prompt": "1+3=", "label": " "}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = load_settings(None, [f"eval.sets.rows={{data: {tmp_path}/rows.jsonl{reward}}}", *UNTRAINED, "model.path=m"])
    with pytest.raises(UserError, match=r"eval\.sets\.rows: .*rows\.jsonl:3: the label ' ' cannot be scored .*check_labels=false"):
        asyncio.run(evaluate_url(with_options(given, samples=1, out=tmp_path / "out"), url=server.url))
    assert server.asked == []


def test_environments_are_not_asked_of_a_server(tmp_path: Path) -> None:
    given = load_settings(None, ["eval.sets.a=rows.jsonl", "rollout.environment=a:B", *UNTRAINED, "model.path=m"])
    with pytest.raises(UserError, match=r"--url was given with rollout.environment a:B.*remove it"):
        asyncio.run(evaluate_url(with_options(given, samples=None, out=tmp_path), url="http://127.0.0.1:9/v1"))
