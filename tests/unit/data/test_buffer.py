import dataclasses
import errno
import fcntl
import os
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from buffer_parts import assert_same, fill, finished_samples, take_done, unfinished

from megatron_rl.data import buffer as buffer_module
from megatron_rl.data.buffer import COUNT, FRONT, LATER, PRUNABLE, Answer, Buffer, BufferCounts
from megatron_rl.errors import UserError
from megatron_rl.types import Group, Prompt, Sample


@pytest.fixture
def buffer(tmp_path: Path) -> Iterator[Buffer]:
    with Buffer(tmp_path / "buffer.sqlite") as opened:
        yield opened


def test_a_group_passes_through_all_states_and_comes_back_equal(buffer: Buffer, make_group: Any) -> None:
    groups = [make_group("0-1"), make_group("0-0", num_samples=3, length=1)]
    assert buffer.add_prompts(group.prompt for group in groups) == 2
    assert buffer.take_pending(0) == buffer.take_pending(-3) == []
    assert buffer.counts() == BufferCounts(pending=2, in_flight=0, done=0, consumed=0)
    (first,) = buffer.take_pending(1)
    assert_same(first, groups[0].prompt)
    assert buffer.counts() == BufferCounts(pending=1, in_flight=1, done=0, consumed=0)
    assert [prompt.id for prompt in buffer.take_pending(9)] == ["0-0"]
    assert buffer.take_pending(9) == []
    buffer.put_done(groups[1])
    buffer.put_done(groups[0])
    assert buffer.counts() == BufferCounts(pending=0, in_flight=0, done=2, consumed=0)
    taken = take_done(buffer, 9, step=4)
    assert_same(tuple(taken), tuple(groups))
    assert take_done(buffer, 9, step=4) == []
    assert buffer.counts() == BufferCounts(pending=0, in_flight=0, done=0, consumed=2)


def test_messages_of_a_chat_return(buffer: Buffer) -> None:
    chat = ({"role": "system", "content": "Brief."}, {"role": "user", "content": "Hï"})
    tokens = np.array([1])
    buffer.add_prompts([Prompt("chat", tokens, "as text", messages=chat), Prompt("text", tokens, "Hï")])
    assert [prompt.messages for prompt in buffer.take_pending(2)] == [chat, ({"role": "user", "content": "Hï"},)]
    with sqlite3.connect(buffer.path) as connection:
        rows = connection.execute("SELECT messages FROM groups ORDER BY position").fetchall()
    assert rows == [('[{"role": "system", "content": "Brief."}, {"role": "user", "content": "Hï"}]',), (None,)]


def test_only_the_first_unconsumed_groups_are_handed_out(buffer: Buffer, make_group: Any) -> None:
    groups = [make_group(name) for name in "abcdef"]
    fill(buffer, groups[:1])
    take_done(buffer, 1, step=0)
    buffer.add_prompts(group.prompt for group in groups[1:])
    # In front are b, c, d, whatever state they are in.
    assert [prompt.id for prompt in buffer.take_pending(2, among=3)] == ["b", "c"]
    buffer.put_done(groups[2])
    assert [len(unfinished(buffer, number)) for number in (0, 1, 2, 5)] == [0, 1, 1, 4]
    assert [prompt.id for prompt in buffer.take_pending(9, among=3)] == ["d"]
    assert buffer.take_pending(9, among=3) == buffer.take_pending(9, among=-1) == []
    buffer.put_done(groups[1])
    assert [len(unfinished(buffer, number)) for number in (1, 2, 3)] == [0, 0, 1]
    assert [prompt.id for prompt in buffer.take_pending(9)] == ["e", "f"]


def test_finished_groups_that_are_too_old_are_made_anew(buffer: Buffer, make_group: Any) -> None:
    fill(buffer, [make_group(name, version=version) for name, version in (("a", 3), ("b", 5), ("c", 4), ("d", 3))])
    assert buffer.renew(3, oldest_version=3) == 0
    assert buffer.renew(3, oldest_version=4) == 1, "d is not among the first three"
    assert buffer.counts() == BufferCounts(pending=1, in_flight=0, done=3, consumed=0)
    (prompt,) = buffer.take_pending(9)
    assert prompt.id == "a"
    assert finished_samples(buffer, prompt) == ()
    buffer.put_done(make_group("a", version=6))
    assert [group.id for group in take_done(buffer, 9, step=6)] == ["a", "b", "c", "d"]


