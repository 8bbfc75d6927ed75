"""The endpoint of a run: OpenAI's and Anthropic's API, over one conversation per key.

It listens on loopback, and on the node's address where agents play on other nodes.

Requests become turns of the trajectory's tree. No field of a request reaches an engine but its
messages as tokens, its stop strings and a lower bound of tokens.
"""

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from aiohttp import web
from pydantic_core import from_json

from megatron_rl.config.settings import RolloutSettings
from megatron_rl.engines.sampling import Sampling
from megatron_rl.errors import TrajectoryError
from megatron_rl.rollout.anthropic_dialect import Messages
from megatron_rl.rollout.conversation import Asked, Conversation, Turn
from megatron_rl.rollout.dialects import MODEL, ChatCompletions, Completions, Fields, Request, RequestRefusal
from megatron_rl.rollout.generator import cancel, together

MAX_BODY_BYTES = 2**24
"""Largest request: a context of a million tokens, written in JSON."""
KEEP_ALIVE_S = 5.0
"""Time without an event after which a stream gets a comment, so that no client gives it up."""
_MODEL_PATH = f"/v1/models/{MODEL}"
_RETRIES = frozenset(map(str, range(1, 100)))
CLOSE_S = 1.0  # for connections that clients keep open
Dialect = ChatCompletions | Completions | Messages
"""Form of requests and answers: `read` one, the `answer` or its `events`, and errors."""
_DIALECTS: Mapping[str, Dialect] = MappingProxyType({
    "/v1/chat/completions": ChatCompletions(), "/v1/completions": Completions(), "/v1/messages": Messages(),
    "/v1/messages/count_tokens": Messages(),
})  # fmt: skip


@dataclass(slots=True, eq=False)
class _Work:
    """One request in the making or answered: the number of handlers that wait, and its latest attempt."""

    digest: bytes
    idempotency_key: str | None
    attempt: int
    request: Request
    task: "asyncio.Task[Sequence[Turn]]"
    num_waiting: int = 0

    @property
    def is_given_up(self) -> bool:
        """Return True where the last client went away before the answer."""
        return self.task.cancelling() > 0


