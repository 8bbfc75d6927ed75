"""Client of one engine: token ids in, token ids and log-probs out, and calls that change weights.

Legend: P prompt tokens, R response tokens, T tokens of a scored sequence. Requests that would crash
the server (token ids outside the vocabulary, too much memory) are refused before sending.
"""

import asyncio
import contextlib
import uuid
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar, get_args

import numpy as np

from megatron_rl.deadlines import ENGINE_ABORT_S, ENGINE_CONTROL_S
from megatron_rl.engines.engine import EngineAddress
from megatron_rl.engines.routing_record import MixtureShape, read_routed_experts
from megatron_rl.engines.sampling import Sampling
from megatron_rl.engines.transport import MAX_ATTEMPTS, EngineRefusal, Transport
from megatron_rl.errors import DeadlineError, EngineError, UserError
from megatron_rl.types import Experts, Floats, Ints, StopReason

Result = TypeVar("Result")
EnginePart = Literal["weights", "kv_cache", "cuda_graph"]
"""Parts of an engine's GPU memory, by SGLang's names."""
ENGINE_PARTS: tuple[EnginePart, ...] = get_args(EnginePart)

SHORT_RESPONSE_TOKENS = 32
"""Requests of at most so many tokens a response may share an HTTP call, which costs the server 1 ms: their answers come together then, so
that the first waits for the last, at most for these tokens."""
MAX_TOGETHER = 64
"""Samples with which a shared HTTP call is full: many enough to make its cost small, few enough to use answers while others are made."""


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """One response. `token_ids`, `log_probs` (nats, sampling distribution), `weight_versions` are
    [R].

    `routed_experts` [P + R - 1, L, K] are the experts of all tokens but the last, from an engine
    that records experts.
    """

    token_ids: Ints
    log_probs: Floats
    weight_versions: Ints
    stop_reason: StopReason
    routed_experts: Experts | None = None


@dataclass(frozen=True, slots=True)
class _Asked:
    """One requested sample, with the id for an abort on the server."""

    request_id: str
    prompt: list[int]
    sampling: dict[str, Any]


