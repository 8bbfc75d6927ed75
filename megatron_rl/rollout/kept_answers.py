"""Answers of engines for a group that is being made, kept in the buffer: a run that is killed asks only for the others again.

A rollout that runs again asks the same requests in the same order, as far as its tools answer alike. So an answer is found by the whole
of its request, with the seed, which also tells the samples of one prompt from each other.
"""

import asyncio
import contextlib
import hashlib
import io
from typing import Any

import numpy as np

from megatron_rl.data.buffer import Answer, Buffer
from megatron_rl.errors import UserError
from megatron_rl.rollout.client import Generation
from megatron_rl.rollout.sampling import Sampling
from megatron_rl.types import Ints, StopReason

KEEP_AFTER_S = 1.0
"""An answer is on its way to the disk this long after it came: groups that are finished by then are written once, as a whole."""


class KeptAnswers:
    """The answers for the group `group_id`, which is in flight in `buffer`; `close` it. Lives on one event loop."""

    def __init__(self, buffer: Buffer, *, group_id: str) -> None:
        self._buffer, self._group_id = buffer, group_id
        self._found = buffer.answers(group_id)
        self._unwritten: list[Answer] = []
        self._writing: asyncio.TimerHandle | None = None

    def find(self, token_ids: Ints, sampling: Sampling) -> Generation | None:
        """The answer to the prompt `token_ids` [P] under `sampling`, seed and all, or None."""
        content = self._found.get(self._request(token_ids, sampling))
        return None if content is None else _read(content)

    def add(self, token_ids: Ints, sampling: Sampling, generation: Generation) -> None:
        """Keep a finished answer to the prompt `token_ids` [P] under `sampling`; one that was aborted is none."""
        made = generation.weight_versions
        if generation.stop_reason is StopReason.ABORT or not len(made):
            return
        request, content = self._request(token_ids, sampling), _written(generation)
        self._unwritten.append(Answer(request=request, content=content, min_version=int(made.min()), max_version=int(made.max())))
        if self._writing is None:
            self._writing = asyncio.get_running_loop().call_later(KEEP_AFTER_S, self._write)

    def close(self, *, finished: bool) -> None:
        """The group's samples are `finished`, or will be made again by who opens the buffer next."""
        if self._writing is not None:
            self._writing.cancel()
            if not finished:
                self._write()

    def _write(self) -> None:
        answers, self._unwritten, self._writing = self._unwritten, [], None
        # A buffer that cannot be written ends the run when the group is finished: here nobody could be told.
        with contextlib.suppress(UserError):
            self._buffer.put_answers(self._group_id, answers)

    @staticmethod
    def _request(token_ids: Ints, sampling: Sampling) -> str:
        digest = hashlib.blake2b(f"{sampling}\0".encode(), digest_size=16)
        digest.update(token_ids.astype("<i8").tobytes())
        return digest.hexdigest()


def _written(generation: Generation) -> bytes:
    arrays: dict[str, Any] = {
        "token_ids": generation.token_ids,
        "log_probs": generation.log_probs,
        "weight_versions": generation.weight_versions,
        "stop_reason": np.array(generation.stop_reason.value),
    }
    if generation.routed_experts is not None:
        arrays["routed_experts"] = generation.routed_experts
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def _read(content: bytes) -> Generation:
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        arrays = dict(file)
    return Generation(stop_reason=StopReason(str(arrays.pop("stop_reason"))), **arrays)
