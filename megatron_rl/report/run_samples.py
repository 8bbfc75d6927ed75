"""Samples of a run, read from its buffer, also while the run goes on or after it died.

Legend: R response tokens, K `TOKEN_VALUES`.
"""

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_rl.data import buffer_rows
from megatron_rl.data.buffer import BUFFER_FILE
from megatron_rl.data.token_values import TOKEN_VALUES
from megatron_rl.errors import UserError
from megatron_rl.observe.groups_of_interest import GroupFacts

_SAMPLES = (
    "sample_index, trajectory, role, outcome, reward, reward_message, reward_components, stop_reason, response_text, num_tokens, "
    "response_ids, loss_mask, rollout_log_probs, weight_versions, token_values, own_prompt_text, own_prompt_ids, metadata"
)
_ENDS = (
    "SELECT consumed_step, group_id, trajectory, sample_index, reward, stop_reason, num_tokens FROM samples "
    "JOIN groups ON id = group_id WHERE state = 'consumed' AND consumed_step IN (SELECT value FROM json_each(?)) "
    "ORDER BY groups.position, sample_index"
)


class Answer(NamedTuple):
    """One sample in numbers; `trajectory` None: one by itself."""

    step: int
    group: str
    trajectory: int | None
    index: int
    reward: float | None
    stop: str
    num_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class StoredSample:
    """A sample of the buffer. Arrays [R] are None where only the text is kept; `values` [K, R] where it was not trained on."""

    index: int
    trajectory: int | None
    role: str | None
    outcome: str | None
    reward: float | None
    message: str
    components: str
    stop: str
    text: str
    num_tokens: int
    ids: NDArray[np.int32] | None
    mask: NDArray[np.bool_] | None
    engine: NDArray[np.float32] | None
    versions: NDArray[np.int32] | None
    values: NDArray[np.float32] | None
    own_prompt: str | None
    own_prompt_ids: NDArray[np.int32] | None
    metadata: str


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A consumed group of the buffer; `rejection` is the reason why it was not trained on."""

    id: str
    step: int
    prompt: str
    prompt_ids: NDArray[np.int32]
    label: str | None
    messages: str | None
    metadata: str
    rejection: str | None
    failures: tuple[str, ...]
    samples: tuple[StoredSample, ...]


class RunSamples:
    """The groups that a run's steps have consumed; made by `open_samples`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._read = connection.execute

    def steps(self) -> list[int]:
        """Return the steps with groups, rising."""
        return [step for (step,) in self._read("SELECT DISTINCT consumed_step FROM groups WHERE state = 'consumed' ORDER BY 1")]

    def answers(self, steps: Iterable[int]) -> list[Answer]:
        """Return all samples of these steps, in the order of prompts."""
        return [Answer(*row) for row in self._read(_ENDS, (str(list(steps)),))]

    def num_failures(self) -> dict[str, int]:
        """Return the number of failed trajectories of every group with one."""
        return dict(self._read("SELECT group_id, count(*) FROM failures GROUP BY 1").fetchall())

    def sources(self) -> dict[str, str]:
        """Return the source of each consumed prompt that names one in its metadata, by group id."""
        names = ", ".join(f"json_extract(metadata, '$.{name}')" for name in ("data_source", "source", "dataset"))
        found = self._read(f"SELECT id, coalesce({names}) FROM groups WHERE state = 'consumed' AND metadata <> '{{}}'")
        return {name: str(source) for name, source in found if source is not None}

    def group(self, name: str) -> StoredGroup:
        """Return the group `name`. Raises UserError for a name of no consumed group."""
        wanted = "consumed_step, prompt_text, prompt_ids, label, messages, metadata, rejection"
        row = self._read(f"SELECT {wanted} FROM groups WHERE id = ? AND state = 'consumed'", (name,)).fetchone()
        if row is None:
            raise UserError(f"no group {name!r} was trained on or rejected in this run, needs one of the column group of its report")
        step, prompt, prompt_ids, *rest = row
        failures = self._read("SELECT cause || ': ' || headline FROM failures WHERE group_id = ? ORDER BY rowid", (name,))
        samples = self._read(f"SELECT {_SAMPLES} FROM samples WHERE group_id = ? ORDER BY sample_index", (name,))
        return StoredGroup(
            name,
            step,
            prompt,
            np.frombuffer(prompt_ids, "<i4"),
            *rest,
            failures=tuple(words for (words,) in failures),
            samples=tuple(map(_stored_sample, samples)),
        )


def _stored_sample(row: Sequence[Any]) -> StoredSample:
    (
        index, trajectory, role, outcome, reward, message, components, stop, text, num_tokens,
        ids, mask, log_probs, versions, values, own_text, own_ids, metadata,
    ) = row  # fmt: skip
    array = {"ids": (ids, "<i4"), "mask": (mask, "?"), "engine": (log_probs, "<f4"), "versions": (versions, "<i4")}
    return StoredSample(
        index, trajectory, role, outcome, reward, message or "", components or "{}", stop, text, num_tokens,
        **{name: None if data is None else np.frombuffer(data, kind) for name, (data, kind) in array.items()},
        values=None if values is None else np.frombuffer(values, "<f4").reshape(len(TOKEN_VALUES), -1),
        own_prompt=own_text,
        own_prompt_ids=None if own_ids is None else np.frombuffer(own_ids, "<i4"),
        metadata=metadata,
    )  # fmt: skip


def ends(answers: Iterable[Answer]) -> list[Answer]:
    """Return the last sample of each trajectory, with the trajectory's reward."""
    found: dict[Any, Answer] = {}
    for answer in answers:
        alone = answer.trajectory is None
        found[answer.group, alone, answer.index if alone else answer.trajectory] = answer
    return list(found.values())


def facts(answers: Sequence[Answer], num_failures: dict[str, int]) -> list[GroupFacts]:
    """Return the groups of `answers` in numbers."""
    groups: dict[str, list[Answer]] = {}
    for answer in answers:
        groups.setdefault(answer.group, []).append(answer)
    made = []
    for name, samples in groups.items():
        last = ends(samples)
        rewards = [end.reward for end in last if end.reward is not None]
        failed = num_failures.get(name, 0) + len(last) - len(rewards)
        mean = sum(rewards) / len(rewards) if rewards else None
        longest = max(answer.num_tokens for answer in samples)
        made.append(GroupFacts(name, mean, longest, sum(end.stop == "length" for end in last), failed))
    return made


@contextmanager
def open_samples(directory: Path) -> Iterator[RunSamples]:
    """Open the buffer of the run in `directory` for reading. Raises UserError for one that cannot be read."""
    path = directory / BUFFER_FILE
    if not path.is_file():
        raise UserError(f"{path} does not exist, so this run has no samples: it is supervised, or no run")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            ((version,),) = connection.execute("PRAGMA user_version").fetchall()
            if version != buffer_rows.SCHEMA_VERSION:
                raise UserError(
                    f"{path} has schema version {version}, this release reads {buffer_rows.SCHEMA_VERSION}; use the release that wrote it"
                )
            yield RunSamples(connection)
    except sqlite3.Error as error:
        raise UserError(f"{path} cannot be read ({error}); check the disk, or copy the file to one that can be written") from error
