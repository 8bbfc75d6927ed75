"""A rollout whose requests never meet in a batch, so that a seeded server answers two equal runs alike, to the last bit."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_rl.rollout.generate import Decode, Generator, single_turn
from megatron_rl.rollout.sampling import Sampling
from megatron_rl.types import Prompt, Sample


async def rollout(prompt: Prompt, *, engine: Generator, sampling: Sampling, num_samples: int, decode: Decode) -> Sequence[Sample]:
    """One sample after the other; use with rollout.max_concurrent_requests=1, so that prompts come one after the other, too."""
    samples = []
    for index in range(num_samples):
        (sample,) = await single_turn(prompt, engine=engine, sampling=sampling, num_samples=1, decode=decode)
        samples.append(replace(sample, index=index))
    return samples


def score(*, prompt: str, response: str, label: str | None, metadata: Mapping[str, Any]) -> float:
    """Something to learn for a model that cannot calculate yet: the share of even digits."""
    digits = [int(character) for character in response if character.isdigit()]
    return sum(digit % 2 == 0 for digit in digits) / max(1, len(digits))
