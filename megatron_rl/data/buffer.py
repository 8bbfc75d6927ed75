"""The durable buffer: groups move pending -> in flight -> done -> consumed, in one SQLite file.

Each move is a transaction. `kill -9` at any moment loses no finished sample and hands none out a
second time. After a power failure or a kernel crash the last moves are only safe once `flush` has
run (synchronous=NORMAL: no wait for the disk per group). So the loop calls `flush` before writing a
checkpoint. Lost moves are then younger than the checkpoint that a resumed run starts from, and
their groups are generated again.

During a run any program, such as the `sqlite3` shell, may read the file; only the run writes.

    groups: one row per prompt
      position       order of arrival and of handing out; begins behind a lost buffer's positions
      id             the prompt's id
      state          pending | in_flight | done | consumed
      consumed_step  the consuming step, from 1 on as on the console; NULL unless consumed
      trained        1 when the step trained on the group, 0 when rejected; NULL unless consumed
      rejection      reason for no training; NULL unless trained is 0
      prompt_text, label   the prompt given to the model and the reference answer
      prompt_ids, metadata   token ids (array of <i4), and JSON
      pruned         1 when `prune` has dropped the samples' token arrays, 2 when kept for readers
      updated_at     seconds since 1970 of the last move
      made_by        settings that shaped the samples, as JSON; NULL without samples, after `prune`
    samples: one row per finished response; (group_id, sample_index) is unique
      outcome        scored | error | timeout; NULL when no reward was asked for
      reward         REAL, only when scored; reward_message, reward_components (JSON)
      stop_reason    stop | length | abort
      response_text, num_tokens, num_trainable_tokens, metadata (JSON)
      min_version, max_version   of the weights that made the tokens; NULL when no engine made any
      response_ids, weight_versions (arrays of <i4), rollout_log_probs (<f4), loss_mask (u1)
                     NULL after `prune`
      routed_experts experts of the first tokens, [tokens, layers, experts of a token]
      routed_format  type and last two sizes, such as "<u1 48 8"; both NULL without a record or
                     after `prune`
      trajectory     samples of a group with one number are one attempt with one reward; NULL: alone
      own_prompt_text, own_prompt_ids   prompt of this response where not the group's, else NULL;
                     own_prompt_ids also NULL after `prune`
    failures: one row per trajectory that the rollout failed to make
      cause, headline, trace   error | timeout | contract; a line; a traceback, or empty
    answers: one row per engine answer for a group in flight; empty once the group has samples
      request, content   hash of the request; the answer, in the form of rollout/generator
      min_version, max_version   of the weights that made the tokens

    select consumed_step, sum(trained), avg(reward), avg(num_tokens) from samples
    join groups on id = group_id where outcome = 'scored' group by 1;
    numpy.frombuffer(response_ids, "<i4")
"""

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron_rl.data import buffer_rows
from megatron_rl.deadlines import BUFFER_LOCK_S, NAMED_S
from megatron_rl.errors import UserError
from megatron_rl.files import claim, disk_errors, sync_directory, sync_file
from megatron_rl.types import Failure, Group, Prompt, Sample

BUFFER_FILE = "buffer.sqlite"
"""Its name in the directory of a run."""
_MAGIC = b"SQLite format 3\0"
"""The first bytes of every database that is not empty."""
LOCKED = "database is locked"
# SQLite's words (the same in every version; error codes are only in Python 3.11) and what the user can do.
_FIXES = {
    "database or disk is full": "free space on this disk",
    "disk I/O error": "check the disk and its quota",
    "file is not a database": "choose another run.directory, or move this file away: groups since the checkpoint are made again",
    "database disk image is malformed": "restore the file from a copy, or move it away: groups since the checkpoint are made again",
    "attempt to write a readonly database": "give yourself write permission or choose another run.directory",
    "unable to open database file": "give yourself write permission or choose another run.directory",
    LOCKED: "end the other program's transaction on this file",
}

