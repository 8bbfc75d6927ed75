from dataclasses import replace

import numpy as np
import pytest

from megatron_rl.observe.group_metrics import has_one_reward, rollout_metrics, tail_metrics
from megatron_rl.observe.metrics import check_metrics, metric_values
from megatron_rl.types import Group, Prompt, Reward, RewardOutcome, Sample, StopReason

PROMPT = Prompt(id="p", token_ids=np.array([1, 2, 3]), text="abc")


def sample(reward: Reward, *, length: int = 2, stop: StopReason = StopReason.STOP, version: int = 4) -> Sample:
    return Sample(
        group_id="p",
        index=0,
        prompt=PROMPT,
        response_ids=np.zeros(length, np.int64),
        loss_mask=np.ones(length, np.bool_),
        rollout_log_probs=np.zeros(length, np.float32),
        weight_versions=np.full(length, version),
        stop_reason=stop,
        reward=reward,
    )


FAILED = Reward(RewardOutcome.ERROR, message="boom")


def scored(value: float, **components: float) -> Reward:
    return Reward(RewardOutcome.SCORED, value, components=components)


def test_failed_rewards_are_counted_and_not_averaged() -> None:
    failed = [Reward(RewardOutcome.ERROR, message="boom"), Reward(RewardOutcome.TIMEOUT, message="late")]
    group = Group("p", PROMPT, tuple(map(sample, [scored(1.0), scored(0.5), *failed])))
    metrics = rollout_metrics([group], version=4)
    check_metrics(metrics)
    values = metric_values(metrics)
    assert values["rollout/reward"] == 0.75
    assert values["rollout/reward_errors"] == values["rollout/reward_timeouts"] == 1
    assert values["rollout/num_samples"] == 4


def test_responses_with_their_label_are_counted_among_those_with_one() -> None:
    texts = [("12", "it is 12, or 13"), ("12", "it is 21"), ("", "any"), (None, "any"), ("a b", "a b")]
    samples = tuple(
        replace(sample(scored(0.0)), index=index, prompt=replace(PROMPT, label=label), response_text=text)
        for index, (label, text) in enumerate(texts)
    )
    metrics = rollout_metrics([Group("p", PROMPT, samples)], version=4)
    check_metrics(metrics)
    assert metric_values(metrics)["rollout/label_found_fraction"] == pytest.approx(2 / 3)
    assert "rollout/label_found_fraction" not in metric_values(rollout_metrics([Group("p", PROMPT, samples[2:4])], version=4))


def test_lengths_truncation_and_staleness() -> None:
    samples = (sample(scored(0), length=3, stop=StopReason.LENGTH, version=2), sample(scored(1), length=1))
    metrics = rollout_metrics([Group("p", PROMPT, samples)], version=4)
    check_metrics(metrics)
    values = metric_values(metrics)
    assert values["rollout/truncated_fraction"] == 0.5
    assert values["rollout/response_length"] == 2
    assert values["rollout/response_length_max"] == 3
    assert values["rollout/staleness"] == pytest.approx(1.5)
    assert values["rollout/staleness_max"] == 2
    assert (values["rollout/staleness_share/0"], values["rollout/staleness_share/2"]) == (0.25, 0.75)
    assert values["rollout/mixed_versions_fraction"] == 0.0


def test_lengths_trained_on_leave_context_out() -> None:
    """Of 3 and 5 tokens, of which an environment wrote one, 2 are too old, and 4 are trained on."""
    first = replace(sample(scored(0), length=3), loss_mask=np.array([False, False, True]), weight_versions=np.array([2, 3, 4]))
    versions = np.array([4, -1, 4, 4, 5])
    second = replace(sample(scored(1), length=5), loss_mask=np.array([True, False, False, True, True]), weight_versions=versions)
    metrics = tail_metrics([Group("p", PROMPT, (first,)), Group("p", PROMPT, (second,))], oldest_version=4)
    check_metrics(metrics)
    values = metric_values(metrics)
    assert values == {"rollout/trained_length": 2.0, "rollout/stale_context_fraction": pytest.approx(2 / 7)}


def test_tokens_of_one_age_are_told_where_it_is_not_the_newest() -> None:
    def shares(version: int) -> dict[str, float]:
        values = metric_values(rollout_metrics([Group("p", PROMPT, (sample(scored(0)), sample(scored(1))))], version=version))
        return {name: value for name, value in values.items() if name.startswith("rollout/staleness_share")}

    assert shares(4) == {}
    assert shares(5) == {"rollout/staleness_share/1": 1.0}


def test_aborted_samples_are_counted() -> None:
    stops = (StopReason.ABORT, StopReason.STOP, StopReason.LENGTH, StopReason.STOP)
    samples = tuple(sample(scored(0), stop=stop) for stop in stops)
    assert metric_values(rollout_metrics([Group("p", PROMPT, samples)], version=4))["rollout/aborted_fraction"] == 0.25


def test_a_response_across_a_weight_sync_is_counted_as_mixed() -> None:
    first = replace(sample(scored(0), length=3), weight_versions=np.array([3, 3, 4]))
    values = metric_values(rollout_metrics([Group("p", PROMPT, (first, sample(scored(1))))], version=4))
    assert values["rollout/mixed_versions_fraction"] == 0.5
    assert values["rollout/staleness"] == pytest.approx(0.4)
    across_the_first = replace(sample(scored(0), length=3), weight_versions=np.array([0, -1, 1]))
    values = metric_values(rollout_metrics([Group("p", PROMPT, (across_the_first,))], version=1))
    assert (values["rollout/mixed_versions_fraction"], values["rollout/staleness"]) == (1.0, 0.5)


