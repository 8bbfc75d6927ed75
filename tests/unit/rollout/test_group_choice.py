"""Which groups teach something, by the estimator that reads their rewards or the user's filter, and which weights may have made them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_rl.algorithms.objective import AdvantageSettings
from megatron_rl.config.load import load_settings
from megatron_rl.config.settings import FilterSettings
from megatron_rl.errors import UserError
from megatron_rl.rollout.group_choice import NO_REWARD, NO_SIGNAL, GroupChoice, check_versions, has_signal, load_filter
from megatron_rl.types import Group, Prompt, Reward, RewardOutcome, Sample, StopReason


def group_of(*rewards: Reward) -> Group:
    prompt = Prompt(id="p", token_ids=np.array([1, 2]), text="ab")
    samples = tuple(
        Sample(
            group_id="p",
            index=index,
            prompt=prompt,
            response_ids=np.zeros(2 + index, np.int64),
            loss_mask=np.ones(2 + index, np.bool_),
            rollout_log_probs=np.zeros(2 + index, np.float32),
            weight_versions=np.zeros(2 + index, np.int64),
            stop_reason=StopReason.STOP,
            reward=reward,
        )
        for index, reward in enumerate(rewards)
    )
    return Group("p", prompt, samples)


def scored(value: float, **components: float) -> Reward:
    return Reward(RewardOutcome.SCORED, value, components=components)


FAILED = Reward(RewardOutcome.ERROR, message="boom")


@pytest.mark.parametrize(
    ("advantage", "rewards", "expected"),
    [
        ({"estimator": "grpo"}, [scored(1), scored(1)], False),
        ({"estimator": "grpo"}, [scored(1), scored(0)], True),
        ({"estimator": "grpo"}, [scored(1), FAILED], False),
        ({"estimator": "grpo"}, [FAILED, FAILED], False),
        ({"estimator": "pass@k"}, [scored(1), scored(1), scored(0)], False),
        ({"estimator": "remax"}, [scored(1, greedy_baseline=0.5)], True),
        ({"estimator": "remax"}, [scored(1, greedy_baseline=0.5), scored(1, greedy_baseline=0.5)], True),
        ({"estimator": "remax"}, [scored(1, greedy_baseline=1.0), scored(1, greedy_baseline=1.0)], False),
        ({"estimator": "gdpo"}, [scored(1, a=1, b=0), scored(1, a=1, b=1)], True),
        ({"estimator": "gdpo"}, [scored(1, a=1), scored(0, a=1)], False),
        ({"estimator": "gdpo", "args": {"reward_weights": [1.0, 0.0]}}, [scored(1, a=1, b=0), scored(1, a=1, b=1)], False),
        ({"estimator": "gdpo"}, [scored(1), scored(1)], True),
        ({"estimator": "gdpo"}, [scored(1, a=1), scored(1, b=1)], True),
        ({"estimator": "gdpo", "args": {"reward_weights": [1.0, 0.0]}}, [scored(1, a=1), scored(1, a=1)], True),
    ],
)
def test_what_a_group_teaches_depends_on_the_estimator(advantage: dict[str, Any], rewards: list[Reward], expected: bool) -> None:
    assert has_signal(group_of(*rewards), AdvantageSettings(**advantage)) is expected


def test_trajectories_are_compared_and_not_their_samples() -> None:
    one, other = group_of(scored(1), scored(1)), group_of(scored(1), scored(1), scored(0))
    alone = replace(one, samples=tuple(replace(sample, trajectory=0) for sample in one.samples))
    assert not has_signal(alone, AdvantageSettings(estimator="reinforce_plus_plus_baseline"))
    both = replace(other, samples=tuple(replace(sample, trajectory=index // 2) for index, sample in enumerate(other.samples)))
    assert has_signal(both, AdvantageSettings()) and has_signal(both, AdvantageSettings(estimator="pass@k"))
    # The best two are one trajectory: there is a second best.
    assert not has_signal(other, AdvantageSettings(estimator="pass@k"))


@pytest.mark.parametrize("versions", [[2, 2, 2], [1, 2, -1], [-1, -1, -1], [1, 1, 1]])
def test_tokens_of_the_weights_that_were_served_are_taken(versions: list[int]) -> None:
    check_versions([made_by(versions)], step=2, oldest_version=1, rollout="rollout.function a:b")


@pytest.mark.parametrize("versions", [[0, 2, 2], [2, 2, 0], [0, 0, 0], [2, 3, 2]])
def test_a_token_of_other_weights_is_one_sentence(versions: list[int]) -> None:
    message = (
        f"step 3: sample 0 of prompt p has tokens of weight versions {min(versions)} to {max(versions)}, needs 1 to 2 .*staleness 1.*"
        "rollout.function a:b has to ask the engine anew"
    )
    with pytest.raises(UserError, match=message):
        check_versions([made_by(versions)], step=2, oldest_version=1, rollout="rollout.function a:b")


def made_by(versions: list[int]) -> Group:
    prompt = Prompt(id="p", token_ids=np.array([1]), text="")
    made = [version >= 0 for version in versions]
    arrays = {"response_ids": np.ones(3), "loss_mask": made, "rollout_log_probs": np.full(3, -1.0), "weight_versions": versions}
    return Group("p", prompt, (Sample(group_id="p", index=0, prompt=prompt, stop_reason=StopReason.STOP, **arrays),))


@pytest.mark.parametrize("zero_variance", ["keep", "mask_kl", "drop", "resample"])
def test_a_group_without_rewards_is_what_was_generated_where_nothing_is_dropped(zero_variance: str) -> None:
    paths = ("run.directory=run", "model.path=model", "data.train=train.jsonl")
    choice = GroupChoice(load_settings(None, [*paths, f"objective.zero_variance={zero_variance}"]))
    drops = zero_variance in ("drop", "resample")
    failed, constant, different = group_of(FAILED, FAILED), group_of(scored(1), scored(1)), group_of(scored(1), scored(0))
    assert choice.rejection(failed) == NO_REWARD and choice.keeps(NO_REWARD) is not drops
    assert choice.rejection(constant) == (NO_SIGNAL if drops else None) and not choice.keeps(NO_SIGNAL)
    assert choice.rejection(different) is None and choice.keeps(None)


FILTERS = """
def keep(*, group, digit: int):
    return "its number ends with the digit" if group.prompt.text.endswith(str(digit)) else None

