from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_rl.data.batch import batch_samples, make_train_batch
from megatron_rl.errors import UserError
from megatron_rl.types import Group, Prompt, Reward, RewardOutcome, Sample, StopReason


def group_of(name: str, prompt_ids: list[int], responses: list[list[int]], rewards: list[Reward | None]) -> Group:
    prompt = Prompt(id=name, token_ids=np.array(prompt_ids), text=name)
    samples = [
        Sample(
            group_id=name,
            index=index,
            prompt=prompt,
            response_ids=np.array(ids),
            loss_mask=np.arange(len(ids)) != 1,
            rollout_log_probs=-0.5 * np.array(ids),
            weight_versions=np.full(len(ids), 6 + index),
            stop_reason=StopReason.LENGTH if index else StopReason.STOP,
            reward=reward,
        )
        for index, (ids, reward) in enumerate(zip(responses, rewards, strict=True))
    ]
    return Group(id=name, prompt=prompt, samples=tuple(samples))


def scored(value: float) -> Reward:
    return Reward(RewardOutcome.SCORED, value)


FAILED = Reward(RewardOutcome.ERROR, None, "Traceback: boom")


def test_flat_arrays_hold_every_scored_sample() -> None:
    groups = [
        group_of("a", [1, 2, 3], [[10], [11, 12, 13], [14]], [scored(1.0), scored(0.25), FAILED]),
        group_of("b", [4], [[20]], [Reward(RewardOutcome.TIMEOUT)]),
        group_of("c", [5, 6], [[30, 31]], [scored(-2.0)]),
    ]
    batch = make_train_batch(groups)
    np.testing.assert_array_equal(batch.tokens, [1, 2, 3, 10, 1, 2, 3, 11, 12, 13, 5, 6, 30, 31])
    np.testing.assert_array_equal(batch.cu_seqlens, [0, 4, 10, 14])
    np.testing.assert_array_equal(batch.prompt_lengths, [3, 3, 2])
    np.testing.assert_array_equal(np.flatnonzero(batch.loss_mask), [3, 7, 9, 12])
    np.testing.assert_array_equal(batch.rollout_log_probs, [0, 0, 0, -5, 0, 0, 0, -5.5, -6, -6.5, 0, 0, -15, -15.5])
    np.testing.assert_array_equal(batch.weight_versions, [-1, -1, -1, 6, -1, -1, -1, 7, 7, 7, -1, -1, 6, 6])
    np.testing.assert_array_equal(batch.rewards, [1.0, 0.25, -2.0])
    np.testing.assert_array_equal(batch.group_ids, [0, 0, 1])
    np.testing.assert_array_equal(batch.truncated, [False, True, False])


def test_components_are_named_columns_and_follow_sequences() -> None:
    parts: list[dict[str, float]] = [{"format": 1.0, "accuracy": 0.5}, {"accuracy": 0.25}]
    rewards: list[Reward | None] = [Reward(RewardOutcome.SCORED, 1.0, components=part) for part in parts]
    batch = make_train_batch([group_of("a", [1, 2], [[3], [4]], rewards)])
    assert batch.component_names == ("accuracy", "format")
    np.testing.assert_array_equal(batch.reward_components, [[0.5, 1.0], [0.25, np.nan]])
    np.testing.assert_array_equal(batch.select(np.array([1])).reward_components, [[0.25, np.nan]])
    assert make_train_batch([group_of("a", [1], [[3], [4]], [scored(0), scored(1)])]).reward_components.shape == (2, 0)


def test_nothing_scored_is_an_error_with_the_first_message() -> None:
    with pytest.raises(UserError, match=r"none of 2 samples in 1 group has a reward.*first failure was: Traceback: boom"):
        make_train_batch([group_of("a", [1], [[2], [3]], [FAILED, FAILED])])
    with pytest.raises(UserError, match="none of 0 samples"):
        make_train_batch([])


def test_a_sample_without_any_reward_is_a_programming_error() -> None:
    with pytest.raises(ValueError, match="sample 0 of group 'a' was never given to a reward function"):
        make_train_batch([group_of("a", [1], [[2]], [None])])


def test_masked_tokens_may_hold_anything(make_group: Any) -> None:
    batch = make_train_batch([make_group("x", num_samples=1)])
    assert np.isnan(batch.rollout_log_probs[~batch.loss_mask]).any()