class Session:
    """The requests of one trajectory, which become turns of `conversation`, under the secret `key`.

    `failed` gets the error of an answer that could not be made, which ends the trajectory.
    """

    def __init__(self, conversation: Conversation, *, sampling: Sampling, settings: RolloutSettings) -> None:
        assert settings.agent is not None, "only agents have sessions"
        self.key = secrets.token_urlsafe(32)
        self.conversation, self._sampling, self._max_turns = conversation, sampling, settings.max_turns
        self._overrides = settings.agent.sampling == "override"
        names = ("temperature", "top_p", "top_k", "min_p")
        self._fixed = {name: (value,) for name in names if (value := getattr(settings.sampling, name)) is not None}
        self.num_refused, self.num_overridden = 0, 0
        self.cause: RequestRefusal | None = None
        """The first refusal that is a failure of the trajectory where the agent fails, too."""
        self.requests: dict[Turn, Request] = {}
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._works: list[_Work] = []
        self._num_asked = 0

    async def close(self) -> None:
        """End the requests; what was not answered is no turn."""
        await cancel([work.task for work in self._works])
        self.failed.cancel()
        if not self.failed.cancelled():
            # asyncio prints an error that nobody has read.
            self.failed.exception()

    def refuse(self, refusal: RequestRefusal) -> None:
        """Note a refusal."""
        self.num_refused += 1
        if refusal.cause is not None:
            self.cause = self.cause or refusal

    def read(self, dialect: Dialect, body: bytes) -> Request:
        """Return the request in `body`, with other settings than the run's refused or overridden."""
        try:
            values = from_json(body, allow_inf_nan=False)
        except ValueError as error:
            raise RequestRefusal(f"the request is no JSON ({error}), needs an object") from error
        try:
            request = dialect.read(Fields(values, sampling=self._fixed))
        except RequestRefusal:
            raise
        except (TypeError, ValueError, RecursionError) as error:
            # Python hashes no object as a name, and prints no number of 4300 digits.
            raise RequestRefusal(f"the request cannot be read ({error}), needs the values that its fields have in this API") from error
        if request.others and not self._overrides:
            first = request.others[0]
            raise RequestRefusal(
                f"{first}; rollout.agent.sampling: override takes the run's for any request", status=first.status, code=first.code
            )
        return request

    def begin(self, dialect: Dialect, body: bytes, headers: Mapping[str, str], *, path: str) -> _Work:
        """Return the work of a request: that of an earlier attempt at it, or else a new one.

        Attempts are known by their header. A repeated body alone is another request. Of equal ones, an
        attempt is at the one that was given up, and is answered anew.
        """
        retries = headers.get("x-stainless-retry-count", "")
        attempt = int(retries) if retries in _RETRIES else 0
        key = headers.get("idempotency-key")
        digest = hashlib.blake2b(path.encode() + b"\0" + body).digest()
        known = [
            work
            for work in reversed(self._works)
            if (work.digest == digest and work.attempt < attempt if key is None else work.idempotency_key == key)
        ]
        for work in sorted(known, key=lambda work: not work.is_given_up):
            if work.is_given_up:
                self._works.remove(work)
                break
            if work.digest != digest:
                raise RequestRefusal(f"idempotency-key {key:.60} came with another request before, needs a new key")
            work.attempt = max(work.attempt, attempt)
            return work
        request = self.read(dialect, body)
        if self._num_asked + request.count > self._max_turns:
            raise RequestRefusal(
                f"the trajectory had {self._num_asked} answers and {request.count} more were asked for, needs at most {self._max_turns}; "
                "end it, or raise rollout.max_turns",
                cause="budget",
            )
        self._num_asked += request.count
        work = _Work(digest, key, attempt, request, asyncio.create_task(self._answer(request)))
        self._works.append(work)
        work.task.add_done_callback(lambda task: self._ended(work))
        return work

    async def rendered(self, request: Request) -> Asked:
        """Return the request in tokens. Raises RequestRefusal for one that the template refuses."""
        if request.text is not None:
            return await self.conversation.continued(request.text)
        try:
            return await self.conversation.rendered(request.messages, tools=request.tools)
        except TrajectoryError as error:
            raise RequestRefusal(str(error), cause=error.cause) from error

    async def _answer(self, request: Request) -> Sequence[Turn]:
        """Return the answers, all turns of the tree together; no turn where one is missing. Raises RequestRefusal."""
        asked = await self.rendered(request)
        length, context = len(asked.prompt_ids), self.conversation.context
        if length >= context:
            raise RequestRefusal(
                f"the request is too long: it has {length} tokens and an answer needs one, the context has {context} (the engines' and "
                "training.max_tokens_per_micro_batch × cp); shorten it",
                code="context_length_exceeded",
                cause="context",
            )
        self.num_overridden += bool(request.others)
        limit = self._sampling.max_tokens if request.max_tokens is None else min(request.max_tokens, self._sampling.max_tokens)
        sampling = replace(self._sampling, max_tokens=limit)
        options: dict[str, Any] = {"sampling": sampling, "stop": request.stop, "as_served": True}
        turns = await together(self.conversation.answer(asked, **options) for _ in range(request.count))
        self.conversation.turns.extend(turns)
        self.requests |= dict.fromkeys(turns, request)
        return turns

    def _ended(self, work: _Work) -> None:
        """Take no turn of the budget for a request without an answer. A failure fails the trajectory, a refusal is forgotten."""
        error = None if work.task.cancelled() else work.task.exception()
        if work.task.cancelled() or error is not None:
            self._num_asked -= work.request.count
        if isinstance(error, RequestRefusal):
            self._works = [each for each in self._works if each is not work]
        elif error is not None and not self.failed.done():
            self.failed.set_exception(error)


