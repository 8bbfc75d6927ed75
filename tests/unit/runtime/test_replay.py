"""Training on recorded batches, and generation without training, with stand-ins for Ray's actors, servers and reward workers alone."""

import dataclasses
import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from whole_run_parts import Client, Engines, Ranks

from megatron_rl.cli import main
from megatron_rl.config.settings import Settings
from megatron_rl.data.recorded import Recorded
from megatron_rl.errors import UserError
from megatron_rl.observe.live_state import read_state
from megatron_rl.observe.metrics import Metric, Sum
from megatron_rl.runtime import session, start
from megatron_rl.types import TrainBatch

MakeSettings = Callable[..., Settings]
RECORDED = ("data.samples_per_prompt=2", "run.num_steps=3", "run.save_interval=1", "run.keep_checkpoints=9", "run.keep_groups=2")


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, TrainBatch]]:
    """The batches that ranks got, with the steps before."""
    batches: list[tuple[int, TrainBatch]] = []

    def train(self: Ranks, batch: TrainBatch, *, step: int, expected: object, rows: object) -> list[dict[str, Metric]]:
        batches.append((step, batch))
        return [{"train/num_tokens": Sum(1.0)}]

    monkeypatch.setattr(Ranks, "train", train)
    monkeypatch.setattr(Ranks, "load", lambda self, directory, *, weights_only: (), raising=False)
    return batches


def assert_equal(got: list[tuple[int, TrainBatch]], expected: list[tuple[int, TrainBatch]]) -> None:
    assert [step for step, _ in got] == [step for step, _ in expected]
    for (_, one), (_, other) in zip(got, expected, strict=True):
        for field in dataclasses.fields(TrainBatch):
            np.testing.assert_array_equal(getattr(one, field.name), getattr(other, field.name), field.name)


def refused(settings: Settings, replay: Path, *needed: str, **kind: Any) -> None:
    with pytest.raises(UserError) as error:
        session.train(settings, resume=False, replay=replay, **kind)
    assert all(word in str(error.value) for word in needed), error.value


