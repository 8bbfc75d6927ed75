"""A server that answers as a test says, for tests of the client."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from aiohttp import web

from megatron_rl.engines.answers import MixtureShape
from megatron_rl.engines.client import EngineClient
from megatron_rl.engines.engine import EngineAddress
from megatron_rl.engines.sampling import Sampling

Handler = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]
ONE = Sampling(max_tokens=3)


def answer(request_id: str = "r", **meta: Any) -> dict[str, Any]:
    scored = [[-0.5, 7, None], [-0.25, 8, None], [-2.0, 9, None]]
    known = {"id": request_id, "finish_reason": {"type": "length", "length": 3}, "weight_version": "5", "output_token_logprobs": scored}
    return {"output_ids": [7, 8, 9], "meta_info": {**known, **meta}}


def talk(
    handler: Handler, work: Callable[[EngineClient], Awaitable[Any]], *, timeout_s: float = 20.0, mixture: MixtureShape | None = None
) -> tuple[Any, list[Any]]:
    """Run `work(client)` against `handler`; return its result and the (path, body) of all requests."""
    seen: list[tuple[str, dict]] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        text = await request.text()
        seen.append((request.path_qs, json.loads(text) if text else {}))
        return await handler(request, seen[-1][1])

    async def session() -> Any:
        application = web.Application()
        application.router.add_route("*", "/{tail:.*}", handle)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        sizes = {"vocab_size": 16, "context_length": 64, "max_total_tokens": 64}
        address = EngineAddress(f"http://{host}:{port}", "key", **sizes, has_tokenizer=False, mixture=mixture)
        try:
            async with EngineClient(address, request_timeout_s=timeout_s, control_timeout_s=timeout_s) as client:
                return await work(client)
        finally:
            await runner.cleanup()

    return asyncio.run(session()), seen


def always(payload: Any, *, status: int = 200) -> Handler:
    """Answer every request with `payload`."""

    async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response(payload, status=status)

    return handler


def generate(client: EngineClient) -> Awaitable[Any]:
    return client.generate(np.array([1]), sampling=ONE)
