"""The examples of agents without an engine: their tasks, teachers, environments, and the commands of their script."""

import asyncio
import itertools
import json
import os
import random
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from examples.agents.make_task import EXAMPLES, make_task
from examples.agents.nim import Nim
from examples.agents.nim import rows as games
from megatron_rl.config.load import load_settings
from megatron_rl.config.settings import Settings
from megatron_rl.plugins.environment import Reply
from megatron_rl.rollout.renderers import choose_renderer
from megatron_rl.types import Prompt, Sample, StopReason

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`made(name)` is the directory of an example's task."""
    root = tmp_path_factory.mktemp("tasks")

    def directory(name: str) -> Path:
        if name == "reasoning":
            pytest.importorskip("reasoning_gym")
        if not (root / name).exists():
            make_task(name, root / name, seed=1)
        return root / name

    return directory


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_task_is_short_in_tokens_and_holds_rows_out(name: str, made: Callable[[str], Path]) -> None:
    task = made(name)
    held_out, train = ({json.dumps(row) for row in read(task / f"{part}.jsonl")} for part in ("held_out", "train"))
    assert len(held_out) == 128 and len(train) == 4096 and not held_out & train
    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    renderer = choose_renderer(tokenizer, model_type="qwen3").renderer
    for row in read(task / "supervised.jsonl")[:200]:
        before = renderer.render_ids(row["prompt"], add_generation_prompt=True)
        answer = tokenizer.encode(row["response"] + "<|end|>", add_special_tokens=False)
        assert len(before) + len(answer) <= 64 and tokenizer.decode(answer) == row["response"] + "<|end|>"
        # What was sampled stays as it is when further messages follow.
        parsed = renderer.parse_response(answer)
        calls = [{"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in parsed.tool_calls]
        said = {"role": "assistant", "content": parsed.content, **({"tool_calls": calls} if calls else {})}
        later = renderer.render_ids([*row["prompt"], said, {"role": "user", "content": "4"}], add_generation_prompt=True)
        assert later[: len(before) + len(answer)] == [*before, *answer]


@pytest.mark.parametrize("name", ["shop", "black_box", "reasoning"])
def test_a_teacher_is_right_and_wrong(name: str, made: Callable[[str], Path]) -> None:
    rows, draw = read(made(name) / "train.jsonl")[:300], random.Random(0)
    right = [conversation[-1]["content"] == row["label"] for row in rows for conversation in EXAMPLES[name][1](row, draw)]
    assert 0.25 < np.mean(right) < 0.6


def test_a_game_of_nim() -> None:
    async def play(stones: int, answers: list[str]) -> list[Reply | str]:
        game = Nim()
        prompt = Prompt(id="p", token_ids=np.array([1]), text="", metadata={"stones": stones, "seed": 1})
        game.prompt = prompt
        assert await game.reset(prompt=prompt) is None
        return [await game.step(message={"role": "assistant", "content": answer}) for answer in answers]

    def last(stones: int, *answers: str) -> Reply | str:
        return asyncio.run(play(stones, list(answers)))[-1]

    assert last(3, "3") == Reply(done=True, reward=1.0)
    for wrong in ("4", "", "all of them", "03"):
        assert last(7, wrong) == Reply(done=True, reward=0.0)
    assert last(2, "3") == Reply(done=True, reward=0.0)
    left = last(7, "3")
    assert isinstance(left, Reply) and left.content in ("1 left.", "2 left.", "3 left.") and not left.done
    assert left == last(7, "3"), "the opponent's moves follow from the row"
    won = last(7, "3", left.content[0])
    assert won == Reply(done=True, reward=1.0)
    assert all(row["stones"] % 4 for row in itertools.islice(games(1), 50))


def test_a_dataset_that_refuses_its_own_answers_is_refused() -> None:
    pytest.importorskip("reasoning_gym")
    from examples.agents.reasoning import rows_of
    from megatron_rl.rewards.reasoning_gym import score

    with pytest.raises(
        ValueError, match=r"graph_color gives its own answer None to question 0 a score of 0, needs 1; take another dataset"
    ):
        next(rows_of("graph_color", seed=1, size=2))
    row = next(rows_of("spell_backward", seed=1, size=2, min_word_len=4, max_word_len=4))
    fields = {name: row[name] for name in ("dataset", "entry")}
    prompt = Prompt(id="p", token_ids=np.array([1]), text="", label=row["label"], metadata=fields)

    def rewarded(text: str) -> object:
        sample = Sample(
            group_id="p", index=0, prompt=prompt, response_ids=np.array([1]), loss_mask=np.array([True]),
            rollout_log_probs=np.zeros(1, np.float32), weight_versions=np.array([1]), stop_reason=StopReason.STOP, response_text=text,
        )  # fmt: skip
        return score(sample=sample)["reward"]

    assert rewarded(row["label"]) == 1 and rewarded(row["label"][0]) == 0.25 and rewarded("") == 0


def commands(name: str, *options: str) -> list[list[str]]:
    words = ["bash", "examples/agents/run.sh", name, "--dry-run", *options]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=60)
    return [shlex.split(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_commands_of_an_example_fit_together(name: str) -> None:
    task, sft, grpo = (words for words in commands(name, "--seed", "7", "run.num_steps=3") if "pip" not in words and "bash" not in words)
    assert task[1:4] == ["-m", "examples.agents.make_task", name]
    assert task[-4:] == ["--seed", "7", "--held-out", "64" if name == "black_box" else "128"]

    def settings(words: list[str]) -> Settings:
        assert words[1:4] == ["-m", "megatron_rl", "train"]
        return load_settings(ROOT / words[4], words[5:])

    warm, rl = settings(sft), settings(grpo)
    directory = Path(task[4])
    assert (warm.model.path, warm.data.train) == (directory / "model", directory / "supervised.jsonl")
    assert (rl.model.path, rl.data.train) == (warm.run.directory / "huggingface", directory / "train.jsonl")
    assert (rl.run.num_steps, rl.run.seed, warm.run.seed) == (3, 7, 7)
    assert rl.rollout.is_hosted == (name != "reasoning") and (rl.reward.function is None) == rl.rollout.is_hosted


def test_an_unknown_example_is_refused() -> None:
    words = ["bash", "examples/agents/run.sh", "chess", "--dry-run"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2 and "'chess' is no example, needs one of shop, nim, pair, black_box and reasoning" in done.stderr
