"""An evaluation on the engines of a manager: what is kept, and what a killed one goes on with."""

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from manager_parts import GREEDY_LOG_PROB, Client, Engine, UnequalRewards, opened, replace_engines, settings_for

from megatron_rl.config.settings import Settings
from megatron_rl.data.source import RunPrompts
from megatron_rl.evaluation import graded_answers
from megatron_rl.evaluation.estimates import Estimate
from megatron_rl.evaluation.eval_words import print_results
from megatron_rl.evaluation.evaluator import SetResult
from megatron_rl.evaluation.graded_answers import Answer, AnswerFile, answers_of, read_answers
from megatron_rl.observe.metrics import check_metrics
from megatron_rl.runtime.run_evaluations import make_evaluator
from megatron_rl.types import Failure, Group, Reward, RewardOutcome, Sample

FACTS = {"model": "m", "steps": 3}


@pytest.fixture
def make_settings(tmp_path: Path, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Settings]:
    replace_engines(monkeypatch)
    rows = [{"prompt": f"{number}=", "label": "1"} for number in (100, 101, 102)]
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = tmp_path / "held_out.jsonl"
    make = settings_for(tmp_path, tiny_model())
    sets = f"eval.sets={{many: {{data: {file}, samples: 4}}, greedy: {{data: {file}, sampling: {{temperature: 0}}}}}}"
    return lambda *words: make(sets, *words)


def evaluate(settings: Settings, directory: Path, *, seed: int = 0, names: tuple[str, ...] = ("many", "greedy"), **changes: Any) -> Any:
    """Results and the number of requests of the engine."""

    async def work() -> tuple[list[SetResult], int]:
        Client.engine = engine = Engine(seed=seed)
        buffer = settings.run.directory / f"{seed}.sqlite"
        async with opened(settings, buffer) as manager:
            run = {"rollout": settings.rollout, "reward": settings.reward, "seed": settings.run.seed}
            evaluator = make_evaluator(settings.eval, manager, **run)
            return await evaluator.run(names, directory=directory, facts=changes.pop("facts", FACTS), **changes), len(engine.started)

    return asyncio.run(work())


def test_each_set_has_its_sampling_and_every_answer_is_kept(
    make_settings: Callable[..., Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def by_tokens(self: UnequalRewards, sample: Sample) -> Reward:
        greedy = sample.rollout_log_probs[0] == GREEDY_LOG_PROB
        if sample.index == 3:
            return Reward(RewardOutcome.TIMEOUT, message="too late")
        return Reward(RewardOutcome.SCORED, float(greedy or sample.index == 0), answer=f"a{sample.index % 2}")

    monkeypatch.setattr(UnequalRewards, "score", by_tokens)
    settings = make_settings()
    (many, greedy), _ = evaluate(settings, tmp_path / "e")
    check_metrics(many.metrics)
    assert (greedy.estimates["accuracy"].value, many.estimates["accuracy"].value) == (1.0, pytest.approx(1 / 3))
    assert (many.estimates["failed"].value, many.failures) == (0.25, {"reward_timeout": 3})
    assert many.failed == "; failed: 3 reward_timeout, most often: too late" and not greedy.failed
    assert many.estimates["pass@2"].value == pytest.approx(2 / 3) and "pass@4" not in many.estimates
    kept = read_answers(tmp_path / "e" / "many.jsonl")
    assert len(kept) == 12 and {answer.prompt_id for answer in kept} == {"many-0", "many-1", "many-2"}
    failed = [answer for answer in kept if answer.index == 3]
    assert {(answer.cause, answer.message, answer.reward, answer.correct) for answer in failed} == {
        ("reward_timeout", "too late", None, None)
    }
    assert {(answer.answer, answer.num_tokens, answer.stop_reason) for answer in kept if answer.index == 1} == {("a1", 3, "stop")}
    result = json.loads(greedy.path.read_text())
    assert result["facts"]["sampling"]["temperature"] == 0.0 and result["facts"]["sampling"]["top_p"] == 1.0
    assert result["facts"]["engine"].startswith("sglang ") and len(result["facts"]["prompts_sha256"]) == 64
    assert result["confidence"] == 0.95 and result["weight_versions"] == [0, 0]
    others = [evaluate(settings, tmp_path / f"e{seed}", seed=seed)[0][0].estimates for seed in range(1, 4)]
    assert all(found == many.estimates for found in others), "whichever answer is the first"


def test_a_killed_evaluation_goes_on_where_it_was(make_settings: Callable[..., Settings], tmp_path: Path) -> None:
    settings, file = make_settings(), tmp_path / "e" / "many.jsonl"
    (whole,), requests = evaluate(settings, tmp_path / "e", names=("many",))
    lines = file.read_text().splitlines(keepends=True)
    # The last prompt was the first, and the kill in the middle of another one's lines.
    cut = "".join(lines[8:] + lines[:2]) + lines[2][:20]
    for changes, expected in (
        ({"goes_on": True}, 2),
        ({"goes_on": False}, requests),
        ({"goes_on": True, "facts": {**FACTS, "steps": 4}}, requests),
    ):
        file.write_text(cut)
        file.with_suffix(".json").write_text(json.dumps({"facts": json.loads(whole.path.read_text())["facts"] | {"steps": 3}}))
        (again,), asked = evaluate(settings, tmp_path / "e", seed=9, names=("many",), **changes)
        assert asked == expected and again.estimates == whole.estimates
        answers = [(answer.prompt_id, answer.index) for answer in read_answers(file)]
        assert answers == [(f"many-{prompt}", index) for prompt in range(3) for index in range(4)]


def test_answers_of_other_prompts_settings_or_failures_are_asked_again(
    make_settings: Callable[..., Settings], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, requests = evaluate(make_settings(), tmp_path / "e", names=("many",))
    assert evaluate(make_settings(), tmp_path / "e", names=("many",), goes_on=True)[1] == 0
    file = tmp_path / "e" / "many.jsonl"
    first, *lines = file.read_text().splitlines(keepends=True)
    failed = json.dumps(json.loads(first) | {"cause": "reward_error", "message": "boom", "reward": None, "correct": None}) + "\n"
    file.write_text(failed + "".join(lines))
    again, asked = evaluate(make_settings(), tmp_path / "e", names=("many",), goes_on=True)
    assert asked == requests // 3 and again[0].failures == {}
    (tmp_path / "held_out.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{number}=", "label": "7"}) + "\n" for number in (100, 101, 102))
    )
    assert "are made anew" not in capsys.readouterr().out
    assert evaluate(make_settings(), tmp_path / "e", names=("many",), goes_on=True)[1] == requests
    assert capsys.readouterr().out == f"the answers in {file} are made anew, because they were of other prompts_sha256\n"
    assert (
        evaluate(make_settings("rollout.max_turns=3", "rollout.renderer=qwen3"), tmp_path / "e", names=("many",), goes_on=True)[1]
        == requests
    )


