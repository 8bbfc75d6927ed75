"""Send the engine requests of one attempt, and keep finished answers in the buffer for a resume.

Each request finds an engine, fails, repeats and aborts independently. A repeated rollout sends the
same requests, as far as tools answer alike; those of one session in any order. So an answer is found
by its whole request, seed included.
"""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack, contextmanager
from dataclasses import fields, replace
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import safetensors.numpy

from megatron_rl.data.buffer import Answer, Buffer
from megatron_rl.engines.answers import Generation, first_recorded
from megatron_rl.engines.client import SERVER_FAULT, SHORT_RESPONSE_TOKENS, EngineClient
from megatron_rl.engines.engine_pool import EnginePool, Urgency
from megatron_rl.engines.sampling import Sampling
from megatron_rl.errors import DeadlineError, EngineError, EngineRefusal, UserError
from megatron_rl.system.frozen_arrays import Candidates
from megatron_rl.types import Ints, StopReason

Result = TypeVar("Result")
Decode = Callable[[list[int]], str]
"""From token ids to their text, special tokens included."""

KEPT_ANSWER_S = 0.1
"""A session waits this long for a kept answer, so that requests sent together are in flight together again."""
KEEP_AFTER_S = 1.0
"""Answers are written this late: a group finished by then is written once, as a whole."""