def empty(*, group):
    return ""

def number(*, group):
    return 0

def fails(*, group):
    return group.samples[9]
"""


@pytest.fixture
def filters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "filters_by_path.py").write_text(FILTERS)
    monkeypatch.syspath_prepend(tmp_path)


def group_with(text: str) -> Group:
    return Group(id="p", prompt=Prompt(id="p", token_ids=np.array([1]), text=text), samples=())


def test_without_a_filter_every_group_is_kept() -> None:
    assert load_filter(None)(group_with("11")) is None


@pytest.mark.usefixtures("filters")
def test_a_reason_names_the_filter() -> None:
    keep = load_filter(FilterSettings(function="filters_by_path:keep", args={"digit": 1}))
    assert keep(group_with("11")) == "rollout.filter.function filters_by_path:keep: its number ends with the digit"
    assert keep(group_with("12")) is None


@pytest.mark.usefixtures("filters")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("empty", "returned '' of type str for the group of prompt p, needs None"),
        ("number", "returned 0 of type int"),
        ("fails", "failed for the group of prompt p: IndexError: tuple index"),
    ],
)
def test_a_filter_that_breaks_its_contract_is_one_sentence(name: str, message: str) -> None:
    with pytest.raises(UserError, match=rf"^rollout.filter.function filters_by_path:{name} {message}"):
        load_filter(FilterSettings(function=f"filters_by_path:{name}"))(group_with("1"))
