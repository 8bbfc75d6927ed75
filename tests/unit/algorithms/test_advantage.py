"""Group advantages against hand-computed values and definitions."""

from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vector_format import advantage_choice

from megatron_rl.algorithms.advantage import Groups, group_advantages
from megatron_rl.algorithms.objective import Objective
from megatron_rl.algorithms.plug_in import PlugInAdvantage
from megatron_rl.plugins.loader import load

REWARDS = torch.tensor([1, 0, 0, 1, 0.3, 0.9, 0.1, 0.5], dtype=torch.float64)
GROUPS = torch.tensor([7, 7, 7, 7, 3, 3, 3, 3])
ONES = torch.ones(8, dtype=torch.int64)
CRITIC_FREE = ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "opo", "gdpo", "pass@k"]


def advantages(estimator: str, rewards=REWARDS, groups=GROUPS, lengths=ONES, baselines=None, **args) -> torch.Tensor:
    """By those of `args` that the estimator has."""
    known = {item.name for item in fields(Objective.of(advantage=advantage_choice({"estimator": estimator})).advantage)}
    if estimator == "dr_grpo" or args.get("scale") == "none":
        known -= {"scale" if estimator == "dr_grpo" else "", "std_epsilon"}
    chosen = advantage_choice({"estimator": estimator, **{name: value for name, value in args.items() if name in known}})
    made = Objective.of(advantage=chosen).advantage
    return group_advantages(made, rewards=rewards, group_ids=groups, lengths=lengths, baselines=baselines)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("grpo", [0.866024, -0.866024, -0.866024, 0.866024, -0.439154, 1.317461, -1.024692, 0.146385]),
        ("rloo", [2 / 3, -2 / 3, -2 / 3, 2 / 3, -0.2, 0.6, -0.4666667, 0.0666667]),
        ("dr_grpo", [0.5, -0.5, -0.5, 0.5, -0.15, 0.45, -0.35, 0.05]),
        ("opo", [0.5, -0.5, -0.5, 0.5, -0.15, 0.45, -0.35, 0.05]),
        ("pass@k", [0, 0, 0, 0, 0, 1.171077, 0, 0]),
    ],
)
def test_published_values(estimator: str, expected: list[float]) -> None:
    torch.testing.assert_close(advantages(estimator), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-6)


def test_opo_weighs_its_baseline_by_length() -> None:
    lengths = torch.tensor([1, 2, 3, 5, 7, 2, 1, 4])
    first, second = (1 * 1 + 5 * 1) / 11, (7 * 0.3 + 2 * 0.9 + 1 * 0.1 + 4 * 0.5) / 14
    expected = REWARDS - torch.tensor([first] * 4 + [second] * 4, dtype=torch.float64)
    torch.testing.assert_close(advantages("opo", lengths=lengths), expected)


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "opo", "pass@k", "gdpo", "reinforce_plus_plus_baseline"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_sample_whose_group_was_not_scored_gets_nothing(estimator: str, scale: str) -> None:
    rewards, groups = torch.tensor([1.0, 0.0, 0.7], dtype=torch.float64), torch.tensor([0, 0, 1])
    given = rewards.unsqueeze(1) if estimator == "gdpo" else rewards
    got = advantages(estimator, given, groups, torch.tensor([2, 3, 4]), scale=scale, whiten=False)
    assert got[2] == 0.0 and got[0] > 0.0
    alone = advantages(estimator, given[2:], groups[2:], torch.tensor([4]), scale=scale, std_epsilon=0.0, whiten=False)
    assert alone.tolist() == [0.0]
    equal = advantages(estimator, given[[2, 2]], torch.tensor([4, 1]), torch.tensor([4, 1]), scale=scale, std_epsilon=0.0, whiten=False)
    assert equal.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("estimator", ["grpo", "pass@k", "gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
@pytest.mark.parametrize("factor", [1e38, 1e200])
@pytest.mark.parametrize("scale", ["group", "batch"])
def test_rewards_whose_squares_overflow_keep_their_proportions(estimator: str, factor: float, scale: str) -> None:
    """An infinite standard deviation made every advantage 0."""
    given = REWARDS.unsqueeze(1) if estimator == "gdpo" else REWARDS
    lengths = torch.arange(1, 9)
    small, large = (advantages(estimator, given * by, lengths=lengths, scale=scale, std_epsilon=0.0) for by in (1.0, factor))
    torch.testing.assert_close(large, small)


def test_remax_subtracts_the_greedy_reward() -> None:
    greedy = torch.full((8,), 0.25, dtype=torch.float64)
    torch.testing.assert_close(advantages("remax", baselines=greedy), REWARDS - 0.25)
    with pytest.raises(ValueError, match="baselines"):
        advantages("remax")


def test_scale_of_the_whole_batch_and_none() -> None:
    centred = advantages("dr_grpo")
    torch.testing.assert_close(advantages("grpo", scale="none"), centred)
    torch.testing.assert_close(advantages("grpo", scale="batch"), centred / (REWARDS.std() + 1e-6))
    margin = torch.tensor([0, 0, 0, 0, 0, 0.4, 0, 0], dtype=torch.float64)
    torch.testing.assert_close(advantages("pass@k", scale="none"), margin)
    torch.testing.assert_close(advantages("pass@k", scale="batch"), margin / (REWARDS.std() + 1e-6))


def test_reinforce_plus_plus_whitens_over_tokens() -> None:
    lengths = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8])
    for estimator, values in (("reinforce_plus_plus", REWARDS), ("reinforce_plus_plus_baseline", advantages("dr_grpo"))):
        tokens = values.repeat_interleave(lengths)
        expected = (values - tokens.mean()) / tokens.std()
        torch.testing.assert_close(advantages(estimator, lengths=lengths), expected)