class PoolGenerator(AbstractAsyncContextManager["PoolGenerator", None]):
    """The engines of `pool` for the rollout of one prompt; leaving the context aborts requests.

    The k-th requested sample gets a seed from the text `seed` and k. So samples differ on an engine
    that draws by seeds, and are reproducible. Each request of a session counts from a seed of its
    tokens, token budget and stop strings: the order of requests, which depends on tool latency,
    changes nothing. Equal requests of a session count on.

    `max_tokens` bounds prompt and answer together, as a micro-batch does; `max_answer` bounds one
    answer. `arrival` is the group's. Answers in `kept` are not requested again; long ones are added.
    """

    def __init__(
        self,
        pool: EnginePool,
        *,
        seed: str,
        max_tokens: int,
        max_answer: int,
        urgency: Urgency,
        arrival: int,
        kept: "KeptAnswers",
        decode: Decode,
    ) -> None:
        self._decode = decode
        self._pool, self._urgency, self._arrival, self._kept = pool, urgency, arrival, kept
        self._seed_source, self._max_tokens, self._max_answer = seed, max_tokens, max_answer
        self._next_seeds: dict[str, int] = {}
        self._engines: dict[str, EngineClient] = {}
        self._requests: set[asyncio.Task[tuple[Generation, ...]]] = set()
        self._closed = False
        self._num_queued = 0
        # Seconds on the clock at which `own_s` was 0; None while a request waits for an engine, and
        # `own_s` stands still.
        self._own_since_s: float | None = time.monotonic()
        self._own_before_s = 0.0
        self.engines_failed: Exception | None = None  # why a request found no engine any more

    @property
    def context(self) -> int:
        """Limit in tokens of a prompt and response together; see `kinds.Generator`."""
        address = self._pool.address
        return min(address.context_length, address.max_total_tokens, self._max_tokens)

    @property
    def own_s(self) -> float:
        """Return the seconds since the start without a request waiting for an engine."""
        return self._own_before_s + (0.0 if self._own_since_s is None else time.monotonic() - self._own_since_s)

    async def __aexit__(self, *_: object) -> None:
        self._closed = True
        await cancel(self._requests)

    async def generate(
        self, token_ids: Ints, *, sampling: Sampling, num_samples: int = 1, session: str | None = None
    ) -> tuple[Generation, ...]:
        """Return `num_samples` responses to `token_ids` [P]; see `kinds.Generator`.

        A `session` prefers its last engine, whose cache has the prefix. A failed engine is retired.
        The request then goes to the next engine with the same seeds, before other requests; the new
        tokens may have a newer weight version. Cancelling the call aborts this request alone.

        Raises:
            EngineError, DeadlineError: the last engine failed, with the engine's reason.
            EngineRefusal: an engine refused the request.
            UserError: a request that no engine can take, or an answer that may exceed the settings.
        """
        self._check(len(token_ids), sampling)
        source = self._seed_source
        if session is not None:
            source += f"\0{session}\0{_digest(f'{sampling.max_tokens} {sampling.stop}', token_ids)}"
        first = self._next_seeds.get(source, _seed(source))
        self._next_seeds[source] = first + num_samples
        seeded = replace(sampling, seed=first)
        # A separate task, so that the end of the rollout also ends requests left without a waiter.
        request = asyncio.create_task(self._request(token_ids, seeded, num_samples, session))
        self._requests.add(request)
        request.add_done_callback(self._requests.discard)
        return await request

    def _check(self, length: int, sampling: Sampling) -> None:
        if self._closed:
            raise UserError("a rollout asked its generator when it had ended; await every call before it returns")
        if sampling.max_tokens > self._max_answer:
            raise UserError(
                f"a rollout asked for an answer of max_tokens {sampling.max_tokens}, rollout.sampling.max_response_tokens "
                f"{self._max_answer} bounds one answer; ask for less, or raise it"
            )
        if length + sampling.max_tokens > self._max_tokens:
            raise UserError(
                f"a prompt of {length} tokens + {sampling.max_tokens} response tokens = {length + sampling.max_tokens}, a micro-batch "
                f"holds {self._max_tokens} (training.max_tokens_per_micro_batch × cp); stay within generator.context {self.context}, or "
                "raise it"
            )

    async def _request(self, token_ids: Ints, sampling: Sampling, num_samples: int, session: str | None) -> tuple[Generation, ...]:
        urgency, answers = self._urgency, self._kept_answers(token_ids, sampling, num_samples)
        pieces = {index: answers.pop(index) for index in list(answers) if answers[index].stop_reason is StopReason.ABORT}
        if session is not None and len(answers) == num_samples:
            await asyncio.sleep(KEPT_ANSWER_S)
        while len(answers) < num_samples:
            preferred = None if session is None else self._engines.get(session)
            slots = self._pool.slots(num_samples - len(answers), urgency=urgency, arrival=self._arrival, preferred=preferred)
            async with AsyncExitStack() as held:
                with self._queued():
                    client = await held.enter_async_context(slots)
                asked = self._pool.router or client
                try:
                    # A hanging engine that leaves the pool is not waited for until the deadline.
                    await self._pool.while_it_stays(client, self._fill(asked, token_ids, sampling, num_samples, answers, pieces))
                except (EngineError, DeadlineError) as error:
                    if isinstance(error, EngineRefusal) and error.status < SERVER_FAULT:
                        raise  # the request is at fault, another engine would refuse it too
                    if asked is client:
                        self._pool.retire(client, error)
                    elif isinstance(error, DeadlineError):
                        raise  # the router does not say which engine is late, and has retired others
            if session is not None and len(answers) == num_samples and asked is client:
                self._engines[session] = client
            if urgency is Urgency.TRAINING:
                urgency = Urgency.AGAIN
        return tuple(answers[index] for index in range(num_samples))

    @contextmanager
    def _queued(self) -> Iterator[None]:
        """Wait for slots in the body, which is no time of the rollout's own."""
        self._num_queued += 1
        self._own_before_s, self._own_since_s = self.own_s, None
        try:
            yield
        except Exception as error:
            self.engines_failed = error
            raise
        finally:
            self._num_queued -= 1
            if not self._num_queued:
                self._own_since_s = time.monotonic()

    def _kept_answers(self, token_ids: Ints, sampling: Sampling, num_samples: int) -> dict[int, Generation]:
        """Return the usable kept answers, by sample number."""
        found = {index: self._kept.find(token_ids, sampling.of_sample(index)) for index in range(num_samples)}
        return {
            index: answer
            for index, answer in found.items()
            # An answer may have been kept before engines were asked for records of experts. The pool has
            # no address before the first engine.
            if answer is not None and (answer.routed_experts is not None or self._pool.address.mixture is None)
        }

    async def _fill(
        self,
        client: EngineClient,
        token_ids: Ints,
        sampling: Sampling,
        num_samples: int,
        answers: dict[int, Generation],
        pieces: dict[int, Generation],
    ) -> None:
        """Add the answers of one engine, and pieces of aborted ones; when it fails, those that came before stay."""

        def add(index: int, new: Generation) -> None:
            piece = pieces.get(index, NOTHING)
            answer = joined(piece, new, prompt_length=len(token_ids), stop=sampling.stop, decode=self._decode)
            is_piece = answer.stop_reason is StopReason.ABORT
            if is_piece and not self._pool.is_interrupted and len(answer.token_ids) <= len(piece.token_ids):
                raise EngineError(f"the engine at {client.address.url} aborted a request without a token, and nobody asked it to")
            (pieces if is_piece else answers)[index] = answer
            if keeps:
                self._kept.add(token_ids, sampling.of_sample(index), answer, is_piece=is_piece)

        # Short ones come together, and are soon made again.
        keeps = self._kept.keeps and sampling.max_tokens > SHORT_RESPONSE_TOKENS
        if not keeps and not pieces:
            for index, new in enumerate(await client.generate(token_ids, sampling=sampling, num_samples=num_samples)):
                add(index, new)
            return

        async def ask_for(index: int) -> None:
            own, piece = sampling.of_sample(index), pieces.get(index, NOTHING)
            rest = replace(own, max_tokens=own.max_tokens - len(piece.token_ids))
            (new,) = await client.generate(np.concatenate([token_ids, piece.token_ids]), sampling=rest)
            add(index, new)

        await together(ask_for(index) for index in range(num_samples) if index not in answers)