def test_samples_of_a_trajectory_are_adjacent_with_own_prompts() -> None:
    """Trajectory 4 is the first and the third sample; in the second group the same number is another trajectory."""
    first = group_of("a", [1, 2], [[10, 11], [12], [13, 14, 15]], [scored(1.0), scored(0.5), scored(1.0)])
    longer = replace(first.prompt, token_ids=np.array([1, 2, 10, 99]), text="a, and what was answered")
    opening, alone, end = first.samples
    experts = [np.full((count, 1, 1), count, np.uint8) for count in (3, 2, 6)]
    samples = (
        replace(opening, trajectory=4, routed_experts=experts[0]),
        replace(alone, trajectory=0, stop_reason=StopReason.STOP, routed_experts=experts[1]),
        replace(end, trajectory=4, prompt=longer, routed_experts=experts[2]),
    )
    second = group_of("b", [3], [[20], [21]], [scored(2.0), FAILED])
    second = replace(second, samples=tuple(replace(each, trajectory=4 + each.index) for each in second.samples))
    batch = make_train_batch([replace(first, samples=samples), second])
    assert batch.tokens.tolist() == [1, 2, 10, 11, 1, 2, 10, 99, 13, 14, 15, 1, 2, 12, 3, 20]
    assert batch.prompt_lengths.tolist() == [2, 4, 2, 1] and batch.rewards.tolist() == [1.0, 1.0, 0.5, 2.0]
    assert batch.group_ids.tolist() == [0, 0, 0, 1] and len(set(batch.trajectory_ids)) == 3
    assert batch.trajectory_ids[0] == batch.trajectory_ids[1]
    assert batch.truncated.tolist() == [True, True, False, False], "the whole trajectory is, whose second sample was cut"
    assert batch.routed_experts is not None
    assert batch.routed.tolist() == [*[True] * 3, False, *[True] * 6, False, *[True] * 2, False, False, False]
    assert batch.routed_experts[batch.routed, 0, 0].tolist() == [3] * 3 + [6] * 6 + [2] * 2


def test_each_row_of_a_batch_names_its_sample(make_group: Any) -> None:
    groups = [make_group("a", num_samples=3), make_group("b", num_samples=4, length=7)]
    whole = tuple(
        replace(sample, trajectory=index // 2) for index, sample in enumerate(make_group("c", num_samples=4, scored=True).samples)
    )
    whole = tuple(replace(sample, reward=whole[0].reward) for sample in (whole[2], whole[0], whole[3], whole[1]))
    groups.append(replace(groups[0], id="c", samples=whole))
    batch, samples = make_train_batch(groups), batch_samples(groups)
    assert len(samples) == batch.num_sequences == 2 + 3 + 4
    for row, sample in enumerate(samples):
        ids = np.concatenate([sample.prompt.token_ids, sample.response_ids])
        np.testing.assert_array_equal(batch.tokens[batch.cu_seqlens[row] : batch.cu_seqlens[row + 1]], ids)


def test_samples_of_a_trajectory_with_other_rewards_are_refused() -> None:
    group = group_of("a", [1], [[2], [3], [4]], [scored(1.0), scored(0.5), FAILED])
    for others in ((0, 1), (0, 2)):
        samples = tuple(replace(group.samples[index], trajectory=0) for index in others)
        with pytest.raises(ValueError, match=r"of group 'a' are of one trajectory and have the rewards \[1.0, (0.5|None)\], needs one"):
            make_train_batch([replace(group, samples=samples)])


def test_trajectories_are_compared_within_their_role() -> None:
    group = group_of("a", [1], [[2], [3], [4, 5], [6], [7]], [scored(1.0), scored(0.5), scored(0.5), scored(0.0), FAILED])
    roles, numbers = ("proposer", "verifier", "verifier", "proposer", "proposer"), (0, 1, 1, 2, 3)
    parts = zip(group.samples, roles, numbers, strict=True)
    group = replace(group, samples=tuple(replace(sample, role=role, trajectory=number) for sample, role, number in parts))
    batch = make_train_batch([group_of("b", [9], [[8]], [scored(2.0)]), group])
    assert batch.group_ids.tolist() == [0, 1, 2, 2, 1]
    assert batch.trajectory_ids.tolist() == [0, 1, 2, 2, 3]
    assert group.num_made == 3 and replace(group, samples=()).num_made == 0
