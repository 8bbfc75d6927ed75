"""The tables of the buffer, and conversion of prompts and samples to and from their rows."""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_rl.errors import UserError
from megatron_rl.system.frozen_arrays import Candidates
from megatron_rl.types import Experts, Failure, Group, Prompt, Reward, RewardOutcome, Sample, StopReason

APPLICATION_ID = 0x4D52_4C42
SCHEMA_VERSION = 11

SCHEMA = f"""
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
CREATE TABLE groups (  -- one row per prompt
    position INTEGER PRIMARY KEY,  -- order of handing out; begins behind a lost buffer's positions
    id TEXT NOT NULL UNIQUE,  -- the prompt's id
    state TEXT NOT NULL CHECK (state IN ('pending', 'in_flight', 'done', 'consumed')),
    -- the consuming step, from 1 on as on the console
    consumed_step INTEGER CHECK ((consumed_step IS NOT NULL) = (state = 'consumed')),
    prompt_text TEXT NOT NULL,
    label TEXT,  -- the reference answer
    prompt_ids BLOB NOT NULL,  -- array of <i4
    metadata TEXT NOT NULL,  -- JSON
    messages TEXT,  -- of a chat, as JSON; NULL where the prompt is a text
    updated_at REAL NOT NULL,  -- seconds since 1970 of the last move but consumption: of a done group, its end
    trained INTEGER CHECK (trained IN (0, 1)),  -- 0 when the consuming step rejected the group
    rejection TEXT,  -- reason for no training
    -- 1 when the samples' token arrays were dropped, 2 when kept for readers
    pruned INTEGER NOT NULL DEFAULT 0 CHECK (pruned IN (0, 1, 2)),
    made_by TEXT  -- settings that shaped the samples, as JSON; NULL without samples, and where pruning dropped anything
);
CREATE INDEX groups_by_state ON groups (state, position);
CREATE INDEX groups_waiting ON groups (position, id, state) WHERE state <> 'consumed';
CREATE INDEX groups_unpruned ON groups (consumed_step, id) WHERE pruned = 0;
CREATE TABLE samples (  -- one row per finished response
    group_id TEXT NOT NULL REFERENCES groups (id),
    sample_index INTEGER NOT NULL,
    outcome TEXT CHECK (outcome IN ('scored', 'error', 'timeout')),  -- NULL: no reward asked for
    reward REAL CHECK ((reward IS NOT NULL) = (outcome IS 'scored')),
    reward_message TEXT,
    reward_components TEXT,  -- JSON
    stop_reason TEXT NOT NULL CHECK (stop_reason IN ('stop', 'length', 'abort')),
    response_text TEXT NOT NULL,
    num_tokens INTEGER NOT NULL,
    num_trainable_tokens INTEGER NOT NULL,
    min_version INTEGER,  -- of the weights that made the tokens; NULL when no engine made any
    max_version INTEGER,
    response_ids BLOB,  -- array of <i4; this and the next three are NULL after pruning
    loss_mask BLOB,  -- u1
    rollout_log_probs BLOB,  -- <f4
    weight_versions BLOB,  -- <i4
    metadata TEXT NOT NULL,  -- JSON
    -- type and last two sizes of routed_experts, such as "<u1 48 8"
    routed_format TEXT CHECK (routed_experts IS NULL OR routed_format IS NOT NULL),
    routed_experts BLOB,  -- of the first tokens: [tokens, layers, experts of a token]
    trajectory INTEGER,  -- samples of a group with one number are one attempt; NULL: alone
    own_prompt_text TEXT,  -- prompt of this response where not the group's
    own_prompt_ids BLOB,
    role TEXT,  -- trajectories of a group are compared within it
    -- array of <f4 [6, num_tokens], rows as data.token_values.TOKEN_VALUES, of kept groups that were trained on
    token_values BLOB,
    candidates BLOB,  -- array of <i4: numbers of candidates of the tokens, then the candidates; NULL: the whole vocabulary
    PRIMARY KEY (group_id, sample_index)
);
CREATE TABLE failures (  -- one row per trajectory that the rollout failed to make
    group_id TEXT NOT NULL REFERENCES groups (id),
    cause TEXT NOT NULL,  -- error, timeout or contract
    headline TEXT NOT NULL,  -- a line
    trace TEXT NOT NULL  -- a traceback, or empty
);
CREATE INDEX failures_by_group ON failures (group_id);
CREATE TABLE answers (  -- engine answers for groups in flight, until the group has samples
    group_id TEXT NOT NULL REFERENCES groups (id),
    request TEXT NOT NULL,  -- hash of the request
    content BLOB NOT NULL,  -- the answer, in the form of rollout/generator
    min_version INTEGER NOT NULL,  -- of the weights that made the tokens
    max_version INTEGER NOT NULL,
    PRIMARY KEY (group_id, request)
);
"""
"""The partial indices keep queries independent of the length of the history."""

