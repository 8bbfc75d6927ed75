"""Advantages and masks as token-aligned arrays, against loops over sequences."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from megatron_rl.algorithms.objective import Objective
from megatron_rl.data.batch import GREEDY_BASELINE
from megatron_rl.data.packing import make_shards
from megatron_rl.errors import UserError
from megatron_rl.training.advantages import TokenData, make_token_data, needs_old_log_probs
from megatron_rl.types import Shard, TrainBatch

LENGTHS = [4, 6, 3, 5]
MASK = [0, 0, 1, 1, 0, 1, 1, 0, 1, 1, 0, 1, 1, 0, 1, 1, 1, 0]
REWARDS = [1.0, 0.0, 0.5, 0.5]


@pytest.fixture
def shards() -> tuple[Shard, ...]:
    return make_two_groups()


def make_two_groups(**components: Any) -> tuple[Shard, ...]:
    """Two groups of two sequences over two data-parallel ranks; the second group's rewards are equal."""
    total = sum(LENGTHS)
    batch = TrainBatch(
        tokens=np.arange(total),
        cu_seqlens=np.concatenate([[0], np.cumsum(LENGTHS)]),
        prompt_lengths=np.ones(4),
        loss_mask=np.array(MASK, dtype=bool),
        rollout_log_probs=np.zeros(total),
        weight_versions=np.zeros(total),
        rewards=REWARDS,
        group_ids=[7, 7, 9, 9],
        truncated=np.zeros(4),
        **components,
    )
    return make_shards(batch, dp=2, optimizer_steps=1, max_tokens_per_micro_batch=100, seed=0)


def whole(shards: tuple[Shard, ...], objective: Objective, **log_probs: np.ndarray) -> tuple[np.ndarray, list[TokenData]]:
    """Advantages of the whole batch's tokens, put together from the shards."""
    offsets = np.concatenate([[0], np.cumsum(LENGTHS)])
    advantages = np.full(sum(LENGTHS), np.nan)
    made = []
    for shard in shards:
        where = np.concatenate([np.arange(offsets[row], offsets[row + 1]) for row in shard.rows])
        arrays = {name: values[where] for name, values in log_probs.items()} | _absent(log_probs)
        data = make_token_data(
            objective, shard, **arrays, kl_reward_coef=(0.0 if objective.kl_reward is None else objective.kl_reward.coef)
        )
        advantages[where] = data.advantages
        made.append(data)
    return advantages, made


def _absent(log_probs: dict[str, np.ndarray]) -> dict[str, None]:
    return {name: None for name in ("old", "reference") if name not in log_probs}


def test_group_advantages_reach_all_tokens_across_ranks(shards: tuple[Shard, ...]) -> None:
    advantages, _ = whole(shards, Objective.of(advantage={"kind": "group", "scale": "none"}))
    np.testing.assert_allclose(advantages, np.where(MASK, np.repeat([0.5, -0.5, 0.0, 0.0], LENGTHS), 0.0))


def test_returns_with_a_kl_in_the_rewards_are_those_of_a_loop(shards: tuple[Shard, ...]) -> None:
    settings = Objective.of(advantage={"kind": "reinforce_plus_plus", "gamma": 0.9, "whiten": False}).advantage
    objective = Objective.of(kl_reward={"coef": 0.1, "estimator": "k1"}, advantage=settings)
    random = np.random.default_rng(0)
    old, reference = (random.normal(-2, 1, sum(LENGTHS)).astype(np.float32) for _ in range(2))
    advantages, _ = whole(shards, objective, old=old, reference=reference)
    expected = np.zeros(sum(LENGTHS))
    start = 0
    for length, reward in zip(LENGTHS, REWARDS, strict=True):
        trained = [token for token in range(start, start + length) if MASK[token]]
        carried = 0.0
        for token in reversed(trained):
            kl = float(old[token]) - float(reference[token])
            carried = -0.1 * kl + (reward if token == trained[-1] else 0.0) + 0.9 * carried
            expected[token] = carried
        start += length
    np.testing.assert_allclose(advantages, expected, atol=1e-6)


