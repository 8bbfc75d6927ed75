"""Baselines over trajectories of one to three sequences on two data-parallel ranks, against loops in float64."""

import dataclasses
import statistics
from typing import Any

import numpy as np
import pytest

from megatron_rl.algorithms.objective import Objective
from megatron_rl.data.batch import GREEDY_BASELINE, batch_from_sequences
from megatron_rl.data.packing import make_shards
from megatron_rl.errors import UserError
from megatron_rl.plugins.loader import load
from megatron_rl.training.advantages import TokenData, make_token_data
from megatron_rl.training.objective_checks import check_batch
from megatron_rl.types import Shard, TrainBatch

# In group "a" trajectories 5, 2 and 8, in group "b" 1 and 7; those of several sequences do not stand together.
TRAJECTORIES = (5, 1, 2, 5, 8, 7, 2, 5, 7)
LENGTHS = (3, 5, 2, 6, 4, 7, 1, 2, 3)
GROUPS = {5: "a", 2: "a", 8: "a", 1: "b", 7: "b"}
REWARDS = {5: 1.0, 2: 0.25, 8: -0.5, 1: 0.5, 7: 2.0}
GREEDY = {"a": 0.125, "b": 0.75}
PARTS = {5: (1.0, 3.0), 2: (0.0, 1.0), 8: (1.0, -2.0), 1: (0.5, 4.0), 7: (0.25, 4.5)}


def make_batch(**fields: Any) -> TrainBatch:
    batch = batch_from_sequences(
        prompts=[[1, 2]] * 9,
        responses=[np.arange(length) for length in LENGTHS],
        rewards=[REWARDS[owner] for owner in TRAJECTORIES],
        group_ids=[GROUPS[owner] for owner in TRAJECTORIES],
        trajectory_ids=TRAJECTORIES,
        loss_masks=[np.arange(length) != 1 for length in LENGTHS],
    )
    return dataclasses.replace(batch, **fields)


def trained() -> dict[int, int]:
    """Trainable tokens of each trajectory."""
    return {owner: sum(n - (n > 1) for n, each in zip(LENGTHS, TRAJECTORIES, strict=True) if each == owner) for owner in GROUPS}


def token_data(batch: TrainBatch, objective: Objective) -> list[tuple[Shard, TokenData]]:
    shards = make_shards(batch, dp=2, optimizer_steps=1, max_tokens_per_micro_batch=8, seed=1)
    assert np.isin(batch.trajectory_ids[shards[0].rows], batch.trajectory_ids[shards[1].rows]).any(), "ranks divide trajectories"
    return [(shard, make_token_data(objective, shard, old=None, reference=None)) for shard in shards]


def by_trajectory(batch: TrainBatch, objective: Objective) -> dict[int, float]:
    """The advantage of each trajectory, the same for every trainable token of all its sequences."""
    found: dict[int, set[float]] = {owner: set() for owner in GROUPS}
    for shard, data in token_data(batch, objective):
        for row, (start, end) in zip(shard.rows, np.lib.stride_tricks.sliding_window_view(shard.batch.cu_seqlens, 2), strict=True):
            mask = shard.batch.loss_mask[start:end]
            found[TRAJECTORIES[row]] |= set(data.advantages[start:end][mask].tolist())
            assert not data.advantages[start:end][~mask].any()
    assert all(len(values) == 1 for values in found.values())
    return {owner: values.pop() for owner, values in found.items()}


def others(owner: int, *, itself: bool = True) -> list[int]:
    return [other for other in GROUPS if GROUPS[other] == GROUPS[owner] and (itself or other != owner)]


def opo(owner: int) -> float:
    lengths = trained()
    return REWARDS[owner] - sum(lengths[other] * REWARDS[other] for other in others(owner)) / sum(lengths[other] for other in others(owner))


def z_score(owner: int, values: dict[int, float]) -> float:
    group = [values[other] for other in others(owner)]
    return (values[owner] - statistics.fmean(group)) / statistics.stdev(group)


def best_alone(owner: int) -> float:
    first, second = sorted((REWARDS[other] for other in others(owner)), reverse=True)[:2]
    return (first - second) / statistics.stdev(REWARDS[other] for other in others(owner)) if REWARDS[owner] == first else 0.0


def whitened(values: dict[int, float], weights: dict[int, int]) -> dict[int, float]:
    each = [values[owner] for owner in GROUPS for _ in range(weights[owner])]
    return {owner: (value - statistics.fmean(each)) / statistics.stdev(each) for owner, value in values.items()}


