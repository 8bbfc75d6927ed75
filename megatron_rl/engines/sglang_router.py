"""SGLang's router between a run and its engines; `python -m megatron_rl.engines.sglang_router` is its process.

Requests for answers go through it, all other calls to the engines themselves. The pool decides
which engines it has, and heals them: the router's own retries, breaker and health checks, which
would hide the engine that failed, are off. Standard input of the process has RouterArgs fields as a
JSON object: a process list would show the key.
"""

import asyncio
import contextlib
import importlib
import json
import math
import secrets
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp

from megatron_rl.engines.answers import Generation, refusal
from megatron_rl.engines.client import BUSY, MAX_ATTEMPTS, SERVER_FAULT, EngineClient
from megatron_rl.engines.engine import POLL_S, free_port
from megatron_rl.engines.engine_pool import EnginePool
from megatron_rl.engines.server_args import ENGINE_HEADER
from megatron_rl.errors import DeadlineError, EngineError, EngineRefusal, UserError
from megatron_rl.system.deadlines import ENGINE_CONTROL_S, ENGINE_LOAD_S
from megatron_rl.system.leftovers import die_with_parent
from megatron_rl.types import StopReason

HOST = "127.0.0.1"  # only the driver asks it
START_ATTEMPTS = 8  # over 32 s, which a busy machine needs for the imports
LISTED_S = 10.0  # deadline of the router for taking an engine, a matter of 0.3 s
# The kernel chooses the port of its metrics, which has no key.
OWN = {"host": HOST, "prometheus_port": 0, "log_level": "warn"}
OWN |= dict.fromkeys(("disable_retries", "disable_circuit_breaker", "disable_health_check"), True)