class Endpoint(AbstractAsyncContextManager["Endpoint", None]):
    """The server, at `url` on loopback while the context is open, for the keys of open sessions."""

    def __init__(self, settings: RolloutSettings) -> None:
        self._settings = settings
        self._sessions: dict[str, Session] = {}
        self.url = ""

    async def __aenter__(self) -> "Endpoint":
        application = web.Application(client_max_size=MAX_BODY_BYTES)
        application.router.add_route("*", "/{path:.*}", self._serve)
        # Compressed, 3 GB are 13 MB, and the event loop would see to nothing else for seconds.
        self._runner = web.AppRunner(
            application, handler_cancellation=True, auto_decompress=False, access_log=None, shutdown_timeout=CLOSE_S
        )
        await self._runner.setup()
        self.url = await self.listen("127.0.0.1")
        return self

    async def listen(self, host: str) -> str:
        """Serve on a free port of this node's address `host`, too; return the URL."""
        await web.TCPSite(self._runner, host, 0).start()
        return f"http://{f'[{host}]' if ':' in host else host}:{self._runner.addresses[-1][1]}"

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    @asynccontextmanager
    async def open(self, conversation: Conversation, sampling: Sampling) -> AsyncIterator[Session]:
        """Yield a session that answers by `sampling`, whose key ends with the body."""
        session = Session(conversation, sampling=sampling, settings=self._settings)
        self._sessions[session.key] = session
        try:
            yield session
        finally:
            del self._sessions[session.key]
            await session.close()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        """Answer one HTTP request, or refuse it in the form of its dialect."""
        fallback = "/v1/messages" if "anthropic-version" in request.headers else "/v1/completions"
        dialect, session = _DIALECTS.get(request.path, _DIALECTS[fallback]), None
        try:
            session = self._session(request)
            if request.path in ("/v1/models", _MODEL_PATH) and request.method == "GET":
                models = _models()
                return web.json_response(models["data"][0] if request.path == _MODEL_PATH else models)
            if request.path not in _DIALECTS or request.method != "POST":
                served = f"POST {', '.join(_DIALECTS)} or GET /v1/models"
                raise RequestRefusal(f"{request.method} {request.path} is not served, needs {served}", status=404)
            body = await _body(request)
            # The trajectory may have ended meanwhile.
            session = self._session(request)
            if request.path.endswith("/count_tokens"):
                return web.json_response({"input_tokens": len((await session.rendered(session.read(dialect, body))).prompt_ids)})
            return await self._answered(request, dialect, session.begin(dialect, body, request.headers, path=request.path))
        except RequestRefusal as refusal:
            if session is not None:
                session.refuse(refusal)
            return web.json_response(dialect.error(refusal), status=refusal.status)

    def _session(self, request: web.Request) -> Session:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        for key in (token.strip() if scheme.lower() == "bearer" else None, request.headers.get("x-api-key")):
            if key in self._sessions:
                return self._sessions[key]
        raise RequestRefusal(
            "the key is none of a trajectory in progress, needs the one that this agent was given, as bearer token or x-api-key",
            status=401,
            code="invalid_api_key",
        )

    async def _answered(self, request: web.Request, dialect: Dialect, work: _Work) -> web.StreamResponse:
        """Wait for the answer and send it. The work ends with the last handler that waits for it."""
        work.num_waiting += 1
        try:
            await asyncio.wait([work.task], timeout=KEEP_ALIVE_S if work.request.streams else None)
            if not work.request.streams:
                return web.json_response(dialect.answer(_turns(work), work.request))
            return await self._stream(request, dialect, work)
        finally:
            work.num_waiting -= 1
            if not work.num_waiting:
                work.task.cancel()

    async def _stream(self, request: web.Request, dialect: Dialect, work: _Work) -> web.StreamResponse:
        """Send the answer as events, and comments until it is made. An early failure still has a status of its own."""
        if work.task.done():
            _turns(work)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        while not work.task.done():
            await response.write(b": keep-alive\n\n")
            await asyncio.wait([work.task], timeout=KEEP_ALIVE_S)
        try:
            for event in dialect.events(_turns(work), work.request):
                await response.write(event)
        except RequestRefusal as refusal:
            await response.write(dialect.error_event(refusal))
        await response.write_eof()
        return response


async def _body(request: web.Request) -> bytes:
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        message = f"the request has more than {MAX_BODY_BYTES} bytes, needs less; shorten the messages"
        raise RequestRefusal(message, status=413, cause="context") from error


def _turns(work: _Work) -> Sequence[Turn]:
    """Return the answers. Raises RequestRefusal where there are none."""
    if work.task.cancelled():
        raise RequestRefusal("the trajectory of this key has ended", status=401, code="invalid_api_key")
    error = work.task.exception()
    if isinstance(error, RequestRefusal):
        raise error
    if error is not None:
        raise RequestRefusal(f"the trajectory failed: {type(error).__name__}: {error}", status=500) from error
    return work.task.result()


def _models() -> dict[str, Any]:
    """Return the one model, with the fields of both dialects."""
    names = {"id": MODEL, "display_name": MODEL, "object": "model", "type": "model", "owned_by": "megatron_rl"}
    model = {**names, "created": 0, "created_at": "1970-01-01T00:00:00Z"}
    return {"object": "list", "data": [model], "has_more": False, "first_id": MODEL, "last_id": MODEL}
