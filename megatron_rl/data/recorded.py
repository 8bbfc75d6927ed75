"""The samples of a run's buffer for readers: beside the run, after its end or its death. Nothing is written."""

import json
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from megatron_rl.data import buffer_rows
from megatron_rl.data.buffer import BUFFER_FILE
from megatron_rl.data.sqlite_file import check_identity, database_errors
from megatron_rl.errors import UserError
from megatron_rl.system.files import disk_errors
from megatron_rl.types import Group

_PAGE = 16  # groups that are read at once; between two pages nothing of the file is held
_OF_GROUP = "position, id, consumed_step, state, trained, rejection, pruned, prompt_text, label, prompt_ids"
_OF_SAMPLE = (
    "sample_index, trajectory, role, outcome, reward, reward_components, reward_message, stop_reason, num_tokens, "
    "num_trainable_tokens, min_version, max_version, response_text, metadata, own_prompt_text, response_ids, loss_mask, "
    "rollout_log_probs, weight_versions, own_prompt_ids"
)
_BY_STEP = """
SELECT consumed_step AS step, count(DISTINCT id) AS groups, count(DISTINCT iif(trained, id, NULL)) AS trained,
count(sample_index) AS samples, count(reward) AS scored, avg(reward) AS reward, avg(num_tokens) AS tokens,
avg(stop_reason = 'length') AS truncated, min(min_version) AS oldest_version, max(max_version) AS newest_version,
count(DISTINCT iif(pruned = 1, id, NULL)) AS without_tokens
FROM groups LEFT JOIN samples ON group_id = id WHERE state = 'consumed' GROUP BY consumed_step
"""
_TALLIES = {
    "groups by state": "SELECT state, count(*) FROM groups GROUP BY 1",
    "groups left out, by reason": "SELECT rejection, count(*) FROM groups WHERE rejection IS NOT NULL GROUP BY 1 ORDER BY 2 DESC LIMIT 10",
    "samples by outcome of the reward": "SELECT ifnull(outcome, 'not asked for'), count(*) FROM samples GROUP BY 1",
    "samples by end": "SELECT stop_reason, count(*) FROM samples GROUP BY 1",
    "failed trajectories by cause": "SELECT cause, count(*) FROM failures GROUP BY 1",
    "samples by age in steps": "SELECT consumed_step - 1 - min_version, count(*) FROM samples JOIN groups ON id = group_id "
    "WHERE consumed_step IS NOT NULL AND min_version IS NOT NULL GROUP BY 1",
}
_SPREADS = {"reward": "reward", "response tokens": "num_tokens"}
_PERCENTS = (0, 10, 50, 90, 99, 100)
_COPIED = {"groups": "id", "samples": "group_id", "failures": "group_id"}
"""Tables of a copy, with the column of a group's id."""


