"""The durable buffer: groups move pending -> in flight -> done -> consumed, each move a transaction in one SQLite file.

`kill -9` at any moment loses no finished sample and hands none out a second time. Against a power failure or a kernel crash the last moves
are only safe once `flush` has run (synchronous=NORMAL: no wait for the disk per group), so the loop calls it before it writes a
checkpoint: what may then be lost is younger than the checkpoint that a resumed run starts from, and is generated again.

While a run is live anyone may read the file, for example with the `sqlite3` shell; only the run writes to it.

    groups    one row per prompt.
              position           order of arrival, the order in which groups are handed out; begins behind those of a buffer that is gone
              id                 the prompt's id
              state              pending | in_flight | done | consumed
              consumed_step      the step that took it, from 1 on as the console counts; NULL unless consumed
              trained            1 when that step trained on it, 0 when it rejected it; NULL unless consumed, or where a release noted it
                                 that did not tell
              rejection          why it was not trained on; NULL unless trained is 0
              prompt_text, label what the model was asked and the reference answer
              prompt_ids         token ids (array of <i4)
              metadata           JSON
              pruned             1 when `prune` has dropped the token arrays of its samples
              updated_at         seconds since 1970 of the last move
              made_by            the settings that decided what its samples are like, as JSON; NULL without samples and after `prune`
    samples   one row per finished response; (group_id, sample_index) is unique.
              outcome            scored | error | timeout; NULL when no reward was asked for
              reward             REAL, only when scored; reward_message, reward_components (JSON)
              stop_reason        stop | length | abort
              response_text, num_tokens, num_trainable_tokens
              min_version, max_version   of the weights that made its tokens; NULL when no engine made any
              response_ids, weight_versions (arrays of <i4), rollout_log_probs (<f4), loss_mask (u1); NULL after `prune`
              metadata           JSON
              routed_experts     experts of its first tokens, [tokens, layers, experts of a token]; NULL without a record or after
              routed_format      `prune`. routed_format is the type and the last two sizes, such as "<u1 48 8"
              trajectory         samples of a group with the same number are one attempt, with one reward; NULL: an attempt by itself
              own_prompt_text    what the model saw before this response, where that is not the group's prompt; NULL where it is, and
              own_prompt_ids     own_prompt_ids after `prune`
    answers   one row per answer of an engine for a group in flight; empty as soon as its samples are there.
              request            what was asked, hashed
              content            the answer, in the form of rollout/kept_answers
              min_version, max_version   of the weights that made its tokens

    select consumed_step, sum(trained), avg(reward), avg(num_tokens) from samples join groups on id = group_id where outcome = 'scored'
    group by 1;
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
from megatron_rl.deadlines import BUFFER_LOCK_S
from megatron_rl.errors import UserError
from megatron_rl.files import claim, disk_errors, sync_directory, sync_file
from megatron_rl.types import Group, Prompt, Sample

BUFFER_FILE = "buffer.sqlite"
"""Its name in the directory of a run."""
# SQLite's words (the same in every version; error codes are only in Python 3.11) and what the user can do.
_FIXES = {
    "database or disk is full": "free space on this disk",
    "disk I/O error": "check the disk and its quota",
    "file is not a database": "choose another run.directory, or move this file away: groups since the checkpoint are made again",
    "database disk image is malformed": "restore the file from a copy, or choose another run.directory",
    "attempt to write a readonly database": "give yourself write permission or choose another run.directory",
    "unable to open database file": "give yourself write permission or choose another run.directory",
    "database is locked": "end the other program's transaction on this file",
}

# What follows costs as much as the groups that wait, however many were consumed before. The index is named so that SQLite never reads the
# table instead, whose own order is that of `position`, too.
FRONT = "SELECT position, id, state FROM groups INDEXED BY groups_waiting WHERE state <> 'consumed' ORDER BY position LIMIT ?"
COUNT = "SELECT count(*) FROM groups WHERE state = ?"
PRUNABLE = "SELECT id FROM groups INDEXED BY groups_unpruned WHERE pruned = 0 AND consumed_step <= ?"
LATER = "SELECT count(*) FROM groups INDEXED BY groups_unpruned WHERE pruned = 0 AND consumed_step > ?"


def _never(_: Group) -> None:
    """No group is rejected."""


@dataclass(frozen=True, slots=True)
class BufferCounts:
    """Groups in each state."""

    pending: int
    in_flight: int
    done: int
    consumed: int

    @property
    def waiting(self) -> int:
        """Groups that are not consumed."""
        return self.pending + self.in_flight + self.done

    @property
    def total(self) -> int:
        """All groups."""
        return self.waiting + self.consumed


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What an engine answered to `request`, by weights from `min_version` to `max_version`."""

    request: str
    content: bytes
    min_version: int
    max_version: int