def test_a_replay_trains_on_the_batches_of_its_run(
    make_settings: MakeSettings, trained: list[tuple[int, TrainBatch]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session.train(make_settings(*RECORDED), resume=False)
    expected = trained.copy()
    trained.clear()
    again = f"run.directory={tmp_path}/again"
    # It ends with its record, its engines are none, and its status is that of this process.
    session.train(make_settings(*RECORDED, again, "run.num_steps=5"), resume=False, replay=tmp_path / "run")
    state = read_state(tmp_path / "again")
    assert state is not None and state.identity["pid"] == os.getpid()
    assert_equal(trained, expected)
    assert Engines.stopped == 1
    assert "step 1 trains on step 1 of" in capsys.readouterr().out
    # A copy of a checkpoint goes on with the next recorded step, also from a file of that step alone.
    with Recorded(tmp_path / "run") as recorded:
        recorded.copy(tmp_path / "three.sqlite", step=3)
    shutil.copytree(tmp_path / "run" / "checkpoints" / "step-000002", tmp_path / "part" / "checkpoints" / "step-000002")
    trained.clear()
    session.train(make_settings(*RECORDED, f"run.directory={tmp_path}/part"), resume=True, replay=tmp_path / "three.sqlite")
    assert_equal(trained, expected[2:])
    trained.clear()
    # A new run begins with the first one that there is.
    session.train(make_settings(*RECORDED, f"run.directory={tmp_path}/alone"), resume=False, replay=tmp_path / "three.sqlite")
    assert_equal(trained, [(0, expected[2][1])])


def test_rejected_and_failed_groups_are_replayed_as_such(
    make_settings: MakeSettings, trained: list[tuple[int, TrainBatch]], tmp_path: Path
) -> None:
    session.train(make_settings(*RECORDED, "run.num_steps=2"), resume=False)
    with sqlite3.connect(tmp_path / "run" / "buffer.sqlite") as buffer:
        ids = [name for (name,) in buffer.execute("SELECT id FROM groups WHERE state = 'consumed' ORDER BY position")]
        leave_out = "UPDATE groups SET trained = 0, rejection = ? WHERE id = ?"
        failed = "the rollout failed for 1 of 2 trajectories: x"
        buffer.executemany(leave_out, [("too easy", ids[0]), ("too easy", ids[2]), (failed, ids[3])])
    new = make_settings(*RECORDED, "run.save_interval=0", f"run.directory={tmp_path}/again")
    # Another group takes the place of a failed one; without it the run was killed, or is still at it.
    refused(new, tmp_path / "run", "has 1 of data.prompts_per_step 2 groups of step 2", "run.num_steps=1")
    assert (tmp_path / "again" / "checkpoints" / "step-000001").is_dir(), "what was trained is saved"
    shutil.rmtree(tmp_path / "again")
    trained.clear()
    with sqlite3.connect(tmp_path / "run" / "buffer.sqlite") as buffer:
        names = [name for _, name, *_ in buffer.execute("PRAGMA table_info(groups)") if name not in ("position", "id", "rejection")]
        columns = ", ".join(names)
        copied = f"INSERT INTO groups (id, rejection, {columns}) SELECT 'new', 'too easy', {columns} FROM groups WHERE id = ?"
        buffer.execute(copied, (ids[2],))
    session.train(new, resume=False, replay=tmp_path / "run")
    (_, first), (_, second) = trained
    assert first.num_sequences == 2 and first.loss_mask.sum() == 2, "the group that was trained on"
    assert second.num_sequences == 2 and not second.loss_mask.any(), "nothing is trained on, and a failed group is not even there"


def test_a_step_that_was_pruned_is_named(make_settings: MakeSettings, trained: list[tuple[int, TrainBatch]], tmp_path: Path) -> None:
    session.train(make_settings(*RECORDED, "run.keep_groups=1"), resume=False)
    new = make_settings(*RECORDED, f"run.directory={tmp_path}/again")
    refused(new, tmp_path / "run", "step 1", "1 of its 2 groups", "ids and masks", "set run.keep_groups to 2")
    with sqlite3.connect(tmp_path / "run" / "buffer.sqlite") as buffer:
        (kept, *_), *_ = buffer.execute("SELECT consumed_step FROM groups WHERE pruned = 2").fetchall()
        buffer.execute("DELETE FROM groups WHERE pruned = 1")
    with Recorded(tmp_path / "run") as recorded:
        assert len(recorded.batch_groups(kept, records=False)[0]) == 1, "tokens are enough where no candidates are trained on"
        with pytest.raises(UserError, match="1 of its 1 groups have none of the engines' records"):
            recorded.batch_groups(kept, records=True)


def test_records_that_do_not_fit_are_refused(make_settings: MakeSettings, trained: object, tmp_path: Path) -> None:
    own = make_settings(*RECORDED)
    session.train(own, resume=False)
    refused(own, tmp_path / "run", "--replay", "run.directory itself", "new one")
    other = make_settings(*RECORDED, f"run.directory={tmp_path}/again", "rollout.sampling.temperature=0.5")
    refused(other, tmp_path / "run", "rollout.sampling.temperature is 0.5 now and was 1.0")
    aware = "rollout.sampling.entropy={thresholds: [0.1, 0.1]}"
    other = make_settings(*RECORDED, f"run.directory={tmp_path}/again", aware, "objective.proximal=rollout")
    refused(other, tmp_path / "run", "rollout.sampling.entropy is {'thresholds'", "and was None")
    refused(other, tmp_path / "nothing", "does not exist", "run.directory")
    (tmp_path / "text.sqlite").write_text("no database " * 100)
    refused(other, tmp_path / "text.sqlite", "not a database")
    with Recorded(tmp_path / "run") as recorded, pytest.raises(UserError, match="no step 4, only 1 to 3"):
        recorded.batch_groups(4, records=False)
    with sqlite3.connect(tmp_path / "run" / "buffer.sqlite") as buffer:
        buffer.execute("DELETE FROM groups")
    refused(make_settings(*RECORDED, f"run.directory={tmp_path}/again"), tmp_path / "run", "no step to replay")
    with sqlite3.connect(tmp_path / "run" / "buffer.sqlite") as buffer:
        buffer.execute("PRAGMA user_version = 9")
    refused(own, tmp_path / "run", "schema version 9", "this release reads")


def test_check_of_a_replay_looks_at_its_record(
    make_settings: MakeSettings, trained: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session.train(make_settings(*RECORDED), resume=False)
    Engines.stopped = 0
    words = ["train", str(tmp_path / "run" / "settings.yaml"), f"run.directory={tmp_path}/again", "data.train=gone.jsonl"]
    words += ["reward.function=gone:score", "rollout.environment=gone:Gone", "--check", "--replay", str(tmp_path / "run")]
    assert main(words) == 0
    shown = capsys.readouterr()
    assert f"none: recorded batches of {tmp_path / 'run'}" in shown.out and "engine 0" not in shown.out
    assert "step 1 trains on step 1 of" in shown.err and not (tmp_path / "again").exists()
    assert main([*words, "rollout.sampling.temperature=0.5"]) == 2
    assert "rollout.sampling.temperature is 0.5 now and was 1.0" in capsys.readouterr().err
    # A critic's values end with a sequence.
    assert main([*words, "objective.advantage={kind: gae}"]) == 0
    with sqlite3.connect(tmp_path / "run" / "buffer.sqlite") as buffer:
        buffer.execute("UPDATE samples SET trajectory = 0 WHERE group_id IN (SELECT id FROM groups WHERE consumed_step = 2)")
    capsys.readouterr()
    assert main([*words, "objective.advantage={kind: gae}"]) == 2
    assert "kind gae got trajectories of several sequences" in capsys.readouterr().err
    assert main(words) == 0 and Engines.stopped == 0


def test_a_replay_refuses_older_tokens_than_its_own_staleness(
    make_settings: MakeSettings, trained: list[tuple[int, TrainBatch]], tmp_path: Path
) -> None:
    session.train(make_settings(*RECORDED), resume=False)
    with sqlite3.connect(tmp_path / "run" / "buffer.sqlite") as buffer:
        buffer.execute("UPDATE groups SET consumed_step = consumed_step + 1")
    trained.clear()
    again = make_settings(*RECORDED, f"run.directory={tmp_path}/again")
    refused(again, tmp_path / "run", "weight versions 0 to 0, needs 1 to 1", "set rollout.max_staleness")
    assert not trained
    older = (f"run.directory={tmp_path}/older", "rollout.max_staleness=1", "objective.proximal=rollout")
    session.train(make_settings(*RECORDED, *older), resume=False, replay=tmp_path / "run")
    assert len(trained) == 3


def test_samples_are_generated_without_training(make_settings: MakeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Client, "version", 0)
    settings = make_settings("data.samples_per_prompt=2", "data.shuffle=false")
    monkeypatch.setattr(start.TrainerGroup, "start", lambda self: pytest.fail("a rank was started"))
    buffer = session.generate(settings, count=3)
    with Recorded(buffer) as recorded:
        rows = list(recorded.samples(tokens=True))
    assert [(row["group"], row["index"], row["state"]) for row in rows] == [
        (f"0-{row}", index, "done") for row in range(3) for index in (0, 1)
    ]
    assert [row["reward"] for row in rows] == [2.0, 3.0] * 3 and rows[1]["response_ids"] == [3] and rows[0]["weight_versions"] == [0]
    # After a kill the samples that are there are kept.
    with sqlite3.connect(buffer) as connection:
        connection.execute("UPDATE samples SET response_text = 'kept' WHERE group_id = '0-0'")
        connection.execute("UPDATE groups SET state = 'in_flight' WHERE id = '0-2'")
    with Recorded(session.generate(settings, count=3)) as recorded:
        assert [row["text"] for row in recorded.samples()].count("kept") == 2
    # Fewer prompts would leave more samples in the file than were asked for.
    for other, count in ((make_settings("data.samples_per_prompt=3", "data.shuffle=false"), 3), (settings, 2)):
        with pytest.raises(UserError, match="another model, other settings or another --count"):
            session.generate(other, count=count)
    assert json.dumps(rows)