CENTRED = {owner: REWARDS[owner] - statistics.fmean(REWARDS[other] for other in others(owner)) for owner in GROUPS}
COMPONENTS = {
    owner: 2.0 * z_score(owner, {o: p[0] for o, p in PARTS.items()}) + 0.5 * z_score(owner, {o: p[1] for o, p in PARTS.items()})
    for owner in GROUPS
}
EXPECTED = {
    "group": {owner: z_score(owner, REWARDS) for owner in GROUPS},
    "rloo": {o: REWARDS[o] - statistics.fmean(REWARDS[other] for other in others(o, itself=False)) for o in GROUPS},
    "opo": {owner: opo(owner) for owner in GROUPS},
    "pass@k": {owner: best_alone(owner) for owner in GROUPS},
    "remax": {owner: REWARDS[owner] - GREEDY[GROUPS[owner]] for owner in GROUPS},
    "gdpo": whitened(COMPONENTS, dict.fromkeys(GROUPS, 1)),
    "reinforce_plus_plus": whitened(REWARDS, trained()),
    "reinforce_plus_plus_baseline": whitened(CENTRED, trained()),
}


@pytest.mark.parametrize("estimator", [name for name in EXPECTED if not name.startswith("reinforce")])
def test_baselines_count_each_trajectory_once(estimator: str) -> None:
    columns = {"remax": ((GREEDY_BASELINE,), lambda o: (GREEDY[GROUPS[o]],)), "gdpo": (("first", "second"), PARTS.__getitem__)}
    names, part = columns.get(estimator, ((), lambda _: ()))
    batch = make_batch(component_names=names, reward_components=np.array([part(owner) for owner in TRAJECTORIES]))
    args = {name: {"std_epsilon": 1e-12} for name in ("group", "pass@k")} | {"gdpo": {"std_epsilon": 1e-12, "reward_weights": [2.0, 0.5]}}
    objective = Objective.of(advantage={"kind": estimator, **args.get(estimator, {})})
    got = by_trajectory(batch, objective)
    assert got == {owner: pytest.approx(value, rel=1e-6, abs=1e-7) for owner, value in EXPECTED[estimator].items()}


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_whitening_counts_tokens_and_the_group_mean_trajectories(estimator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_rl.training.advantages.sum_over_data_parallel", lambda tensor: tensor)
    objective = Objective.of(advantage={"kind": estimator})
    (shard,) = make_shards(make_batch(), dp=1, optimizer_steps=1, max_tokens_per_micro_batch=99, seed=0)
    data = make_token_data(objective, shard, old=None, reference=None)
    expected = np.repeat([EXPECTED[estimator][owner] for owner in TRAJECTORIES], shard.batch.lengths)
    np.testing.assert_allclose(data.advantages, np.where(shard.batch.loss_mask, expected, 0.0), rtol=1e-6)


def test_an_estimator_of_your_own_gets_trajectories(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "counts_trajectories.py").write_text(
        "def lengths_of_five(*, rewards, group_ids, lengths):\n    assert len(group_ids) == 5\n    return lengths.double()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    got = by_trajectory(make_batch(), Objective.of(advantage="counts_trajectories:lengths_of_five").loaded(load))
    assert got == trained()


def test_the_kl_of_a_group_without_signal_is_masked() -> None:
    rewards = [1.0 if GROUPS[owner] == "b" else REWARDS[owner] for owner in TRAJECTORIES]
    for shard, data in token_data(make_batch(rewards=rewards), Objective.of(zero_variance="mask_kl", kl={"coef": 0.1})):
        assert data.kl_mask is not None
        expected = [GROUPS[TRAJECTORIES[row]] == "a" for row in shard.rows]
        np.testing.assert_array_equal(data.kl_mask, np.repeat(expected, shard.batch.lengths))


def test_the_loss_gets_trajectories_with_tokens_of_all_ranks() -> None:
    totals, seen = trained(), {}
    for shard, data in token_data(make_batch(), Objective()):
        assert data.trajectory_ids is not None and data.trajectory_tokens is not None
        for row, number, tokens in zip(shard.rows, data.trajectory_ids, data.trajectory_tokens, strict=True):
            assert tokens == totals[TRAJECTORIES[row]]
            assert seen.setdefault(TRAJECTORIES[row], number) == number
    assert len(set(seen.values())) == 5


def test_no_optimizer_step_gets_a_part_of_a_trajectory() -> None:
    batch = make_batch()
    for seed in range(5):
        shards = make_shards(batch, dp=2, optimizer_steps=3, max_tokens_per_micro_batch=8, seed=seed)
        steps: list[set[int]] = []
        for step in range(3):
            rows = np.concatenate([shard.rows[part] for shard in shards for part in shard.steps[step]])
            whole = {TRAJECTORIES[row] for row in rows}
            assert sorted(rows) == [row for row, owner in enumerate(TRAJECTORIES) if owner in whole]
            totals = shards[0].totals[step]
            assert (totals.num_trajectories, totals.num_sequences) == (len(whole), len(rows))
            steps.append(whole)
        assert sorted(map(len, steps)) == [1, 2, 2]


def test_a_trajectory_without_trainable_tokens_is_not_counted() -> None:
    mask = make_batch().loss_mask & np.repeat(np.isin(TRAJECTORIES, (2, 5, 8)), [length + 2 for length in LENGTHS])
    (shard,) = make_shards(make_batch(loss_mask=mask), dp=1, optimizer_steps=1, max_tokens_per_micro_batch=99, seed=0)
    assert (shard.totals[0].num_trajectories, shard.totals[0].num_sequences) == (3, 6)


def test_with_one_sequence_each_nothing_differs_from_no_ids() -> None:
    alone = make_batch(trajectory_ids=np.empty(0, np.int64))
    named = make_batch(trajectory_ids=[7, 2, 90, 4, 1, 0, 3, 5, 6])
    for steps in (1, 3):
        plans = [make_shards(batch, dp=2, optimizer_steps=steps, max_tokens_per_micro_batch=8, seed=4) for batch in (alone, named)]
        for want, got in zip(*plans, strict=True):
            assert want.totals == got.totals
            for one, other in zip(want.steps, got.steps, strict=True):
                assert [part.tolist() for part in one] == [part.tolist() for part in other]
            for estimator in ("group", "rloo", "opo", "pass@k"):
                objective = Objective.of(advantage={"kind": estimator})
                data = [make_token_data(objective, shard, old=None, reference=None) for shard in (want, got)]
                np.testing.assert_array_equal(data[0].advantages, data[1].advantages)
                assert data[1].trajectory_ids is None and data[1].trajectory_tokens is None


@pytest.mark.parametrize(
    ("objective", "refused"),
    [
        (Objective.of(advantage={"kind": "gae"}), "kind gae got trajectories of several sequences"),
        (
            Objective.of(advantage={"kind": "reinforce_plus_plus", "gamma": 0.9}),
            "end with each sequence instead of the",
        ),
        (Objective.of(kl_reward={"coef": 0.1}, advantage={"kind": "reinforce_plus_plus"}), "reinforce_plus_plus got trajector"),
        (Objective.of(advantage={"kind": "reinforce_plus_plus"}), None),
        (Objective.of(kl_reward={"coef": 0.1}, advantage={"kind": "reinforce_plus_plus_baseline"}), None),
        (Objective(), None),
        (Objective.of(policy_loss="sft"), None),
    ],
)
def test_returns_that_would_end_within_a_trajectory_are_refused(objective: Objective, refused: str | None) -> None:
    batch = make_batch()
    alone = dict(rewards=batch.rewards, trajectory_ids=np.arange(9))
    check_batch(objective, batch, **alone)
    if refused is None:
        check_batch(objective, batch, rewards=batch.rewards, trajectory_ids=batch.trajectory_ids)
    else:
        with pytest.raises(UserError, match=refused):
            check_batch(objective, batch, rewards=batch.rewards, trajectory_ids=batch.trajectory_ids)


def test_ages_need_the_version_before_the_step() -> None:
    objective = Objective.of(proximal="interpolated", off_policy={"mode": "truncate", "high": 2.0})
    batch = make_batch()
    batch = dataclasses.replace(
        batch, rollout_log_probs=np.zeros(len(batch.tokens)), weight_versions=np.full(len(batch.tokens), 3), old_log_probs=None
    )
    known = {"rewards": batch.rewards, "trajectory_ids": batch.trajectory_ids}
    with pytest.raises(UserError, match=r"TrainBatch\.version is 0 and weight_versions reach 3.*dataclasses\.replace"):
        check_batch(objective, batch, **known)
    check_batch(objective, dataclasses.replace(batch, version=3), **known)
    check_batch(Objective(), batch, **known)
