"""What the buffer keeps of failures and for readers, and what a foreign lock on it does."""

import dataclasses
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from buffer_parts import assert_same, done, fill, take_done

from megatron_rl.data.buffer import Buffer, BufferCounts
from megatron_rl.data.token_values import TOKEN_VALUES, TokenValues
from megatron_rl.errors import UserError
from megatron_rl.types import Failure, Prompt


@pytest.fixture
def buffer(tmp_path: Path) -> Iterator[Buffer]:
    with Buffer(tmp_path / "buffer.sqlite") as opened:
        yield opened


def test_a_rewind_tries_again_what_failed(buffer: Buffer, make_group: Any) -> None:
    """Of a, b and c, which no checkpoint knows, a is scored again, b is made anew, and c is left as it is; d is trained on."""
    a, b, c, d = make_group("a"), make_group("b", scored=True), make_group("c", scored=True), make_group("d")
    failures = (Failure("error", "ValueError: no", "Traceback"), Failure("timeout", "no samples after 5 s"))
    b, d = dataclasses.replace(b, failures=failures), dataclasses.replace(d, failures=failures[:1])
    fill(buffer, [d, a, b, c])
    assert_same(tuple(take_done(buffer, 1, step=1)), (d,))
    assert_same(tuple(take_done(buffer, 2, step=2)), (a, b))
    buffer.rewind(1)
    assert buffer.counts() == BufferCounts(pending=2, in_flight=0, done=1, consumed=1)
    first, second = buffer.take_pending(9)
    assert_same(buffer.finished(first), a)
    assert second.id == "b" and buffer.finished(second) is None
    assert_same(tuple(done(buffer, 9)), (c,))
    query = "SELECT group_id, cause, headline, trace FROM failures"
    assert buffer._connection.execute(query).fetchall() == [("d", "error", "ValueError: no", "Traceback")]


def test_a_group_of_failures_is_kept_and_an_empty_one_is_not(buffer: Buffer, make_group: Any) -> None:
    group = dataclasses.replace(make_group("a"), samples=(), failures=(Failure("contract", "it returned None"),))
    buffer.add_prompts([group.prompt])
    buffer.take_pending(1)
    with pytest.raises(ValueError, match="'a' has no samples and no failures, needs at least one"):
        buffer.put_done(dataclasses.replace(group, failures=()))
    buffer.put_samples(group)
    assert_same(buffer.finished(group.prompt), group)
    buffer.put_done(group)
    assert_same(tuple(done(buffer, 1)), (group,))


def test_prune_keeps_some_groups_of_each_step_whole(buffer: Buffer, make_group: Any) -> None:
    groups = [make_group(name, scored=True) for name in "abcdef"]
    fill(buffer, groups)
    take_done(buffer, 3, step=1)
    take_done(buffer, 2, step=2)
    take_done(buffer, 1, step=3)
    buffer.prune(2, keep=2)
    query = "SELECT id, pruned, response_ids IS NOT NULL FROM groups JOIN samples ON id = group_id WHERE sample_index = 0 ORDER BY position"
    assert buffer._connection.execute(query).fetchall() == [("a", 2, 1), ("b", 2, 1), ("c", 1, 0), ("d", 2, 1), ("e", 2, 1), ("f", 0, 1)]
    (first,) = buffer.groups(["a"])
    assert_same(first, groups[0])
    buffer.prune(3, keep=0)
    assert buffer._connection.execute(query).fetchall()[-1] == ("f", 1, 0)
    assert buffer._connection.execute(query).fetchall()[:2] == [("a", 2, 1), ("b", 2, 1)], "what was kept stays"


class Pauses:
    """In place of an event: in each pause before a piece another prompt is written, and in the last of `count` pruning ends."""

    def __init__(self, buffer: Buffer, prompts: Iterator[Prompt], count: int = 99) -> None:
        self._buffer, self._prompts, self.left, self.seen = buffer, prompts, count, 0

    def wait(self, seconds: float) -> bool:
        self.seen += self._buffer.add_prompts([next(self._prompts)])
        self.left -= 1
        return not self.left

    def set(self) -> None:
        self.left = 1


