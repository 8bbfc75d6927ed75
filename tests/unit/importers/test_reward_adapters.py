"""Rewards of slime and verl, unchanged, as a run calls its own."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_rl.rewards.worker import call_all
from megatron_rl.types import Prompt, RewardOutcome, Sample, StopReason

THEIRS = """
async def reward(args, sample, **kwargs):
    assert sample.status.value == "truncated" and sample.response_length == 3 and len(sample.tokens) == 5
    return {"score": float(sample.response == sample.label), "length": sample.response_length, "pred": "x"}

def rm(args, sample):
    return {"acc": 0.25, "score": 0.5}

def fails(args, sample):
    raise KeyError("no")

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert (data_source, extra_info) == ("gsm8k", {"index": 4})
    return {"score": 0.5, "acc": True} if solution_str == ground_truth else -1
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "their_rewards.py").write_text(THEIRS)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("their_rewards", None)


def scored(kind: str, name: str, *, response: str = "7", **args: Any) -> Any:
    metadata = {"data_source": "gsm8k", "extra_info": {"index": 4}}
    prompt = Prompt(id="p", token_ids=np.array([1, 2]), text="3 + 4", label="7", metadata=metadata)
    sample = Sample(
        group_id="p",
        index=0,
        prompt=prompt,
        response_ids=np.array([3, 4, 5]),
        loss_mask=np.ones(3, np.bool_),
        rollout_log_probs=np.zeros(3, np.float32),
        weight_versions=np.zeros(3, np.int64),
        stop_reason=StopReason.LENGTH,
        response_text=response,
    )
    given = ", ".join(f'"{key}": "{value}"' for key, value in {"path": f"their_rewards:{name}", **args}.items())
    (reward,), _ = call_all(f"megatron_rl.importers.rewards:{kind}", f"{{{given}}}", samples=[sample], form="sample", call_timeout_s=9.0)
    return reward


def test_a_reward_of_slime() -> None:
    reward = scored("slime", "reward")
    assert (reward.outcome, reward.value, dict(reward.components)) == (RewardOutcome.SCORED, 1.0, {"length": 3.0})
    assert scored("slime", "reward", response="8").value == 0.0
    assert (scored("slime", "rm", key="acc").value, scored("slime", "rm").value) == (0.25, 0.5)


def test_a_score_of_verl() -> None:
    reward = scored("verl", "compute_score")
    assert (reward.value, dict(reward.components)) == (0.5, {"acc": 1.0})
    assert scored("verl", "compute_score", response="8").value == -1.0


@pytest.mark.parametrize(("name", "part"), [("fails", "KeyError: 'no'"), ("nothing", "reward.args.path is their_rewards:nothing")])
def test_a_failure_is_an_error_and_no_zero(name: str, part: str) -> None:
    reward = scored("slime", name)
    assert reward.outcome is RewardOutcome.ERROR and part in reward.message
