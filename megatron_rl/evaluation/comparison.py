"""`megatron-rl compare`: whether runs differ on a set, by a paired bootstrap over prompts, from their kept answers."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.errors import UserError
from megatron_rl.evaluation.estimates import interval
from megatron_rl.evaluation.evaluator import EVALUATION_DIRECTORY
from megatron_rl.evaluation.graded_answers import Answer, by_prompt, read_answers

_STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True, slots=True)
class Difference:
    """The mean difference of `metric` on a set, second run minus first, with an interval over the prompts that both have scored."""

    set_name: str
    metric: str
    means: tuple[float, float]
    low: float
    high: float
    num_prompts: int

    def __str__(self) -> str:
        verdict = "higher" if self.low > 0 else "lower" if self.high < 0 else "not told apart"
        first, second = self.means
        change = f"{second - first:+.4f}  [{self.low:+.4f}, {self.high:+.4f}]"
        return f"{self.set_name} {self.metric} {first:.4f} → {second:.4f}, {change} over {self.num_prompts} prompts: {verdict}"


def evaluations_in(directory: Path) -> dict[int, Path]:
    """Return the directories of a run's evaluations by step, or the one of `megatron-rl eval`. Raises UserError without any."""
    found = {int(match[1]): path for path in (directory / EVALUATION_DIRECTORY).glob("step-*") if (match := _STEP.fullmatch(path.name))}
    if not found and any(directory.glob("*.jsonl")) and _sets(directory):
        found = {0: directory}
    if not found:
        raise UserError(f"{directory} has no evaluations, needs the run.directory of a run with eval.sets, or what megatron-rl eval wrote")
    return dict(sorted(found.items()))


def _sets(evaluation: Path) -> list[str]:
    """Return the names of the finished sets of an evaluation."""
    return [path.stem for path in sorted(evaluation.glob("*.json")) if path.with_suffix(".jsonl").exists() and _estimates(path)]


def _estimates(result: Path) -> Mapping[str, Any]:
    values = json.loads(result.read_text("utf-8"))
    return values.get("estimates", {}) if isinstance(values, dict) else {}


def compare(first: Path, second: Path, *, seed: int = 0) -> list[Difference]:
    """Return the differences between two evaluations on each set that both have. Raises UserError for none, or for other prompts."""
    sets, others = _sets(first), _sets(second)
    shared = [name for name in sets if name in others]
    if not shared:
        raise UserError(f"{first} has the sets {', '.join(sets) or 'none'} and {second} {', '.join(others) or 'none'}, needs a common one")
    return [_difference(name, *(by_prompt(read_answers(path / f"{name}.jsonl")) for path in (first, second)), seed=seed) for name in shared]


def _difference(name: str, first: Mapping[str, list[Answer]], second: Mapping[str, list[Answer]], *, seed: int) -> Difference:
    asked = [{prompt: (answers[0].prompt, answers[0].label) for prompt, answers in run.items()} for run in (first, second)]
    if asked[0] != asked[1]:
        other = next(prompt for prompt in (*first, *second) if asked[0].get(prompt) != asked[1].get(prompt))
        raise UserError(
            f"the set {name} has other prompts in the second run than in the first, such as {other}, needs the same file in both"
        )
    every = [answer for run in (first, second) for answers in run.values() for answer in answers if answer.cause is None]
    judged = all(answer.correct is not None for answer in every)
    values = np.array([[_mean(run[prompt], judged) for prompt in first] for run in (first, second)], np.float64)
    values = values[:, np.isfinite(values).all(axis=0)]
    if not values.size:
        raise UserError(f"no prompt of the set {name} has a scored answer in both runs, needs one; look at the failures of the evaluations")
    differences, num_prompts = values[1] - values[0], values.shape[1]
    low, high = interval(lambda times: times @ differences[:, None] / num_prompts, num_prompts=num_prompts, seed=seed)
    means = (float(values[0].mean()), float(values[1].mean()))
    return Difference(name, "accuracy" if judged else "reward", means, float(low[0]), float(high[0]), num_prompts)


def _mean(answers: Sequence[Answer], judged: bool) -> float:
    scored = [float(answer.correct or 0) if judged else float(answer.reward or 0) for answer in answers if answer.cause is None]
    return sum(scored) / len(scored) if scored else math.nan


def curves_of(directory: Path) -> dict[int, dict[str, float]]:
    """Return the accuracy, or the reward without one, of each set after each evaluated step."""
    found = {step: {name: _estimates(path / f"{name}.json") for name in _sets(path)} for step, path in evaluations_in(directory).items()}
    return {
        step: {name: (each.get("accuracy") or each["reward"])["value"] for name, each in of_sets.items() if "reward" in each}
        for step, of_sets in found.items()
    }