class KeptAnswers(AbstractContextManager["KeptAnswers", None]):
    """Answers for the group `group_id`, in flight in `buffer`; none without a buffer.

    After an exception the next owner of the buffer makes the group, and finds all answers.
    """

    def __init__(self, buffer: Buffer | None, group_id: str) -> None:
        self._buffer, self._group_id = buffer, group_id
        self._found = {} if buffer is None else buffer.answers(group_id)
        self._unwritten: list[Answer] = []
        self._writing: asyncio.TimerHandle | None = None

    @property
    def keeps(self) -> bool:
        """Return True where there is a buffer."""
        return self._buffer is not None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._writing is not None:
            self._writing.cancel()
            if error is not None:
                self._write()

    def find(self, token_ids: Ints, sampling: Sampling) -> Generation | None:
        """Return the answer to the prompt `token_ids` [P] under `sampling`, seed and all, or None."""
        content = self._found.get(_digest(f"{sampling}", token_ids)) if self._found else None
        return None if content is None else _read(content)

    def add(self, token_ids: Ints, sampling: Sampling, generation: Generation, *, is_piece: bool = False) -> None:
        """Keep an answer to the prompt `token_ids` [P] under `sampling`, an aborted one as a piece to continue."""
        made = generation.weight_versions
        if (generation.stop_reason is StopReason.ABORT) is not is_piece or not len(made):
            return
        request, content = _digest(f"{sampling}", token_ids), _written(generation)
        self._unwritten.append(Answer(request=request, content=content, min_version=int(made.min()), max_version=int(made.max())))
        if self._writing is None:
            self._writing = asyncio.get_running_loop().call_later(KEEP_AFTER_S, self._write)

    def _write(self) -> None:
        assert self._buffer is not None, "without a buffer nothing is added"
        answers, self._unwritten, self._writing = self._unwritten, [], None
        # A failed write ends the run when the group is finished; here no caller could be informed.
        with contextlib.suppress(UserError):
            self._buffer.put_answers(self._group_id, answers)


NOTHING = Generation(np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.int64), StopReason.ABORT)


def joined(piece: Generation, new: Generation, *, prompt_length: int, stop: Sequence[str], decode: Decode) -> Generation:
    """Return `piece` and its continuation `new` as one answer to a prompt of `prompt_length` tokens.

    An engine looks for stop strings in `new` alone. So a string of `stop` across the joint ends the
    answer here, behind the token that completes it. An aborted answer loses its last token of `new`:
    the engine does not say whether that one would have been the end.
    """
    end, reason = len(new.token_ids), new.stop_reason
    # A token has one byte or more.
    longest = max((len(text.encode()) for text in stop if len(piece.token_ids)), default=1)
    before = piece.token_ids[max(0, len(piece.token_ids) + 1 - longest) :].tolist()
    for number in range(1, min(longest - 1, end) + 1):
        if any(text in decode(before + new.token_ids[:number].tolist()) for text in stop):
            end, reason = number, StopReason.STOP
            break
    if reason is StopReason.ABORT:
        end = max(0, end - 1)
    names = ("token_ids", "log_probs", "weight_versions")
    arrays = {name: np.concatenate([getattr(piece, name), getattr(new, name)[:end]]) for name in names}
    num_routed = prompt_length + len(arrays["token_ids"]) - 1
    experts = None if new.routed_experts is None else new.routed_experts[:num_routed]
    # Without a token, a piece may be of other weights, which then chose nothing.
    if num_kept := len(piece.token_ids):
        own = None if piece.routed_experts is None else piece.routed_experts[: prompt_length + num_kept - 1]
        experts = first_recorded([own, experts])
    recorded = [part.take(slice(last)) for part, last in ((piece.candidates, None), (new.candidates, end)) if part is not None]
    candidates = Candidates.joined(recorded) if recorded else None
    return Generation(**arrays, stop_reason=reason, routed_experts=experts, candidates=candidates)


def _written(generation: Generation) -> bytes:
    arrays: dict[str, Any] = {field.name: getattr(generation, field.name) for field in fields(generation)}
    arrays["stop_reason"] = np.frombuffer(generation.stop_reason.value.encode(), np.uint8)
    if generation.candidates is not None:
        arrays["candidates"] = generation.candidates.packed()
    # Ten times as fast as numpy's own format.
    return safetensors.numpy.save({name: np.ascontiguousarray(array) for name, array in arrays.items() if array is not None})


def _read(content: bytes) -> Generation:
    arrays: dict[str, Any] = safetensors.numpy.load(content)
    if "candidates" in arrays:
        arrays["candidates"] = Candidates.unpacked(arrays["candidates"], len(arrays["token_ids"]))
    return Generation(stop_reason=StopReason(arrays.pop("stop_reason").tobytes().decode()), **arrays)


def _digest(text: str, token_ids: Ints) -> str:
    digest = hashlib.blake2b(f"{text}\0".encode(), digest_size=16)
    digest.update(token_ids.astype("<i8").tobytes())
    return digest.hexdigest()


def _seed(source: str) -> int:
    """Return a seed below 2^56, equal for the same run, prompt (id with epoch), session and request in it."""
    return int.from_bytes(hashlib.blake2b(source.encode(), digest_size=7).digest(), "big")


async def together(work: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Return the results, in order. A failure, or the end of the caller, cancels all others."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel(tasks)


async def cancel(tasks: Iterable["asyncio.Future[Any]"]) -> None:
    """Cancel tasks and wait for their end, so that their aborts reach the engines."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