def test_a_set_may_be_several_files(make_settings: Callable[..., Settings], tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"part-{number}.jsonl").write_text(json.dumps({"prompt": f"{number}=", "label": "1"}) + "\n")
    (found,), _ = evaluate(make_settings(f"eval.sets.parts={tmp_path}/part-*.jsonl"), tmp_path / "e", names=("parts",))
    assert found.estimates["reward"].num == 2


def test_a_set_has_its_own_reward_function(make_settings: Callable[..., Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str | None, Any]] = []

    class Own:
        def __init__(self, settings: Any, **_: Any) -> None:
            made.append((settings.function, settings.args))

        def __enter__(self) -> "Own":
            return self

        def __exit__(self, *_: object) -> None:
            return None

        def probe(self, prompt: Any) -> None:
            made.append((prompt.id, None))

        async def score(self, sample: Sample) -> Reward:
            return Reward(RewardOutcome.SCORED, 7.0)

    monkeypatch.setattr("megatron_rl.rewards.runner.RewardRunner", Own)
    settings = make_settings("eval.sets.many.reward={function: 'a:b', args: {c: 1}}")
    (many, greedy), _ = evaluate(settings, tmp_path / "e")
    assert made == [("a:b", {"c": 1}), ("many-0", None)]
    assert many.estimates["reward"].value == 7.0 != greedy.estimates["reward"].value
    assert json.loads(many.path.read_text())["facts"]["reward"] == {"function": "a:b", "args": {"c": 1}}


def test_failures_of_a_rollout_are_answers_with_a_cause(tmp_path: Path, make_settings: Callable[..., Settings]) -> None:
    settings = make_settings()
    prompt = RunPrompts.read(settings.model.path, settings.data, sets=settings.eval.sets, seed=0).held_out["many"][0]
    group = Group("many-0", prompt, (), (Failure("timeout", "no samples after 3 s"),))
    found = answers_of(group, num_samples=2)
    assert [(answer.index, answer.cause, answer.is_made) for answer in found] == [
        (0, "rollout_timeout", False),
        (1, "rollout_error", False),
    ]
    file = AnswerFile(tmp_path / "a.jsonl", facts={}, num_samples=2, goes_on=False)
    file.add(found)
    assert read_answers(file.path) == found


def test_a_kill_leaves_no_answers_beside_the_facts_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = AnswerFile(tmp_path / "a.jsonl", facts={"steps": 1}, num_samples=1, goes_on=True)
    file.add([Answer(prompt_id="a-0", index=0, prompt="p", label=None)])
    write, written = graded_answers.write_atomic, list[Path]()

    def killed(path: Path, content: str) -> None:
        if written:
            raise KeyboardInterrupt
        written.append(path)
        write(path, content)

    monkeypatch.setattr(graded_answers, "write_atomic", killed)
    with pytest.raises(KeyboardInterrupt):
        AnswerFile(tmp_path / "a.jsonl", facts={"steps": 2}, num_samples=1, goes_on=True)
    monkeypatch.setattr(graded_answers, "write_atomic", write)
    assert AnswerFile(tmp_path / "a.jsonl", facts={"steps": 2}, num_samples=1, goes_on=True).kept == {}


def test_results_of_one_model_and_of_several(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def result(value: float, **failures: int) -> list[SetResult]:
        return [SetResult("a", {"accuracy": Estimate(value, 0.1, 0.9, 7, "prompts")}, failures, "gone", tmp_path / "a.json")]

    print_results({"m": result(0.5, rollout_error=2)})
    alone = capsys.readouterr().out
    assert "0.5000  [0.1000, 0.9000]  of 7 prompts" in alone and "a.json; failed: 2 rollout_error, most often: gone" in alone
    print_results({"m": result(0.5), "n": result(0.25)})
    [row] = [line for line in capsys.readouterr().out.splitlines() if "accuracy" in line]
    assert re.findall(r"[\w.]+", row) == ["accuracy", "0.5000", "0.2500"]