def test_kl_mask_leaves_out_groups_without_variance(shards: tuple[Shard, ...]) -> None:
    _, made = whole(shards, Objective.of(zero_variance="mask_kl", kl={"coef": 0.1}))
    for shard, data in zip(shards, made, strict=True):
        assert data.kl_mask is not None
        np.testing.assert_array_equal(data.kl_mask, np.repeat(shard.rows < 2, shard.batch.lengths))


def test_token_keys_are_unique_in_the_batch(shards: tuple[Shard, ...]) -> None:
    _, made = whole(shards, Objective())
    keys = np.concatenate([data.token_keys for data in made])
    assert len(set(keys.tolist())) == sum(LENGTHS)


def test_old_log_probs_are_needed_for_steps_or_a_kl_in_rewards() -> None:
    assert not needs_old_log_probs(Objective(), num_steps=1)
    assert needs_old_log_probs(Objective(), num_steps=2)
    with_kl = Objective.of(kl_reward={"coef": 0.1}, advantage={"kind": "reinforce_plus_plus"})
    assert needs_old_log_probs(with_kl, num_steps=1)
    assert not needs_old_log_probs(Objective.of(policy_loss="sft"), num_steps=2)


@pytest.mark.parametrize("proximal", ["interpolated", "rollout"])
def test_no_pass_is_made_for_a_proximal_policy_of_rollouts(shards: tuple[Shard, ...], proximal: str) -> None:
    weights = {"off_policy": {"mode": "truncate", "high": 2.0}} if proximal == "interpolated" else {}
    objective = Objective.of(proximal=proximal, **weights)
    assert not needs_old_log_probs(objective, num_steps=4)
    versions = np.arange(sum(LENGTHS)) % 5 - 1
    batch = dataclasses.replace(make_two_groups()[0].batch.select(np.array([0])), version=3)
    batch = dataclasses.replace(batch, weight_versions=versions[: len(batch.tokens)])
    data = make_token_data(objective, dataclasses.replace(shards[0], batch=batch, rows=np.array([0])), old=None, reference=None)
    ages = {-1: 1.0, 0: 2 / 3, 1: 1 / 2, 2: 0.0, 3: 0.0} if proximal == "interpolated" else {-1: 1.0}
    assert data.current_share is not None and data.current_share.dtype == np.float32
    np.testing.assert_allclose(data.current_share, [ages.get(int(version), 0.0) for version in batch.weight_versions], rtol=1e-6)
    assert make_token_data(Objective(), shards[0], old=None, reference=None).current_share is None


REMAX = Objective.of(advantage={"kind": "remax"})


def test_remax_subtracts_the_reward_of_the_greedy_response() -> None:
    baselines = np.array([[0.5], [0.5], [-1.0], [-1.0]])
    shards = make_two_groups(component_names=(GREEDY_BASELINE,), reward_components=baselines)
    advantages, _ = whole(shards, REMAX)
    expected = shards[0].all_rewards - baselines[:, 0]
    np.testing.assert_allclose(advantages, np.where(MASK, np.repeat(expected, LENGTHS), 0.0), atol=1e-7)


def test_remax_without_a_greedy_response_is_refused() -> None:
    with pytest.raises(UserError, match="remax needs the reward of a greedy response"):
        whole(make_two_groups(component_names=(), reward_components=np.empty((4, 0))), REMAX)


def gdpo(*weights: float) -> Objective:
    return Objective.of(advantage={"kind": "gdpo", "std_epsilon": 0.0, "whiten": False, "reward_weights": weights or None})


def test_components_are_normalised_in_groups_across_ranks() -> None:
    components = np.array([[0.0, 5.0], [2.0, 3.0], [1.0, 7.0], [1.0, 9.0]])
    shards = make_two_groups(component_names=("accuracy", "format"), reward_components=components)
    advantages, _ = whole(shards, gdpo(1.0, 0.1))
    half = 0.5**0.5
    expected = [-half + 0.1 * half, half - 0.1 * half, -0.1 * half, 0.1 * half]
    np.testing.assert_allclose(advantages, np.where(MASK, np.repeat(expected, LENGTHS), 0.0), atol=1e-7)


def test_a_part_of_a_component_is_not_counted_again() -> None:
    components = np.array([[0.0, 9.0, 5.0], [2.0, 4.0, 3.0], [1.0, 4.0, 7.0], [1.0, 2.0, 9.0]])
    shards = make_two_groups(component_names=("right", "right/x", "format"), reward_components=components)
    plain = make_two_groups(component_names=("right", "format"), reward_components=components[:, [0, 2]])
    np.testing.assert_array_equal(whole(shards, gdpo(1.0, 0.1))[0], whole(plain, gdpo(1.0, 0.1))[0])


