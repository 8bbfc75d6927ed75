"""A rollout whose samples are not what engines returned, once the weights have version 1."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_rl.rollout.groups import single_turn
from megatron_rl.types import Sample


async def rollout(*, num_samples: int, change: str, **arguments: Any) -> Sequence[Sample]:
    """Samples as by default, each with the `change`: tokens reversed or at random, log-probs with noise, or 0 in every second sample."""
    samples = await single_turn(num_samples=num_samples, **arguments)
    return [_changed(sample, change) if (sample.weight_versions == 1).all() else sample for sample in samples]


def _changed(sample: Sample, change: str) -> Sample:
    random = np.random.default_rng(sample.index + sum(sample.group_id.encode()))
    if change == "noise":
        noise = random.normal(0, 2e-3, len(sample.rollout_log_probs)).astype(np.float32)
        return replace(sample, rollout_log_probs=sample.rollout_log_probs + noise)
    if change == "zero":
        return replace(sample, rollout_log_probs=sample.rollout_log_probs * (sample.index % 2))
    return replace(sample, response_ids=sample.response_ids[::-1] if change == "reversed" else random.permutation(sample.response_ids))
