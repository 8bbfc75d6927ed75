"""What a client knows of its engine's load: counts of answers, and the server's own measure."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from client_parts import ONE, always, answer, generate, talk

from megatron_rl.engines.answers import EngineLoad
from megatron_rl.engines.client import EngineClient
from megatron_rl.engines.engine import EngineAddress
from megatron_rl.errors import EngineError


def test_answers_are_counted_with_what_the_engine_tells_of_them() -> None:
    async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        told = ({"cached_tokens": 2, "num_retractions": 3}, {"cached_tokens": 1}, {})
        return web.json_response([answer(**meta) for meta, _ in zip(told, body["input_ids"], strict=False)])

    async def work(client: EngineClient) -> Any:
        await client.generate(np.array([1, 2, 5, 6]), sampling=ONE, num_samples=3)
        await client.generate(np.array([1, 2]), sampling=ONE)
        return client.served

    served, _ = talk(handler, work)
    assert served.pop("milliseconds") > 0 and served.pop("tokens") == 6
    assert served == {"answers": 4, "prompt_tokens": 14, "cached_tokens": 5, "retractions": 6}


@pytest.mark.parametrize(("mode", "expected"), [("retract", 1), ("in_place", 2)])
def test_a_weight_sync_is_no_want_of_memory(mode: Any, expected: int) -> None:
    """The server counts requests that a pause retracts with those retracted for want of memory."""

    async def work(client: EngineClient) -> Any:
        asked, paused = asyncio.Event(), asyncio.Event()
        events.extend((asked, paused))
        await client.pause(mode)
        asking = asyncio.ensure_future(generate(client))
        await asked.wait()
        await client.pause(mode)
        paused.set()
        await asking
        return client.served["retractions"]

    async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if request.path != "/generate":
            return web.json_response(None)
        events[0].set()
        await events[1].wait()
        return web.json_response([answer(num_retractions=2)])

    events: list[asyncio.Event] = []
    retractions, _ = talk(handler, work)
    assert retractions == expected


@pytest.mark.parametrize(
    ("payload", "status", "expected"),
    [
        ({"loads": [{"token_usage": 0.25, "num_waiting_reqs": 2}]}, 200, EngineLoad(0.25, 2)),
        ({"loads": [{"token_usage": 0.25, "num_waiting_reqs": 2}, {"token_usage": 0.5, "num_waiting_reqs": 1}]}, 200, EngineLoad(0.5, 3)),
        ({"loads": [{"token_usage": 0.25, "num_waiting_reqs": 2, "timestamp": 7.5}]}, 200, EngineLoad(0.25, 2, told_at=7.5)),
        ({"loads": []}, 200, None),
        ({"loads": [{"num_waiting_reqs": 2}]}, 200, None),
        ({"loads": [{"token_usage": None, "num_waiting_reqs": 2}]}, 200, None),
        ("no", 200, None),
        (None, 404, None),
        (None, 503, None),
    ],
)
def test_the_load_is_read_where_the_engine_tells_it(payload: Any, status: int, expected: EngineLoad | None) -> None:
    load, ((path, _),) = talk(always(payload, status=status), lambda client: client.load())
    assert (load, path) == (expected, "/v1/loads?include=core")


@pytest.mark.parametrize(
    ("call", "joint"),
    [
        (lambda client: client.pause("retract"), False),
        (lambda client: client.begin_weight_update(), False),
        (lambda client: client.take_bucket(["handle"]), False),
        (lambda client: client.receive_bucket(["w"], dtypes=["float32"], shapes=[(1,)], group="g"), True),
        (lambda client: client.leave_group("g"), True),
        (lambda client: client.order("end", num_ranks=1), False),
        (lambda client: client.order("end", num_ranks=2), True),
        (lambda client: client.load_weights(Path("hf"), version=1), True),
    ],
    ids=["pause", "begin", "take", "receive", "leave", "order", "order of ranks", "load"],
)
@pytest.mark.parametrize("fails", [False, True])
def test_control_calls_are_counted_while_they_last(call: Callable[[EngineClient], Awaitable[None]], joint: bool, fails: bool) -> None:
    """By whether they wait for others than the engine, too; also one that fails has ended."""
    client = EngineClient(EngineAddress("http://url", "key", 16, 64, 64, has_tokenizer=False), request_timeout_s=5.0)
    seen = []

    async def asked(*_: object, **__: object) -> dict[str, bool]:
        seen.append((dict(+client.pending), client.num_ended))
        return {"success": not fails}

    client._call = asked  # type: ignore[method-assign]
    with pytest.raises(EngineError) if fails else contextlib.nullcontext():
        asyncio.run(call(client))
    assert (seen, client.pending.total(), client.num_ended) == ([({joint: 1}, 0)], 0, 1)
