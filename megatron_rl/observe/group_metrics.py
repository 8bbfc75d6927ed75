"""Metrics of the rollout, from a batch of generated groups."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from megatron_rl.observe.metrics import Max, Mean, Metric, Sum
from megatron_rl.types import Group, Ints, RewardOutcome, Sample, StopReason, trajectories


def rollout_metrics(groups: Sequence[Group], *, version: int) -> dict[str, Metric]:
    """Return metrics `rollout/*` of the groups of the step that trains weights of `version`.

    Rewards, truncations and aborts count trajectories; lengths and versions count samples.
    """
    samples = [sample for group in groups for sample in group.samples]
    all_parts = [parts for group in groups for parts in trajectories(group.samples)]
    compared = [group for group in groups if _compares(group)]
    lengths = [len(sample.response_ids) for sample in samples]
    num_tokens = sum(lengths)
    ages = np.concatenate([np.empty(0, np.int64), *(version - sample.weight_versions[sample.weight_versions >= 0] for sample in samples)])
    metrics: dict[str, Metric] = {
        "rollout/num_samples": Sum(len(samples)),
        "rollout/num_tokens": Sum(num_tokens),
        "rollout/response_length": Mean(num_tokens, len(samples)),
        "rollout/response_length_max": Max(max(lengths, default=0)),
        "rollout/prompt_length": Mean(sum(len(group.prompt.token_ids) for group in groups), len(groups)),
        "rollout/truncated_fraction": _share(all_parts, StopReason.LENGTH),
        "rollout/aborted_fraction": _share(all_parts, StopReason.ABORT),
        "rollout/zero_variance_fraction": Mean(sum(map(has_one_reward, compared)), len(compared)),
    }
    # All failed and all solved need opposite cures.
    counts = Counter(f"{round(value, 1) + 0.0:.1f}" for group in compared if has_one_reward(group) for _, value in _rewards(group))
    metrics |= {f"rollout/zero_variance_fraction/{name}": Mean(count, len(compared)) for name, count in sorted(counts.items())}
    if len(ages):
        metrics |= {"rollout/staleness": Mean(float(ages.sum()), len(ages)), "rollout/staleness_max": Max(float(ages.max()))}
        metrics |= _shares_by_age(ages)
        mixed = [len(np.unique(sample.weight_versions[sample.weight_versions >= 0])) > 1 for sample in samples]
        metrics["rollout/mixed_versions_fraction"] = Mean(sum(mixed), len(samples))
    metrics |= _turn_metrics(all_parts)
    if len(all_parts) < len(samples):
        metrics["rollout/samples_per_trajectory"] = Mean(len(samples), len(all_parts))
    return metrics | _reward_metrics([parts[-1] for parts in all_parts])


def _turn_metrics(all_parts: Sequence[Sequence[Sample]]) -> dict[str, Metric]:
    """Return turns, tools and tokens of trajectories with an environment or agent; nothing without any."""
    notes = [parts[-1].metadata for parts in all_parts if "num_turns" in parts[-1].metadata]
    if not notes:
        return {}
    versions = np.concatenate([sample.weight_versions for parts in all_parts for sample in parts])
    calls = sum(note["num_tool_calls"] for note in notes)
    requests = {
        f"rollout/{what}_requests": Sum(sum(note[f"num_{what}"] for note in notes))
        for what in ("refused", "overridden")
        if all(f"num_{what}" in note for note in notes)
    }
    replays = sum(note.get("num_replays", 0) for note in notes)
    return (
        requests
        | ({"rollout/replays": Sum(replays)} if replays else {})
        | {
            "rollout/structure_difference_fraction": Mean(sum("structure_difference" in note for note in notes), len(notes)),
            "rollout/turns": Mean(sum(note["num_turns"] for note in notes), len(notes)),
            "rollout/tool_calls": Mean(calls, len(notes)),
            "rollout/tool_error_fraction": Mean(sum(note["num_tool_errors"] for note in notes), calls),
            "rollout/environment_token_fraction": Mean(int((versions < 0).sum()), len(versions)),
        }
    )


def tail_metrics(groups: Sequence[Group], *, oldest_version: int) -> dict[str, Metric]:
    """Return the lengths trained on, and the share of engine-made tokens before `oldest_version`, which are context."""
    samples = [sample for group in groups for sample in group.samples]
    versions = np.concatenate([np.empty(0, np.int64), *(sample.weight_versions for sample in samples)])
    return {
        "rollout/trained_length": Mean(sum(int(sample.loss_mask.sum()) for sample in samples), len(samples)),
        "rollout/stale_context_fraction": Mean(int(((versions >= 0) & (versions < oldest_version)).sum()), int((versions >= 0).sum())),
    }


def failure_metrics(groups: Sequence[Group], *, num_left_out: int, retries: Mapping[str, int]) -> dict[str, Metric]:
    """Count failed trajectories of `groups` and repeated calls by cause, and left-out groups."""
    causes = Counter(failure.cause for group in groups for failure in group.failures)
    return {
        "rollout/failures": Sum(causes.total()),
        **{f"rollout/failures/{cause}": Sum(count) for cause, count in sorted(causes.items())},
        "rollout/left_out_groups": Sum(num_left_out),
        "rollout/retries": Sum(sum(retries.values())),
        **{f"rollout/retries/{cause}": Sum(count) for cause, count in sorted(retries.items())},
    }


def _share(all_parts: Sequence[Sequence[Sample]], reason: StopReason) -> Metric:
    """Return the share of trajectories with a sample that ended for this reason."""
    return Mean(sum(any(sample.stop_reason is reason for sample in parts) for parts in all_parts), len(all_parts))


def _shares_by_age(ages: Ints) -> dict[str, Metric]:
    """Return the share of tokens at each age in weight versions; nothing where all are of age 0."""
    values, counts = np.unique(ages, return_counts=True)
    if values.tolist() == [0]:
        return {}
    return {f"rollout/staleness_share/{age}": Mean(int(count), len(ages)) for age, count in zip(values, counts, strict=True)}


def _compares(group: Group) -> bool:
    """Return True where a role has several trajectories: a lone one is compared with none."""
    lasts = (parts[-1] for parts in trajectories(group.samples))
    return max(Counter(last.role for last in lasts if last.reward is not None).values(), default=0) > 1


def has_one_reward(group: Group) -> bool:
    """Return True when all scored samples of a role have equal rewards, never by a standard deviation: no signal."""
    found = _rewards(group)
    return len(found) == len({role for role, _ in found})


def _rewards(group: Group) -> set[tuple[str | None, float]]:
    """Return the distinct rewards of the group's scored samples, each with its role."""
    rewarded = ((sample.role, sample.reward) for sample in group.samples if sample.reward is not None)
    return {(role, reward.value) for role, reward in rewarded if reward.value is not None}


