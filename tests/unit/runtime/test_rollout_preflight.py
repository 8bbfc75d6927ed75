"""A run's own rollout before the start: it is tried on the first row, with the row's own fields."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl.config.load import load_settings
from megatron_rl.errors import UserError
from megatron_rl.runtime.preflight import preflight

PLUGINS = """
from megatron_rl import Environment, Reply
from megatron_rl.rollout.groups import single_turn

async def numbered(*, prompt, **asked):
    assert prompt.metadata["number"] == 0 and prompt.text == "0+1=" and prompt.label == "1"
    return await single_turn(prompt=prompt, **asked)

class Rows:
    state = 0

    def __init__(self, *, seed, first: int):
        self.first = first

    def next_rows(self, count):
        return [{"prompt": "0+1=", "label": "1", "number": self.first} for _ in range(count)]

class Bare(Environment):
    pass

class Giving(Environment):
    def step(self, *, message):
        return Reply(done=True, reward=0)
"""


@pytest.mark.parametrize("probe", [True, False])
def test_an_own_rollout_is_tried_on_the_first_row(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, probe: bool
) -> None:
    (tmp_path / "rollout_preflight_plugins.py").write_text(PLUGINS)
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = [{"prompt": f"{number}+1=", "label": str(number + 1), "number": number} for number in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = tiny_model()

    def check(origin: str) -> None:
        data = f"data={{{origin}, max_prompt_tokens: 16, prompts_per_step: 4, samples_per_prompt: 2}}"
        words = [f"run.directory={tmp_path / 'run'}", f"model.path={model}", data, "rollout.sampling.max_response_tokens=8"]
        own = ["rollout.function=rollout_preflight_plugins:numbered", "reward.function=megatron_rl.rewards.math:score"]
        preflight(load_settings(None, [*words, *own, "training.optimizer.lr=1e-4"]), probe=probe)

    check(f"train: {tmp_path / 'train.jsonl'}")
    check("source: 'rollout_preflight_plugins:Rows', args: {first: 0}")
    with pytest.raises(UserError, match=r"rollout\.function rollout_preflight_plugins:numbered failed for a probe"):
        check("source: 'rollout_preflight_plugins:Rows', args: {first: 1}")


@pytest.mark.parametrize(("name", "reward", "noted"), [("Bare", "null", True), ("Bare", "length:score", False), ("Giving", "null", False)])
def test_an_end_without_any_reward_is_noted(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, reward: str, noted: bool
) -> None:
    (tmp_path / "rollout_preflight_plugins.py").write_text(PLUGINS)
    (tmp_path / "length.py").write_text("def score(*, sample):\n    return 0.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "train.jsonl").write_text('{"prompt": "0+1=", "label": "1"}\n' * 4)
    model = tiny_model()
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}=")
    data = f"data={{train: {tmp_path / 'train.jsonl'}, max_prompt_tokens: 16, prompts_per_step: 4, samples_per_prompt: 2}}"
    words = [f"run.directory={tmp_path / 'run'}", f"model.path={model}", data, "rollout.sampling.max_response_tokens=8"]
    words += [f"rollout.environment=rollout_preflight_plugins:{name}", f"reward.function={reward}", "training.optimizer.lr=1e-4"]
    notes = " ".join(preflight(load_settings(None, words)))
    assert ("rollout.environment ended a trial without a reward, and reward.function is null" in notes) == noted