INSERT_GROUP = (
    "INSERT INTO groups (position, id, state, prompt_text, label, prompt_ids, metadata, messages, updated_at) "
    "VALUES (coalesce((SELECT max(position) FROM groups) + 1, ?), ?, 'pending', ?, ?, ?, ?, ?, ?)"
)
UPDATE_GROUP = "UPDATE groups SET prompt_text = ?2, label = ?3, prompt_ids = ?4, metadata = ?5, messages = ?6 WHERE id = ?1"
GROUP_COLUMNS = "id, prompt_text, label, prompt_ids, metadata, messages"
SAMPLE_COLUMNS = (
    "group_id, sample_index, outcome, reward, reward_message, reward_components, stop_reason, response_text, num_tokens, "
    "num_trainable_tokens, min_version, max_version, response_ids, loss_mask, rollout_log_probs, weight_versions, metadata, routed_format, "
    "routed_experts, trajectory, own_prompt_text, own_prompt_ids, role, candidates"
)
INSERT_SAMPLE = f"INSERT OR REPLACE INTO samples ({SAMPLE_COLUMNS}) VALUES ({', '.join('?' * 24)})"


def prompt_row(prompt: Prompt) -> tuple[Any, ...]:
    """Return the values of INSERT_GROUP except the position. Raises UserError as `sample_row`."""
    owner = f"prompt {prompt.id!r}"
    facts = prompt.id, prompt.text, prompt.label, _int32_bytes(prompt.token_ids, owner), _json(prompt.metadata, owner)
    is_text = prompt.messages == ({"role": "user", "content": prompt.text},)
    return *facts, None if is_text else json.dumps(list(prompt.messages), ensure_ascii=False), time.time()


def read_prompt(row: Sequence[Any]) -> Prompt:
    """Return the prompt of a row of GROUP_COLUMNS."""
    group_id, text, label, token_ids, metadata, messages = row
    chat = () if messages is None else tuple(json.loads(messages))
    ids = np.frombuffer(token_ids, "<i4")
    return Prompt(id=group_id, token_ids=ids, text=text, label=label, metadata=json.loads(metadata), messages=chat)


def sample_row(sample: Sample, *, prompt: Prompt) -> tuple[Any, ...]:
    """Return the values of INSERT_SAMPLE. Raises UserError for values that JSON cannot hold."""
    owner = f"sample {sample.index} of group {sample.group_id!r}"
    made = sample.weight_versions[sample.weight_versions >= 0]
    reward = sample.reward
    return (
        sample.group_id,
        sample.index,
        *((reward.outcome.value, reward.value, reward.message, _json(reward.components, owner)) if reward else (None,) * 4),
        sample.stop_reason.value,
        sample.response_text,
        len(sample.response_ids),
        int(sample.loss_mask.sum()),
        int(made.min()) if len(made) else None,
        int(made.max()) if len(made) else None,
        _int32_bytes(sample.response_ids, owner),
        sample.loss_mask.astype("u1").tobytes(),
        sample.rollout_log_probs.astype("<f4").tobytes(),
        _int32_bytes(sample.weight_versions, owner),
        _json(sample.metadata, owner),
        *_experts_columns(sample.routed_experts),
        sample.trajectory,
        *_own_prompt_columns(sample.prompt, prompt, owner),
        sample.role,
        None if sample.candidates is None else sample.candidates.packed().astype("<i4").tobytes(),
    )


