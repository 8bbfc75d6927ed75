"""When a run writes checkpoints, what it waits for and measures, and what becomes of one that fails."""

import asyncio
import os
import signal
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayError, RayTaskError
from run_parts import Calls, Devices, Evaluations, MakeRun, Manager, Ranks, Sync

from megatron_rl.algorithms.rounding_limits import Expected
from megatron_rl.checkpoints.run_checkpoints import CheckpointWriter, checkpoint_paths
from megatron_rl.errors import DeadlineError, EngineDiedError, EngineError, UserError
from megatron_rl.observe.metrics import Metric
from megatron_rl.observe.sinks import METRICS_FILE, read_metrics
from megatron_rl.observe.summary import read_summary
from megatron_rl.runtime import watchdog
from megatron_rl.runtime.grace import Grace
from megatron_rl.runtime.loop import train_loop
from megatron_rl.runtime.watchdog import Watchdog


def test_a_run_that_is_ended_saves_its_last_step(make_run: MakeRun, calls: Calls, tmp_path: Path) -> None:
    run = make_run("run.num_steps=9", "run.save_interval=0", fails_at=2, error=SystemExit(143))
    with pytest.raises(SystemExit):
        train_loop(run, first_step=0)
    run.break_off(SystemExit(143))
    summary = read_summary(tmp_path / "run")
    assert summary is not None and (summary.status, summary.steps) == ("interrupted: SIGTERM", 2)
    assert [call for call in calls if call[0] == "save"] == [("save", ".step-000002.partial")]
    # What a checkpoint has already is not written again.
    run.break_off(SystemExit(143))
    again = make_run("run.num_steps=9", "run.save_interval=0", resume=True)
    assert again.resume() == 2
    again.break_off(SystemExit(143))
    assert sum(call[0] == "save" for call in calls) == 1


@pytest.mark.parametrize("colocated", [False, True])
@pytest.mark.parametrize("error", [UserError("4 of 8 trajectories failed"), DeadlineError("rollout of step 3 did not finish")])
def test_samples_that_cannot_be_made_leave_a_checkpoint(
    make_run: MakeRun, calls: Calls, tmp_path: Path, error: Exception, colocated: bool
) -> None:
    devices = Devices(calls) if colocated else None
    run = make_run("run.num_steps=9", "run.save_interval=0", fails_at=2, error=error, devices=devices)
    with pytest.raises(type(error)):
        train_loop(run, first_step=0)
    run.break_off(error)
    assert [path.name for path in checkpoint_paths(tmp_path / "run")] == ["step-000002"] and (("abandon",) in calls) is colocated


