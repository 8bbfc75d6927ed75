"""The durable buffer: groups move pending -> in flight -> done -> consumed, in one SQLite file.

Each move is a transaction. `kill -9` at any moment loses no finished sample and hands none out a
second time. After a power failure or a kernel crash the last moves are only safe once `flush` has
run (synchronous=NORMAL: no wait for the disk per group). So the loop calls `flush` before writing a
checkpoint: groups of lost moves are generated again by a run resumed from the checkpoint.

During a run any program may read the file; only the run writes. `.schema` in the `sqlite3` shell,
or `buffer_rows.SCHEMA`, describes the tables.

    select consumed_step, sum(trained), avg(reward), avg(num_tokens) from samples
    join groups on id = group_id where outcome = 'scored' group by 1;
    numpy.frombuffer(response_ids, "<i4")
"""

import itertools
import json
import math
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.data import buffer_rows
from megatron_rl.data.sqlite_file import LOCKED, SqliteFile, database_errors
from megatron_rl.data.token_values import TokenValues
from megatron_rl.errors import UserError
from megatron_rl.types import Group, Prompt, Sample

BUFFER_FILE = "buffer.sqlite"  # its name in the directory of a run
PENDING = "(SELECT id FROM groups WHERE state = 'pending')"
OLDEST_DONE = "(SELECT id FROM groups WHERE state = 'done' ORDER BY position LIMIT ?)"
CHOSEN = "id IN (SELECT value FROM json_each(?))"

# The cost of the queries below depends on the waiting groups alone, not on the consumed ones. The
# index is named because SQLite would otherwise read the table, also sorted by `position`.
FRONT = "SELECT position, id, state FROM groups INDEXED BY groups_waiting WHERE state <> 'consumed' ORDER BY position LIMIT ?"
WAITING = (
    "SELECT id, state, updated_at, min(ifnull((SELECT min(min_version) FROM samples WHERE group_id = id), 9e999), "
    "ifnull((SELECT min(min_version) FROM answers WHERE group_id = id), 9e999)) "
    "FROM groups INDEXED BY groups_waiting WHERE state <> 'consumed' ORDER BY position"
)
NEWEST = "SELECT trained FROM groups INDEXED BY groups_by_state WHERE state = 'consumed' ORDER BY position DESC LIMIT ?"
COUNT = "SELECT count(*) FROM groups WHERE state = ?"
PRUNABLE = (
    "SELECT consumed_step, row_number() OVER (PARTITION BY consumed_step ORDER BY "
    "EXISTS (SELECT 1 FROM samples WHERE group_id = id AND token_values IS NOT NULL) DESC, position), "
    "count(*) OVER (PARTITION BY consumed_step), id "
    "FROM groups INDEXED BY groups_unpruned WHERE pruned = 0 AND consumed_step <= ? ORDER BY 1, 2 DESC"
)
RECORDS = "routed_experts = NULL, candidates = NULL"
ARRAYS = (
    "response_ids = NULL, loss_mask = NULL, rollout_log_probs = NULL, weight_versions = NULL, own_prompt_ids = NULL, "
    f"token_values = NULL, {RECORDS}"
)
MEAN_REWARDS = (
    "SELECT id, avg(reward) FROM (SELECT id, position, max(reward) AS reward FROM groups JOIN samples ON group_id = id "
    "WHERE {} AND outcome = 'scored' GROUP BY id, ifnull(trajectory, -1 - sample_index)) GROUP BY id ORDER BY position"
)
LATER = "SELECT count(*) FROM groups INDEXED BY groups_unpruned WHERE pruned = 0 AND consumed_step > ?"


@dataclass(frozen=True, slots=True)
class BufferCounts:
    """Groups in each state."""

    pending: int
    in_flight: int
    done: int
    consumed: int

    @property
    def waiting(self) -> int:
        """Groups not yet consumed."""
        return self.pending + self.in_flight + self.done

    @property
    def total(self) -> int:
        """All groups."""
        return self.waiting + self.consumed


