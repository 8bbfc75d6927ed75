"""Client of one engine: token ids in, token ids and log-probs out, and calls that change weights.

Legend: P prompt tokens. Requests that would crash the server are refused before sending.
"""

import asyncio
import base64
import bisect
import contextlib
import itertools
import math
import time
import uuid
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import aiohttp
import numpy as np
from pydantic_core import to_json

from megatron_rl.engines.answers import EngineLoad, Generation, read_body, read_generation, read_load, read_version, refusal
from megatron_rl.engines.engine import EngineAddress
from megatron_rl.engines.entropy_processor import PROCESSOR
from megatron_rl.engines.sampling import Sampling
from megatron_rl.engines.server_args import ENGINE_HEADER, ORDER_LOADER, WeightOrder
from megatron_rl.errors import DeadlineError, EngineError, EngineRefusal, UserError
from megatron_rl.system.deadlines import ENGINE_ABORT_S, ENGINE_CONTROL_S, ENGINE_LOAD_S
from megatron_rl.types import Floats, Ints

Result = TypeVar("Result")
EnginePart = Literal["weights", "kv_cache", "cuda_graph"]  # parts of an engine's GPU memory, by SGLang's names
ENGINE_PARTS: tuple[EnginePart, ...] = get_args(EnginePart)

SHORT_RESPONSE_TOKENS = 32
"""Longest responses of requests that share an HTTP call, which costs the server 1 ms.

The answers come together: the first waits for the last, at most for these tokens.
"""
MAX_TOGETHER = 64  # samples of a full shared call: a small cost for each, and answers in use early
FIRST_BACKOFF_S = 0.25
MAX_ATTEMPTS = 6  # attempts of a generation, over 8 s: a busy server drops connections for less time
IDLE_CONNECTION_S = 2.0
"""Idle time after which a connection is not used again: the server closes it after 5 s.

A loaded machine can take longer than the difference, and lose a call sent at that moment. So a call
with one attempt has a connection of its own.
"""
BUSY = 503
SERVER_FAULT = 500
"""The least HTTP status that is the server's fault, not the request's."""
_Asked = dict[str, Any]  # one requested sample in the server's words; `rid` is the id for an abort


