"""A rollout whose driver reaches its engines through loopback proxies that are slow, cut or garble some of the answers."""

import asyncio
import contextlib
import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from megatron_rl.engines.client import EngineClient
from megatron_rl.rollout.groups import single_turn
from megatron_rl.types import Sample

FIRST, EVERY, SLOW_S = 4, 4, 1.0
"""From the FIRST piece of answers on one of EVERY is spoilt, and one alone is garbled; a slow one comes so many seconds late."""
_proxies: dict[str, str] = {}
_numbers = itertools.count(1)
_attempt = EngineClient._attempt


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, kind: str, port: int) -> None:
    """Serve one connection of the driver to the engine at `port`."""

    async def requests(engine: asyncio.StreamWriter) -> None:
        while piece := await reader.read(2**16):
            engine.write(piece)
            await engine.drain()

    async def answers(engine: asyncio.StreamReader) -> None:
        while piece := await engine.read(2**16):
            number = next(_numbers)
            if number == FIRST or (number > FIRST and number % EVERY == 0 and kind != "garbled"):
                if kind == "cut":
                    writer.write(piece[: len(piece) // 2])
                    return
                await asyncio.sleep(SLOW_S if kind == "slow" else 0)
                piece = piece.replace(b"output_token_logprobs", b"output_t\xffken_logprobs") if kind == "garbled" else piece
            writer.write(piece)
            await writer.drain()

    there, back = await asyncio.open_connection("127.0.0.1", port)
    ways = [asyncio.ensure_future(requests(back)), asyncio.ensure_future(answers(there))]
    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    for end in (*ways, back, writer):
        end.cancel() if isinstance(end, asyncio.Future) else end.close()
    with contextlib.suppress(OSError, asyncio.CancelledError):
        await asyncio.gather(*ways)


async def rollout(*, kind: str, **arguments: Any) -> Sequence[Sample]:
    """One turn; its requests alone, not the control of engines, pass through a proxy of this `kind`."""

    async def attempt(self: EngineClient, method: str, path: str, body: Mapping[str, Any] | None, *, pooled: bool) -> Any:
        url = self.address.url
        if path != "/generate":
            return await _attempt(self, method, path, body, pooled=pooled)
        if url not in _proxies:
            port = urlsplit(url).port
            assert port is not None
            serving = await asyncio.start_server(lambda *ends: _pass_on(*ends, kind=kind, port=port), "127.0.0.1", 0)
            _proxies[url] = f"http://127.0.0.1:{serving.sockets[0].getsockname()[1]}"
        other = copy.copy(self)
        other.address = replace(self.address, url=_proxies[url])
        return await _attempt(other, method, path, body, pooled=pooled)

    EngineClient._attempt = attempt  # type: ignore[method-assign]
    return await single_turn(**arguments)