def test_gdpo_normalises_each_component() -> None:
    rewards = torch.stack([REWARDS, torch.zeros(8, dtype=torch.float64), 10 * REWARDS.flip(0)], 1)
    parts = [advantages("grpo", rewards=rewards[:, column]) for column in range(3)]
    total = 2 * parts[0] + 1 * parts[1] + 0.5 * parts[2]
    got = advantages("gdpo", rewards=rewards, reward_weights=(2.0, 1.0, 0.5), whiten=False)
    torch.testing.assert_close(got, total)
    whitened = advantages("gdpo", rewards=rewards, reward_weights=(2.0, 1.0, 0.5))
    torch.testing.assert_close(whitened, (total - total.mean()) / total.std())
    with pytest.raises(ValueError, match="reward_weights"):
        advantages("gdpo", rewards=rewards, reward_weights=(1.0,))


@pytest.mark.parametrize("factor", [-1.0, -2.0, -1e3])
@pytest.mark.parametrize("std_epsilon", [0.0, 1e-6])
def test_gdpo_of_components_that_cancel_is_zero(factor: float, std_epsilon: float) -> None:
    one = torch.tensor([0.1, 0.7, 0.35, 0.9, 0.2, 0.3], dtype=torch.float64)
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    got = advantages("gdpo", torch.stack([one, factor * one], 1), groups, ONES[:6], std_epsilon=std_epsilon)
    assert got.tolist() == [0.0] * 6
    # Beside a group with a signal, too.
    other = torch.stack([one, torch.cat([factor * one[:3], one[3:]])], 1)
    mixed = advantages("gdpo", other, groups, ONES[:6], std_epsilon=std_epsilon, whiten=False)
    assert (mixed != 0).tolist() == [False] * 3 + [True] * 3


def test_whitening_takes_rounding_for_no_spread() -> None:
    nearly_equal = 0.1 + torch.tensor([0.0, 1.0, -1.0, 2.0], dtype=torch.float64) * 2e-17
    got = advantages("reinforce_plus_plus", 1e3 * nearly_equal, torch.arange(4), torch.tensor([1, 2, 3, 4]))
    assert len(set(nearly_equal.tolist())) > 1 and got.tolist() == [0.0] * 4


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "opo", "pass@k"])
@pytest.mark.parametrize("value", [0.3, 1.7, -1.3, 0.1, 1e9, 1e-9])
def test_constant_groups_get_exactly_zero(estimator: str, value: float) -> None:
    for size in (2, 7, 8, 16):
        for dtype in (torch.float32, torch.float64):
            rewards = torch.full((size,), value, dtype=dtype)
            got = advantages(estimator, rewards, torch.zeros(size), torch.arange(size), std_epsilon=1e-12)
            assert got.tolist() == [0.0] * size
            assert bool(Groups.of(torch.zeros(size)).constant(rewards.double()).all())