def test_token_values_that_cannot_be_kept_leave_a_checkpoint(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def keep(self: Manager, values: object) -> None:
        raise DeadlineError("keeping the values of tokens did not finish")

    run = make_run("run.num_steps=9", "run.save_interval=0")
    monkeypatch.setattr(Manager, "keep", keep)
    with pytest.raises(DeadlineError) as caught:
        train_loop(run, first_step=0)
    run.break_off(caught.value)
    assert [path.name for path in checkpoint_paths(tmp_path / "run")] == ["step-000001"], "the step was trained on"


@pytest.mark.parametrize("colocated", [False, True])
@pytest.mark.parametrize("error", [EngineDiedError("killed by signal 9"), EngineError("gave an answer of another form")])
def test_the_last_engines_end_leaves_a_checkpoint(
    make_run: MakeRun, calls: Calls, tmp_path: Path, error: EngineError, colocated: bool
) -> None:
    """But not on shared devices, where its memory is not given back."""
    devices = Devices(calls) if colocated else None
    run = make_run("run.num_steps=9", "run.save_interval=0", fails_at=2, error=error, devices=devices)
    with pytest.raises(EngineError):
        train_loop(run, first_step=0)
    run.break_off(error)
    assert [path.name for path in checkpoint_paths(tmp_path / "run")] == ([] if colocated else ["step-000002"])


@pytest.mark.parametrize(("colocated", "answers"), [(False, True), (False, False), (True, True)])
@pytest.mark.parametrize(
    "error", [EngineError("no engine is left"), DeadlineError("weight sync did not finish"), RayTaskError("", "", Exception())]
)
def test_a_failed_sync_leaves_a_checkpoint_where_ranks_are_well(
    make_run: MakeRun, calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, colocated: bool, answers: bool
) -> None:
    async def run_sync(self: Sync, *, version: int, prove: object = None) -> dict[str, Metric]:
        if version == 2:
            raise error
        return {}

    monkeypatch.setattr(Sync, "run", run_sync)
    monkeypatch.setattr(Ranks, "answers", answers)
    run = make_run("run.num_steps=9", "run.save_interval=0", devices=Devices(calls) if colocated else None)
    with pytest.raises(type(error)):
        train_loop(run, first_step=0)
    run.break_off(error)
    kept = ["step-000002"] if answers and not colocated else []
    assert [path.name for path in checkpoint_paths(tmp_path / "run")] == kept


def test_an_engine_lost_before_a_save_leaves_a_checkpoint(
    make_run: MakeRun, watchdog: Watchdog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait for the buffer's position ends by it."""
    run, lost = make_run("run.num_steps=9", "run.save_interval=2"), Future[None]()
    watchdog.watch("engine 0", lost, goes_on=lambda error: False)

    def finish(self: Any, *, step: int, late: bool = True) -> None:
        if step == 2:
            lost.set_exception(EngineDiedError("killed by signal 9"))

    monkeypatch.setattr(type(run), "_finish_evaluation", finish)
    with pytest.raises(EngineDiedError) as caught:
        train_loop(run, first_step=0)
    run.break_off(caught.value)
    assert [path.name for path in checkpoint_paths(tmp_path / "run")] == ["step-000002"]


def test_a_step_that_cannot_be_trained_on_leaves_no_checkpoint(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights may be those of a part of it."""

    def fail(self: Ranks, batch: str, *, step: int) -> None:
        if step == 2:
            raise UserError("the loss has no gradient")

    monkeypatch.setattr(Ranks, "train", lambda self, batch, step, **_: fail(self, batch, step=step) or [])
    run = make_run("run.num_steps=9", "run.save_interval=0")
    with pytest.raises(UserError) as caught:
        train_loop(run, first_step=0)
    run.break_off(caught.value)
    assert checkpoint_paths(tmp_path / "run") == []


def test_a_failed_last_save_keeps_the_summary(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: Ranks, directory: Path, *, hf: Path) -> None:
        raise UserError("the disk is full")

    monkeypatch.setattr(Ranks, "begin_save", fail)
    run = make_run("run.num_steps=9", "run.save_interval=0", fails_at=2, error=SystemExit(143))
    with pytest.raises(SystemExit):
        train_loop(run, first_step=0)
    run.break_off(SystemExit(143))
    summary = read_summary(tmp_path / "run")
    assert summary is not None and (summary.steps, summary.checkpoint) == (2, None)
    assert "the checkpoint of step 2 is lost: the disk is full" in capsys.readouterr().out


@pytest.mark.parametrize("phase", ["train", "save", "saved"])
def test_sigterm_waits_for_a_step_and_for_a_checkpoint(
    make_run: MakeRun, calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    asked = {"train": "train", "save": "begin_save", "saved": "finish_save"}[phase]
    own = getattr(Ranks, asked)

    def interrupted(self: Ranks, *arguments: Any, **keywords: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return own(self, *arguments, **keywords)

    monkeypatch.setattr(Ranks, asked, interrupted)
    run = make_run("run.num_steps=9", "run.save_interval=1")
    with Grace(), pytest.raises(SystemExit) as left:
        train_loop(run, first_step=0)
    monkeypatch.setattr(Ranks, asked, own)
    begun = [call for call in calls if call[0] == "save"]
    assert len(begun) == (0 if phase == "train" else 1), "it is not begun again"
    assert calls.count(("saved",)) == (1 if phase == "saved" else 0), "what has begun is finished"
    run.break_off(left.value)
    assert [call[0] for call in calls if call[0] in ("train", "save")] == ["train", "save"]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000001"]


def test_a_second_signal_does_not_wait_for_the_checkpoint(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Ranks, directory: Path, *, hf: Path) -> None:
        signal.raise_signal(signal.SIGINT)
        pytest.fail("went on")

    run = make_run("run.num_steps=9", "run.save_interval=0", fails_at=2)
    with Grace():
        run.begin(step=0)
        run.train(run.next_batch(0), step=0)
        with pytest.raises(SystemExit) as first:
            signal.raise_signal(signal.SIGINT)
        monkeypatch.setattr(Ranks, "begin_save", interrupted)
        with pytest.raises(SystemExit) as second:
            run.break_off(first.value)
    assert first.value.code == second.value.code == 130
    summary = read_summary(tmp_path / "run")
    assert summary is not None and (summary.status, summary.steps, summary.checkpoint) == ("interrupted: SIGINT", 1, None)
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_a_long_save_is_awaited_by_the_next_and_by_the_end(make_run: MakeRun, calls: Calls, tmp_path: Path) -> None:
    run = make_run("run.num_steps=3", "run.save_interval=1", written=False)
    train_loop(run, first_step=0)
    around = [call[:2] for call in calls if call[0] in ("rollout", "train", "save", "saved")]
    step = [[("rollout", n), ("train", f"batch {n}"), ("saved",), ("save", f".step-00000{n + 1}.partial")] for n in range(3)]
    assert around == [call for number, part in enumerate(step) for call in part if number or call != ("saved",)]
    assert [path.name for path in checkpoint_paths(tmp_path / "run")] == ["step-000001", "step-000002"]
    run.finish()
    assert [path.name for path in checkpoint_paths(tmp_path / "run")] == ["step-000002", "step-000003"]


@pytest.mark.parametrize(("owner", "long"), [(Manager, "next_batch"), (Evaluations, "run")])
def test_a_written_save_is_in_place_before_the_next_samples(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, long: str
) -> None:
    """A run that is killed in a long rollout goes back to the checkpoint before it, so finished groups fit the weights of that."""
    own, place = getattr(owner, long), tmp_path / "run" / "checkpoints"
    waits: list[str] = []
    found: list[bool] = []

    async def lasts(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if (place / ".step-000001.partial").exists():
            waits.append(long)
            deadline = time.monotonic() + 10
            while not (place / "step-000001").exists() and time.monotonic() < deadline:
                await asyncio.sleep(0.01)
            found.append((place / "step-000001").exists())
        return await own(self, *arguments, **keywords)

    monkeypatch.setattr(owner, long, lasts)
    monkeypatch.setattr(Ranks, "save_is_written", lambda self: bool(waits))
    monkeypatch.setattr(watchdog, "MEANWHILE_S", 0.01)
    run = make_run("run.num_steps=2", "run.save_interval=1", "eval.interval=1", "eval.sets.held_out=held_out.jsonl")
    train_loop(run, first_step=0)
    assert found == [True]


def test_exports_have_an_interval_of_their_own(make_run: MakeRun, calls: Calls, tmp_path: Path) -> None:
    run = make_run("run.num_steps=6", "run.save_interval=4", "run.keep_checkpoints=1", "run.export_interval=2")
    train_loop(run, first_step=0)
    run.finish()
    assert [call[1] for call in calls if call[0] == "save"] == [".step-000004.partial", ".step-000006.partial"]
    assert sorted(path.name for path in (tmp_path / "run" / "exports").iterdir()) == ["step-000002", "step-000004", "step-000006"]
    assert [path.name for path in checkpoint_paths(tmp_path / "run")] == ["step-000006"]
    assert (tmp_path / "run" / "huggingface").resolve() == tmp_path / "run" / "checkpoints" / "step-000006" / "hf"


def test_a_run_ended_after_an_export_still_saves_that_step(make_run: MakeRun, calls: Calls, tmp_path: Path) -> None:
    run = make_run("run.num_steps=9", "run.save_interval=0", "run.export_interval=2", fails_at=2, error=SystemExit(143))
    with pytest.raises(SystemExit):
        train_loop(run, first_step=0)
    run.break_off(SystemExit(143))
    assert [path.name for path in checkpoint_paths(tmp_path / "run")] == ["step-000002"]
    assert [path.name for path in (tmp_path / "run" / "exports").iterdir()] == ["step-000002"]


def test_the_link_moves_before_the_old_policy_is_deleted(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    links: list[str] = []

    def prune(_: CheckpointWriter) -> list[str]:
        links.append((tmp_path / "run" / "huggingface").readlink().parent.name)
        return ["an old one could not be deleted"]

    monkeypatch.setattr(CheckpointWriter, "_prune", prune)
    run = make_run("run.num_steps=2", "run.save_interval=1")
    train_loop(run, first_step=0)
    run.finish()
    assert links == ["step-000001", "step-000002"]
    assert capsys.readouterr().out.count("an old one could not be deleted") == 2


def test_rows_are_on_the_disk_before_the_checkpoint_behind_them(make_run: MakeRun, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda number: calls.append(("sync", Path(os.readlink(f"/proc/self/fd/{number}")).name)))
    train_loop(make_run("run.num_steps=1"), first_step=0)
    steps = [call for call in calls if call == ("sync", "metrics.jsonl") or call[0] in ("train", "save")]
    assert [call[0] for call in steps] == ["train", "sync", "save"]


def test_a_failed_save_ends_the_run_and_is_told_once(make_run: MakeRun, calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run("run.num_steps=3", "run.save_interval=1", save_error=UserError("the disk is full"))
    with pytest.raises(UserError, match="the disk is full") as caught:
        train_loop(run, first_step=0)
    run.break_off(caught.value)
    assert calls.count(("saved",)) == 1
    assert "the disk is full" not in capsys.readouterr().out


@pytest.mark.parametrize("kind", [UserError, RayError])
def test_a_failed_save_does_not_hide_why_a_run_ended(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: type[Exception]
) -> None:
    """Ray raises what any exception of a rank becomes."""
    run = make_run("run.save_interval=1", fails_at=1, error=EngineError("gone"), written=False, save_error=kind("the disk is full"))
    with pytest.raises(EngineError, match="gone") as caught:
        train_loop(run, first_step=0)
    run.break_off(caught.value)
    summary = read_summary(tmp_path / "run")
    assert summary is not None and summary.status == "failed: EngineError: gone"
    assert capsys.readouterr().out.count("the disk is full") == 1
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_a_run_that_ends_early_keeps_the_checkpoint_on_its_way(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("run.save_interval=1", fails_at=1, error=EngineError("gone"), written=False)
    with pytest.raises(EngineError) as caught:
        train_loop(run, first_step=0)
    run.break_off(caught.value)
    assert [path.name for path in checkpoint_paths(tmp_path / "run")] == ["step-000001"]


@pytest.mark.parametrize(("answers", "kept"), [(True, ["step-000001"]), (False, [])])
def test_hanging_ranks_are_not_awaited_again_for_a_checkpoint(
    make_run: MakeRun,
    calls: Calls,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answers: bool,
    kept: list[str],
) -> None:
    """The deadline of a rollout, in contrast, says nothing about them."""
    monkeypatch.setattr(Ranks, "answers", answers)
    run = make_run("run.save_interval=1", fails_at=1, error=DeadlineError("training of step 2 did not finish"), written=False)
    with pytest.raises(DeadlineError, match="step 2") as caught:
        train_loop(run, first_step=0)
    run.break_off(caught.value)
    assert calls.count(("saved",)) == answers
    assert [path.name for path in checkpoint_paths(tmp_path / "run")] == kept
    assert ("the checkpoint of step 1 is lost: still waiting for: Megatron rank 1" in capsys.readouterr().out) is not answers
    summary = read_summary(tmp_path / "run")
    assert summary is not None and summary.status == "failed: DeadlineError: training of step 2 did not finish"


def test_engines_on_shared_devices_stop_before_a_sigterm_save(make_run: MakeRun, calls: Calls, watchdog: Watchdog) -> None:
    run = make_run("run.num_steps=9", "run.save_interval=0", fails_at=1, error=SystemExit(143), devices=Devices(calls))
    with pytest.raises(SystemExit):
        train_loop(run, first_step=0)
    died: Future[None] = Future()
    died.set_exception(EngineError("an engine that died fails no wait for the ranks"))
    watchdog.watch("engine 0", died)
    del calls[:]
    run.break_off(SystemExit(143))
    assert [call[0] for call in calls][:3] == ["abandon", "phase", "save"] and ("saved",) in calls


def test_a_swap_and_a_weight_sync_are_not_cut_short(make_run: MakeRun, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in ((Devices, "take"), (Sync, "run")):
        with monkeypatch.context() as patch:
            own = getattr(owner, name)

            def interrupted(*arguments: Any, own: Any = own, **keywords: Any) -> Any:
                signal.raise_signal(signal.SIGTERM)
                return own(*arguments, **keywords)

            patch.setattr(owner, name, interrupted)
            run = make_run("run.num_steps=9", devices=Devices(calls))
            with Grace(), pytest.raises(SystemExit):
                train_loop(run, first_step=0)
        assert calls[-1][0] == {"take": "phase", "run": "publish"}[name], "it was done before the run ended"


def test_a_run_measures_engine_time_and_its_overlap(
    make_run: MakeRun, calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(self: Ranks, batch: str, *, step: int, expected: Expected | None, rows: Any = ()) -> list[dict[str, Metric]]:
        Manager.busy_s += 3600.0 if step == 0 else 0.0
        return []

    monkeypatch.setattr(Manager, "busy_s", 5.0)
    monkeypatch.setattr(Ranks, "train", train)
    train_loop(make_run("run.num_steps=2", "run.save_interval=0"), first_step=0)
    rows = read_metrics(tmp_path / "run" / METRICS_FILE)
    assert [rows[step]["time/rollout"] for step in (0, 1, 2)] == [5.0, 3600.0, 0.0]
    assert [rows[step]["rollout/overlap_fraction"] for step in (1, 2)] == [1.0, 0.0]