class EngineClient:
    """Asynchronous calls to one engine; use in an `async with` block, on one event loop.

    Generation changes nothing on the server, so a lost connection is followed by retries until
    `request_timeout_s`. Control calls are made once, each within `control_timeout_s`. Every call
    raises EngineRefusal for an error of the server, EngineError without a connection and
    DeadlineError without an answer in time.
    """

    def __init__(self, address: EngineAddress, *, request_timeout_s: float, control_timeout_s: float = ENGINE_CONTROL_S) -> None:
        self.address = address
        self.served: Counter[str] = Counter()  # answers, their prompt_tokens and others; milliseconds and tokens of calls
        self._retracting_pauses_s: list[float] = []  # on the clock
        self.is_paused = False
        """True from a pause on, until generation goes on."""
        self.pending, self.num_ended = Counter[bool](), 0
        self.stepped_s = -math.inf  # on the loop's clock, when its scheduler was last seen to have made a step
        """Control calls in progress, by whether they are `joint` with others, such as ranks, and how many have ended."""
        self.holds: str | None = None  # weights to which the engine takes deltas, see `received_weights.follow`
        self._request_timeout_s, self._control_timeout_s = request_timeout_s, control_timeout_s
        # A pool for calls with several attempts, and a connection each for others.
        self._sessions: tuple[aiohttp.ClientSession, aiohttp.ClientSession] | None = None
        # Requests collected for one HTTP call, and the task that makes the call.
        self._together: tuple[list[Sequence[_Asked]], asyncio.Task[list[Any] | None]] | None = None

    async def __aenter__(self) -> "EngineClient":
        pooled = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S)
        single_use = aiohttp.TCPConnector(limit=0, force_close=True)
        self._sessions = _session(pooled, self.address.api_key), _session(single_use, self.address.api_key)
        return self

    async def __aexit__(self, *_: object) -> None:
        sessions, self._sessions = self._sessions or (), None
        for session in sessions:
            await session.close()

    # Generation

    async def generate(self, token_ids: Ints, *, sampling: Sampling, num_samples: int = 1) -> tuple[Generation, ...]:
        """Return `num_samples` responses to the prompt `token_ids` [P], in one request.

        Cancelling the call aborts the samples. Raises UserError for a request beyond the engine.
        """
        self._check_request(token_ids, sampling)
        # Of one width: the server may abort every request whose id begins with the given one.
        request_ids = [f"{uuid.uuid4().hex}-{index:06d}" for index in range(num_samples)]
        prompt, begun_s = token_ids.tolist(), time.monotonic()
        parameters = [sampling.request(index) for index in range(num_samples)]
        common = {"input_ids": prompt, "return_sampling_mask": sampling.records_candidates}
        common |= {} if sampling.entropy is None else {"custom_logit_processor": PROCESSOR}
        asked = [{"rid": rid, **common, "sampling_params": each} for rid, each in zip(request_ids, parameters, strict=True)]
        try:
            answers = await (self._ask_together(asked) if sampling.max_tokens <= SHORT_RESPONSE_TOKENS else self._ask(asked))
        except asyncio.CancelledError:
            aborting = _noted(asyncio.create_task(self.abort(request_ids)))
            # The caller sees only the cancellation, not also the error of a lost engine.
            with contextlib.suppress(EngineError, DeadlineError):
                await asyncio.shield(aborting)
            raise
        read = tuple(self._read(each, prompt_length=len(prompt), sampling=sampling, begun_s=begun_s) for each in answers)
        self.served.update(milliseconds=round(1000 * (time.monotonic() - begun_s)), tokens=max(len(each.token_ids) for each in read))
        return read

    def _read(self, answer: Any, *, prompt_length: int, sampling: Sampling, begun_s: float) -> Generation:
        """Return the response in the server's answer to a sample asked for at `begun_s`, and count it."""
        try:
            mixture, recorded = self.address.mixture, sampling.records_candidates
            read = read_generation(answer, prompt_length=prompt_length, mixture=mixture, with_candidates=recorded)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            form = f"{type(error).__name__}: {error}"
            raise EngineError(f"the engine at {self.address.url} gave an answer of another form than SGLang's ({form})") from error
        largest = max(read.token_ids, default=0)
        if largest >= self.address.vocab_size:
            raise EngineError(f"the engine at {self.address.url} gave token {largest} of a vocabulary of {self.address.vocab_size}")
        # Numbers for metrics alone: an engine need not give them. Each such pause retracts a request, too.
        meta, pauses_s = answer["meta_info"], self._retracting_pauses_s
        retractions = max(0, meta.get("num_retractions", 0) - (len(pauses_s) - bisect.bisect(pauses_s, begun_s)))
        cached_tokens = meta.get("cached_tokens", 0)
        self.served.update(answers=1, prompt_tokens=prompt_length, cached_tokens=cached_tokens, retractions=retractions)
        return read

    async def score(self, sequences: Sequence[Ints]) -> list[Floats]:
        """Return log-probs [n], nats at temperature 1, of every token of each sequence [n]; 0 for its first.

        The tokens go through the prompt phase, past all cached prefixes; none is generated.
        """
        body = {
            "input_ids": [ids.tolist() for ids in sequences],
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answers = await self._control("/generate", body, timeout_s=self._request_timeout_s, attempts=MAX_ATTEMPTS)
        try:
            scored = [answer["meta_info"]["input_token_logprobs"] for answer in answers]
            # SGLang names the last token of the vocabulary 0 here, beside its own log-prob.
            last = self.address.vocab_size - 1
            if [[token for _, token, *_ in entries] for entries in scored] != [np.where(ids == last, 0, ids).tolist() for ids in sequences]:
                raise ValueError("other tokens than it was given")
            return [np.array([0.0, *(value for value, *_ in entries[1:])], np.float32) for entries in scored]
        except (KeyError, TypeError, ValueError) as error:
            form = f"{type(error).__name__}: {error}"
            raise EngineError(f"the engine at {self.address.url} scored tokens in another form than SGLang's ({form})") from error

    async def _ask(self, asked: Sequence[_Asked]) -> list[Any]:
        """Return the server's answers to samples, in one HTTP call."""
        body: dict[str, Any] = {name: [each.get(name) for each in asked] for name in dict.fromkeys(itertools.chain(*asked))}
        body |= {"return_logprob": True, "return_routed_experts": self.address.mixture is not None}
        answers = await self._call("POST", "/generate", body, timeout_s=self._request_timeout_s, attempts=MAX_ATTEMPTS)
        if not isinstance(answers, list) or len(answers) != len(asked):
            raise EngineError(f"the engine at {self.address.url} answered {len(asked)} samples with {str(answers)[:200]!r}")
        return answers

    async def _ask_together(self, asked: Sequence[_Asked]) -> list[Any]:
        """Ask in one HTTP call with concurrent requests; after a joint refusal, ask alone."""
        if self._together is None:
            collected: list[Sequence[_Asked]] = []
            self._together = collected, _noted(asyncio.create_task(self._ask_collected(collected)))
        requests, task = self._together
        first = sum(map(len, requests))
        requests.append(asked)
        if first + len(asked) >= MAX_TOGETHER:
            self._together = None
        answers = await asyncio.shield(task)
        return await self._ask(asked) if answers is None else answers[first : first + len(asked)]

    async def _ask_collected(self, requests: Sequence[Sequence[_Asked]]) -> list[Any] | None:
        """Return the answers to `requests`, collected until this task has its first turn.

        None for a refusal of several: the reason need not hold for all.
        """
        if self._together is not None and self._together[0] is requests:
            self._together = None
        try:
            return await self._ask([each for request in requests for each in request])
        except EngineRefusal:
            if len(requests) == 1:
                raise
            return None

    def _check_request(self, token_ids: Ints, sampling: Sampling) -> None:
        address, length = self.address, len(token_ids)
        if not length:
            raise UserError("a prompt has no tokens, needs at least one")
        stops = sampling.stop_token_ids or (0,)
        if min(token_ids.min(), *stops) < 0 or max(token_ids.max(), *stops) >= address.vocab_size:
            raise UserError(
                f"token ids from {token_ids.min()} to {token_ids.max()} and stop token ids {sampling.stop_token_ids} need to be"
                f" between 0 and {address.vocab_size - 1} (vocab_size of config.json); use the tokenizer of this model"
            )
        limit = min(address.context_length, address.max_total_tokens)
        if length + sampling.max_tokens > limit:
            raise UserError(
                f"a prompt of {length} tokens + {sampling.max_tokens} response tokens = {length + sampling.max_tokens}, the engine takes"
                f" {limit} (context {address.context_length}, KV pool {address.max_total_tokens}); shorten the prompt,"
                " lower rollout.sampling.max_response_tokens or raise rollout.sglang.max_total_tokens"
            )
        if sampling.stop and not address.has_tokenizer:
            raise UserError(
                f"stop strings {list(sampling.stop)} need an engine with a tokenizer; set them in rollout.sampling.stop, not in one request"
            )

    # Running requests and memory

    async def load(self) -> EngineLoad | None:
        """Return the present load; None from an engine that does not tell it."""
        try:
            return read_load(await self._call("GET", "/v1/loads?include=core", timeout_s=ENGINE_LOAD_S))
        except (EngineError, DeadlineError):
            return None

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Abort requests, which answer with their tokens so far; unknown ones are ignored."""
        await asyncio.gather(*(self._control("/abort_request", {"rid": each}, timeout_s=ENGINE_ABORT_S) for each in request_ids))

    async def abort_all(self) -> None:
        """Abort every request, as `abort`."""
        await self._control("/abort_request", {"abort_all": True}, timeout_s=ENGINE_ABORT_S)

    async def pause(self, mode: Literal["abort", "retract", "in_place"]) -> None:
        """Stop generating: end requests, recompute them after `resume`, or keep their cache."""
        self._retracting_pauses_s += [time.monotonic()] * (mode == "retract")
        self.is_paused = True
        await self._control("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Generate again; no error when not paused."""
        await self._control("/continue_generation", {})
        self.is_paused = False

    async def flush_cache(self) -> None:
        """Forget all cached prefixes. Raises EngineRefusal when still busy after seconds."""
        await self._control("/flush_cache?timeout=5", {})

    async def release_memory(self, parts: Collection[EnginePart]) -> None:
        """Free GPU memory with content, and cached prefixes. Raises EngineRefusal when busy."""
        # A release during a running request kills the server.
        await self.flush_cache()
        await self._control("/release_memory_occupation", {"tags": sorted(parts)})

    async def restore_memory(self, parts: Collection[EnginePart]) -> None:
        """Allocate released memory again, without content; other parts kill the server."""
        await self._control("/resume_memory_occupation", {"tags": sorted(parts)})

    # Weights

    async def weight_version(self) -> int:
        """Return the version of the served weights; 0 are the weights of the start."""
        answer = await self._call("GET", "/model_info", timeout_s=self._control_timeout_s)
        return read_version(answer.get("weight_version") if isinstance(answer, dict) else answer)

    async def begin_weight_update(self) -> None:
        """Open an update. Pause first: requests may run between two buckets."""
        await self._control("/begin_weight_update", {"selector": "all"})

    async def end_weight_update(self) -> None:
        """Close an update."""
        await self._control("/end_weight_update", {})

    async def join_group(self, *, address: str, port: int, rank_offset: int, world_size: int, name: str, backend: str) -> None:
        """Join the process group `name` with ranks from `rank_offset` on; the trainer is rank 0."""
        body = {"master_address": address, "master_port": port, "rank_offset": rank_offset, "world_size": world_size}
        await self._control("/init_weights_update_group", {**body, "group_name": name, "backend": backend}, joint=True)

    async def leave_group(self, name: str) -> None:
        """Leave the process group `name`. Raises EngineRefusal for no member."""
        await self._control("/destroy_weights_update_group", {"group_name": name}, joint=True)

    async def receive_bucket(
        self, names: Sequence[str], *, dtypes: Sequence[str], shapes: Iterable[Sequence[int]], group: str, version: int | None = None
    ) -> None:
        """Receive tensors that rank 0 of `group` broadcasts during this call, as one of uint8.

        Names and shapes are the Hugging Face checkpoint's, `dtypes` torch's. `version`, given with
        the last bucket, becomes the engine's, and cached prefixes are then forgotten.
        """
        tensors = {"names": list(names), "dtypes": list(dtypes), "shapes": [list(shape) for shape in shapes]}
        await self._control("/update_weights_from_distributed", {**tensors, "group_name": group, **_bucket(version)}, joint=True)

    async def take_bucket(self, handles: Sequence[str], *, version: int | None = None) -> None:
        """Copy tensors from shared memory, by a handle for each tensor parallel rank.

        The server dies of a handle that cannot be opened. `version` as in `receive_bucket`.
        """
        await self._control("/update_weights_from_tensor", {"serialized_named_tensors": list(handles), **_bucket(version)})

    async def order(self, step: WeightOrder, *, num_ranks: int, version: int | None = None, **keywords: Any) -> None:
        """Give the engine's `num_ranks` ranks an order about the weights of an open update (`received_weights.order`).

        They wait for each other. A difference ends the server. `version` as in `receive_bucket`.
        """
        # Imported here, because it imports torch, and the actor of an engine never does.
        from megatron_rl.engines.received_weights import order

        orders = [base64.b64encode(order(step, **keywords)).decode()] * num_ranks
        body = {"serialized_named_tensors": orders, **_bucket(version), "load_format": ORDER_LOADER, "selector": "target"}
        await self._control("/update_weights_from_tensor", body, joint=num_ranks > 1)

    async def load_weights(self, path: Path, *, version: int, timeout_s: float | None = None) -> None:
        """Read weights from a Hugging Face directory of the engine's machine; flush the cache.

        SGLang dies of other shapes than the running model's. The load format is explicit: a server
        started without weights would make weights up again.
        """
        body = {"model_path": str(path), "load_format": "auto", "flush_cache": True, "weight_version": str(version)}
        self.holds = None
        # A sync without this engine has the other half of the time.
        await self._control("/update_weights_from_disk", body, timeout_s=timeout_s or self._control_timeout_s / 2, joint=True)

    async def checksums(self) -> dict[str, str]:
        """Return the checksum of each weight by engine name, on each tensor parallel rank.

        Equal weights on equally configured engines have equal checksums; q, k and v (gate and up)
        are one weight of an engine.
        """
        answer = await self._control("/weights_checker", {"action": "checksum", "selector": "target"})
        ranks = [(f"(tp rank {number})", rank["checksums"]) for number, rank in enumerate(answer["ranks"])]
        return {f"{name} {where}": checksum for where, checksums in ranks for name, checksum in checksums.items()}

    # HTTP

    async def _control(self, path: str, body: Any, *, timeout_s: float | None = None, attempts: int = 1, joint: bool = False) -> Any:
        self.pending[joint] += 1
        try:
            answer = await self._call("POST", path, body, timeout_s=timeout_s or self._control_timeout_s, attempts=attempts)
        finally:
            self.pending[joint] -= 1
            self.num_ended += 1
        # Some calls report a failure with status 200.
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineRefusal(f"the engine at {self.address.url} failed at {path}: {answer.get('message')}", status=200)
        return answer

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float, attempts: int = 1) -> Any:
        """Return the JSON answer, None for an empty one, within `timeout_s` for all `attempts`."""
        url = self.address.url
        try:
            async with asyncio.timeout(timeout_s):
                for attempt in itertools.count(1):
                    try:
                        return await self._attempt(method, path, body, pooled=attempts > 1)
                    except (EngineRefusal, aiohttp.ClientError) as error:
                        if attempt == attempts or (isinstance(error, EngineRefusal) and error.status != BUSY):
                            raise
                    await asyncio.sleep(FIRST_BACKOFF_S * 2 ** (attempt - 1))
        except aiohttp.ClientError as error:
            raise EngineError(f"the engine at {url} cannot be reached for {path} ({attempts} attempts): {error}") from error
        except TimeoutError as error:
            derived_s = (self._request_timeout_s, self._control_timeout_s, self._control_timeout_s / 2)
            see = "; see model.deadline_s" if timeout_s in derived_s else ""
            raise DeadlineError(f"the engine at {url} did not answer {path} within {timeout_s:g} s{see}") from error

    async def _attempt(self, method: str, path: str, body: Mapping[str, Any] | None, *, pooled: bool) -> Any:
        if self._sessions is None:
            raise EngineError(f"the client of {self.address.url} is not open; use it in an `async with` block")
        session = self._sessions[0] if pooled else self._sessions[1]
        # As fast again as aiohttp's own encoder, with prompts of thousands of tokens on the event loop.
        content = None if body is None else to_json(body, inf_nan_mode="constants")
        headers = {} if body is None else {"Content-Type": "application/json"}
        async with session.request(method, self.address.url + path, data=content, headers=headers) as response:
            return self._body(response, await response.read())

    def _body(self, response: aiohttp.ClientResponse, content: bytes) -> Any:
        if not response.ok:
            reason, url = f"{refusal(content)} (HTTP {response.status})", response.headers.get(ENGINE_HEADER, self.address.url)
            raise EngineRefusal(f"the engine at {url} refused {response.url.path_qs}: {reason}", status=response.status, url=url)
        return read_body(content)


def _session(connector: aiohttp.TCPConnector, api_key: str) -> aiohttp.ClientSession:
    # `trust_env` stays off: a proxy must not see traffic between our own processes.
    headers, timeout = {"Authorization": f"Bearer {api_key}"}, aiohttp.ClientTimeout(total=None, sock_connect=10)
    return aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout)


def _noted(task: "asyncio.Task[Result]") -> "asyncio.Task[Result]":
    """Return `task` with its failure marked as read, which asyncio would print otherwise."""
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


def _bucket(version: int | None) -> dict[str, Any]:
    last = {"flush_cache": False} if version is None else {"flush_cache": True, "weight_version": str(version)}
    return {"load_format": "flattened_bucket", **last}