def test_what_is_kept_of_a_pending_group_goes_when_it_is_too_old(buffer: Buffer, make_group: Any) -> None:
    old, young = make_group("old", version=3), make_group("young", version=4)
    buffer.add_prompts([old.prompt, young.prompt])
    buffer.take_pending(2)
    buffer.put_samples(old)
    buffer.put_samples(young)
    buffer.recover()
    assert buffer.renew(2, oldest_version=4) == 0
    assert [len(finished_samples(buffer, prompt)) for prompt in buffer.take_pending(2)] == [0, len(young.samples)]


def test_moves_that_skip_a_state_are_refused_and_change_nothing(buffer: Buffer, make_group: Any) -> None:
    group = make_group("a")
    with pytest.raises(ValueError, match="not in the buffer"):
        buffer.put_done(group)
    buffer.add_prompts([group.prompt])
    for move in (
        lambda: buffer.put_done(group),
        lambda: buffer.put_samples(group),
    ):
        with pytest.raises(ValueError, match="'a' is pending, needs to be in_flight"):
            move()
    buffer.take_pending(1)
    with pytest.raises(ValueError, match="no samples"):
        buffer.put_done(Group(id="a", prompt=group.prompt, samples=()))
    buffer.put_done(group)
    with pytest.raises(ValueError, match="'a' is done"):
        buffer.put_done(group)
    assert len(take_done(buffer, 1, step=0)[0].samples) == 2


def test_adding_prompts_again_is_harmless_unless_they_changed(buffer: Buffer, make_group: Any) -> None:
    group = make_group("a")
    assert buffer.add_prompts([group.prompt]) == 1
    assert buffer.add_prompts([group.prompt, make_group("b").prompt]) == 1
    changed = Prompt(id="a", token_ids=[1, 2], text="other")
    with pytest.raises(UserError, match="prompt 'a' has other tokens"):
        buffer.add_prompts([make_group("c").prompt, changed])
    assert buffer.counts().pending == 2, "the failed call must not leave c behind"
    buffer.add_prompts([dataclasses.replace(group.prompt, label="present", metadata={"level": 2})])
    (taken,) = buffer.take_pending(1)
    assert (taken.label, taken.metadata) == ("present", {"level": 2}), "what waits is what the settings of now say"
    buffer.put_done(dataclasses.replace(group, prompt=taken))
    buffer.add_prompts([group.prompt])
    assert take_done(buffer, 1, step=5)[0].prompt.label == "present", "its samples were made with that"
    with pytest.raises(UserError, match="already trained on at step 5"):
        buffer.add_prompts([group.prompt])


def test_reopening_recovers_groups_in_flight_and_their_samples(tmp_path: Path, make_group: Any) -> None:
    path = tmp_path / "buffer.sqlite"
    group = make_group("a", num_samples=3)
    with Buffer(path) as buffer:
        buffer.add_prompts([group.prompt, make_group("b").prompt])
        buffer.take_pending(2)
        buffer.put_samples(dataclasses.replace(group, samples=(group.samples[2], group.samples[0])))
    with Buffer(path) as buffer:
        assert buffer.counts() == BufferCounts(pending=2, in_flight=0, done=0, consumed=0)
        (prompt, other) = buffer.take_pending(2)
        assert_same(finished_samples(buffer, prompt), (group.samples[0], group.samples[2]))
        assert finished_samples(buffer, other) == ()


def test_answers_are_kept_until_samples_exist_or_weights_are_old(tmp_path: Path, make_group: Any) -> None:
    groups = [make_group(name) for name in "abcd"]

    def kept(buffer: Buffer) -> dict[str, list[str]]:
        return {name: sorted(buffer.answers(name)) for name in "abcd"}

    with Buffer(tmp_path / "buffer.sqlite") as buffer:
        buffer.add_prompts(group.prompt for group in groups)
        buffer.take_pending(3)
        for name in "abc":
            versions = {"old": (1, 1), "aged": (1, 3), "mixed": (2, 4), "new": (3, 3)}
            buffer.put_answers(
                name,
                [Answer(request=request, content=b"x", min_version=first, max_version=last) for request, (first, last) in versions.items()],
            )
        buffer.put_answers("a", [Answer(request="new", content=b"y", min_version=3, max_version=3)])
        with pytest.raises(ValueError, match="'d' is pending, needs to be in_flight"):
            buffer.put_answers("d", [])
        assert buffer.answers("a") == {"old": b"x", "aged": b"x", "mixed": b"x", "new": b"y"}
        buffer.put_samples(groups[1])
        buffer.put_done(groups[2])
        assert kept(buffer) == {"a": ["aged", "mixed", "new", "old"], "b": [], "c": [], "d": []}
    with Buffer(tmp_path / "buffer.sqlite") as buffer:
        buffer.rewind(3)
        assert kept(buffer)["a"] == ["aged", "new", "old"]
        buffer.renew(0, oldest_version=2)
        assert kept(buffer)["a"] == ["new"]
        buffer.take_pending(1)
        buffer.renew(0, oldest_version=4)
        assert kept(buffer)["a"] == ["new"], "of a group that is being made they are in use"