def test_centring_is_exact_beside_a_large_common_offset() -> None:
    """Also without a scale: what is whitened later must not start from rounding."""
    for rewards in (torch.full((7,), 0.1, dtype=torch.float64), torch.full((16,), 1e9 + 0.1, dtype=torch.float64)):
        got = advantages("reinforce_plus_plus_baseline", rewards, torch.zeros(len(rewards)), torch.ones(len(rewards)), whiten=False)
        assert got.tolist() == [0.0] * len(rewards)
    near = 1e9 + torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    assert advantages("dr_grpo", near, torch.zeros(3), torch.ones(3)).tolist() == [-0.5, 0.0, 0.5]


def test_a_leave_one_out_group_keeps_its_scale() -> None:
    """Seven 0.35 and one 0.0: a naive leave-one-out std gave the odd one -2154."""
    rewards = torch.tensor([0.35] * 7 + [0.0], dtype=torch.float64)
    got = advantages("grpo", rewards, torch.zeros(8), ONES)
    assert float(got.abs().max()) == pytest.approx(7 / 8 / (1 / 8) ** 0.5, rel=1e-3)


@pytest.mark.parametrize("estimator", [name for name in CRITIC_FREE if name not in ("gdpo", "remax")])
def test_grouping_is_by_id_never_by_position(estimator: str) -> None:
    order = torch.tensor([3, 7, 0, 5, 1, 6, 2, 4])
    lengths = torch.arange(1, 9)
    shuffled = advantages(estimator, REWARDS[order], GROUPS[order], lengths[order])
    torch.testing.assert_close(shuffled, advantages(estimator, lengths=lengths)[order])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    rewards=st.lists(st.floats(-1e3, 1e3, allow_subnormal=False), min_size=1, max_size=12),
    estimator=st.sampled_from([n for n in CRITIC_FREE if n not in ("gdpo", "remax")]),
    data=st.data(),
)
def test_advantages_are_finite_and_ignore_a_common_offset(rewards: list[float], estimator: str, data) -> None:
    groups = torch.tensor([data.draw(st.integers(0, 3)) for _ in rewards])
    values = torch.tensor(rewards, dtype=torch.float64)
    got = advantages(estimator, values, groups, torch.ones(len(rewards)))
    assert bool(got.isfinite().all())
    if estimator in ("dr_grpo", "rloo"):
        for group in groups.unique():
            assert float(got[groups == group].sum()) == pytest.approx(0, abs=1e-9 * max(1, float(values.abs().max())))


def test_single_samples_are_no_zero_variance_group() -> None:
    """Evaluation with one response per prompt must not lose everything to masking."""
    ids = torch.arange(4)
    assert not bool(Groups.of(ids).constant(torch.ones(4, dtype=torch.float64)).any())


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="critic"):
        advantages("ppo")
    with pytest.raises(ValueError, match="finite"):
        advantages("grpo", rewards=torch.where(REWARDS == 1, torch.nan, REWARDS))
    with pytest.raises(ValueError, match="rewards"):
        advantages("grpo", rewards=REWARDS[:3])
    assert advantages("grpo", REWARDS[:0], GROUPS[:0], ONES[:0]).shape == (0,)


def test_an_estimator_plug_in_gets_the_batch_and_its_arguments(monkeypatch, tmp_path) -> None:
    (tmp_path / "my_estimators.py").write_text(
        "def by_length(*, rewards, group_ids, lengths, power: int):\n    return (rewards - group_ids) * lengths.double() ** power\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = PlugInAdvantage(path="my_estimators:by_length", args={"power": 2})
    batch = {"rewards": torch.tensor([1.0, 0.5, 4.0]), "group_ids": torch.tensor([0, 0, 2]), "lengths": torch.tensor([2, 3, 1])}
    assert group_advantages(own.loaded(load), **batch).tolist() == [4.0, 4.5, 2.0]
    with pytest.raises(ValueError, match="my_estimators:by_length is not loaded"):
        group_advantages(own, **batch)
