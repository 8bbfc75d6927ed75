"""JSON over HTTP to one engine: every call has a deadline, lost connections are tried again, refusals become one sentence."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from megatron_rl.errors import DeadlineError, EngineError

FIRST_BACKOFF_S = 0.25
MAX_ATTEMPTS = 6
"""Attempts of one call, spread over 8 seconds: longer than a busy server drops connections, shorter than a dead one is missed."""
IDLE_CONNECTION_S = 2.0
"""An idle connection is not used again after this; the server closes it after 5 s, and a call sent at that moment would be lost.

On a machine so loaded that 3 s pass between the look at the clock and the call it is lost nevertheless: what is tried once has a connection
of its own.
"""

_BUSY = 503


class EngineRefusal(EngineError):
    """The engine answered, and the answer was no. `status` is the HTTP status."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class Transport:
    """A pool of connections to one engine, to be opened, used and closed in one event loop."""

    def __init__(self, url: str, api_key: str) -> None:
        self.url = url
        self._headers = {"Authorization": f"Bearer {api_key}"}
        self._session: aiohttp.ClientSession | None = None
        self._single_use: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Open the pool. `trust_env` stays off: a proxy in the environment must not see traffic between our own processes."""
        self._session = self._new_session(aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S))
        self._single_use = self._new_session(aiohttp.TCPConnector(limit=0, force_close=True))

    def _new_session(self, connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        return aiohttp.ClientSession(headers=self._headers, connector=connector, timeout=timeout)

    async def close(self) -> None:
        """Close all connections; the engine aborts what still runs on them."""
        for session in (self._session, self._single_use):
            if session is not None:
                await session.close()
        self._session = self._single_use = None

    async def call(self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float, attempts: int = 1) -> Any:
        """Return the JSON answer (None for an empty one) to one request.

        Raises:
            DeadlineError: no answer within `timeout_s` seconds, all attempts together.
            EngineRefusal: a status other than 200, after the attempts where it was "busy".
            EngineError: the connection was refused or lost in each of the `attempts`.
        """
        try:
            return await asyncio.wait_for(self._attempt_all(method, path, body, attempts=attempts), timeout_s)
        except TimeoutError as error:
            raise DeadlineError(f"the engine at {self.url} did not answer {path} within {timeout_s:g} s") from error

    async def _attempt_all(self, method: str, path: str, body: Mapping[str, Any] | None, *, attempts: int) -> Any:
        for attempt in range(attempts):
            last = attempt == attempts - 1
            try:
                return await self._attempt(method, path, body, session=self._session if attempts > 1 else self._single_use)
            except EngineRefusal as error:
                if last or error.status != _BUSY:
                    raise
            except aiohttp.ClientError as error:
                if last:
                    raise EngineError(f"the engine at {self.url} cannot be reached for {path} ({attempts} attempts): {error}") from error
            await asyncio.sleep(FIRST_BACKOFF_S * 2**attempt)
        raise AssertionError("the last attempt returns or raises")

    async def _attempt(self, method: str, path: str, body: Mapping[str, Any] | None, *, session: aiohttp.ClientSession | None) -> Any:
        if session is None:
            raise EngineError(f"the client of {self.url} is not open; use it in an `async with` block")
        async with session.request(method, self.url + path, json=body) as response:
            content = await response.read()
            if response.status != 200:
                reason = f"{refusal(content)} (HTTP {response.status})"
                raise EngineRefusal(f"the engine at {self.url} refused {path}: {reason}", status=response.status)
            return _decode(content)


def refusal(content: bytes) -> str:
    """The message of an error body, in any of its shapes: {"error": {"message": ..}}, {"error": ".."}, {"message": ..}, plain text."""
    body = _decode(content)
    if not isinstance(body, dict):
        return str(body)
    error = body.get("error", body)
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _decode(content: bytes) -> Any:
    """JSON where it is JSON, else the text, None where there is nothing."""
    text = content.decode(errors="replace").strip()
    if not text:
        return None
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