def test_rewind_hands_out_old_weights_groups_and_makes_the_rest(buffer: Buffer, make_group: Any) -> None:
    """Step s, from 1 on, consumes g<s - 1> of version s - 1; g4 is done but unused; g5 is in flight with samples of versions 1 and 4."""
    groups = [make_group(f"g{version}", version=version, scored=True) for version in range(5)]
    for step, group in enumerate(groups[:4], start=1):
        fill(buffer, [group])
        take_done(buffer, 1, step=step)
    fill(buffer, groups[4:])
    old, new = make_group("g5", version=1, scored=True), make_group("g5", version=4, scored=True)
    buffer.add_prompts([old.prompt])
    buffer.take_pending(1)
    buffer.put_samples(dataclasses.replace(old, samples=(old.samples[0], dataclasses.replace(new.samples[1], prompt=old.prompt))))
    buffer.rewind(1)
    buffer.recover()
    assert buffer.counts() == BufferCounts(pending=4, in_flight=0, done=1, consumed=1)
    assert_same(tuple(take_done(buffer, 9, step=1)), (groups[1],))
    prompts = buffer.take_pending(9)
    assert [prompt.id for prompt in prompts] == ["g2", "g3", "g4", "g5"]
    assert [len(finished_samples(buffer, prompt)) for prompt in prompts] == [0, 0, 0, 0]


def test_groups_of_other_settings_are_made_again_in_any_state(tmp_path: Path, make_group: Any) -> None:
    """Step s consumes g<s - 1>; g2 and g3 are done, g4 is in flight with its samples; of g3 an older release does not tell."""
    groups = [make_group(f"g{number}", version=0, scored=True) for number in range(5)]
    with Buffer(tmp_path / "buffer.sqlite", made_by="old") as buffer:
        for step, group in enumerate(groups[:2], start=1):
            fill(buffer, [group])
            take_done(buffer, 1, step=step)
        fill(buffer, groups[2:4])
        buffer.add_prompts([groups[4].prompt])
        buffer.take_pending(1)
        buffer.put_samples(groups[4])
        buffer._connection.execute("UPDATE groups SET made_by = NULL WHERE id = 'g3'")
    with Buffer(tmp_path / "buffer.sqlite", made_by="old") as buffer:
        assert buffer.rewind(1) == {}
        assert buffer.counts() == BufferCounts(pending=1, in_flight=0, done=3, consumed=1)
    with Buffer(tmp_path / "buffer.sqlite", made_by="new") as buffer:
        assert buffer.rewind(1) == {"old": 3}
        assert buffer.counts() == BufferCounts(pending=3, in_flight=0, done=1, consumed=1)
        prompts = buffer.take_pending(9)
        assert [(prompt.id, finished_samples(buffer, prompt)) for prompt in prompts] == [("g1", ()), ("g2", ()), ("g4", ())]
        buffer.put_done(groups[1])
        assert buffer.rewind(1) == {}
        assert [group.id for group in take_done(buffer, 9, step=2)] == ["g1", "g3"]
        buffer.prune(2, keep=0)
        assert buffer._connection.execute("SELECT count(*) FROM groups WHERE made_by IS NOT NULL").fetchone() == (0,)


