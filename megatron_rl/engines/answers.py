"""Responses of an engine. Legend: P prompt and R response tokens, L mixture layers, K experts."""

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_rl.errors import EngineError
from megatron_rl.system.frozen_arrays import Candidates
from megatron_rl.types import Experts, Floats, Ints, StopReason


@dataclass(frozen=True, slots=True)
class MixtureShape:
    """Shape of a model's records of experts; the first `num_dense_layers` layers have none."""

    num_layers: int
    num_dense_layers: int
    num_experts: int
    experts_per_token: int


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """One response: arrays [R], `log_probs` in nats of the sampling distribution.

    `routed_experts` [P + R - 1, L, K], where recorded, are of all tokens but the last. `candidates`
    [R], where recorded, are those of the sampler, over which log-probs are normalised.
    """

    token_ids: Ints
    log_probs: Floats
    weight_versions: Ints
    stop_reason: StopReason
    routed_experts: Experts | None = None
    candidates: Candidates | None = None


def first_recorded(records: Sequence[Experts | None]) -> Experts | None:
    """Return the last of `records` [N, L, K], each of more tokens than the one before, with the first record of each token.

    A token of an earlier request is computed anew where no cache has it, and may be routed otherwise
    than when it was sampled. Without every record, the last one is returned as it is.
    """
    known = [record for record in records if record is not None]
    if len(known) < len(records) or len(known) == 1:
        return records[-1]
    starts = [0, *map(len, known[:-1])]
    return np.concatenate([record[start:] for start, record in zip(starts, known, strict=True)])


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Load of an engine: `kv_use`, the share of the key-value pool held by running requests, and requests in its queue."""

    kv_use: float
    num_waiting: int
    told_at: float = 0.0  # when its scheduler made a step and told this, in seconds since 1970


def read_load(answer: Any) -> EngineLoad | None:
    """Return the load from SGLang's /v1/loads, the fullest pool of several; None for another answer."""
    try:
        ranks = [(float(rank["token_usage"]), int(rank["num_waiting_reqs"]), float(rank.get("timestamp", 0.0))) for rank in answer["loads"]]
        uses, queues, times = zip(*ranks, strict=True)
    except (KeyError, TypeError, ValueError):
        return None
    return EngineLoad(max(uses), sum(queues), max(times))


def read_generation(
    answer: dict[str, Any], *, prompt_length: int, mixture: MixtureShape | None, with_candidates: bool = False
) -> Generation:
    """Return a response from one element of the server's answer. Raises EngineError."""
    meta = answer["meta_info"]
    finish = meta["finish_reason"]
    if finish["type"] == "abort" and finish.get("status_code") is not None:
        raise EngineError(f"the engine failed at a request: {finish.get('message')} ({finish['status_code']})")
    token_ids = np.array(answer["output_ids"], np.int64)
    length = len(token_ids)
    if not length and finish["type"] != "abort":
        raise EngineError(f"the engine answered no token and says that it ended by {finish['type']!r}, needs at least one token")
    scored = meta["output_token_logprobs"]
    if [entry[1] for entry in scored] != token_ids.tolist():
        raise EngineError(f"the engine returned {length} tokens and the log-probs of {len(scored)} others")
    candidates, kept = _read_candidates(meta, token_ids) if with_candidates else (None, None)
    log_probs = np.array([entry[0] for entry in scored] if kept is None else kept, np.float32)
    if not np.isfinite(log_probs).all():
        raise EngineError(f"the engine returned the log-prob {log_probs[~np.isfinite(log_probs)][0]} of a token, needs a finite number")
    return Generation(
        token_ids=token_ids,
        log_probs=log_probs,
        weight_versions=_token_versions(meta, length),
        stop_reason=StopReason(finish["type"]),
        routed_experts=_read_routed_experts(meta, mixture, prompt_length, length) if mixture else None,
        candidates=candidates,
    )


def _read_candidates(meta: dict[str, Any], token_ids: Ints) -> tuple[Candidates, list[float]]:
    """Return the candidates for each of `token_ids` [R], and the log-probs [R] over them alone."""
    rows, log_probs = meta.get("output_token_sampling_mask", []), meta.get("output_token_sampling_logprobs", [])
    candidates = Candidates.of(rows)
    if not len(rows) == len(log_probs) == len(token_ids) or not candidates.hold(token_ids).all():
        raise EngineError(
            f"the engine answered {len(token_ids)} tokens with candidates for {len(rows)} and {len(log_probs)} log-probs over them, needs "
            "a record of each token that has it among its candidates; use SGLang 0.5.18 or later, or leave rollout.sampling.top_p, top_k "
            "and min_p out"
        )
    return candidates, log_probs


def _token_versions(meta: dict[str, Any], length: int) -> Ints:
    """Return the weight version of each of `length` tokens, from the server's spans if reported."""
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": length}]
    versions = np.full(length, -1, np.int64)
    for span in spans:
        versions[span["start"] : span["end"]] = read_version(span["version"])
    if (versions < 0).any():
        raise EngineError(f"the engine reports weight versions for a part of {length} tokens only: {spans}")
    return versions


def _read_routed_experts(meta: dict[str, Any], shape: MixtureShape, prompt_length: int, response_length: int) -> Experts:
    """Return the experts [P + R - 1, L, K] of a response with `meta_info` `meta`.

    The last token is only drawn, not routed. SGLang reports zeros for dense layers, and nothing for
    a response aborted before its first token.
    """
    kind: Any = np.uint8 if shape.num_experts <= 256 else np.uint16
    text = meta.get("routed_experts")
    if text is None:
        if response_length:
            raise EngineError(
                f"the engine answered {response_length} tokens without the experts that it routed them to, which training.routing_replay "
                "needs; use an SGLang release that records them for this model, or turn training.routing_replay off"
            )
        return np.empty((0, shape.num_layers - shape.num_dense_layers, shape.experts_per_token), kind)
    flat = np.frombuffer(base64.b64decode(text), "<i4")
    num_tokens = prompt_length + response_length - 1
    needed = num_tokens * shape.num_layers * shape.experts_per_token
    if len(flat) != needed:
        raise EngineError(
            f"the engine recorded {len(flat)} experts for a prompt of {prompt_length} and a response of {response_length} tokens, needs "
            f"{num_tokens} tokens x {shape.num_layers} layers x {shape.experts_per_token} experts = {needed}"
        )
    experts = flat.reshape(num_tokens, shape.num_layers, shape.experts_per_token)[:, shape.num_dense_layers :]
    if experts.size and not 0 <= experts.min() <= experts.max() < shape.num_experts:
        raise EngineError(f"the engine recorded experts {experts.min()} to {experts.max()}, the model has 0 to {shape.num_experts - 1}")
    return experts.astype(kind)


def read_version(text: Any) -> int:
    """Return the number of a weight version. Raises EngineError."""
    try:
        return int(text)
    except (TypeError, ValueError) as error:
        raise EngineError(f"an engine serves weight version {text!r}, needs a number; only this program may update its weights") from error


def refusal(content: bytes) -> str:
    """Return the message of an error body, as {"error": {"message": ..}}, {"error": ".."} and so on."""
    body = read_body(content)
    if not isinstance(body, dict):
        return str(body)
    error = body.get("error", body)
    return str(error.get("message", error) if isinstance(error, dict) else error)


def read_body(content: bytes) -> Any:
    """Return the value of JSON, the text of other content, None for no content."""
    text = content.decode(errors="replace").strip()
    try:
        return json.loads(text) if text else None
    except json.JSONDecodeError:
        return text