class Router(EngineClient):
    """A router for the usable engines of `pool`, which has a member, and its client; use in an `async with` block.

    An engine that fails at a request is retired here: who asks does not know which one it was.
    """

    def __init__(self, fields: Mapping[str, Any], *, pool: EnginePool, log_path: Path, request_timeout_s: float) -> None:
        self._claim = socket.socket(socket.AF_UNIX)
        port, key = free_port(HOST, claim=self._claim), secrets.token_urlsafe(24)
        super().__init__(replace(pool.address, url=f"http://{HOST}:{port}", api_key=key), request_timeout_s=request_timeout_s)
        own = {"port": port, "api_key": key, "request_timeout_secs": math.ceil(request_timeout_s)}
        self._arguments, self._pool, self._log_path = {**fields, **OWN, **own}, pool, log_path
        self._process: subprocess.Popen[bytes] | None = None
        self._ids: dict[str, str] = {}  # the router's names of its engines, by URL
        self.loads = Counter[str]()  # requests of each engine at the last look, by URL
        self._settling = asyncio.Lock()

    async def __aenter__(self) -> "Router":
        await super().__aenter__()
        await self._settle()
        return self

    async def __aexit__(self, *error: object) -> None:
        await super().__aexit__(*error)
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._claim.close()

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Abort requests on all engines: the router does not pass it on."""
        asked = (client.abort(request_ids) for client in self._pool.membership.members)
        await asyncio.gather(*asked, return_exceptions=True)

    async def load(self) -> None:
        """Ask the router which engines it has, and for the requests of each."""
        try:
            found = (await self._call("GET", "/workers", timeout_s=ENGINE_LOAD_S))["workers"]
        except (EngineError, DeadlineError):
            return  # before the next request a dead one is started again
        self._ids = {each["url"]: each["id"] for each in found}
        self.loads = Counter({each["url"]: each["load"] for each in found})

    async def _settle(self) -> None:
        """Let the router have the usable engines and no others; start it where it does not run."""
        async with self._settling:
            until_s, asked = time.monotonic() + LISTED_S, set[str]()
            while self._process is None or self._process.poll() is not None or self._pool.usable.keys() != self._ids.keys():
                if self._process is None or self._process.poll() is not None:
                    await self._start()
                    until_s, asked = time.monotonic() + LISTED_S, set()
                usable = self._pool.usable
                for url in usable.keys() - self._ids.keys() if time.monotonic() > until_s else ():
                    self._pool.retire(usable[url], EngineError(f"SGLang's router did not take the engine at {url} in {LISTED_S:g} s"))
                with contextlib.suppress(EngineError, DeadlineError):  # a router that ends just now
                    for url in self._ids.keys() - usable.keys():
                        await self._call("DELETE", f"/workers/{self._ids[url]}", timeout_s=ENGINE_LOAD_S)
                    for url in usable.keys() - self._ids.keys() - asked:
                        await self._call("POST", "/workers", {"url": url, "api_key": usable[url].address.api_key}, timeout_s=ENGINE_LOAD_S)
                        asked.add(url)
                await asyncio.sleep(POLL_S / 5)
                await self.load()

    async def _start(self) -> None:
        self._ids = {}
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen([sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=log, stderr=log)
        assert self._process.stdin is not None, "opened as a pipe"
        with self._process.stdin as orders:
            orders.write(json.dumps(self._arguments).encode())
        try:
            await self._call("GET", "/liveness", timeout_s=ENGINE_CONTROL_S, attempts=START_ATTEMPTS)
        except (EngineError, DeadlineError) as error:
            why = f"exit status {self._process.poll()}, see the end of {self._log_path}"
            raise UserError(f"SGLang's router does not answer after its start ({why}); mend or remove rollout.sglang.router") from error

    async def _ask(self, asked: Sequence[dict[str, Any]]) -> list[Any]:
        """Return the answers to samples, each in a call of its own: the router takes parameters and an id for one."""
        form: dict[str, Any] = {"timeout_s": self._request_timeout_s, "attempts": MAX_ATTEMPTS}
        calls = [asyncio.ensure_future(self._call("POST", "/generate", {**each, "return_logprob": True}, **form)) for each in asked]
        try:
            return await asyncio.gather(*calls)
        finally:
            for call in calls:
                call.cancel()

    async def _ask_together(self, own: Sequence[dict[str, Any]]) -> list[Any]:
        return await self._ask(own)

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float, attempts: int = 1) -> Any:
        try:
            return await super()._call(method, path, body, timeout_s=timeout_s, attempts=attempts)
        except EngineRefusal as error:
            if error.status >= SERVER_FAULT and error.url in self._pool.usable:
                self._pool.retire(self._pool.usable[error.url], error)
            raise

    async def _attempt(self, method: str, path: str, body: Mapping[str, Any] | None, *, pooled: bool) -> Any:
        if path == "/generate":
            await self._settle()
        return await super()._attempt(method, path, body, pooled=pooled)

    def _body(self, response: aiohttp.ClientResponse, content: bytes) -> Any:
        if (url := response.headers.get(ENGINE_HEADER)) is not None:
            return {ENGINE_HEADER: url, "answer": super()._body(response, content)}
        if response.status >= SERVER_FAULT:
            # The engine is gone, and asked for no more once that is known.
            raise EngineRefusal(f"SGLang's router could not ask an engine: {refusal(content)} (HTTP {response.status})", status=BUSY)
        return super()._body(response, content)

    def _read(self, answer: Any, **request: Any) -> Generation:
        engine = self._pool.usable.get(answer[ENGINE_HEADER])
        if engine is None:  # it has failed at another request, or left
            return super()._read(answer["answer"], **request)
        try:
            read = engine._read(answer["answer"], **request)
            if read.stop_reason is StopReason.ABORT and len(read.token_ids) < 2 and not self._pool.is_interrupted:
                raise EngineError(f"the engine at {engine.address.url} aborted a request without a token, and nobody asked it to")
        except EngineError as error:
            self._pool.retire(engine, error)
            raise
        return read


def main() -> None:
    """Route until the parent is gone."""
    die_with_parent()
    arguments = importlib.import_module("sglang_router.router_args").RouterArgs(**json.load(sys.stdin))
    importlib.import_module("sglang_router.router").Router.from_args(arguments).start()


if __name__ == "__main__":
    main()