@dataclass(frozen=True, slots=True)
class WaitingGroup:
    """A group not yet consumed, moved to its state at `moved_at`, in seconds since 1970 and later than any moved before.

    `oldest_version` made a token of its samples or answers; infinity without any.
    """

    id: str
    state: str
    moved_at: float
    oldest_version: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An engine's answer to `request`, by weights from `min_version` to `max_version`."""

    request: str
    content: bytes
    min_version: int
    max_version: int


class Buffer(SqliteFile):
    """The buffer of one run, held by one process at a time and used by one thread of the process; `prune` by any.

    Opening puts groups that a killed process had in flight back to pending. Every method raises
    UserError when the disk is full or the file cannot be used.
    """

    def __init__(self, path: Path, *, made_by: str = "{}", note: Callable[[str], None] = print) -> None:
        """Open the file at `path`, new or not; `made_by` is the column's value for new samples."""
        identity = (buffer_rows.APPLICATION_ID, buffer_rows.SCHEMA_VERSION)
        super().__init__(path, schema=buffer_rows.SCHEMA, identity=identity, note=note)
        self.made_by = made_by
        self._pruning, self._closing, self._moved_at = threading.Lock(), threading.Event(), 0.0
        ((first,),) = self._read("SELECT min(position) FROM groups")
        self.num_gone = 0 if first is None else int(first) - 1
        """Groups of a lost buffer, consumed before the present ones; set only in an empty buffer."""
        self.recover()

    def add_prompts(self, prompts: Iterable[Prompt], *, renewed: bool = False) -> int:
        """Add prompts as pending groups, or renew label and metadata; return the number of new ones.

        Raises UserError for a consumed prompt, and for other tokens of an id, unless pending ones are `renewed`.
        """
        with self.transaction() as connection:
            new = 0
            for prompt in prompts:
                row = buffer_rows.prompt_row(prompt)
                known = connection.execute("SELECT state, prompt_ids, consumed_step FROM groups WHERE id = ?", (prompt.id,)).fetchone()
                if known is None:
                    connection.execute(buffer_rows.INSERT_GROUP, (1 + self.num_gone, *row))
                    new += 1
                elif known[1] != row[3] and not (renewed and known[0] == "pending"):
                    raise UserError(
                        f"prompt {prompt.id!r} has other tokens than in {self.path}: the data file, the tokenizer, or what data "
                        "says of prompts (system_prompt, chat_template_kwargs, max_prompt_tokens) has changed; restore it or choose "
                        "another run.directory"
                    )
                elif known[0] == "consumed":
                    raise UserError(
                        f"prompt {prompt.id!r} was already trained on at step {known[2]} according to {self.path}; "
                        "resume from the checkpoint of that run or choose another run.directory"
                    )
                elif known[0] == "pending":
                    connection.execute(buffer_rows.UPDATE_GROUP, row[:6])
            return new

    def take_pending(self, limit: int, *, among: int | None = None) -> list[Prompt]:
        """Put up to `limit` pending groups in flight, oldest first, and return their prompts.

        `among` restricts the choice to the first `among` groups not yet consumed.
        """
        chosen = f"state = 'pending' AND position IN (SELECT position FROM ({FRONT})) ORDER BY position LIMIT ?"
        # SQLite takes a negative limit for none at all.
        limits = (-1 if among is None else max(among, 0), max(limit, 0))
        with self.transaction() as connection:
            found = connection.execute(f"SELECT {buffer_rows.GROUP_COLUMNS} FROM groups WHERE {chosen}", limits).fetchall()
            prompts = [buffer_rows.read_prompt(row) for row in found]
            self._move([prompt.id for prompt in prompts], "in_flight")
        return prompts

    def put_samples(self, group: Group) -> None:
        """Save the part of a group in flight, for a restart. Raises ValueError as `put_done`."""
        with self.transaction():
            self._replace_samples(group)

    def finished(self, prompt: Prompt) -> Group | None:
        """Return the samples saved by `put_samples` for a prompt in flight, for reuse."""
        (group,) = buffer_rows.read_groups(self._read, "id = ?", (prompt.id,))
        return group if group.samples or group.failures else None

    def put_answers(self, group_id: str, answers: Iterable[Answer]) -> None:
        """Save answers for a group in flight until it has samples. Raises ValueError as `put_done`."""
        rows = [(group_id, answer.request, answer.content, answer.min_version, answer.max_version) for answer in answers]
        with self.transaction() as connection:
            self._check_in_flight(group_id)
            connection.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?)", rows)

    def answers(self, group_id: str) -> dict[str, bytes]:
        """Return the answers saved by `put_answers` for a group, by request."""
        return dict(self._read("SELECT request, content FROM answers WHERE group_id = ?", (group_id,)))

    def put_done(self, group: Group) -> None:
        """Move a group with a sample or failure from in flight to done; else raise ValueError."""
        if not group.samples and not group.failures:
            raise ValueError(f"group {group.id!r} has no samples and no failures, needs at least one")
        with self.transaction():
            self._replace_samples(group)
            self._move([group.id], "done")

    def groups(self, group_ids: Iterable[str]) -> list[Group]:
        """Return these groups with all samples, in the order of their prompts."""
        return buffer_rows.read_groups(self._read, CHOSEN, (json.dumps(list(group_ids)),))

    def in_order(self, group_ids: Iterable[str]) -> list[str]:
        """Return these ids in the order of prompts."""
        return self._ids(f"SELECT id FROM groups WHERE {CHOSEN} ORDER BY position", (json.dumps(list(group_ids)),))

    def ids_after(self, count: int) -> list[str]:
        """Return the ids of all groups but the first `count`, in the order of prompts."""
        return self._ids("SELECT id FROM groups WHERE position > ? ORDER BY position", (count,))

    def mean_rewards(self, after: int, until: int) -> dict[str, float]:
        """Return the mean reward of the scored trajectories of each group of steps `after` + 1 to `until`, by id."""
        return dict(self._read(MEAN_REWARDS.format("consumed_step > ? AND consumed_step <= ?"), (after, until)))

    def mean_reward(self, group_id: str, *, until: int) -> float | None:
        """Return the mean reward of one group, None where no step up to `until` took it or nothing is scored."""
        found = self._read(MEAN_REWARDS.format("id = ? AND consumed_step <= ?"), (group_id, until))
        return found[0][1] if found else None

    def consume(self, rejections: Mapping[str, str | None], *, step: int) -> None:
        """Mark done groups as consumed by `step` (from 1), by id with a reason for no training."""
        with self.transaction() as connection:
            connection.executemany(
                "UPDATE groups SET state = 'consumed', consumed_step = ?, trained = ?, rejection = ? WHERE id = ?",
                [(step, reason is None, reason, group_id) for group_id, reason in rejections.items()],
            )

    def put_token_values(self, samples: Mapping[int, Sample], values: TokenValues) -> None:
        """Keep `values` of the tokens of `samples`, by row of the trained batch, for readers of the run."""
        with self.transaction() as connection:
            for row, sample in samples.items():
                table = values.of_row(row, begin=len(sample.prompt.token_ids), length=len(sample.response_ids))
                if table is not None:
                    connection.execute(
                        "UPDATE samples SET token_values = ? WHERE group_id = ? AND sample_index = ?",
                        (table.astype("<f4").tobytes(), sample.group_id, sample.index),
                    )

    def waiting(self) -> list[WaitingGroup]:
        """Return all groups not consumed, in the order of prompts."""
        return [WaitingGroup(*row) for row in self._read(WAITING)]

    def recently_trained(self, limit: int) -> tuple[int, int]:
        """Return the numbers of trained groups and of all among the newest `limit` consumed ones."""
        found = [trained for (trained,) in self._read(NEWEST, (limit,))]
        return sum(found), len(found)

    def renew(self, limit: int, *, oldest_version: int, by_newest: bool = False) -> int:
        """Drop all samples of groups with a token before `oldest_version`, of the first `limit` done.

        `by_newest` drops only groups without a younger token, and no answers: tokens before
        `oldest_version` may be context. Returns the number of such groups, which become pending
        again. Saved samples and answers of pending groups are dropped likewise, answer by answer.
        """
        version = "max(max_version)" if by_newest else "min(min_version)"
        stale = f"SELECT group_id FROM samples WHERE group_id IN {{}} GROUP BY group_id HAVING {version} < ?"
        with self.transaction() as connection:
            found = self._ids(stale.format(OLDEST_DONE), (max(limit, 0), oldest_version))
            self._move(found, "pending")
            self._drop(self._ids(stale.format(PENDING), (oldest_version,)))
            if not by_newest:
                connection.execute(f"DELETE FROM answers WHERE min_version < ? AND group_id IN {PENDING}", (oldest_version,))
        return len(found)

    def counts(self) -> BufferCounts:
        """Return the number of groups in each state."""
        pending, in_flight, done = (int(self._read(COUNT, (state,))[0][0]) for state in ("pending", "in_flight", "done"))
        # No group is ever removed, so the last position is the number of all.
        ((total,),) = self._read("SELECT coalesce(max(position), 0) FROM groups")
        return BufferCounts(pending, in_flight, done, consumed=int(total) - pending - in_flight - done)

    def num_consumed(self, *, step: int) -> int:
        """Return the number of groups consumed up to `step`, the step of some checkpoint."""
        ((later,),) = self._read(LATER, (step,))
        return self.counts().consumed - int(later)

    def recover(self) -> int:
        """Put every group in flight, now abandoned, back to pending; return their number."""
        with self.transaction() as connection:
            return connection.execute(
                "UPDATE groups SET state = 'pending', updated_at = ? WHERE state = 'in_flight'", (time.time(),)
            ).rowcount

    def rewind(self, step: int) -> dict[str, int]:
        """Go back to the checkpoint after `step` steps (1 to `step`), with weights of version `step`.

        Groups consumed by later steps are handed out again. Consumed and done groups become pending
        without samples in three cases: a token comes from newer weights, which no longer exist; the
        group was pruned; or other settings made the group. Failed groups become pending as well,
        because the user may have fixed the cause: samples without a score are scored again, and
        failed trajectories made anew.
        Call before generation starts. Returns the number of groups made by other settings, by
        those settings.
        """
        gone = "SELECT group_id FROM samples WHERE max_version > :step OR response_ids IS NULL UNION SELECT group_id FROM failures"
        waits = "(state <> 'consumed' OR consumed_step > :step)"
        clean = "consumed_step = NULL, trained = NULL, rejection = NULL, pruned = 0"
        values = {"step": step, "made_by": self.made_by}
        with self.transaction() as connection:
            others = dict(
                self._read(f"SELECT made_by, count(*) FROM groups WHERE {waits} AND made_by <> :made_by GROUP BY made_by", values)
            )
            dropped = self._ids(f"SELECT id FROM groups WHERE {waits} AND (made_by <> :made_by OR pruned > 0 OR id IN ({gone}))", values)
            failed = "SELECT group_id FROM samples WHERE outcome <> 'scored'"
            unscored = self._ids(f"SELECT id FROM groups WHERE {waits} AND id IN ({failed})", values)
            later = "group_id IN (SELECT id FROM groups WHERE consumed_step > :step)"
            connection.execute(f"UPDATE samples SET token_values = NULL WHERE token_values IS NOT NULL AND {later}", values)
            connection.execute(f"UPDATE groups SET state = 'done', {clean} WHERE consumed_step > :step", values)
            # All samples of such a group: the samples left would count as the whole group.
            self._drop(dropped)
            self._moved_at = max((group.moved_at for group in self.waiting()), default=0.0)
            self._move([*dropped, *unscored], "pending")
            connection.execute("DELETE FROM answers WHERE max_version > :step", values)
        return others

    def distrust(self, *, step: int) -> None:
        """Drop the samples of done groups, and let `rewind` make those that `step` consumed anew, too."""
        with self.transaction() as connection:
            done = self._ids("SELECT id FROM groups WHERE state = 'done'", ())
            self._drop(done)
            self._move(done, "pending")
            connection.execute("UPDATE groups SET pruned = 1 WHERE consumed_step = ?", (step,))

    def prune(self, step: int, *, keep: int) -> None:
        """Drop the token arrays of groups consumed up to `step`, the oldest kept checkpoint.

        Of each step `keep` groups only lose their records of engines, for readers of the run: those
        with values of tokens, then the first ones. A step of `keep` groups or fewer loses nothing,
        for a replay.

        Each group is a transaction of a connection of its own, and others write in a pause as long after it; kept
        groups come last, beside one other, so that a later call finds the same ones to keep. `close` ends the call.
        A later one prunes what is left then, or where another program locks the file.
        """
        with self._pruning, database_errors(self.path), closing(self._connected()) as connection:
            found, pause_s = connection.execute(PRUNABLE, (step,)).fetchall(), 0.0
            for _, piece in itertools.groupby(found, key=lambda row: (row[0], max(row[1], keep + 1))):
                if self._closing.wait(pause_s):
                    return
                begun_s = time.monotonic()
                try:
                    connection.execute("BEGIN IMMEDIATE")
                except sqlite3.OperationalError as error:
                    if str(error) != LOCKED:
                        raise
                    return
                with connection:
                    for _, number, of_step, group_id in piece:
                        kept, whole = number <= keep, of_step <= keep
                        if not whole:
                            connection.execute(f"UPDATE samples SET {RECORDS if kept else ARRAYS} WHERE group_id = ?", (group_id,))
                        values = (1 + kept, whole, group_id)
                        connection.execute("UPDATE groups SET pruned = ?, made_by = iif(?, made_by, NULL) WHERE id = ?", values)
                pause_s = time.monotonic() - begun_s

    def close(self) -> None:
        """End `prune`, flush and let another process open the file."""
        self._closing.set()
        with self._pruning:
            super().close()

    def _move(self, group_ids: Sequence[str], state: str) -> None:
        # Steps take groups by these times: a clock that is set back changes no order.
        self._moved_at = max(time.time(), math.nextafter(self._moved_at, math.inf))
        self._connection.executemany(
            "UPDATE groups SET state = ?, updated_at = ? WHERE id = ?", [(state, self._moved_at, group_id) for group_id in group_ids]
        )

    def _ids(self, query: str, values: Any) -> list[str]:
        return [group_id for (group_id,) in self._read(query, values)]

    def _drop(self, group_ids: Iterable[str]) -> None:
        """Delete all rows of the given groups except the prompts."""
        names = [(group_id,) for group_id in group_ids]
        for table in ("samples", "failures"):
            self._connection.executemany(f"DELETE FROM {table} WHERE group_id = ?", names)
        self._connection.executemany("UPDATE groups SET made_by = NULL WHERE id = ?", names)

    def _replace_samples(self, group: Group) -> None:
        """Replace the stored samples of a group. Raises ValueError unless in flight."""
        self._check_in_flight(group.id)
        self._drop([group.id])
        self._connection.execute("DELETE FROM answers WHERE group_id = ?", (group.id,))
        rows = [buffer_rows.sample_row(sample, prompt=group.prompt) for sample in group.samples]
        self._connection.executemany(buffer_rows.INSERT_SAMPLE, rows)
        failures = [(group.id, failure.cause, failure.headline, failure.trace) for failure in group.failures]
        self._connection.executemany("INSERT INTO failures VALUES (?, ?, ?, ?)", failures)
        self._connection.execute("UPDATE groups SET made_by = ? WHERE id = ?", (self.made_by, group.id))

    def _check_in_flight(self, group_id: str) -> None:
        found = self._connection.execute("SELECT state FROM groups WHERE id = ?", (group_id,)).fetchone()
        if found is None or found[0] != "in_flight":
            raise ValueError(f"group {group_id!r} is {found[0] if found else 'not in the buffer'}, needs to be in_flight")