@pytest.mark.parametrize("until", range(1, 8))
def test_prune_lets_others_write_and_goes_on_where_it_ended(buffer: Buffer, make_group: Any, until: int) -> None:
    """What is kept does not depend on where an earlier call ended: groups, and the records of whole steps alone."""
    fill(buffer, [make_group(str(number), scored=True) for number in range(11)])
    for step, count in ((1, 5), (2, 2), (3, 3), (4, 1)):
        take_done(buffer, count, step=step)
    connection, prompts = buffer._connection, (make_group(f"more {number}").prompt for number in range(99))
    connection.execute("UPDATE samples SET routed_format = '<u1 1 1', routed_experts = x'00'")
    buffer._closing = pauses = Pauses(buffer, prompts, until)  # type: ignore[assignment]
    buffer.prune(3, keep=2)
    found = "SELECT id, pruned FROM groups WHERE state = 'consumed' AND pruned = 0 ORDER BY position"
    assert pauses.seen == min(until, 5), "a piece for each of 2 groups and for what is kept of 3 steps"
    assert len(connection.execute(found).fetchall()) == [11, 10, 9, 6, 4, 1, 1][until - 1]
    pauses.left = 99
    buffer.prune(3, keep=2)
    query = (
        "SELECT group_id, pruned, count(response_ids) > 0, count(routed_experts) > 0 FROM samples JOIN groups ON id = group_id "
        "GROUP BY 1 ORDER BY position"
    )
    kept, gone, whole = (2, 1, 0), (1, 0, 0), (2, 1, 1)
    expected = [kept, kept, gone, gone, gone, whole, whole, kept, kept, gone, (0, 1, 1)]
    assert connection.execute(query).fetchall() == [(str(number), *each) for number, each in enumerate(expected)]


def test_prune_works_in_any_thread_until_the_buffer_is_closed(tmp_path: Path, make_group: Any) -> None:
    with ThreadPoolExecutor() as pool, Buffer(tmp_path / "buffer.sqlite") as buffer:
        fill(buffer, [make_group(name, scored=True) for name in "ab"])
        take_done(buffer, 2, step=1)
        pool.submit(buffer.prune, 1, keep=0).result()
        assert buffer._connection.execute("SELECT count(response_ids) FROM samples").fetchone() == (0,)
        assert buffer._connection.execute("PRAGMA secure_delete").fetchone() == (2,), "zeros take 20 times as long"
        buffer._pruning.acquire()
        closing = pool.submit(buffer._closing.wait)
        ended = pool.submit(lambda: (closing.result(), buffer._pruning.release()))
    assert ended.done() and closing.result(), "a call that goes on ends before the file is another's"
    with sqlite3.connect(tmp_path / "buffer.sqlite") as other:
        other.execute("UPDATE groups SET pruned = 0")
    buffer.prune(1, keep=0)
    with sqlite3.connect(tmp_path / "buffer.sqlite") as other:
        assert other.execute("SELECT sum(pruned) FROM groups").fetchone() == (0,), "and one that comes late does nothing"


def test_prune_keeps_groups_with_values_of_tokens_first(buffer: Buffer, make_group: Any) -> None:
    groups = [make_group(name, scored=True) for name in "abc"]
    fill(buffer, groups)
    take_done(buffer, 3, step=1)
    (sample, *_) = groups[1].samples
    begin = len(sample.prompt.token_ids)
    values = TokenValues(np.array([7]), np.array([begin]), np.ones((len(TOKEN_VALUES), 1), np.float32))
    buffer.put_token_values({7: sample, 8: groups[2].samples[0]}, values)
    buffer.prune(1, keep=1)
    query = "SELECT group_id, sum(response_ids IS NOT NULL), sum(token_values IS NOT NULL) FROM samples GROUP BY 1"
    assert buffer._connection.execute(query).fetchall() == [("a", 0, 0), ("b", 2, 1), ("c", 0, 0)]
    fill(buffer, [make_group("d", scored=True)])
    (again,) = take_done(buffer, 1, step=2)
    buffer.put_token_values({7: again.samples[0]}, values)
    buffer.rewind(1)
    assert buffer._connection.execute(query).fetchall()[1:] == [("b", 2, 1), ("c", 0, 0), ("d", 2, 0)], "to be trained on again"