def _reward_metrics(samples: Sequence[Sample]) -> dict[str, Metric]:
    """Return the mean reward of the scored `samples`, the components, two kinds of failure, and the share with their label."""
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    scored = [reward for reward in rewards if reward.outcome is RewardOutcome.SCORED]
    metrics: dict[str, Metric] = {
        "rollout/reward": Mean(sum(reward.value for reward in scored if reward.value is not None), len(scored)),
        "rollout/reward_failed_fraction": Mean(len(rewards) - len(scored), len(rewards)),
        "rollout/reward_errors": Sum(sum(reward.outcome is RewardOutcome.ERROR for reward in rewards)),
        "rollout/reward_timeouts": Sum(sum(reward.outcome is RewardOutcome.TIMEOUT for reward in rewards)),
    }
    labelled = [(sample.prompt.label, sample.response_text) for sample in samples if sample.prompt.label]
    metrics["rollout/label_found_fraction"] = Mean(sum(label in text for label, text in labelled), len(labelled))
    by_role = {sample.role: [each.reward for each in samples if each.role == sample.role] for sample in samples if sample.role is not None}
    for role, given in sorted(by_role.items()):
        values = [reward.value for reward in given if reward is not None and reward.value is not None]
        metrics[f"rollout/role_reward/{role}"] = Mean(sum(values), len(values))
    for name in sorted({name for reward in scored for name in reward.components}):
        values = [reward.components[name] for reward in scored if name in reward.components]
        metrics[f"rollout/reward_component/{name}"] = Mean(sum(values), len(values))
    return metrics
