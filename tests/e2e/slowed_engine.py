"""Engines that are in the middle of their answers while a test looks at them, on a machine of any speed."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, TypeVar

from megatron_rl.engines.client import EngineClient
from megatron_rl.engines.transport import Transport
from megatron_rl.errors import EngineError

Result = TypeVar("Result")
TOKEN_S = 0.02
"""Sleep before each token: an answer of 400 takes 8 s at least."""
CALL_S = 60.0


@asynccontextmanager
async def in_the_middle(
    call: Coroutine[Any, Any, Result], *clients: EngineClient, num_samples: int = 1
) -> AsyncIterator["asyncio.Task[Result]"]:
    """Start `call`, which asks each of the engines for `num_samples`, and enter with its task when all samples have tokens.

    Until the block ends each further token takes TOKEN_S, so that long answers are not whole. A client may lose its engine in it.
    """
    async with AsyncExitStack() as stack:
        transports = [await stack.enter_async_context(_slowed(client)) for client in clients]
        task = asyncio.create_task(call)
        for transport in transports:
            await _until_running(transport, num_samples, asked=task)
        yield task


@asynccontextmanager
async def _slowed(client: EngineClient) -> AsyncIterator[Transport]:
    transport = Transport(client.address.url, client.address.api_key)
    await transport.open()
    try:
        await _sleep_before_each_token(transport, TOKEN_S)
        await _until_running(transport, 0)
        yield transport
        with suppress(EngineError):
            await _sleep_before_each_token(transport, 0)
    finally:
        await transport.close()


async def _sleep_before_each_token(transport: Transport, seconds: float) -> None:
    await transport.call("POST", "/slow_down", {"forward_sleep_time": seconds}, timeout_s=CALL_S)


async def _until_running(transport: Transport, num_samples: int, *, asked: "asyncio.Task[Any] | None" = None) -> None:
    """Wait until the engine is generating for so many samples: each has its first token then, as prompts are no part of it."""
    while True:
        (load,) = (await transport.call("GET", "/v1/loads", timeout_s=CALL_S))["loads"]
        if load["num_running_reqs"] == num_samples:
            return
        assert asked is None or not asked.done(), f"the engine at {transport.url} answered before {num_samples} samples ran"
        await asyncio.sleep(TOKEN_S)