def test_a_rewind_writes_no_sample_that_it_keeps(buffer: Buffer, make_group: Any) -> None:
    """Samples have megabytes, and those of all steps since the checkpoint would be written once more, while the run waits."""
    fill(buffer, [make_group(name, scored=True) for name in "abc"])
    take_done(buffer, 1, step=2)
    take_done(buffer, 2, step=3)
    before = buffer._connection.total_changes
    assert buffer.rewind(1) == {} and buffer.counts().done == 3
    assert buffer._connection.total_changes - before == 3, "the groups alone"


def test_values_of_tokens_are_found_by_row_whatever_their_order() -> None:
    generator = np.random.default_rng(0)
    order = generator.permutation(12)
    rows, offsets = np.repeat([3, 5, 9], 4)[order], np.tile([2, 3, 4, 6], 3)[order]
    values = np.tile(10.0 * rows + offsets, (len(TOKEN_VALUES), 1)).astype(np.float32)
    halves = [TokenValues(rows[part], offsets[part], values[:, part]) for part in (slice(5), slice(5, None))]
    found = TokenValues.joined(halves)
    assert found.rows.tolist() == sorted(rows), "else every row looks at all tokens"
    for row in (3, 5, 9):
        table = found.of_row(row, begin=2, length=5)
        assert table is not None
        np.testing.assert_array_equal(table, np.tile([10.0 * row + 2, 10.0 * row + 3, 10.0 * row + 4, np.nan, 10.0 * row + 6], (6, 1)))
    assert found.of_row(4, begin=2, length=5) is None and found.of_row(10, begin=2, length=5) is None


@pytest.fixture
def locked(buffer: Buffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A connection of another program in the midst of a transaction, which the buffer waits for in short turns."""
    monkeypatch.setattr("megatron_rl.data.sqlite_file.NAMED_S", 0.02)
    monkeypatch.setattr("megatron_rl.data.sqlite_file.BUFFER_LOCK_S", 0.5)
    with closing(sqlite3.connect(tmp_path / "buffer.sqlite", isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield other


def test_a_foreign_lock_is_named_once_and_waited_for(buffer: Buffer, locked: sqlite3.Connection, make_group: Any) -> None:
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        locked.execute("COMMIT")

    buffer._note = note
    assert buffer.add_prompts([make_group("a").prompt]) == 1
    (text,) = notes
    assert "another program has kept the buffer" in text and "locked for 0.02 s" in text
    assert text.endswith("end the other program's transaction on this file, or this run ends after 0.5 s")


def test_a_foreign_lock_ends_every_write_at_one_deadline(
    buffer: Buffer, locked: sqlite3.Connection, make_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"another program has kept the buffer .* locked for 0\.5 s; end the other program's"):
        buffer.add_prompts([make_group("a").prompt])
    # Waits no second time.
    monkeypatch.setattr("megatron_rl.data.sqlite_file.BUFFER_LOCK_S", 100)
    with pytest.raises(UserError, match=r"locked for 0\.5 s"):
        buffer.recover()
    # What a last checkpoint asks for.
    buffer.prune(1, keep=0)
    buffer.flush()
    assert buffer.num_consumed(step=0) == buffer.counts().total == 0


def test_a_rewind_makes_distrusted_groups_anew(buffer: Buffer, make_group: Any) -> None:
    groups = [make_group(name, scored=True) for name in "abcd"]
    fill(buffer, groups)
    take_done(buffer, 1, step=1)
    take_done(buffer, 2, step=2)
    buffer.distrust(step=2)
    assert buffer.counts() == BufferCounts(pending=1, in_flight=0, done=0, consumed=3)
    assert buffer.rewind(1) == {}
    assert buffer.counts() == BufferCounts(pending=3, in_flight=0, done=0, consumed=1)
    assert [prompt.id for prompt in buffer.take_pending(9)] == ["b", "c", "d"]
    for group in groups[1:]:
        assert buffer.finished(group.prompt) is None
        buffer.put_done(group)
    take_done(buffer, 3, step=2)
    assert buffer.rewind(1) == {} and buffer.counts().done == 3, "what was made anew is trusted"
