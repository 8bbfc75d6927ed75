"""Engines that are in the middle of their answers while a test looks at them, on a machine of any speed."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, TypeVar

from megatron_rl.engines.client import EngineClient
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
        slowed = [await stack.enter_async_context(_slowed(client)) for client in clients]
        task = asyncio.create_task(call)
        for each in slowed:
            await _until_running(each, num_samples, asked=task)
        yield task


@asynccontextmanager
async def _slowed(client: EngineClient) -> AsyncIterator[EngineClient]:
    # A client may be closed or cancelled by the test; this one stays.
    async with EngineClient(client.address, request_timeout_s=CALL_S) as own:
        await _sleep_before_each_token(own, TOKEN_S)
        await _until_running(own, 0)
        yield own
        with suppress(EngineError):
            await _sleep_before_each_token(own, 0)


async def _sleep_before_each_token(client: EngineClient, seconds: float) -> None:
    await client._call("POST", "/slow_down", {"forward_sleep_time": seconds}, timeout_s=CALL_S)


async def _until_running(client: EngineClient, num_samples: int, *, asked: "asyncio.Task[Any] | None" = None) -> None:
    """Wait until the engine is generating for so many samples: each has its first token then, as prompts are no part of it."""
    while True:
        (load,) = (await client._call("GET", "/v1/loads", timeout_s=CALL_S))["loads"]
        if load["num_running_reqs"] == num_samples:
            return
        assert asked is None or not asked.done(), f"the engine at {client.address.url} answered before {num_samples} samples ran"
        await asyncio.sleep(TOKEN_S)
