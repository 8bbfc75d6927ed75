import math
from pathlib import Path

import pytest

from megatron_rl.checkpoints.run_checkpoints import Best
from megatron_rl.config.eval_sets import EvalSet
from megatron_rl.evaluation.best_steps import best_after, reason_to_stop
from megatron_rl.evaluation.estimates import Estimate
from megatron_rl.evaluation.evaluator import SetResult

SETS = {
    "a": EvalSet(data=Path("a.jsonl"), samples=4, keep_best="pass@4", stop_after=2),
    "b": EvalSet(data=Path("b.jsonl"), keep_best="reward"),
    "c": EvalSet(data=Path("c.jsonl")),
}


def result(name: str, metric: str, value: float | None) -> SetResult:
    estimates = {} if value is None else {metric: Estimate(value, 0.0, 1.0, 4, "prompts"), "response_length": Estimate(9.0, 9, 9, 4, "")}
    return SetResult(name, estimates, {}, "", Path())


def follow(values: list[float | None], best: dict[str, Best] | None = None, *, first_step: int = 0) -> list[dict[str, Best]]:
    states = [best or {}]
    for step, value in enumerate(values, start=first_step):
        results = [result("a", "pass@4", value), result("b", "reward", None if value is None else -value), result("c", "reward", 1.0)]
        states.append(best_after(states[-1], results, sets=SETS, step=step))
    return states[1:]


def test_the_first_of_the_largest_values_is_the_best() -> None:
    states = follow([0.25, 0.5, 0.5, 0.375, 0.75])
    assert [state["a"].step for state in states] == [0, 1, 1, 1, 4]
    assert [state["a"].num_since for state in states] == [0, 0, 1, 2, 0]
    assert states[-1] == {"a": Best("pass@4", 4, 0.75), "b": Best("reward", 0, -0.25, 4)}
    # Of a state, as of its beginning.
    assert follow([0.375, 0.75], states[2], first_step=3) == states[3:]
    assert [reason_to_stop(state, sets=SETS) is not None for state in states] == [False, False, False, True, False]
    reason = reason_to_stop(states[3], sets=SETS)
    assert reason is not None
    assert all(word in reason for word in ("set a", "2 evaluations since step 1", "pass@4 0.5", "eval.sets.a.stop_after is 2"))


def test_an_evaluation_without_a_value_counts_as_none() -> None:
    assert follow([None, math.nan]) == [{}, {}] and reason_to_stop({}, sets=SETS) is None
    states = follow([0.5, None, math.nan, 0.25])
    assert [state["a"].num_since for state in states] == [0, 0, 0, 1]


def test_the_best_of_another_metric_is_forgotten() -> None:
    before = {"a": Best("accuracy", 3, 1.0, 9), "gone": Best("reward", 1, 1.0)}
    assert reason_to_stop(before, sets=SETS) is None
    assert best_after(before, [result("a", "pass@4", 0.125)], sets=SETS, step=5) == {"a": Best("pass@4", 5, 0.125)}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"keep_best": "pass@3", "samples": 4}, ("keep_best pass@3", "pass@4", "samples is 4")),
        ({"keep_best": "pass@2"}, ("needs one of accuracy, reward, as",)),
        ({"keep_best": "failed"}, ("failed", "accuracy")),
        ({"stop_after": 3}, ("stop_after 3 without keep_best", "set keep_best")),
    ],
)
def test_what_cannot_be_the_best_is_refused(values: dict[str, object], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as error:
        EvalSet.model_validate({"data": Path("x"), **values})
    assert all(word in str(error.value) for word in words), error.value
