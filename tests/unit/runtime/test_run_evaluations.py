"""When a run evaluates, what it waits for, and what becomes of results."""

from pathlib import Path
from typing import Any

import pytest
from run_parts import Calls, MakeRun

from megatron_rl.engines.engine_pool import EnginePool
from megatron_rl.errors import EngineError
from megatron_rl.observe.sinks import METRICS_FILE, read_metrics
from megatron_rl.runtime import watchdog
from megatron_rl.runtime.loop import train_loop


def test_an_asynchronous_run_trains_during_an_evaluation(make_run: MakeRun, calls: Calls, tmp_path: Path) -> None:
    """Which ends before the weights change, and has the row of the weights that it is of."""
    words = ("rollout.max_staleness=1", "objective.proximal=rollout", "eval.interval=1", "run.save_interval=0")
    run: Any = make_run("run.num_steps=2", "eval.sets.held_out=held_out.jsonl", *words)
    run._evaluations._evaluator.may_end.clear()
    run.begin(step=0)
    run.train(run.next_batch(0), step=0)
    assert [call[0] for call in calls][-3:] == ["evaluate", "rollout", "train"] and ("publish", 1) not in calls
    run._evaluations._evaluator.may_end.set()
    run.publish(version=1)
    assert read_metrics(tmp_path / "run" / METRICS_FILE)[0]["eval/held_out/accuracy"] == 0.0
    run.evaluate(step=1)
    run.log(step=1)
    run.train(run.next_batch(1), step=1)
    run.publish(version=2)
    run.evaluate(step=2)
    run.log(step=2)
    rows = read_metrics(tmp_path / "run" / METRICS_FILE)
    assert [rows[step]["eval/held_out/accuracy"] for step in rows] == [0.0, 0.1, 0.2]
    assert [rows[step].get("train/loss") for step in rows] == [None, 1.0, 0.9]


def test_an_evaluation_without_engines_of_its_weights_is_given_up(
    make_run: MakeRun, calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine that was started again gets weights by the sync alone, which the evaluation would hold up."""
    monkeypatch.setattr(watchdog, "MEANWHILE_S", 0.01)
    words = ("rollout.max_staleness=1", "objective.proximal=rollout", "eval.interval=1", "run.save_interval=0")
    run: Any = make_run("run.num_steps=2", "eval.sets.held_out=held_out.jsonl", *words)
    run._evaluations._evaluator.may_end.clear()
    run.begin(step=0)
    run.train(run.next_batch(0), step=0)
    monkeypatch.setattr(EnginePool, "waits_for_weights", True)
    run.publish(version=1)
    run._evaluations._evaluator.may_end.set()
    assert ("publish", 1) in calls and "the evaluation after step 0 is given up" in " ".join(capsys.readouterr().out.split())
    assert "eval/held_out/accuracy" not in read_metrics(tmp_path / "run" / METRICS_FILE)[0]


def test_answers_of_later_steps_go_with_a_resume(make_run: MakeRun, tmp_path: Path) -> None:
    for step in (0, 2, 4):
        (tmp_path / "run" / "evaluation" / f"step-{step:06}").mkdir(parents=True)
    run: Any = make_run("run.num_steps=9")
    run._rewind(step=2, position={"cursor": 7})
    assert sorted(path.name for path in (tmp_path / "run" / "evaluation").iterdir()) == ["step-000000", "step-000002"]


def test_a_resumed_run_evaluates_at_the_same_steps(make_run: MakeRun, calls: Calls) -> None:
    overrides = ("run.num_steps=9", "run.save_interval=1", "eval.interval=2", "eval.sets.held_out=held_out.jsonl")
    for last, evaluates in ((3, False), (4, True)):
        first = make_run(*overrides, resume=True, fails_at=last, error=EngineError("gone"))
        with pytest.raises(EngineError):
            train_loop(first, first_step=first.resume())
        again = make_run(*overrides, resume=True)
        step = again.resume()
        calls.clear()
        again.begin(step=step)
        assert step == last and calls[:5] == [("publish", step), ("probe",), ("score", 4), ("score", 1), ("parity",)]
        assert (("evaluate", f"step-{step:06}", True) in calls) == evaluates
