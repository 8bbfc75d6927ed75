"""Which groups teach something, by the estimator that reads their rewards or the user's filter, and which weights may have made them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_rl.algorithms.objective import Objective
from megatron_rl.config.settings import FilterSettings
from megatron_rl.errors import UserError
from megatron_rl.rollout.group_choice import NO_REWARD, NO_SIGNAL, Chosen, GroupChoice, check_versions, has_signal, load_filter
from megatron_rl.types import Failure, Group, Prompt, Reward, RewardOutcome, Sample, StopReason


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
        ({"kind": "group"}, [scored(1), scored(1)], False),
        ({"kind": "group"}, [scored(1), scored(0)], True),
        ({"kind": "group"}, [scored(1), FAILED], False),
        ({"kind": "group"}, [FAILED, FAILED], False),
        ({"kind": "pass@k"}, [scored(1), scored(1), scored(0)], False),
        ({"kind": "remax"}, [scored(1, greedy_baseline=0.5)], True),
        ({"kind": "remax"}, [scored(1, greedy_baseline=0.5), scored(1, greedy_baseline=0.5)], True),
        ({"kind": "remax"}, [scored(1, greedy_baseline=1.0), scored(1, greedy_baseline=1.0)], False),
        ({"kind": "gdpo"}, [scored(1, a=1, b=0), scored(1, a=1, b=1)], True),
        ({"kind": "gdpo"}, [scored(1, a=1), scored(0, a=1)], False),
        ({"kind": "gdpo", "reward_weights": [1.0, 0.0]}, [scored(1, a=1, b=0), scored(1, a=1, b=1)], False),
        ({"kind": "gdpo"}, [scored(1), scored(1)], True),
        ({"kind": "gdpo"}, [scored(1, a=1), scored(1, b=1)], True),
        ({"kind": "gdpo", "reward_weights": [1.0, 0.0]}, [scored(1, a=1), scored(1, a=1)], True),
        ({"kind": "gdpo"}, [scored(1, **{"a": 1, "a/x": 0}), scored(1, **{"a": 1, "a/x": 1})], False),
    ],
)
def test_what_a_group_teaches_depends_on_the_estimator(advantage: dict[str, Any], rewards: list[Reward], expected: bool) -> None:
    assert has_signal(group_of(*rewards), Objective.of(advantage={**advantage}).advantage) is expected


def test_trajectories_are_compared_and_not_their_samples() -> None:
    one, other = group_of(scored(1), scored(1)), group_of(scored(1), scored(1), scored(0))
    alone = replace(one, samples=tuple(replace(sample, trajectory=0) for sample in one.samples))
    assert not has_signal(alone, Objective.of(advantage={"kind": "reinforce_plus_plus_baseline"}).advantage)
    both = replace(other, samples=tuple(replace(sample, trajectory=index // 2) for index, sample in enumerate(other.samples)))
    assert has_signal(both, Objective.of(advantage={}).advantage) and has_signal(both, Objective.of(advantage={"kind": "pass@k"}).advantage)
    # The best two are one trajectory: there is a second best.
    assert not has_signal(other, Objective.of(advantage={"kind": "pass@k"}).advantage)


@pytest.mark.parametrize("versions", [[2, 2, 2], [1, 2, -1], [-1, -1, -1], [1, 1, 1]])
def test_tokens_of_the_weights_that_were_served_are_taken(versions: list[int]) -> None:
    check_versions([made_by(versions)], step=2, oldest_version=1, cure="mend it")


@pytest.mark.parametrize("versions", [[0, 2, 2], [2, 2, 0], [0, 0, 0], [2, 3, 2]])
def test_a_token_of_other_weights_is_one_sentence(versions: list[int]) -> None:
    message = (
        f"step 3: sample 0 of prompt p has tokens of weight versions {min(versions)} to {max(versions)}, needs 1 to 2 .*ness 1.; mend it"
    )
    with pytest.raises(UserError, match=message):
        check_versions([made_by(versions)], step=2, oldest_version=1, cure="mend it")


def made_by(versions: list[int]) -> Group:
    prompt = Prompt(id="p", token_ids=np.array([1]), text="")
    made = [version >= 0 for version in versions]
    arrays = {"response_ids": np.ones(3), "loss_mask": made, "rollout_log_probs": np.full(3, -1.0), "weight_versions": versions}
    return Group("p", prompt, (Sample(group_id="p", index=0, prompt=prompt, stop_reason=StopReason.STOP, **arrays),))


def choose(group: Group, **objective: Any) -> Chosen:
    return GroupChoice(Objective.of(**objective), filter=None, samples_per_prompt=8).choose(group)


@pytest.mark.parametrize("drops", [False, True])
def test_a_group_without_rewards_is_kept_without_a_filter(drops: bool) -> None:
    def chosen(*rewards: Reward) -> tuple[str | None, bool]:
        found = choose(group_of(*rewards), zero_variance="drop" if drops else "keep")
        assert not found.failed and not found.filtered
        return found.rejection, found.kept

    assert chosen(FAILED, FAILED) == (NO_REWARD, not drops)
    assert chosen(scored(1), scored(1)) == ((NO_SIGNAL, False) if drops else (None, True))
    assert chosen(scored(1), scored(0)) == (None, True)


@pytest.mark.parametrize(
    ("num_left", "num_failed", "advantage", "failed"),
    [(2, 6, "group", False), (1, 7, "group", True), (1, 7, "reinforce_plus_plus", False), (0, 1, "reinforce_plus_plus", True)],
)
def test_a_group_is_left_out_when_too_few_trajectories_are_left(num_left: int, num_failed: int, advantage: str, failed: bool) -> None:
    group = replace(group_of(*(scored(index) for index in range(num_left))), failures=(Failure("error", "ValueError: no"),) * num_failed)
    found = choose(group, advantage=advantage)
    words = f"the rollout failed for {num_failed} of {num_left + num_failed} trajectories: ValueError: no"
    assert (found.rejection, found.failed, found.kept) == (words if failed else None, failed, not failed)


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


@pytest.mark.parametrize(("rewards", "expected"), [((1, 0, 1, 0), False), ((1, 0, 1, 1), True)])
def test_a_signal_is_a_difference_within_a_role(rewards: tuple[float, ...], expected: bool) -> None:
    group = group_of(*map(scored, rewards))
    samples = tuple(replace(sample, role=("proposer", "verifier")[sample.index % 2]) for sample in group.samples)
    assert has_signal(replace(group, samples=samples), Objective().advantage) is expected


def test_failures_have_to_leave_enough_of_each_role() -> None:
    group = group_of(scored(1), scored(0))
    samples = tuple(replace(sample, role=("proposer", "verifier")[sample.index]) for sample in group.samples)
    choice = GroupChoice(Objective(), None, samples_per_prompt=2)
    chosen = choice.choose(replace(group, samples=samples, failures=(Failure("error", "boom"),)))
    assert chosen.failed and chosen.rejection is not None and "1 of 2 trajectories" in chosen.rejection
