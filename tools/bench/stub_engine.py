"""A server with the HTTP calls of an engine and no model, for `rollout.py`; prints its port.

    python tools/bench/stub_engine.py [BUDGET SECONDS_PER_TOKEN DIRECTORY]

Without arguments every request is answered at once, with as many tokens as it allows. With them an answer's length is drawn from a
log-normal distribution by the request's seed, BUDGET at most, and takes its time; an abort answers with the tokens so far. Tokens are
those of the policy of `copy_task.py` in DIRECTORY, and a sync of weights reads another one.
"""

import asyncio
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web
from copy_task import CopyPolicy

LETTERS = range(32, 90)
MEDIAN_TOKENS, SIGMA = 60, 1.0
LOG_PROB = -4.0


class StubEngine:
    """Answers in SGLang's form, for as many engines as have its address."""

    def __init__(self, budget: int = 0, token_s: float = 0.0, policy: CopyPolicy | None = None) -> None:
        self._budget, self._token_s, self._policy, self._version, self._aborted = budget, token_s, policy, "0", asyncio.Event()

    async def answer(self, request: web.Request) -> web.Response:
        """Answer generations, aborts and syncs of weights; other calls with an empty object."""
        body = await request.json() if request.can_read_body else {}
        if request.path == "/generate":
            return web.json_response(await asyncio.gather(*map(self._generate, body["input_ids"], body["sampling_params"])))
        if request.path == "/abort_request":
            self._aborted.set()
            self._aborted = asyncio.Event()
        if self._policy is not None and "model_path" in body:
            self._policy = CopyPolicy.read(Path(body["model_path"]))
        self._version = body.get("weight_version", self._version)
        return web.json_response({})

    async def _generate(self, input_ids: list[int], parameters: dict[str, Any]) -> dict[str, Any]:
        length, version, policy, finish = parameters["max_new_tokens"], self._version, self._policy, "length"
        draw, num_before = random.Random(parameters["sampling_seed"]), self._budget - length
        if self._token_s:
            # What is missing of the budget was made before an abort.
            whole = round(MEDIAN_TOKENS * draw.lognormvariate(0, SIGMA))
            length = min(length, max(1, whole - num_before))
            begun_s = time.monotonic()
            aborted = asyncio.ensure_future(self._aborted.wait())
            if (await asyncio.wait([aborted], timeout=length * self._token_s))[0]:
                length, finish = min(length, 1 + int((time.monotonic() - begun_s) / self._token_s)), "abort"
            aborted.cancel()
        ids, log_probs = draw.choices(LETTERS, k=length), [LOG_PROB] * length
        if policy is not None:
            # The one of the request's begin, as its version says, however long it takes.
            row = policy.log_probs[policy.digit_of(input_ids)]
            drawn = random.Random(f"{parameters['sampling_seed']} {num_before}").choices(range(8), np.exp(row).tolist(), k=length)
            ids, log_probs = [policy.ids[each] for each in drawn], row[drawn].tolist()
        meta = {"finish_reason": {"type": finish}, "output_token_logprobs": list(zip(log_probs, ids, [None] * length, strict=True))}
        return {"output_ids": ids, "meta_info": {**meta, "weight_version": version}}


async def main() -> None:
    """Serve on a free port until the parent closes the input."""
    made = StubEngine(int(sys.argv[1]), float(sys.argv[2]), CopyPolicy.read(Path(sys.argv[3]))) if sys.argv[1:] else StubEngine()
    application = web.Application(client_max_size=2**30)
    application.router.add_route("*", "/{path:.*}", made.answer)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
