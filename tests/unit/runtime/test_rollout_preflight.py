"""A run's own rollout before the start: it is tried on the first row, with the row's own fields."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl.config.load import load_settings
from megatron_rl.errors import UserError
from megatron_rl.runtime.preflight import preflight

PLUGINS = """
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
