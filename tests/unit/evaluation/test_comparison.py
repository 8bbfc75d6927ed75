"""Differences of runs on a set, by answers that evaluations kept, against loops in float64."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_rl.cli import main
from megatron_rl.errors import UserError
from megatron_rl.evaluation.comparison import compare, curves_of, evaluations_in
from megatron_rl.evaluation.graded_answers import Answer, AnswerFile

Rewards = list[list[float | None]]
FIRST: Rewards = [[1, 0, 0, 0], [1, 1], [0], [None, 1], [None], [1, 1, 0]]
SECOND: Rewards = [[1, 1, 1, 0], [1, 0], [1], [1, 1], [1], [1, 1, 1]]


def write(directory: Path, rewards: Rewards, *, name: str = "held_out", label: str = "4", correct: bool = True) -> Path:
    """Keep answers with these rewards for each prompt; None is a failure."""
    file = AnswerFile(directory / f"{name}.jsonl", facts={}, num_samples=4, goes_on=False)
    answers = []
    for prompt, values in enumerate(rewards):
        asked: dict[str, Any] = {"prompt_id": f"{name}-{prompt}", "prompt": f"2+{prompt}=", "label": label}
        answers.append(
            [
                Answer(
                    index=index,
                    **asked,
                    cause=None if value is not None else "reward_error",
                    reward=value,
                    correct=value == 1 if correct else None,
                )
                for index, value in enumerate(values)
            ]
        )
    every = [value for values in rewards for value in values if value is not None]
    mean = {"accuracy" if correct else "reward": {"value": sum(every) / max(len(every), 1)}}
    file.finish(answers, {"estimates": mean | {"reward": {"value": 0.5}}})
    return directory


def test_each_prompt_that_both_scored_counts_once(tmp_path: Path) -> None:
    (found,) = compare(write(tmp_path / "a", FIRST), write(tmp_path / "b", SECOND))
    means, differences = [0.0, 0.0], []
    for first, second in zip(FIRST, SECOND, strict=True):
        ones = [[value for value in values if value is not None] for values in (first, second)]
        if ones[0] and ones[1]:
            pair = [sum(values) / len(values) for values in ones]
            differences.append(pair[1] - pair[0])
            means = [before + each for before, each in zip(means, pair, strict=True)]
    count, drawn, rng = len(differences), [], np.random.default_rng(0)
    for _ in range(20):
        for times in rng.multinomial(count, [1 / count] * count, size=100):
            drawn.append(sum(int(time) * each for time, each in zip(times, differences, strict=True)) / count)
    assert (found.metric, found.num_prompts, count) == ("accuracy", 5, 5)
    assert found.means == pytest.approx([mean / count for mean in means])
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(drawn, (0.025, 0.975))))
    assert str(found).endswith(" over 5 prompts: not told apart") and f"{sum(differences) / count:+.4f}  [" in str(found)


def test_pairs_tell_apart_what_means_do_not(tmp_path: Path) -> None:
    """Each prompt a little better: the means' own intervals overlap widely."""
    levels = np.linspace(0, 0.9, 40)
    first, second = ([[level + better] for level in levels] for better in (0.0, 0.05))
    (found,) = compare(*(write(tmp_path / name, rewards, correct=False) for name, rewards in (("a", first), ("b", second))))
    (back,) = compare(tmp_path / "b", tmp_path / "a")
    assert "reward" in str(found) and str(found).endswith("40 prompts: higher") and str(back).endswith("40 prompts: lower")
    assert found.means[1] - found.means[0] == pytest.approx(0.05) and back.low == pytest.approx(-0.05)


def test_other_prompts_are_refused(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a", FIRST), write(tmp_path / "b", SECOND, label="5")
    with pytest.raises(UserError, match=r"the set held_out has other prompts in the second run.*held_out-0"):
        compare(first, second)
    with pytest.raises(UserError, match=r"has the sets held_out and .* other, needs a common one"):
        compare(first, write(tmp_path / "c", SECOND, name="other"))
    with pytest.raises(UserError, match="has a scored answer in both runs"):
        compare(write(tmp_path / "d", [[1.0], [None, 1.0]]), write(tmp_path / "e", [[None], [None, None]]))


def test_runs_are_compared_at_their_last_common_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run, steps in {"a": (0, 2, 4), "b": (0, 2)}.items():
        for step in steps:
            write(tmp_path / run / "evaluation" / f"step-{step:06}", SECOND if (run, step) == ("b", 2) else FIRST)
    assert list(evaluations_in(tmp_path / "a")) == [0, 2, 4]
    assert curves_of(tmp_path / "b") == {0: {"held_out": 6 / 11}, 2: {"held_out": 11 / 13}}
    runs, picture = [str(tmp_path / run) for run in ("a", "b")], tmp_path / "both.png"
    assert main(["compare", *runs, "--out", str(picture)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"{runs[0]}: held_out is best at step 0: 0.5455" in out and f"{runs[1]}: held_out is best at step 2: 0.8462" in out
    assert "step 2; the first run is" in out and "not told apart" in out and picture.stat().st_size > 5_000
    assert main(["compare", *runs, "--step", "0", "--out", str(picture)]) == 0
    assert "+0.0000 [+0.0000, +0.0000] over 5 prompts" in " ".join(capsys.readouterr().out.split())
    assert main(["compare", *runs, "--step", "4"]) != 0 and "not all evaluated at step 4" in capsys.readouterr().err
    assert main(["compare", runs[0]]) != 0 and main(["compare", runs[0], str(tmp_path)]) != 0
    assert "has no evaluations, needs the run.directory of a run" in capsys.readouterr().err


def test_results_without_a_run_are_evaluations_too(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(json.dumps([1]))
    (tmp_path / "other.jsonl").write_text("")
    assert evaluations_in(write(tmp_path, FIRST)) == {0: tmp_path}


def test_one_evaluation_has_no_best_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = [str(write(tmp_path / name, rewards)) for name, rewards in (("a", FIRST), ("b", SECOND))]
    assert main(["compare", *results, "--out", str(tmp_path / "both.png")]) == 0
    out = capsys.readouterr().out
    assert "over 5 prompts" in out and "is best at step" not in out