class EngineClient:
    """Asynchronous calls to one engine; use in an `async with` block.

    Generation and scoring change nothing on the server. So a lost connection is followed by retries
    until `request_timeout_s`, retries included. Control calls are made once, each within
    `control_timeout_s`.
    """

    def __init__(self, address: EngineAddress, *, request_timeout_s: float, control_timeout_s: float = ENGINE_CONTROL_S) -> None:
        self.address = address
        self._request_timeout_s = request_timeout_s
        self._control_timeout_s = control_timeout_s
        self._transport = Transport(address.url, address.api_key)
        # Requests collected for one HTTP call, and the task that makes the call.
        self._together: tuple[list[Sequence[_Asked]], asyncio.Task[list[Any] | None]] | None = None

    async def __aenter__(self) -> "EngineClient":
        await self._transport.open()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._transport.close()

    # Generation

    async def generate(self, token_ids: Ints, *, sampling: Sampling, num_samples: int = 1) -> tuple[Generation, ...]:
        """Return `num_samples` responses to the prompt `token_ids` [P], in one request.

        Cancelling the call aborts the samples.

        Raises:
            UserError: an empty prompt, an id outside the vocabulary, a request longer than the
                context or
                the KV pool, or stop strings for an engine without a tokenizer.
            EngineError: the engine refused or could not be reached.
            DeadlineError: no answer in time.
        """
        self._check_request(token_ids, sampling)
        # Of one width, because the server may abort every request whose id begins with the given one.
        request_ids = [f"{uuid.uuid4().hex}-{index:06d}" for index in range(num_samples)]
        prompt = token_ids.tolist()
        asked = [_Asked(request_id, prompt, sampling.request(index)) for index, request_id in enumerate(request_ids)]
        try:
            answers = await (self._ask_together(asked) if sampling.max_tokens <= SHORT_RESPONSE_TOKENS else self._ask(asked))
        except asyncio.CancelledError:
            aborting = _noted(asyncio.create_task(self.abort(request_ids)))
            # The caller sees only the cancellation, not also the error of a lost engine.
            with contextlib.suppress(EngineError, DeadlineError):
                await asyncio.shield(aborting)
            raise
        return tuple(_read_generation(answer, prompt_length=len(prompt), mixture=self.address.mixture) for answer in answers)

    async def _ask(self, asked: Sequence[_Asked]) -> list[Any]:
        """Return the server's answers to samples, in one HTTP call."""
        body = {
            "rid": [each.request_id for each in asked],
            "input_ids": [each.prompt for each in asked],
            "sampling_params": [each.sampling for each in asked],
            "return_logprob": True,
            "return_routed_experts": self.address.mixture is not None,
        }
        answers = await self._transport.call("POST", "/generate", body, timeout_s=self._request_timeout_s, attempts=MAX_ATTEMPTS)
        if not isinstance(answers, list) or len(answers) != len(asked):
            raise EngineError(f"the engine at {self.address.url} answered {len(asked)} samples with {str(answers)[:200]!r}")
        return answers

    async def _ask_together(self, own: Sequence[_Asked]) -> list[Any]:
        """Ask as `_ask`, in one HTTP call with concurrent requests; when refused together, ask each
        alone.
        """
        if self._together is None:
            collected: list[Sequence[_Asked]] = []
            self._together = collected, _noted(asyncio.create_task(self._ask_collected(collected)))
        requests, task = self._together
        first = sum(map(len, requests))
        requests.append(own)
        if first + len(own) >= MAX_TOGETHER:
            self._together = None
        answers = await asyncio.shield(task)
        return await self._ask(own) if answers is None else answers[first : first + len(own)]

    async def _ask_collected(self, requests: Sequence[Sequence[_Asked]]) -> list[Any] | None:
        """Return the answers to `requests`, collected until this task has its first turn.

        Returns None when the server refuses several requests, because the reason need not hold for
        all.
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

    # Running requests

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Abort these requests; each answers with the tokens so far.

        An unknown or finished request is no error.
        """
        await asyncio.gather(*(self._control("/abort_request", {"rid": each}, timeout_s=ENGINE_ABORT_S) for each in request_ids))

    async def pause(self, mode: Literal["abort", "retract", "in_place"]) -> None:
        """Stop generating.

        `abort` ends running requests, `retract` recomputes running requests after `resume`, and
        `in_place` keeps their cache.
        """
        await self._control("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Generate again; no error when not paused."""
        await self._control("/continue_generation", {})

    async def flush_cache(self) -> None:
        """Forget all cached prefixes; waits a few seconds for running requests.

        Raises EngineRefusal when requests do not end in time.
        """
        await self._control("/flush_cache?timeout=5", {})

    # Memory

    async def release_memory(self, parts: Collection[EnginePart]) -> None:
        """Free GPU memory with content; without a GPU only forget cached prefixes.

        A release during a running request kills the server. So the server must first become idle:
        EngineRefusal when still busy after seconds.
        """
        await self.flush_cache()
        await self._control("/release_memory_occupation", {"tags": sorted(parts)})

    async def restore_memory(self, parts: Collection[EnginePart]) -> None:
        """Allocate released memory again, and only released parts: others kill the server.

        Weights come back without content.
        """
        await self._control("/resume_memory_occupation", {"tags": sorted(parts)})

    # Weights

    async def weight_version(self) -> int:
        """Return the version of the served weights; 0 are the weights of the start."""
        answer = await self._transport.call("GET", "/model_info", timeout_s=self._control_timeout_s)
        return _read_version(answer["weight_version"])

    async def begin_weight_update(self) -> None:
        """Open an update. Pause first: requests may run between two buckets."""
        await self._control("/begin_weight_update", {"selector": "all"})

    async def end_weight_update(self) -> None:
        """Close an update."""
        await self._control("/end_weight_update", {})

    async def join_group(self, *, address: str, port: int, rank_offset: int, world_size: int, name: str, backend: str) -> None:
        """Join the process group `name` with ranks from `rank_offset` on; the trainer joins as rank 0 at the same time."""
        body = {"master_address": address, "master_port": port, "rank_offset": rank_offset, "world_size": world_size}
        await self._control("/init_weights_update_group", {**body, "group_name": name, "backend": backend})

    async def leave_group(self, name: str) -> None:
        """Leave the process group `name`.

        Raises EngineRefusal when the engine is no member of the group.
        """
        await self._control("/destroy_weights_update_group", {"group_name": name})

    async def receive_bucket(
        self,
        names: Sequence[str],
        *,
        dtypes: Sequence[str],
        shapes: Iterable[Sequence[int]],
        group: str,
        version: int | None = None,
        flattened: bool = True,
    ) -> None:
        """Receive tensors that rank 0 of `group` broadcasts during this call.

        Names and shapes are the Hugging Face checkpoint's. `dtypes` are torch names such as
        "float32". `flattened`: one uint8 tensor holds all, else one broadcast each, in order.
        `version`, given with the last bucket, becomes the engine's weight version, and cached
        prefixes are then forgotten.
        """
        body: dict[str, Any] = {"names": list(names), "dtypes": list(dtypes), "shapes": [list(shape) for shape in shapes]}
        body |= {"group_name": group, "load_format": "flattened_bucket" if flattened else None, "flush_cache": version is not None}
        await self._control("/update_weights_from_distributed", body | _version(version))

    async def take_bucket(self, handles: Sequence[str], *, version: int | None = None) -> None:
        """Copy tensors from memory shared with this engine, by handles of `weights.ipc`.

        There is one handle for each tensor parallel rank. The server dies of a handle that cannot
        be opened. `version` as in `receive_bucket`.
        """
        body = {"serialized_named_tensors": list(handles), "load_format": "flattened_bucket", "flush_cache": version is not None}
        await self._control("/update_weights_from_tensor", body | _version(version))

    async def load_weights(self, path: Path, *, version: int, timeout_s: float | None = None) -> None:
        """Read new weights from a Hugging Face directory on the engine's machine; forget cached
        prefixes.

        The tensors need the shapes of the running model: SGLang dies of other shapes. The load
        format is explicit, because SGLang would reuse the format of the start: a server started
        without weights would make weights up.
        """
        body = {"model_path": str(path), "load_format": "auto", "flush_cache": True}
        await self._control("/update_weights_from_disk", body | _version(version), timeout_s=timeout_s)

    async def checksums(self) -> dict[str, str]:
        """Return the checksum of each weight by engine name, on each tensor parallel rank.

        Equal weights on equally configured engines have equal checksums; q, k and v (gate and up)
        are one weight of an engine.
        """
        answer = await self._control("/weights_checker", {"action": "checksum", "selector": "target"})
        return {
            f"{name} (tp rank {tp_rank})": checksum
            for tp_rank, rank in enumerate(answer["ranks"])
            for name, checksum in rank["checksums"].items()
        }

    async def _control(self, path: str, body: dict[str, Any], *, timeout_s: float | None = None) -> Any:
        answer = await self._transport.call("POST", path, body, timeout_s=timeout_s or self._control_timeout_s)
        # Some calls report a failure with status 200.
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineRefusal(f"the engine at {self.address.url} failed at {path}: {answer.get('message')}", status=200)
        return answer


def _noted(task: "asyncio.Task[Result]") -> "asyncio.Task[Result]":
    """Return `task`, with the failure marked as read: asyncio prints failures that no waiter has
    read.
    """
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


def _version(version: int | None) -> dict[str, str]:
    return {} if version is None else {"weight_version": str(version)}


def _read_version(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise EngineError(f"an engine serves weight version {text!r}, needs a number; only this program may update its weights") from error


def _read_generation(answer: dict[str, Any], *, prompt_length: int, mixture: MixtureShape | None) -> Generation:
    """Return a response from one element of the server's answer."""
    meta = answer["meta_info"]
    finish = meta["finish_reason"]
    if finish["type"] == "abort" and finish.get("status_code") is not None:
        raise EngineError(f"the engine failed at a request: {finish.get('message')} ({finish['status_code']})")
    token_ids = np.array(answer["output_ids"], np.int64)
    scored = meta["output_token_logprobs"]
    if [entry[1] for entry in scored] != token_ids.tolist():
        raise EngineError(f"the engine returned {len(token_ids)} tokens and the log-probs of {len(scored)} others")
    return Generation(
        token_ids=token_ids,
        log_probs=np.array([entry[0] for entry in scored], np.float32),
        weight_versions=_token_versions(meta, len(token_ids)),
        stop_reason=StopReason(finish["type"]),
        routed_experts=read_routed_experts(meta, mixture, prompt_length=prompt_length, response_length=len(token_ids)) if mixture else None,
    )


def _token_versions(meta: dict[str, Any], length: int) -> Ints:
    """Return the weight version of each of `length` tokens, from the server's spans if reported."""
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": length}]
    versions = np.full(length, -1, np.int64)
    for span in spans:
        versions[span["start"] : span["end"]] = _read_version(span["version"])
    if (versions < 0).any():
        raise EngineError(f"the engine reports weight versions for a part of {length} tokens only: {spans}")
    return versions