class Recorded:
    """The buffer of a run directory, or a file that was exported from one, open for reading."""

    def __init__(self, run: Path) -> None:
        """Open the buffer of the directory or file `run`. Raises UserError, also for one of another release."""
        self.path = run / BUFFER_FILE if run.is_dir() else run
        if not self.path.is_file():
            raise UserError(f"{self.path} does not exist, needs the buffer of a run; give a run.directory, or a file that was exported")
        with database_errors(self.path):
            self._connection = sqlite3.connect(f"{self.path.absolute().as_uri()}?{self._mode}", uri=True, isolation_level=None)
            check_identity(self.path, self.read, (buffer_rows.APPLICATION_ID, buffer_rows.SCHEMA_VERSION))

    @property
    def _mode(self) -> str:
        # SQLite makes the files of a log to read beside a run, which it cannot in a directory of another user's.
        log = self.path.with_name(f"{self.path.name}-wal")
        return "mode=ro" if log.exists() or os.access(self.path.parent, os.W_OK) else "mode=ro&immutable=1"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self._connection.close()

    def read(self, query: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> list[Any]:
        """Return all rows of a query. Raises UserError as the buffer of a run does."""
        with database_errors(self.path):
            return self._connection.execute(query, values).fetchall()

    def steps(self) -> list[dict[str, Any]]:
        """Return numbers of each step, the means over samples."""
        with database_errors(self.path):
            found = self._connection.execute(_BY_STEP)
            return [dict(zip([name for name, *_ in found.description], row, strict=True)) for row in found]

    def statistics(self) -> dict[str, dict[str, float]]:
        """Return counts of groups and samples by kinds, and percentiles of rewards and lengths."""
        counts = {name: {str(kind): count for kind, count in self.read(query)} for name, query in _TALLIES.items()}
        spreads = {name: self._percentiles(column) for name, column in _SPREADS.items()}
        return {name: found for name, found in {**counts, **spreads}.items() if found}

    def _percentiles(self, column: str) -> dict[str, float]:
        ((count, mean),) = self.read(f"SELECT count({column}), avg({column}) FROM samples")
        if not count:
            return {}
        query = f"SELECT {column} FROM samples WHERE {column} IS NOT NULL ORDER BY 1 LIMIT 1 OFFSET ?"
        places = {f"{percent} %": (count - 1) * percent // 100 for percent in _PERCENTS}
        return {**{name: self.read(query, (place,))[0][0] for name, place in places.items()}, "mean": mean}

    def samples(self, *, step: int | None = None, group: str | None = None, tokens: bool = False) -> Iterator[dict[str, Any]]:
        """Yield each sample's fields, in the order of prompts, of all groups or those of a step or id; `tokens` adds the arrays.

        The arrays are None where they were pruned. Raises UserError where there is no sample.
        """
        condition = "position > :after AND (:step IS NULL OR consumed_step = :step) AND (:group IS NULL OR id = :group)"
        values: dict[str, Any] = {"after": -1, "step": step, "group": group}
        empty = True
        while rows := self.read(f"SELECT {_OF_GROUP} FROM groups WHERE {condition} ORDER BY position LIMIT {_PAGE}", values):
            for row in rows:
                for sample in self.read(f"SELECT {_OF_SAMPLE} FROM samples WHERE group_id = ? ORDER BY sample_index", (row[1],)):
                    empty = False
                    yield _fields(row, sample, tokens=tokens)
            values["after"] = rows[-1][0]
        if empty:
            chosen = "" if step is None else f" of step {step}"
            raise UserError(f"{self.path} has no sample{chosen}{'' if group is None else f' of group {group}'}; see megatron-rl buffer ls")

    def recorded_steps(self) -> range:
        """Return the steps from the first to the last one recorded, counted from 1; empty without any."""
        ((first, last),) = self.read("SELECT min(consumed_step), max(consumed_step) FROM groups")
        return range(0) if first is None else range(first, last + 1)

    def batch_groups(self, step: int, *, records: bool) -> tuple[list[Group], list[str | None]]:
        """Return all groups taken by `step`, in the order of prompts, and why each was not trained on.

        `records` says that training needs what engines recorded besides the tokens, which pruning
        drops first. Raises UserError for a step that is missing, or was pruned.
        """
        found = self.read("SELECT pruned, made_by IS NOT NULL, rejection FROM groups WHERE consumed_step = ? ORDER BY position", (step,))
        if not found:
            steps = self.recorded_steps()
            raise UserError(f"{self.path} has no step {step}, only {f'{steps[0]} to {steps[-1]}' if steps else 'none'}; choose one of them")
        gone = sum(pruned == 1 or (records and pruned == 2 and not whole) for pruned, whole, _ in found)
        if gone:
            what = "of their ids and masks" if any(pruned == 1 for pruned, *_ in found) else "of the engines' records"
            raise UserError(
                f"{self.path} cannot give step {step} again: {gone} of its {len(found)} groups have none {what} any more, which go with "
                f"the next checkpoint; set run.keep_groups to {len(found)} or more in the run to replay, which keeps all"
            )
        return buffer_rows.read_groups(self.read, "consumed_step = ?", (step,)), [rejection for *_, rejection in found]

    def copy(self, target: Path, *, step: int | None) -> int:
        """Write the groups of a step, or all finished ones, into a new buffer file at `target`; return their number."""
        chosen = "state IN ('done', 'consumed') AND (:step IS NULL OR consumed_step = :step)"
        ids = [group for (group,) in self.read(f"SELECT id FROM groups WHERE {chosen} ORDER BY position", {"step": step})]
        unfinished = target.with_name(f".{target.name}.partial")
        with disk_errors(target), database_errors(target):
            unfinished.unlink(missing_ok=True)
            with closing(sqlite3.connect(unfinished, isolation_level=None)) as copy:
                copy.executescript(f"PRAGMA journal_mode = OFF; BEGIN; {buffer_rows.SCHEMA}")
                for group in ids:
                    for table, column in _COPIED.items():
                        for row in self.read(f"SELECT * FROM {table} WHERE {column} = ?", (group,)):
                            copy.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)
                copy.execute("COMMIT")
            unfinished.rename(target)
        return len(ids)


def _fields(group: Sequence[Any], sample: Sequence[Any], *, tokens: bool) -> dict[str, Any]:
    """Return the fields of a sample from its rows, `group` and `sample`."""
    _, name, step, state, trained, rejection, _, prompt, label, prompt_ids = group
    index, trajectory, role, outcome, reward, components, message, stop, *numbers, text, metadata, own_prompt = sample[:15]
    ids, mask, log_probs, versions, own_ids = sample[15:]
    fields = {
        **{"group": name, "index": index, "step": step, "state": state, "trained": None if trained is None else bool(trained)},
        **{"rejection": rejection, "trajectory": trajectory, "role": role, "prompt": own_prompt or prompt, "label": label, "text": text},
        **{"outcome": outcome, "reward": reward, "components": json.loads(components or "{}"), "message": message or "", "stop": stop},
        **dict(zip(("num_tokens", "num_trainable_tokens", "min_version", "max_version"), numbers, strict=True)),
        "metadata": json.loads(metadata),
    }
    if tokens:
        arrays = {"prompt_ids": (prompt_ids if own_prompt is None else own_ids, "<i4"), "response_ids": (ids, "<i4")}
        arrays |= {"loss_mask": (mask, "u1"), "rollout_log_probs": (log_probs, "<f4"), "weight_versions": (versions, "<i4")}
        fields |= {key: None if data is None else _numbers(np.frombuffer(data, kind)) for key, (data, kind) in arrays.items()}
    return fields


def _numbers(array: NDArray[Any]) -> list[Any]:
    """Return a list of numbers; None for NaN, which masked tokens may have and JSON has not."""
    return [None if number != number else number for number in array.tolist()]