def test_prune_keeps_readable_columns_and_a_rewind_regenerates(tmp_path: Path, make_group: Any) -> None:
    path = tmp_path / "buffer.sqlite"
    with Buffer(path) as buffer:
        fill(buffer, [make_group("a", scored=True), make_group("b", scored=True)])
        take_done(buffer, 1, step=1)
        take_done(buffer, 1, step=2)
        buffer.prune(1, keep=0)
        reader = sqlite3.connect(path)
        query = "SELECT group_id, response_ids IS NULL, num_tokens, reward FROM samples WHERE sample_index = 0 ORDER BY 1"
        assert reader.execute(query).fetchall() == [("a", 1, 5, 0.0), ("b", 0, 5, 0.0)]
        reader.close()
        buffer.rewind(0)
        assert buffer.counts() == BufferCounts(pending=1, in_flight=0, done=1, consumed=0)
        (prompt,) = buffer.take_pending(1)
        assert prompt.id == "a" and finished_samples(buffer, prompt) == ()
        buffer.put_done(make_group("a", scored=True))
        take_done(buffer, 2, step=1)
        buffer.prune(1, keep=0)
        query = "SELECT count(*) FROM samples WHERE response_ids IS NOT NULL"
        assert buffer._connection.execute(query).fetchone() == (0,), "what was made again after a rewind is pruned again"


def test_a_step_notes_what_it_trained_on_and_why_not(buffer: Buffer, make_group: Any) -> None:
    fill(buffer, [make_group("a"), make_group("b"), make_group("c")])
    groups = take_done(buffer, 2, step=1, rejections={"a": "no signal"})
    assert [group.id for group in groups] == ["a", "b"]
    query = "SELECT id, consumed_step, trained, rejection FROM groups ORDER BY position"
    assert buffer._connection.execute(query).fetchall() == [("a", 1, 0, "no signal"), ("b", 1, 1, None), ("c", None, None, None)]
    buffer.rewind(0)
    assert buffer._connection.execute(query).fetchall() == [(name, None, None, None) for name in "abc"]


def of_trajectories(group: Group) -> Group:
    """The group's five samples as two trajectories, the last three with a prompt of their own: other tokens, another text, or both."""
    tokens, text = dataclasses.replace(group.prompt, token_ids=[1, 2, 3]), dataclasses.replace(group.prompt, text="what came before")
    parts: list[dict[str, Any]] = [{"trajectory": 5}, {"trajectory": 0}, {"trajectory": 5, "prompt": tokens}, {"prompt": text}]
    parts.append({"trajectory": 0, "prompt": dataclasses.replace(tokens, text="both")})
    samples = tuple(dataclasses.replace(sample, **part) for sample, part in zip(group.samples, parts, strict=True))
    return dataclasses.replace(group, samples=samples)


def test_trajectories_return_and_differing_prompts_are_stored(buffer: Buffer, make_group: Any) -> None:
    group = of_trajectories(make_group("a", num_samples=5))
    buffer.add_prompts([group.prompt])
    (prompt,) = buffer.take_pending(1)
    buffer.put_samples(group)
    assert_same(finished_samples(buffer, prompt), group.samples)
    buffer.put_done(group)
    query = "SELECT own_prompt_text, own_prompt_ids IS NULL FROM samples ORDER BY sample_index"
    texts = ["text of a", "what came before", "both"]
    assert buffer._connection.execute(query).fetchall() == [(None, 1), (None, 1), *((text, 0) for text in texts)]
    assert_same(tuple(take_done(buffer, 1, step=1)), (group,))
    buffer.prune(1, keep=0)
    assert buffer._connection.execute(query).fetchall() == [(None, 1), (None, 1), *((text, 1) for text in texts)]


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        pytest.param(FRONT, "SCAN groups USING COVERING INDEX groups_waiting", id="front"),
        pytest.param(COUNT, "SEARCH groups USING COVERING INDEX groups_by_state (state=?)", id="count"),
        pytest.param(PRUNABLE, "SEARCH groups USING INDEX groups_unpruned (consumed_step<?)", id="prunable"),
        pytest.param(LATER, "SEARCH groups USING INDEX groups_unpruned (consumed_step>?)", id="later"),
    ],
)
def test_queries_of_a_step_use_an_index_of_its_groups(buffer: Buffer, statement: str, expected: str) -> None:
    rows = [str(row[3]) for row in buffer._connection.execute(f"EXPLAIN QUERY PLAN {statement}", (1,))]
    (plan,) = (row for row in rows if " groups " in row)
    assert plan.replace("COVERING ", "") == expected.replace("COVERING ", ""), "a scan of the table would read all groups of the run"