class Buffer:
    """The buffer of one run, held by one process at a time and used by one thread of it.

    Opening puts groups that a killed process had in flight back to pending. Every method raises UserError when the disk is full
    or the file cannot be used.
    """

    def __init__(self, path: Path, *, made_by: str = "{}") -> None:
        """Open the file at `path`, new or not. `made_by` is what the samples that come from now on are made by, see the column."""
        self._path, self.made_by = path, made_by
        self._num_gone = 0
        with ExitStack() as undo:
            lock = undo.enter_context(closing(_claim(path)))
            with _database_errors(self._path):
                self._connection = undo.enter_context(closing(sqlite3.connect(path, timeout=BUFFER_LOCK_S, isolation_level=None)))
                self._open()
                (first,) = self._connection.execute("SELECT min(position) FROM groups").fetchone()
            self._num_gone = 0 if first is None else int(first) - 1
            self.recover()
            self._lock = lock
            undo.pop_all()

    @property
    def num_gone(self) -> int:
        """Groups of a buffer that is gone, behind which those of this one are counted; they count as consumed."""
        return self._num_gone

    def begin_behind(self, num_groups: int) -> None:
        """Count the groups that come from those of a buffer that is gone; this one has none yet."""
        assert not self.counts().total, "groups have their positions"
        self._num_gone = num_groups

    def add_prompts(self, prompts: Iterable[Prompt]) -> int:
        """Add prompts as pending groups and return how many are new.

        A prompt that is already here stays where it is, so a resumed run may add the prompts of its step again; a pending one takes the
        label and metadata that it comes with. Raises UserError when one was consumed already or when the same id now has other tokens: the
        file of prompts has changed.
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
                        f"prompt {prompt.id!r} has other tokens than in {self._path}: the data file or the tokenizer has changed; "
                        "restore it or choose another run.directory"
                    )
                elif known[0] == "consumed":
                    raise UserError(
                        f"prompt {prompt.id!r} was already trained on at step {known[2]} according to {self._path}; "
                        "resume from the checkpoint of that run or choose another run.directory"
                    )
                elif known[0] == "pending":
                    connection.execute(buffer_rows.UPDATE_GROUP, (prompt.label, row[4], prompt.id))
            return new

    def take_pending(self, limit: int, *, among: int | None = None) -> list[Prompt]:
        """Put up to `limit` pending groups in flight, oldest first, and return their prompts; none when `limit` is not positive.

        With `among` only of the first so many groups that are not consumed.
        """
        chosen = f"state = 'pending' AND position IN (SELECT position FROM ({FRONT})) ORDER BY position LIMIT ?"
        # SQLite takes a negative limit for none at all.
        limits = (-1 if among is None else max(among, 0), max(limit, 0))
        with self._transaction() as connection:
            found = connection.execute(f"SELECT {buffer_rows.GROUP_COLUMNS} FROM groups WHERE {chosen}", limits).fetchall()
            prompts = [buffer_rows.read_prompt(row) for row in found]
            self._move([prompt.id for prompt in prompts], "in_flight")
        return prompts

    def put_samples(self, samples: Sequence[Sample], *, prompt: Prompt) -> None:
        """Keep what is generated of a group in flight, in place of what was kept before, so that it survives the process.

        All or nothing. Raises ValueError as `put_done`.
        """
        rows = [buffer_rows.sample_row(sample, prompt=prompt) for sample in samples]
        with self._transaction():
            self._check_in_flight(prompt.id)
            self._replace_samples(prompt.id, rows)

    def finished_samples(self, prompt: Prompt) -> tuple[Sample, ...]:
        """What `put_samples` has kept of a prompt in flight, by index: an interrupted run need not generate it again."""
        with self._transaction() as connection:
            found = connection.execute(
                f"SELECT {buffer_rows.SAMPLE_COLUMNS} FROM samples WHERE group_id = ? ORDER BY sample_index", (prompt.id,)
            )
            return tuple(buffer_rows.read_sample(row, prompt=prompt) for row in found)

    def put_answers(self, group_id: str, answers: Iterable[Answer]) -> None:
        """Keep what engines answered for a group in flight until its samples are kept or done. Raises ValueError as `put_done`."""
        rows = [(group_id, answer.request, answer.content, answer.min_version, answer.max_version) for answer in answers]
        with self._transaction() as connection:
            self._check_in_flight(group_id)
            connection.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?)", rows)

    def answers(self, group_id: str) -> dict[str, bytes]:
        """What `put_answers` has kept of a group, by request."""
        with _database_errors(self._path):
            return dict(self._connection.execute("SELECT request, content FROM answers WHERE group_id = ?", (group_id,)))

    def put_done(self, group: Group) -> None:
        """Keep a finished group: in flight -> done. Raises ValueError when it is not in flight or has no sample."""
        if not group.samples:
            raise ValueError(f"group {group.id!r} has no samples, needs at least one")
        encoded = [buffer_rows.sample_row(sample, prompt=group.prompt) for sample in group.samples]
        with self._transaction():
            self._check_in_flight(group.id)
            self._replace_samples(group.id, encoded)
            self._move([group.id], "done")

    def take_done(self, limit: int, *, step: int, rejection: Callable[[Group], str | None] = _never) -> list[Group]:
        """Hand out up to `limit` done groups, in the order of their prompts, as consumed by `step`; none when `limit` is not positive.

        `rejection` says why the step does not train on a group, None when it does. Steps count from 1.
        """
        chosen = "SELECT id FROM groups WHERE state = 'done' ORDER BY position LIMIT ?"
        with self._transaction() as connection:
            found = connection.execute(
                f"SELECT {buffer_rows.GROUP_COLUMNS} FROM groups WHERE id IN ({chosen}) ORDER BY position", (max(limit, 0),)
            ).fetchall()
            prompts = [buffer_rows.read_prompt(row) for row in found]
            by_id = {prompt.id: prompt for prompt in prompts}
            samples: dict[str, list[Sample]] = {prompt.id: [] for prompt in prompts}
            for row in connection.execute(
                f"SELECT {buffer_rows.SAMPLE_COLUMNS} FROM samples WHERE group_id IN ({chosen}) ORDER BY group_id, sample_index",
                (max(limit, 0),),
            ):
                samples[row[0]].append(buffer_rows.read_sample(row, prompt=by_id[row[0]]))
            groups = [Group(id=prompt.id, prompt=prompt, samples=tuple(samples[prompt.id])) for prompt in prompts]
            self._consume({group.id: rejection(group) for group in groups}, step=step)
        return groups

    def unfinished(self, *, among: int) -> set[str]:
        """Ids of those groups that are not done, of the first `among` in the order of their prompts that are not consumed.

        Raises ValueError when there are fewer than `among`.
        """
        with _database_errors(self._path):
            front = self._connection.execute(FRONT, (max(among, 0),)).fetchall()
        if len(front) < among:
            raise ValueError(f"{among} groups are asked for, the buffer holds {len(front)} that are not consumed")
        return {group_id for _, group_id, state in front if state != "done"}

    def renew(self, limit: int, *, oldest_version: int) -> int:
        """Drop the samples of groups, among the first `limit` done ones, that have a token of weights older than `oldest_version`.

        Those groups become pending again, to be generated anew; returns how many there were. What is kept of pending groups goes likewise,
        answer by answer.
        """
        front = "SELECT id FROM groups WHERE state = 'done' ORDER BY position LIMIT ?"
        stale = f"SELECT group_id FROM samples WHERE min_version < ? AND group_id IN ({front})"
        with self._transaction() as connection:
            found = [group_id for (group_id,) in connection.execute(f"{stale} GROUP BY group_id", (oldest_version, max(limit, 0)))]
            connection.executemany("DELETE FROM samples WHERE group_id = ?", [(group_id,) for group_id in found])
            self._move(found, "pending")
            kept = "SELECT group_id FROM samples WHERE min_version < ? AND group_id IN (SELECT id FROM groups WHERE state = 'pending')"
            connection.execute(f"DELETE FROM samples WHERE group_id IN ({kept})", (oldest_version,))
            pending = "group_id IN (SELECT id FROM groups WHERE state = 'pending')"
            connection.execute(f"DELETE FROM answers WHERE min_version < ? AND {pending}", (oldest_version,))
        return len(found)

    def counts(self) -> BufferCounts:
        """How many groups are in each state."""
        with _database_errors(self._path):
            states = ("pending", "in_flight", "done")
            pending, in_flight, done = (int(self._connection.execute(COUNT, (state,)).fetchone()[0]) for state in states)
            # No group is ever removed, so the last position is the number of all.
            (total,) = self._connection.execute("SELECT coalesce(max(position), 0) FROM groups").fetchone()
        return BufferCounts(pending, in_flight, done, consumed=int(total) - pending - in_flight - done)

    def num_consumed(self, *, step: int) -> int:
        """How many groups the steps up to `step`, to which a checkpoint may come back, have consumed."""
        with _database_errors(self._path):
            (later,) = self._connection.execute(LATER, (step,)).fetchone()
        return self.counts().consumed - int(later)

    def recover(self) -> int:
        """Put every group in flight back to pending, which are not generated any more, and return how many there were."""
        with self._transaction() as connection:
            return connection.execute(
                "UPDATE groups SET state = 'pending', updated_at = ? WHERE state = 'in_flight'", (time.time(),)
            ).rowcount

    def rewind(self, step: int, *, version: int) -> dict[str, int]:
        """Go back to the checkpoint made after `step` steps (1 to `step`), when the weights had `version`.

        Groups consumed by later steps are handed out again. Samples with a token of weights newer than `version`, which no
        longer exist, or pruned, or made by other settings than the present ones, are dropped; their groups become pending, all others done.
        Call it before generation starts. Returns how many groups other settings had made, by those settings.
        """
        gone = "SELECT group_id FROM samples WHERE max_version > :version OR response_ids IS NULL"
        undone = "(state = 'done' OR consumed_step > :step)"
        waits = "(state <> 'consumed' OR consumed_step > :step)"
        clean = "consumed_step = NULL, trained = NULL, rejection = NULL, pruned = 0, updated_at = :now"
        values = {"step": step, "version": version, "now": time.time(), "made_by": self.made_by}
        with self._transaction() as connection:
            found = f"SELECT made_by, count(*) FROM groups WHERE {waits} AND made_by <> :made_by GROUP BY made_by"
            others = dict(connection.execute(found, values))
            connection.execute(
                f"UPDATE groups SET state = 'pending', {clean} WHERE {undone} AND (made_by <> :made_by OR id IN ({gone}))", values
            )
            connection.execute(f"UPDATE groups SET state = 'done', {clean} WHERE consumed_step > :step", values)
            waiting = "SELECT id FROM groups WHERE state IN ('pending', 'in_flight')"
            connection.execute(
                # The others of such a group, too: they count as all that there is of it.
                f"DELETE FROM samples WHERE group_id IN ({waiting}) "
                f"AND group_id IN ({gone} UNION SELECT id FROM groups WHERE made_by <> :made_by)",
                values,
            )
            connection.execute(f"UPDATE groups SET made_by = NULL WHERE id IN ({waiting}) AND made_by <> :made_by", values)
            connection.execute("DELETE FROM answers WHERE max_version > :version", values)
        return others

    def prune(self, step: int) -> None:
        """Drop the token arrays of groups that the steps up to `step` consumed, to which no kept checkpoint goes back; the rest stays."""
        with self._transaction() as connection:
            found = connection.execute(PRUNABLE, (step,)).fetchall()
            connection.executemany(
                "UPDATE samples SET response_ids = NULL, loss_mask = NULL, rollout_log_probs = NULL, weight_versions = NULL, "
                "routed_experts = NULL, own_prompt_ids = NULL WHERE group_id = ?",
                found,
            )
            connection.executemany("UPDATE groups SET pruned = 1, made_by = NULL WHERE id = ?", found)

    def flush(self) -> None:
        """Bring every move so far to the disk itself, so that a power failure cannot undo it."""
        log = self._path.with_name(f"{self._path.name}-wal")
        # Not by a checkpoint of SQLite, which would wait for readers of the file.
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
        """Make the tables in a new file, bring those of an older version up to this one, or check that the file is a buffer."""
        # Where a file system cannot do WAL, SQLite stays with its rollback journal: as safe, slower.
        self._connection.execute("PRAGMA journal_mode = WAL").fetchone()
        self._connection.execute("PRAGMA synchronous = NORMAL")
        (application,), (version,) = (self._connection.execute(f"PRAGMA {name}").fetchone() for name in ("application_id", "user_version"))
        (num_tables,) = self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if not num_tables:
            self._connection.executescript(f"BEGIN IMMEDIATE; {buffer_rows.SCHEMA} COMMIT;")
        elif application != buffer_rows.APPLICATION_ID:
            raise UserError(f"{self._path} is the database of another program; choose another run.directory")
        elif version in buffer_rows.UPGRADES:
            steps = "".join(buffer_rows.UPGRADES[old] for old in sorted(buffer_rows.UPGRADES) if old >= version)
            self._connection.executescript(f"BEGIN IMMEDIATE; {steps} COMMIT;")
        elif version != buffer_rows.SCHEMA_VERSION:
            raise UserError(
                f"{self._path} has schema version {version}, this release reads {buffer_rows.SCHEMA_VERSION}: choose another run.directory "
                "or use the release that wrote it"
            )

    def _move(self, group_ids: Sequence[str], state: str) -> None:
        now = time.time()
        self._connection.executemany(
            "UPDATE groups SET state = ?, updated_at = ? WHERE id = ?", [(state, now, group_id) for group_id in group_ids]
        )

    def _replace_samples(self, group_id: str, rows: Sequence[tuple[Any, ...]]) -> None:
        for table in ("samples", "answers"):
            self._connection.execute(f"DELETE FROM {table} WHERE group_id = ?", (group_id,))
        self._connection.executemany(buffer_rows.INSERT_SAMPLE, rows)
        self._connection.execute("UPDATE groups SET made_by = ? WHERE id = ?", (self.made_by, group_id))

    def _consume(self, rejections: Mapping[str, str | None], *, step: int) -> None:
        now = time.time()
        self._connection.executemany(
            "UPDATE groups SET state = 'consumed', consumed_step = ?, trained = ?, rejection = ?, updated_at = ? WHERE id = ?",
            [(step, reason is None, reason, now, group_id) for group_id, reason in rejections.items()],
        )

    def _check_in_flight(self, group_id: str) -> None:
        found = self._connection.execute("SELECT state FROM groups WHERE id = ?", (group_id,)).fetchone()
        if found is None or found[0] != "in_flight":
            raise ValueError(f"group {group_id!r} is {found[0] if found else 'not in the buffer'}, needs to be in_flight")

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with _database_errors(self._path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                # A full disk ends the transaction by itself.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise


def check_buffer(path: Path) -> None:
    """Raise UserError for a file at `path` that is no database, as its first page says. Writes nothing, also where a run has the file."""
    if path.exists():
        with _database_errors(path), closing(sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True)) as connection:
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()


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
