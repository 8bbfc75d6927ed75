"""Advantages and masks as token-aligned arrays, against loops over sequences."""

import numpy as np
import pytest

from megatron_rl.algorithms.objective import AdvantageSettings, Objective
from megatron_rl.data.packing import make_shards
from megatron_rl.errors import UserError
from megatron_rl.training.token_data import TokenData, check_objective, make_token_data, needs_old_log_probs
from megatron_rl.types import Shard, TrainBatch

LENGTHS = [4, 6, 3, 5]
MASK = [0, 0, 1, 1, 0, 1, 1, 0, 1, 1, 0, 1, 1, 0, 1, 1, 1, 0]
REWARDS = [1.0, 0.0, 0.5, 0.5]


@pytest.fixture
def shards() -> tuple[Shard, ...]:
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
    )
    return make_shards(batch, dp=2, optimizer_steps=1, max_tokens_per_micro_batch=100, seed=0)


def whole(shards: tuple[Shard, ...], objective: Objective, **log_probs: np.ndarray) -> tuple[np.ndarray, list[TokenData]]:
    """Advantages of the whole batch's tokens, put together from the shards."""
    offsets = np.concatenate([[0], np.cumsum(LENGTHS)])
    advantages = np.full(sum(LENGTHS), np.nan)
    made = []
    for shard in shards:
        where = np.concatenate([np.arange(offsets[row], offsets[row + 1]) for row in shard.rows])
        data = make_token_data(objective, shard, **{name: values[where] for name, values in log_probs.items()} | _absent(log_probs))
        advantages[where] = data.advantages
        made.append(data)
    return advantages, made


def _absent(log_probs: dict[str, np.ndarray]) -> dict[str, None]:
    return {name: None for name in ("old", "reference") if name not in log_probs}


def test_group_advantages_reach_every_token_although_groups_span_ranks(shards: tuple[Shard, ...]) -> None:
    advantages, _ = whole(shards, Objective(advantage=AdvantageSettings(estimator="dr_grpo")))
    np.testing.assert_allclose(advantages, np.repeat([0.5, -0.5, 0.0, 0.0], LENGTHS))


def test_returns_with_a_kl_in_the_rewards_are_those_of_a_loop(shards: tuple[Shard, ...]) -> None:
    settings = AdvantageSettings(estimator="reinforce_plus_plus_baseline", gamma=0.9, whiten=False)
    objective = Objective(kl_reward_coef=0.1, kl_reward_estimator="k1", advantage=settings)
    random = np.random.default_rng(0)
    old, reference = (random.normal(-2, 1, sum(LENGTHS)).astype(np.float32) for _ in range(2))
    advantages, _ = whole(shards, objective, old=old, reference=reference)
    expected = np.zeros(sum(LENGTHS))
    start = 0
    for length, reward in zip(LENGTHS, [0.5, -0.5, 0.0, 0.0], strict=True):
        trained = [token for token in range(start, start + length) if MASK[token]]
        carried = 0.0
        for token in reversed(trained):
            kl = float(old[token]) - float(reference[token])
            carried = -0.1 * kl + (reward if token == trained[-1] else 0.0) + 0.9 * carried
            expected[token] = carried
        start += length
    np.testing.assert_allclose(advantages, expected, atol=1e-6)


def test_kl_mask_leaves_out_groups_without_variance(shards: tuple[Shard, ...]) -> None:
    _, made = whole(shards, Objective(zero_variance="mask_kl", kl_loss_coef=0.1))
    for shard, data in zip(shards, made, strict=True):
        assert data.kl_mask is not None
        np.testing.assert_array_equal(data.kl_mask, np.repeat(shard.rows < 2, shard.batch.lengths))


def test_token_keys_are_unique_in_the_batch(shards: tuple[Shard, ...]) -> None:
    _, made = whole(shards, Objective())
    keys = np.concatenate([data.token_keys for data in made])
    assert len(set(keys.tolist())) == sum(LENGTHS)


def test_old_log_probs_are_needed_for_several_steps_or_a_kl_in_the_rewards() -> None:
    assert not needs_old_log_probs(Objective(), num_steps=1)
    assert needs_old_log_probs(Objective(), num_steps=2)
    with_kl = Objective(kl_reward_coef=0.1, advantage=AdvantageSettings(estimator="reinforce_plus_plus"))
    assert needs_old_log_probs(with_kl, num_steps=1)
    assert not needs_old_log_probs(Objective(policy_loss="sft"), num_steps=2)


@pytest.mark.parametrize("estimator", ["ppo", "gdpo", "remax"])
def test_estimators_without_their_input_are_refused(estimator: str) -> None:
    with pytest.raises(UserError, match=f"estimator is {estimator}, which needs"):
        check_objective(Objective(advantage=AdvantageSettings(estimator=estimator)))