def test_indices_of_waiting_groups_do_not_grow_with_history(buffer: Buffer, make_group: Any) -> None:
    def pages(index: str) -> int:
        # A query that only this index can answer counts its entries.
        condition = {"groups_waiting": "state <> 'consumed'", "groups_unpruned": "pruned = 0"}[index]
        (entries,) = buffer._connection.execute(f"SELECT count(*) FROM groups INDEXED BY {index} WHERE {condition}").fetchone()
        return int(entries)

    for step in range(1, 6):
        fill(buffer, [make_group(f"{step}-{number}") for number in range(4)])
        take_done(buffer, 4, step=step)
        buffer.prune(step - 1, keep=1)
        assert (pages("groups_waiting"), pages("groups_unpruned")) == (0, 4)


def test_moves_reach_the_file_and_a_flush_reaches_the_disk(
    buffer: Buffer, make_group: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert buffer._connection.execute("PRAGMA synchronous").fetchone() == (1,), "NORMAL: with OFF a power failure can break the file"
    assert buffer._connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    fill(buffer, [make_group("a")])
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    buffer.flush()
    assert synced == [str(tmp_path / "buffer.sqlite-wal"), str(tmp_path)]


def test_anyone_can_query_the_live_file(buffer: Buffer, make_group: Any, tmp_path: Path) -> None:
    fill(buffer, [make_group("a", num_samples=3)])
    take_done(buffer, 1, step=7)
    reader = sqlite3.connect(tmp_path / "buffer.sqlite")
    query = (
        "select consumed_step, avg(reward), avg(num_tokens) from samples join groups on id = group_id where outcome = 'scored' group by 1"
    )
    assert reader.execute(query).fetchall() == [(7, pytest.approx(0.1), 5.0)]
    (blob,) = reader.execute("select response_ids from samples where sample_index = 0").fetchone()
    np.testing.assert_array_equal(np.frombuffer(blob, "<i4"), make_group("a", num_samples=3).samples[0].response_ids)
    assert reader.execute("select outcome, reward, reward_message from samples where sample_index = 1").fetchone() == (
        "error",
        None,
        "Traceback",
    )
    reader.close()


def test_a_second_process_is_refused_and_told_who_holds_the_file(buffer: Buffer, tmp_path: Path) -> None:
    script = "import sys; from pathlib import Path; from megatron_rl.data.buffer import Buffer; Buffer(Path(sys.argv[1]))"
    command = [sys.executable, "-c", script, str(tmp_path / "buffer.sqlite")]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "is in use by process" in refused.stderr
    buffer.close()
    assert subprocess.run(command, timeout=60, check=False).returncode == 0


def test_a_file_system_without_locks_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with pytest.raises(UserError, match=r"cannot be locked \(No locks available\), needs a file system with locks; choose another"):
        Buffer(tmp_path / "buffer.sqlite")


def test_files_that_are_no_buffer_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("hello " * 1000)
    with pytest.raises(UserError, match="file is not a database"):
        Buffer(text)
    other = tmp_path / "other.sqlite"
    connection = sqlite3.connect(other)
    connection.execute("create table x (y)")
    connection.close()
    with pytest.raises(UserError, match="another program"):
        Buffer(other)
    newer = tmp_path / "newer.sqlite"
    Buffer(newer).close()
    connection = sqlite3.connect(newer)
    connection.execute("pragma user_version = 12")
    connection.close()
    with pytest.raises(UserError, match="schema version 12"):
        Buffer(newer)
    with pytest.raises(UserError, match="a part of this path is a file"):
        Buffer(text / "buffer.sqlite")


def test_full_disk_is_one_sentence_and_the_buffer_stays_usable(buffer: Buffer, make_group: Any) -> None:
    group = make_group("a")
    buffer.add_prompts([group.prompt])
    buffer.take_pending(1)
    connection = buffer._connection
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(UserError, match=r"cannot use the buffer .* disk is full; free space"):
        buffer.put_done(make_group("a", length=20_000, prompt=group.prompt))
    assert buffer.counts().in_flight == 1
    connection.execute("PRAGMA max_page_count = 1000000")
    buffer.put_done(group)
    assert_same(tuple(take_done(buffer, 1, step=0)), (group,))


def test_metadata_that_json_cannot_hold_is_a_user_error(buffer: Buffer) -> None:
    with pytest.raises(UserError, match=r"metadata of prompt 'a' cannot be stored \(Object of type set"):
        buffer.add_prompts([Prompt(id="a", token_ids=[1], text="", metadata={"x": {1}})])


KILLS = 40


def test_kill_9_loses_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    path, journal = tmp_path / "buffer.sqlite", tmp_path / "journal"
    script = Path(__file__).with_name("crash_loop.py")
    subprocess.run([sys.executable, str(script), str(path), str(journal), str(KILLS)], check=True, timeout=300)
    notes = Counter(tuple(line.split()) for line in journal.read_text().splitlines())
    done = {group_id for kind, group_id in notes if kind == "done"}
    taken = {group_id: count for (kind, group_id), count in notes.items() if kind == "taken"}
    assert len(done) > 100 and len(taken) > 50, "the writer was killed too early to show anything"
    assert set(taken.values()) == {1}
    with Buffer(path) as buffer:
        for prompt in buffer.take_pending(10**6):
            assert prompt.id not in done
            assert bool(finished_samples(buffer, prompt)) or ("sample", prompt.id) not in notes
        left = take_done(buffer, 10**6, step=0)
        assert not taken.keys() & {group.id for group in left}
        lost = done - taken.keys() - {group.id for group in left}
        assert len(lost) <= KILLS * 5, "handed out but not noted: at most the 5 groups of one call per kill"
        consumed = {row[0] for row in buffer._connection.execute("SELECT id FROM groups WHERE state = 'consumed'")}
        assert lost <= consumed
        sizes = {row[0] for row in buffer._connection.execute("SELECT count(*) FROM groups WHERE consumed_step > 0 GROUP BY consumed_step")}
        assert sizes == {5}, "a call hands out all of its groups or none"
        for group in left:
            assert_whole(group)


def assert_whole(group: Group) -> None:
    expected = [np.arange(index + 1) + 1000 * int(group.id) for index in range(3)]
    samples: tuple[Sample, ...] = group.samples
    for sample, ids in zip(samples, expected, strict=True):
        np.testing.assert_array_equal(sample.response_ids, ids)


def test_recently_trained_counts_the_newest_consumed_groups(buffer: Buffer, make_group: Any) -> None:
    fill(buffer, [make_group(name) for name in "abcdef"])
    buffer.consume({"a": None, "b": None, "c": "no signal", "d": None, "e": "no signal"}, step=1)
    assert [buffer.recently_trained(limit) for limit in (1, 2, 3, 5, 9)] == [(0, 1), (1, 2), (1, 3), (3, 5), (3, 5)]


def test_only_groups_without_a_younger_token_are_renewed_by_their_newest(buffer: Buffer, make_group: Any) -> None:
    mixed = make_group("b", version=1, num_samples=1)
    younger = dataclasses.replace(make_group("b", version=4).samples[1], prompt=mixed.prompt)
    fill(buffer, [make_group("a", version=1), dataclasses.replace(mixed, samples=(*mixed.samples, younger)), make_group("c", version=2)])
    assert [(group.id, group.state, group.oldest_version) for group in buffer.waiting()] == [
        ("a", "done", 1),
        ("b", "done", 1),
        ("c", "done", 2),
    ]
    assert buffer.renew(3, oldest_version=3, by_newest=True) == 2
    assert [group.state for group in buffer.waiting()] == ["pending", "done", "pending"]
    assert [group.oldest_version for group in buffer.waiting()] == [float("inf"), 1, float("inf")]


def test_a_clock_set_back_changes_no_order(buffer: Buffer, make_group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    groups, later = ([make_group(name, scored=True) for name in names] for names in ("dcba", "fe"))
    fill(buffer, groups)
    buffer.rewind(0)
    monkeypatch.setattr(buffer_module, "time", SimpleNamespace(time=lambda: 1e9))
    fill(buffer, later)
    by_time = sorted(buffer.waiting(), key=lambda group: group.moved_at)
    assert [group.id for group in by_time] == [group.id for group in (*groups, *later)]


def test_a_rewind_keeps_the_order_of_completion(buffer: Buffer, make_group: Any) -> None:
    """What a later step trained on comes first again, whatever its place."""
    groups = [make_group(name, scored=True) for name in "abc"]
    buffer.add_prompts(group.prompt for group in groups)
    buffer.take_pending(3)
    for number, group in enumerate((groups[2], groups[0], groups[1])):
        buffer.put_done(group)
        with sqlite3.connect(buffer.path) as connection:
            connection.execute("UPDATE groups SET updated_at = ? WHERE id = ?", (float(number), group.id))
    buffer.consume({"c": None, "a": None}, step=9)
    buffer.rewind(8)
    assert sorted(buffer.waiting(), key=lambda group: group.moved_at)[0].id == "c"
    assert [group.moved_at for group in buffer.waiting()] == [1.0, 2.0, 0.0]