# The cost of the queries below depends on the waiting groups alone, not on the consumed ones. The
# index is named because SQLite would otherwise read the table, also sorted by `position`.
FRONT = "SELECT position, id, state FROM groups INDEXED BY groups_waiting WHERE state <> 'consumed' ORDER BY position LIMIT ?"
COUNT = "SELECT count(*) FROM groups WHERE state = ?"
PRUNABLE = (
    "SELECT row_number() OVER (PARTITION BY consumed_step ORDER BY position), id "
    "FROM groups INDEXED BY groups_unpruned WHERE pruned = 0 AND consumed_step <= ?"
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
        """Return the number of groups not yet consumed."""
        return self.pending + self.in_flight + self.done

    @property
    def total(self) -> int:
        """All groups."""
        return self.waiting + self.consumed


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An engine's answer to `request`, by weights from `min_version` to `max_version`."""

    request: str
    content: bytes
    min_version: int
    max_version: int


class Buffer:
    """The buffer of one run, held by one process at a time and used by one thread of the process.

    Opening puts groups that a killed process had in flight back to pending. Every method raises
    UserError when the disk is full or the file cannot be used.
    """

    def __init__(self, path: Path, *, made_by: str = "{}", note: Callable[[str], None] = print) -> None:
        """Open the file at `path`, new or not; `made_by` is the column's value for new samples.

        `note` is called when another program keeps the file locked.
        """
        self.path, self.made_by, self._note = path, made_by, note
        # Reason why no write succeeds any more: one wait for a lock, not one for every group.
        self._locked: UserError | None = None
        self._num_gone = 0
        with ExitStack() as undo:
            lock = undo.enter_context(closing(_claim(path)))
            with _database_errors(self.path):
                self._connection = undo.enter_context(closing(sqlite3.connect(path, timeout=NAMED_S, isolation_level=None)))
                self._open()
                (first,) = self._connection.execute("SELECT min(position) FROM groups").fetchone()
            self._num_gone = 0 if first is None else int(first) - 1
            self.recover()
            self._lock = lock
            undo.pop_all()

    @property
    def num_gone(self) -> int:
        """Return the number of a lost buffer's groups, counted as consumed before the present."""
        return self._num_gone

    def begin_behind(self, num_groups: int) -> None:
        """Number new groups behind a lost buffer's groups; the present buffer is still empty."""
        assert not self.counts().total, "groups have their positions"
        self._num_gone = num_groups

    def add_prompts(self, prompts: Iterable[Prompt]) -> int:
        """Add prompts as pending groups and return the number of new ones.

        A prompt already present keeps its place, so a resumed run may add the prompts of a step
        again; a pending prompt takes the new label and metadata. Raises UserError when a prompt was
        consumed already or when the same id now has other tokens: the file of prompts has changed.
        """
        with self._transaction() as connection:
            new = 0
            for prompt in prompts:
                row = buffer_rows.prompt_row(prompt)
                known = connection.execute("SELECT state, prompt_ids, consumed_step FROM groups WHERE id = ?", (prompt.id,)).fetchone()
                if known is None:
                    connection.execute(buffer_rows.INSERT_GROUP, (1 + self._num_gone, *row))
                    new += 1
                elif known[1] != row[3]:
                    raise UserError(
                        f"prompt {prompt.id!r} has other tokens than in {self.path}: the data file or the tokenizer has changed; "
                        "restore it or choose another run.directory"
                    )
                elif known[0] == "consumed":
                    raise UserError(
                        f"prompt {prompt.id!r} was already trained on at step {known[2]} according to {self.path}; "
                        "resume from the checkpoint of that run or choose another run.directory"
                    )
                elif known[0] == "pending":
                    connection.execute(buffer_rows.UPDATE_GROUP, (prompt.label, row[4], prompt.id))
            return new

    def take_pending(self, limit: int, *, among: int | None = None) -> list[Prompt]:
        """Put up to `limit` pending groups in flight, oldest first, and return their prompts.

        Returns none when `limit` is not positive. `among` restricts the choice to the first `among`
        groups not yet consumed.
        """
        chosen = f"state = 'pending' AND position IN (SELECT position FROM ({FRONT})) ORDER BY position LIMIT ?"
        # SQLite takes a negative limit for none at all.
        limits = (-1 if among is None else max(among, 0), max(limit, 0))
        with self._transaction() as connection:
            found = connection.execute(f"SELECT {buffer_rows.GROUP_COLUMNS} FROM groups WHERE {chosen}", limits).fetchall()
            prompts = [buffer_rows.read_prompt(row) for row in found]
            self._move([prompt.id for prompt in prompts], "in_flight")
        return prompts

    def put_samples(self, group: Group) -> None:
        """Save the generated part of a group in flight, all or nothing, for a restart.

        Replaces the part saved before. Raises ValueError as `put_done`.
        """
        with self._transaction():
            self._replace_samples(group)

    def finished(self, prompt: Prompt) -> Group | None:
        """Return the samples saved by `put_samples` for a prompt in flight, for reuse."""
        with _database_errors(self.path):
            (group,) = self._groups("id = ?", (prompt.id,))
        return group if group.samples or group.failures else None

    def put_answers(self, group_id: str, answers: Iterable[Answer]) -> None:
        """Save engine answers for a group in flight; raises ValueError as `put_done`.

        The answers stay until the samples are saved or the group is done.
        """
        rows = [(group_id, answer.request, answer.content, answer.min_version, answer.max_version) for answer in answers]
        with self._transaction() as connection:
            self._check_in_flight(group_id)
            connection.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?)", rows)

    def answers(self, group_id: str) -> dict[str, bytes]:
        """Return the answers saved by `put_answers` for a group, by request."""
        with _database_errors(self.path):
            return dict(self._connection.execute("SELECT request, content FROM answers WHERE group_id = ?", (group_id,)))

    def put_done(self, group: Group) -> None:
        """Move a group with a sample or failure from in flight to done; else raise ValueError."""
        if not group.samples and not group.failures:
            raise ValueError(f"group {group.id!r} has no samples and no failures, needs at least one")
        with self._transaction():
            self._replace_samples(group)
            self._move([group.id], "done")

    def done(self, limit: int) -> list[Group]:
        """Return up to `limit` done groups, in the order of their prompts; none when `limit` is not positive."""
        with _database_errors(self.path):
            return self._groups("id IN (SELECT id FROM groups WHERE state = 'done' ORDER BY position LIMIT ?)", (max(limit, 0),))

    def consume(self, rejections: Mapping[str, str | None], *, step: int) -> None:
        """Mark done groups as consumed by `step` (from 1), by id with a reason for no training."""
        now = time.time()
        with self._transaction() as connection:
            connection.executemany(
                "UPDATE groups SET state = 'consumed', consumed_step = ?, trained = ?, rejection = ?, updated_at = ? WHERE id = ?",
                [(step, reason is None, reason, now, group_id) for group_id, reason in rejections.items()],
            )

    def unfinished(self, *, among: int) -> set[str]:
        """Return ids of unfinished groups among the first `among` not consumed, in prompt order.

        Raises ValueError when there are fewer than `among`.
        """
        with _database_errors(self.path):
            front = self._connection.execute(FRONT, (max(among, 0),)).fetchall()
        if len(front) < among:
            raise ValueError(f"{among} groups are asked for, the buffer holds {len(front)} that are not consumed")
        return {group_id for _, group_id, state in front if state != "done"}

    def renew(self, limit: int, *, oldest_version: int) -> int:
        """Drop all samples of groups with a token before `oldest_version`, of the first `limit` done.

        These groups become pending again, to be generated anew. Returns the number of such groups.
        Saved samples and answers of pending groups are dropped likewise, answer by answer.
        """
        front = "SELECT id FROM groups WHERE state = 'done' ORDER BY position LIMIT ?"
        stale = f"SELECT group_id FROM samples WHERE min_version < ? AND group_id IN ({front})"
        with self._transaction() as connection:
            found = [group_id for (group_id,) in connection.execute(f"{stale} GROUP BY group_id", (oldest_version, max(limit, 0)))]
            self._move(found, "pending")
            kept = "SELECT group_id FROM samples WHERE min_version < ? AND group_id IN (SELECT id FROM groups WHERE state = 'pending')"
            self._drop(group_id for (group_id,) in connection.execute(f"{kept} GROUP BY group_id", (oldest_version,)).fetchall())
            pending = "group_id IN (SELECT id FROM groups WHERE state = 'pending')"
            connection.execute(f"DELETE FROM answers WHERE min_version < ? AND {pending}", (oldest_version,))
        return len(found)

    def counts(self) -> BufferCounts:
        """Return the number of groups in each state."""
        with _database_errors(self.path):
            states = ("pending", "in_flight", "done")
            pending, in_flight, done = (int(self._connection.execute(COUNT, (state,)).fetchone()[0]) for state in states)
            # No group is ever removed, so the last position is the number of all.
            (total,) = self._connection.execute("SELECT coalesce(max(position), 0) FROM groups").fetchone()
        return BufferCounts(pending, in_flight, done, consumed=int(total) - pending - in_flight - done)

    def num_consumed(self, *, step: int) -> int:
        """Return the number of groups consumed up to `step`, the step of some checkpoint."""
        with _database_errors(self.path):
            (later,) = self._connection.execute(LATER, (step,)).fetchone()
        return self.counts().consumed - int(later)

    def recover(self) -> int:
        """Put every group in flight, now abandoned, back to pending; return their number."""
        with self._transaction() as connection:
            return connection.execute(
                "UPDATE groups SET state = 'pending', updated_at = ? WHERE state = 'in_flight'", (time.time(),)
            ).rowcount

    def rewind(self, step: int, *, version: int) -> dict[str, int]:
        """Go back to the checkpoint after `step` steps (1 to `step`), with weights `version`.

        Groups consumed by later steps are handed out again. Consumed and done groups become
        pending, and lose their samples, in three cases: a token comes from weights newer than
        `version`, which no longer exist; the group was pruned; or other settings made the group.
        Failed groups become pending as well, because the user may have fixed the cause: samples
        without a score are scored again, and failed trajectories are made anew. Call before
        generation starts. Returns the number of groups made by other settings, by those settings.
        """
        gone = "SELECT group_id FROM samples WHERE max_version > :version OR response_ids IS NULL UNION SELECT group_id FROM failures"
        waits = "(state <> 'consumed' OR consumed_step > :step)"
        clean = "consumed_step = NULL, trained = NULL, rejection = NULL, pruned = 0, updated_at = :now"
        values = {"step": step, "version": version, "now": time.time(), "made_by": self.made_by}
        with self._transaction() as connection:
            found = f"SELECT made_by, count(*) FROM groups WHERE {waits} AND made_by <> :made_by GROUP BY made_by"
            others = dict(connection.execute(found, values))
            anew = f"SELECT id FROM groups WHERE {waits} AND (made_by <> :made_by OR pruned > 0 OR id IN ({gone}))"
            dropped = [group_id for (group_id,) in connection.execute(anew, values)]
            failed = f"SELECT id FROM groups WHERE {waits} AND id IN (SELECT group_id FROM samples WHERE outcome <> 'scored')"
            unscored = [group_id for (group_id,) in connection.execute(failed, values)]
            connection.execute(f"UPDATE groups SET state = 'done', {clean} WHERE consumed_step > :step", values)
            # All samples of such a group: the samples left would count as the whole group.
            self._drop(dropped)
            self._move([*dropped, *unscored], "pending")
            connection.execute("DELETE FROM answers WHERE max_version > :version", values)
        return others

    def prune(self, step: int, *, keep: int) -> None:
        """Drop the token arrays of groups consumed up to `step`, the oldest kept checkpoint.

        Of each step the first `keep` groups stay whole except for experts, for readers of the run.
        All other columns stay.
        """
        if self._locked is not None:
            # The next run prunes: the checkpoint at the end of this run must not fail.
            return
        with self._transaction() as connection:
            found = connection.execute(PRUNABLE, (step,)).fetchall()
            connection.executemany(
                "UPDATE samples SET response_ids = NULL, loss_mask = NULL, rollout_log_probs = NULL, weight_versions = NULL, "
                "own_prompt_ids = NULL WHERE group_id = ?",
                [(group_id,) for number, group_id in found if number > keep],
            )
            connection.executemany("UPDATE samples SET routed_experts = NULL WHERE group_id = ?", [(group_id,) for _, group_id in found])
            connection.executemany(
                "UPDATE groups SET pruned = ?, made_by = NULL WHERE id = ?",
                [(1 + (number <= keep), group_id) for number, group_id in found],
            )

    def flush(self) -> None:
        """Write all moves so far to the disk, so that no power failure can undo them."""
        log = self.path.with_name(f"{self.path.name}-wal")
        # A checkpoint of SQLite would wait for readers of the file.
        if log.exists():
            with disk_errors(log):
                sync_file(log)
                sync_directory(log.parent)

    def close(self) -> None:
        """Flush and let another process open the buffer."""
        self.flush()
        self._connection.close()
        self._lock.close()

    def __enter__(self) -> "Buffer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _open(self) -> None:
        """Make the tables in a new file, or check that the file is a buffer."""
        # On file systems without WAL, SQLite stays with the rollback journal: as safe, but slower.
        self._connection.execute("PRAGMA journal_mode = WAL").fetchone()
        self._connection.execute("PRAGMA synchronous = NORMAL")
        (application,), (version,) = (self._connection.execute(f"PRAGMA {name}").fetchone() for name in ("application_id", "user_version"))
        (num_tables,) = self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if not num_tables:
            self._connection.executescript(f"BEGIN IMMEDIATE; {buffer_rows.SCHEMA} COMMIT;")
        elif application != buffer_rows.APPLICATION_ID:
            raise UserError(f"{self.path} is the database of another program; choose another run.directory")
        elif version != buffer_rows.SCHEMA_VERSION:
            raise UserError(
                f"{self.path} has schema version {version}, this release reads {buffer_rows.SCHEMA_VERSION}: choose another run.directory "
                "or use the release that wrote it"
            )

    def _move(self, group_ids: Sequence[str], state: str) -> None:
        now = time.time()
        self._connection.executemany(
            "UPDATE groups SET state = ?, updated_at = ? WHERE id = ?", [(state, now, group_id) for group_id in group_ids]
        )

    def _groups(self, condition: str, values: Sequence[Any]) -> list[Group]:
        """Read the matching groups with all their rows, in the order of prompts."""
        rows = self._connection.execute(
            f"SELECT {buffer_rows.GROUP_COLUMNS} FROM groups WHERE {condition} ORDER BY position", values
        ).fetchall()
        chosen = f"group_id IN (SELECT id FROM groups WHERE {condition})"
        prompts = {prompt.id: prompt for prompt in map(buffer_rows.read_prompt, rows)}
        samples: dict[str, list[Sample]] = {group_id: [] for group_id in prompts}
        failures: dict[str, list[Failure]] = {group_id: [] for group_id in prompts}
        for row in self._connection.execute(
            f"SELECT {buffer_rows.SAMPLE_COLUMNS} FROM samples WHERE {chosen} ORDER BY group_id, sample_index", values
        ):
            samples[row[0]].append(buffer_rows.read_sample(row, prompt=prompts[row[0]]))
        for group_id, *fields in self._connection.execute(f"SELECT * FROM failures WHERE {chosen} ORDER BY rowid", values):
            failures[group_id].append(Failure(*fields))
        return [Group(name, prompt, tuple(samples[name]), tuple(failures[name])) for name, prompt in prompts.items()]

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

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with _database_errors(self.path):
            self._begin()
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                # A full disk ends the transaction by itself.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def _begin(self) -> None:
        """Begin to write. Raises UserError when another program has kept the file locked for BUFFER_LOCK_S seconds, and from then on."""
        if self._locked is not None:
            raise self._locked
        for wait_s in (NAMED_S, BUFFER_LOCK_S):
            self._connection.execute(f"PRAGMA busy_timeout = {1000 * wait_s:.0f}")
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                if str(error) != LOCKED:
                    raise
            locked = f"another program has kept the buffer {self.path} locked for {wait_s:g} s; {_FIXES[LOCKED]}"
            if wait_s == NAMED_S:
                self._note(f"{locked}, or this run ends after {BUFFER_LOCK_S:g} s")
        self._locked = UserError(locked)
        raise self._locked


def check_buffer(path: Path) -> None:
    """Raise UserError for a file at `path` that is no database, by the file's first bytes.

    SQLite is not asked. A read-only SQLite leaves out the write-ahead log, and without the log the
    pages of a killed run may be inconsistent. With the log SQLite would write.
    """
    if not path.exists():
        return
    with disk_errors(path), path.open("rb") as file:
        head = file.read(len(_MAGIC))
    if head and head != _MAGIC:
        with _database_errors(path):
            raise sqlite3.DatabaseError("file is not a database")


def _claim(path: Path) -> TextIOWrapper:
    try:
        return claim(path.with_name(f"{path.name}.lock"), what=f"the buffer {path}")
    except OSError as error:
        raise UserError(
            f"the buffer {path} cannot be locked ({error.strerror}), needs a file system with locks; choose another run.directory"
        ) from error


@contextmanager
def _database_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.DatabaseError as error:
        if str(error) not in _FIXES:
            raise
        raise UserError(f"cannot use the buffer {path}: {error}; {_FIXES[str(error)]}") from error
