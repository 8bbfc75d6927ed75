"""When a run evaluates, what it waits for, and what becomes of results."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from run_parts import Calls, MakeRun

from megatron_rl.checkpoints.run_checkpoints import Best
from megatron_rl.engines.engine_pool import EnginePool
from megatron_rl.errors import EngineError
from megatron_rl.evaluation.estimates import Estimate
from megatron_rl.evaluation.evaluator import SetResult
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


BEST = ("run.num_steps=9", "run.keep_checkpoints=1", "run.save_interval=4", "eval.interval=2")


class Values:
    """Gives the evaluation after a step its accuracy."""

    def __init__(self, values: dict[int, float]) -> None:
        self.values, self.steps = values, list[int]()

    async def run(self, names: Sequence[str], *, directory: Path, **_: Any) -> list[SetResult]:
        self.steps.append(step := int(directory.name.removeprefix("step-")))
        return [SetResult(name, {"accuracy": Estimate(self.values[step], 0.0, 1.0, 4, "prompts")}, {}, "", directory) for name in names]


def train(run: Any, values: dict[int, float], *, first_step: int = 0) -> list[int]:
    run._evaluations._evaluator.run = (given := Values(values)).run
    train_loop(run, first_step=first_step)
    run.finish()
    return given.steps


@pytest.mark.parametrize("beside", [False, True])
def test_a_run_that_gets_no_better_ends_and_keeps_its_best(
    make_run: MakeRun, calls: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str], beside: bool
) -> None:
    words = (*BEST, "eval.sets.a={data: a.jsonl, keep_best: accuracy, stop_after: 2}", "eval.sets.b={data: b.jsonl, interval: 5}")
    words += ("rollout.max_staleness=1", "objective.proximal=rollout") if beside else ()
    values = {0: 0.1, 2: 0.5, 4: 0.5, 5: 0.0, 6: 0.4, 7: 0.1}
    # The evaluation beside training ends when one more step is trained.
    last = 7 if beside else 6
    steps = train(make_run(*words), values)
    assert steps == ([0, 2, 4, 5, 6, 7] if beside else [0, 2, 4, 5, 6, 6])
    directory = tmp_path / "run"
    assert sorted(path.name for path in (directory / "checkpoints").iterdir()) == ["step-000002", f"step-{last:06}"]
    assert (directory / "best-a").resolve() == directory / "checkpoints" / "step-000002"
    assert not (directory / "best-b").exists()
    said = " ".join(capsys.readouterr().out.split())
    assert f"the run ends after {last} steps: the set a got no better in 2 evaluations since step 2" in said
    assert f"finished after {last} steps" in said and [call for call in calls if call[0] == "train"][-1][2] == last - 1
    # Continued, it ends at once; with a larger limit it goes on.
    if not beside:
        again: Any = make_run(*words, resume=True)
        assert train(again, values, first_step=again.resume()) == [6, 6]
        longer: Any = make_run(*words, "eval.sets.a.stop_after=3", resume=True)
        assert train(longer, {**values, 8: 0.6, 9: 0.2}, first_step=longer.resume()) == [6, 8, 9]
        assert (directory / "best-a").resolve().name == "step-000008"


def test_a_killed_run_has_the_best_of_one_that_was_not(make_run: MakeRun, tmp_path: Path) -> None:
    words, values = (*BEST, "eval.sets.a={data: a.jsonl, keep_best: accuracy}"), {0: 0.1, 2: 0.3, 4: 0.2, 6: 0.3, 8: 0.25, 9: 0.1}
    for fails_at in (3, 6, 8):
        run: Any = make_run(*words, resume=True, fails_at=fails_at, error=EngineError("gone"))
        with pytest.raises(EngineError):
            train(run, values, first_step=run.resume())
    last: Any = make_run(*words, resume=True)
    train(last, values, first_step=last.resume())
    assert last._records.best == {"a": Best("accuracy", 2, 0.3, 4)}
    assert (tmp_path / "run" / "best-a").resolve().name == "step-000002"