@pytest.mark.parametrize(
    ("names", "components", "weights", "message"),
    [
        ((), np.empty((4, 0)), (), "the reward function gives none"),
        (("a", "b"), np.array([[0.0, 1.0], [0.0, np.nan], [0.0, 1.0], [0.0, 1.0]]), (), "no finite b"),
        (("a", "b"), np.zeros((4, 2)), (1.0,), r"has 1 numbers, the rewards have 2 components \(a, b\)"),
    ],
)
def test_components_that_gdpo_cannot_use_are_refused(
    names: tuple[str, ...], components: np.ndarray, weights: tuple[float, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        whole(make_two_groups(component_names=names, reward_components=components), gdpo(*weights))


def chain(rewards: list[float], values: list[float], *, end: float) -> tuple[list[float], list[float]]:
    """GAE of one sequence's trainable tokens by its definition, with gamma 0.9 and lambda 0.8: advantages and returns."""
    advantages: list[float] = []
    carried = 0.0
    for index in reversed(range(len(rewards))):
        following = values[index + 1] if index + 1 < len(values) else end
        carried = rewards[index] + 0.9 * following - values[index] + 0.9 * 0.8 * carried
        advantages.insert(0, carried)
    return advantages, [advantage + value for advantage, value in zip(advantages, values, strict=True)]


@pytest.mark.parametrize("bootstrapped", [False, True])
@pytest.mark.parametrize("response", range(1, 7))
@pytest.mark.parametrize("prompt", range(1, 5))
def test_the_reward_reaches_the_last_trainable_token(prompt: int, response: int, bootstrapped: bool) -> None:
    """Three truncated responses between others: two with a masked tail or hole, and one that nothing can be learned from."""
    lengths = [prompt + 3, prompt + response, prompt + response, prompt + 2]
    mask = [np.arange(length) >= prompt for length in lengths]
    mask[0][-1] = False
    mask[2][prompt + response // 2] = False
    mask[3][:] = False
    random, total = np.random.default_rng(prompt * 7 + response), sum(lengths)
    batch = TrainBatch(
        tokens=np.arange(total),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]),
        prompt_lengths=np.full(4, prompt),
        loss_mask=np.concatenate(mask),
        rollout_log_probs=np.zeros(total),
        weight_versions=np.zeros(total),
        rewards=[1.0, -2.0, 3.0, 4.0],
        group_ids=[0, 0, 1, 1],
        truncated=[True, False, True, True],
    )
    old, reference, state_values = (random.normal(0, 1, total).astype(np.float32) for _ in range(3))
    settings = Objective.of(
        advantage={"kind": "gae", "gamma": 0.9, "lam": 0.8, "whiten": False, "bootstrap_truncated": bootstrapped}
    ).advantage
    objective = Objective.of(kl_reward={"coef": 0.1}, advantage=settings)
    shard = make_shards(batch, dp=1, optimizer_steps=1, max_tokens_per_micro_batch=100, seed=0)[0]
    data = make_token_data(objective, shard, old=old, reference=reference, state_values=state_values, kl_reward_coef=0.2)
    advantages, returns = np.zeros(total), np.zeros(total)
    for row in range(4):
        trained = [token for token in range(*batch.cu_seqlens[row : row + 2]) if batch.loss_mask[token]]
        if not trained:
            continue
        rewards = [-0.2 * float(old[token] - reference[token]) for token in trained]
        rewards[-1] += batch.rewards[row]
        end = float(state_values[trained[-1]]) if bootstrapped and batch.truncated[row] else 0.0
        values = [float(state_values[token - 1]) for token in trained]
        advantages[trained], returns[trained] = chain(rewards, values, end=end)
    assert data.old_values is not None and data.returns is not None
    np.testing.assert_allclose(data.advantages, advantages, atol=1e-5)
    np.testing.assert_allclose(data.returns, returns, atol=1e-5)
    inner = np.flatnonzero(batch.loss_mask)
    np.testing.assert_array_equal(data.old_values[inner], state_values[inner - 1])
