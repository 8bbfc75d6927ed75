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

EVERY, SLOW_S = 3, 1.0
"""One of EVERY pieces of answers is cut or comes so many seconds late; one alone is garbled, the second or a later one."""
NAME = b'output_token_logprobs":[['
"""Of an answer with tokens: scoring fixed tokens at a sync samples none, and nothing reads this name there."""
_proxies: dict[str, str] = {}
_garbled: list[int] = []
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
            if kind == "garbled" and number > 1 and NAME in piece and not _garbled:
                _garbled.append(number)
                piece = piece.replace(NAME, NAME.replace(b"o", b"\xff"))
            elif kind != "garbled" and number % EVERY == 0:
                if kind == "cut":
                    writer.write(piece[: len(piece) // 2])
                    return
                await asyncio.sleep(SLOW_S)
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
