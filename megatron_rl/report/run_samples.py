"""Samples of a run, read from its buffer and printed, also while the run goes on or after it died."""

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from numpy.typing import NDArray

from megatron_rl.config.load import load_settings
from megatron_rl.data import buffer_rows
from megatron_rl.data.buffer import BUFFER_FILE
from megatron_rl.errors import UserError
from megatron_rl.observe.groups_of_interest import Answer, ends
from megatron_rl.observe.summary import SETTINGS_FILE
from megatron_rl.observe.visible_text import sample_lines

_GROUP = "id, consumed_step, prompt_text, prompt_ids, label, messages, metadata, rejection"
_SAMPLE = (
    "sample_index, trajectory, role, outcome, reward, reward_message, reward_components, stop_reason, response_text, num_tokens, "
    "response_ids, loss_mask, rollout_log_probs, weight_versions, token_values, own_prompt_text, own_prompt_ids, metadata"
)
_ANSWER = "consumed_step, group_id, trajectory, sample_index, reward, stop_reason, num_tokens"
_CONSUMED = "state = 'consumed'"
_TYPES = {"loss_mask": "?", "rollout_log_probs": "<f4", "token_values": "<f4"}


Decode = Callable[[Sequence[int]], str]
"""From token ids to their text, with special tokens."""


class StoredGroup(NamedTuple):
    """A consumed group, its samples by index, and its failed trajectories in words; columns as in `buffer_rows.SCHEMA`."""

    row: sqlite3.Row
    samples: list[sqlite3.Row]
    failures: list[str]


def array(row: sqlite3.Row, name: str) -> NDArray[Any] | None:
    """Return the array [n] in a column of a sample or group, None where it is not kept."""
    return None if row[name] is None else np.frombuffer(row[name], _TYPES.get(name, "<i4"))


class RunSamples:
    """The groups that a run's steps have consumed; made by `open_samples`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        connection.row_factory = sqlite3.Row
        self._read = connection.execute

    def steps(self) -> list[int]:
        """Return the steps with groups, rising."""
        return [step for (step,) in self._read(f"SELECT DISTINCT consumed_step FROM groups WHERE {_CONSUMED} ORDER BY 1")]

    def answers(self, steps: Iterable[int]) -> list[Answer]:
        """Return all samples of these steps, in the order of prompts and of their index."""
        chosen = f"WHERE {_CONSUMED} AND consumed_step IN (SELECT value FROM json_each(?)) ORDER BY position, sample_index"
        found = self._read(f"SELECT {_ANSWER} FROM samples JOIN groups ON id = group_id {chosen}", (str(list(steps)),))
        return [Answer(*row) for row in found]

    def num_failures(self, step: int) -> dict[str, int]:
        """Return the number of failed trajectories of every group of a step with one."""
        found = self._read(
            "SELECT group_id, count(*) FROM failures JOIN groups ON id = group_id WHERE consumed_step = ? GROUP BY 1", (step,)
        )
        return {name: count for name, count in found}

    def sources(self) -> dict[str, str]:
        """Return the source of each consumed prompt that names one in its metadata, by group id."""
        names = ", ".join(f"json_extract(metadata, '$.{name}')" for name in ("data_source", "source", "dataset"))
        found = self._read(f"SELECT id, coalesce({names}) FROM groups WHERE {_CONSUMED} AND metadata <> '{{}}'")
        return {name: str(source) for name, source in found if source is not None}

    def group(self, name: str) -> StoredGroup:
        """Return the group `name`. Raises UserError for a name of no consumed group."""
        row = self._read(f"SELECT {_GROUP} FROM groups WHERE id = ? AND {_CONSUMED}", (name,)).fetchone()
        if row is None:
            raise UserError(f"no group {name!r} was trained on or rejected in this run, needs one of the column group of its report")
        failures = self._read("SELECT cause || ': ' || headline FROM failures WHERE group_id = ? ORDER BY rowid", (name,))
        samples = self._read(f"SELECT {_SAMPLE} FROM samples WHERE group_id = ? ORDER BY sample_index", (name,)).fetchall()
        return StoredGroup(row, samples, [words for (words,) in failures])


@contextmanager
def open_samples(directory: Path) -> Iterator[RunSamples]:
    """Open the buffer of the run in `directory` for reading. Raises UserError for one that cannot be read."""
    path, wanted = directory / BUFFER_FILE, buffer_rows.SCHEMA_VERSION
    if not path.is_file():
        raise UserError(f"{path} does not exist, so this run has no samples: it is supervised, or no run")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            ((version,),) = connection.execute("PRAGMA user_version").fetchall()
            if version != wanted:
                raise UserError(f"{path} has schema version {version}, this release reads {wanted}; use the release that wrote it")
            yield RunSamples(connection)
    except sqlite3.Error as error:
        raise UserError(f"{path} cannot be read ({error}); check the disk, or copy the file to one that can be written") from error


def load_decoder(directories: Iterable[Path]) -> Decode | None:
    """Return the decoder of the first directory with a tokenizer; None without."""
    files = (directory / "tokenizer.json" for directory in directories)
    file = next((file for file in files if file.is_file()), None)
    return None if file is None else partial(tokenizers.Tokenizer.from_file(str(file)).decode, skip_special_tokens=False)


def printed_samples(directory: Path, *, step: int | None, worst: int, best: int, group: str | None) -> Iterator[str]:
    """Yield the lines of the `worst` and the `best` trajectories of `step`, None: the newest, or all samples of the `group`.

    Answers have their special tokens where tokens and a tokenizer are there. Raises UserError for a
    step or a group without samples.
    """
    models = [directory / "huggingface"]
    with suppress(UserError):
        models.append(load_settings(directory / SETTINGS_FILE, on_gpus=False).model.path)
    decode = load_decoder(models)
    with open_samples(directory) as run:
        if group is not None:
            found = run.group(group)
            for sample in found.samples:
                yield from _lines(found, sample, decode)
            yield from (f"failed: {words}" for words in found.failures)
            return
        steps = run.steps()
        step = step if step is not None else steps[-1] if steps else 0
        if step not in steps:
            kept = f"steps {steps[0]} to {steps[-1]}" if steps else "no step yet"
            raise UserError(f"--step is {step}, but the buffer of {directory} has samples of {kept}; name one of them")
        last = ends(run.answers([step]))
        ranked = sorted((end for end in last if end.reward is not None), key=lambda end: end.reward or 0.0)
        yield f"step {step}: {len(last)} trajectories, {len(last) - len(ranked)} of them without a reward"
        for name, answers in (("worst", ranked[:worst]), ("best", ranked[::-1][:best])):
            for number, answer in enumerate(answers, start=1):
                found = run.group(answer.group)
                yield f"-- {name} {number} of {len(answers)}"
                yield from _lines(found, next(sample for sample in found.samples if sample["sample_index"] == answer.sample), decode)


def _lines(group: StoredGroup, sample: sqlite3.Row, decode: Decode | None) -> Iterator[str]:
    """Yield a sample with its prompt and reward."""
    ids = array(sample, "response_ids")
    reward = f"reward {sample['reward']:.4g}" if sample["reward"] is not None else f"no reward ({sample['outcome']})"
    ended = f"{sample['num_tokens']} tokens, ended by {sample['stop_reason']}"
    yield f"{reward}, {ended}, group {group.row['id']!r}, sample {sample['sample_index']}"
    yield from sample_lines(
        prompt=sample["own_prompt_text"] or group.row["prompt_text"],
        label=group.row["label"],
        answer=sample["response_text"] if ids is None or decode is None else decode(ids.tolist()),
        message=sample["reward_message"],
    )
