"""A server with the HTTP calls of an engine and no model, for `rollout.py`; prints its port.

    python tools/bench/stub_engine.py [BUDGET SECONDS_PER_TOKEN]

Without arguments every request is answered at once, with as many tokens as it allows. With them an answer's length is drawn from a
log-normal distribution by the request's seed, BUDGET at most, and takes its time; an abort answers with the tokens so far.
"""

import asyncio
import random
import sys
import time
from typing import Any

from aiohttp import web

LETTERS = range(32, 90)
MEDIAN_TOKENS, SIGMA = 60, 1.0
LOG_PROB = -4.0


class StubEngine:
    """Answers in SGLang's form, for as many engines as have its address."""

    def __init__(self, budget: int = 0, token_s: float = 0.0) -> None:
        self._budget, self._token_s, self._version, self._aborted = budget, token_s, "0", asyncio.Event()

    async def answer(self, request: web.Request) -> web.Response:
        """Answer generations, aborts and syncs of weights; other calls with an empty object."""
        body = await request.json() if request.can_read_body else {}
        if request.path == "/generate":
            return web.json_response(await asyncio.gather(*map(self._generate, body["sampling_params"])))
        if request.path == "/abort_request":
            self._aborted.set()
            self._aborted = asyncio.Event()
        self._version = body.get("weight_version", self._version)
        return web.json_response({})

    async def _generate(self, parameters: dict[str, Any]) -> dict[str, Any]:
        length, version, finish = parameters["max_new_tokens"], self._version, "length"
        draw = random.Random(parameters["sampling_seed"])
        if self._token_s:
            # What is missing of the budget was made before an abort.
            whole = round(MEDIAN_TOKENS * draw.lognormvariate(0, SIGMA))
            length = min(length, max(1, whole - (self._budget - length)))
            begun_s = time.monotonic()
            aborted = asyncio.ensure_future(self._aborted.wait())
            if (await asyncio.wait([aborted], timeout=length * self._token_s))[0]:
                length, finish = min(length, 1 + int((time.monotonic() - begun_s) / self._token_s)), "abort"
            aborted.cancel()
        ids = draw.choices(LETTERS, k=length)
        meta = {"finish_reason": {"type": finish}, "output_token_logprobs": [(LOG_PROB, token, None) for token in ids]}
        return {"output_ids": ids, "meta_info": {**meta, "weight_version": version}}


async def main() -> None:
    """Serve on a free port until the parent closes the input."""
    budget, token_s = int((sys.argv[1:] or ["0"])[0]), float((sys.argv[2:] or ["0"])[0])
    application = web.Application(client_max_size=2**30)
    application.router.add_route("*", "/{path:.*}", StubEngine(budget, token_s).answer)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