@pytest.mark.parametrize(("rewards", "expected"), [((0.3,) * 8, True), ((0.3, 0.3, 0.30000001), False), ((1.0,), True)])
def test_a_group_without_signal_is_one_of_equal_rewards(rewards: tuple[float, ...], expected: bool) -> None:
    assert has_one_reward(Group("p", PROMPT, tuple(sample(scored(value)) for value in rewards))) is expected


def test_groups_without_signal_are_counted_by_their_reward() -> None:
    groups = [Group("p", PROMPT, tuple(sample(scored(value)) for value in values)) for values in ((0, 0), (1, 1), (1, 1), (0, 1))]
    metrics = rollout_metrics(groups, version=4)
    check_metrics(metrics)
    values = metric_values(metrics)
    assert values["rollout/zero_variance_fraction"] == 0.75
    assert (values["rollout/zero_variance_fraction/0.0"], values["rollout/zero_variance_fraction/1.0"]) == (0.25, 0.5)


def test_a_lone_sample_is_no_group_without_signal() -> None:
    lone, pair = Group("p", PROMPT, (sample(scored(1)),)), Group("p", PROMPT, (sample(scored(-0.01)), sample(scored(-0.01))))
    values = metric_values(rollout_metrics([lone], version=4))
    assert not [name for name in values if name.startswith("rollout/zero_variance")]
    # One agent of several turns, and one of each of two roles, are compared with none either.
    turns = tuple(replace(sample(scored(1)), index=index, trajectory=0) for index in range(3))
    roles = tuple(replace(sample(scored(1)), index=index, role=role) for index, role in enumerate("ab"))
    values = metric_values(rollout_metrics([Group("p", PROMPT, turns), Group("p", PROMPT, roles)], version=4))
    assert not [name for name in values if name.startswith("rollout/zero_variance")]
    values = metric_values(rollout_metrics([lone, pair], version=4))
    assert (values["rollout/zero_variance_fraction"], values["rollout/zero_variance_fraction/0.0"]) == (1.0, 1.0)


def test_a_group_without_signal_is_counted_by_its_scored_samples() -> None:
    failed = Reward(RewardOutcome.ERROR, message="boom")
    groups = [Group("p", PROMPT, tuple(map(sample, rewards))) for rewards in ((failed, scored(1), scored(1)), (failed, failed))]
    values = metric_values(rollout_metrics(groups, version=4))
    by_reward = {name: value for name, value in values.items() if name.startswith("rollout/zero_variance_fraction")}
    assert by_reward == {"rollout/zero_variance_fraction": 1.0, "rollout/zero_variance_fraction/1.0": 0.5}


def test_rewards_and_ends_count_trajectories_and_lengths_samples() -> None:
    """Two samples of a trajectory of which the first was cut, and one of another."""
    cut, end = (replace(sample(scored(1.0, accuracy=1.0)), trajectory=0, index=index) for index in range(2))
    cut = replace(cut, stop_reason=StopReason.LENGTH)
    failed = replace(sample(Reward(RewardOutcome.ERROR, message="boom"), length=5), trajectory=1, index=2)
    third = replace(sample(scored(0.0, accuracy=0.0), length=3), index=3)
    values = metric_values(rollout_metrics([Group("p", PROMPT, (cut, end, failed, third))], version=4))
    assert values["rollout/reward"] == values["rollout/reward_component/accuracy"] == 0.5 and values["rollout/reward_errors"] == 1
    assert values["rollout/truncated_fraction"] == pytest.approx(1 / 3)
    assert (values["rollout/num_samples"], values["rollout/response_length"]) == (4, 3)
    assert values["rollout/samples_per_trajectory"] == pytest.approx(4 / 3)
    assert "rollout/samples_per_trajectory" not in rollout_metrics([Group("p", PROMPT, (third,))], version=4)


def test_turns_and_tools_count_trajectories() -> None:
    first, last = (replace(sample(scored(1.0), length=4), trajectory=0, index=index) for index in range(2))
    notes = {"num_turns": 5, "num_tool_calls": 4, "num_tool_errors": 1, "structure_difference": "marker 2 is <a>"}
    mask = np.array([True, False, False, True])
    last = replace(last, metadata=notes, loss_mask=mask, weight_versions=np.where(mask, 3, -1))
    other = replace(sample(scored(0.0), length=2), index=2, metadata={"num_turns": 2, "num_tool_calls": 0, "num_tool_errors": 0})
    metrics = rollout_metrics([Group("p", PROMPT, (first, last, other))], version=3)
    check_metrics(metrics)
    values = metric_values(metrics)
    assert (values["rollout/turns"], values["rollout/tool_calls"], values["rollout/tool_error_fraction"]) == (3.5, 2.0, 0.25)
    assert values["rollout/structure_difference_fraction"] == 0.5
    assert values["rollout/environment_token_fraction"] == pytest.approx(2 / 10)
    assert "rollout/turns" not in rollout_metrics([Group("p", PROMPT, (replace(other, metadata={}),))], version=3)


def test_roles_have_rewards_and_signals_of_their_own() -> None:
    pairs = (("proposer", 1.0), ("verifier", 0.0), ("proposer", 1.0), ("verifier", 0.0))
    samples = tuple(replace(sample(scored(value)), index=index, role=role) for index, (role, value) in enumerate(pairs))
    equal = Group("p", PROMPT, samples)
    other = Group("p", PROMPT, (*samples[:3], replace(samples[3], reward=scored(1.0)), replace(samples[2], reward=FAILED)))
    metrics = rollout_metrics([equal, other], version=4)
    check_metrics(metrics)
    values = metric_values(metrics)
    assert values["rollout/role_reward/proposer"] == 1.0 and values["rollout/role_reward/verifier"] == 0.25
    assert values["rollout/zero_variance_fraction"] == 0.5 and values["rollout/reward"] == 0.625
