"""A rollout whose requests never meet in a batch, so that a seeded server answers two equal runs alike, to the last bit."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron_rl.rollout.groups import single_turn
from megatron_rl.types import Sample


async def rollout(*, num_samples: int, **arguments: Any) -> Sequence[Sample]:
    """One sample after the other; use with rollout.max_concurrent_requests=1, so that prompts come one after the other, too."""
    samples = []
    for index in range(num_samples):
        (sample,) = await single_turn(num_samples=1, **arguments)
        samples.append(replace(sample, index=index))
    return samples


async def slow_rollout(*, num_samples: int, **arguments: Any) -> Sequence[Sample]:
    """One sample after the other, with a moment between them."""
    samples: list[Sample] = []
    for _ in range(num_samples):
        (sample,) = await single_turn(num_samples=1, **arguments)
        samples.append(replace(sample, index=len(samples)))
        await asyncio.sleep(1)
    return samples


def score(*, sample: Sample) -> float:
    """Something to learn for a model that cannot calculate yet: the share of even digits."""
    digits = [int(character) for character in sample.response_text if character.isdigit()]
    return sum(digit % 2 == 0 for digit in digits) / max(1, len(digits))


def coarse_score(*, sample: Sample) -> float:
    """Return 0 or 1, so that many groups have equal rewards."""
    return float(score(sample=sample) > 0.5)


async def slow_score(*, sample: Sample, seconds: float = 0.2) -> float:
    """Return the same after some seconds."""
    await asyncio.sleep(seconds)
    return score(sample=sample)