def read_sample(row: Sequence[Any], *, prompt: Prompt) -> Sample:
    """Return the sample of a row of SAMPLE_COLUMNS in the group of `prompt`, equal to the bit."""
    group_id, index, outcome, value, message, components, stop_reason, text, *_, ids, mask, log_probs, versions, metadata = row[:17]
    *routed, trajectory, own_text, own_ids, role, candidates = row[17:]
    if own_ids is not None:
        prompt = dataclasses.replace(prompt, text=own_text, token_ids=np.frombuffer(own_ids, "<i4"))
    reward = None
    if outcome is not None:
        reward = Reward(outcome=RewardOutcome(outcome), value=value, message=message, components=json.loads(components))
    return Sample(
        group_id=group_id,
        index=index,
        prompt=prompt,
        response_ids=np.frombuffer(ids, "<i4"),
        loss_mask=np.frombuffer(mask, "u1"),
        rollout_log_probs=np.frombuffer(log_probs, "<f4"),
        weight_versions=np.frombuffer(versions, "<i4"),
        stop_reason=StopReason(stop_reason),
        response_text=text,
        reward=reward,
        metadata=json.loads(metadata),
        routed_experts=_read_experts(*routed),
        trajectory=trajectory,
        role=role,
        candidates=None if candidates is None else Candidates.unpacked(np.frombuffer(candidates, "<i4"), len(ids) // 4),
    )


def read_groups(read: Callable[..., list[Any]], condition: str, values: Sequence[Any]) -> list[Group]:
    """Return the groups of a `condition` on their table with all their rows, in the order of prompts; `read` runs a query."""
    rows = read(f"SELECT {GROUP_COLUMNS} FROM groups WHERE {condition} ORDER BY position", values)
    prompts = {prompt.id: prompt for prompt in map(read_prompt, rows)}
    samples: dict[str, list[Sample]] = {group_id: [] for group_id in prompts}
    failures: dict[str, list[Failure]] = {group_id: [] for group_id in prompts}
    chosen = f"group_id IN (SELECT id FROM groups WHERE {condition})"
    for row in read(f"SELECT {SAMPLE_COLUMNS} FROM samples WHERE {chosen} ORDER BY group_id, sample_index", values):
        samples[row[0]].append(read_sample(row, prompt=prompts[row[0]]))
    for group_id, *fields in read(f"SELECT * FROM failures WHERE {chosen} ORDER BY rowid", values):
        failures[group_id].append(Failure(*fields))
    return [Group(name, prompt, tuple(samples[name]), tuple(failures[name])) for name, prompt in prompts.items()]


def _experts_columns(experts: Experts | None) -> tuple[str | None, bytes | None]:
    """Return routed_format and routed_experts."""
    if experts is None:
        return None, None
    kind = np.dtype(experts.dtype).newbyteorder("<")
    return f"<{kind.kind}{kind.itemsize} {experts.shape[1]} {experts.shape[2]}", experts.astype(kind).tobytes()


def _read_experts(routed_format: str | None, data: bytes | None) -> Experts | None:
    if data is None or routed_format is None:
        return None
    kind, num_layers, top_k = routed_format.split()
    return np.frombuffer(data, kind).reshape(-1, int(num_layers), int(top_k))


def _own_prompt_columns(own: Prompt, group: Prompt, owner: str) -> tuple[str | None, bytes | None]:
    if own is group or (own.text == group.text and np.array_equal(own.token_ids, group.token_ids)):
        return None, None
    return own.text, _int32_bytes(own.token_ids, owner)


def _int32_bytes(values: NDArray[np.int64], owner: str) -> bytes:
    if len(values) and (values.min() < -(2**31) or values.max() >= 2**31):
        raise ValueError(f"{owner} has an integer outside of 32 bits among {values.min()} to {values.max()}")
    return values.astype("<i4").tobytes()


def _json(values: Mapping[str, Any], owner: str) -> str:
    try:
        return json.dumps(dict(values), ensure_ascii=False)
    except TypeError as error:
        raise UserError(
            f"the metadata of {owner} cannot be stored ({error}): use strings, numbers, booleans, lists and mappings"
        ) from error
