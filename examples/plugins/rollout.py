"""Best of n: ask for more responses than are trained on, and keep the longest ones."""

from dataclasses import replace
from typing import Any

from megatron_rl.rollout.groups import single_turn
from megatron_rl.types import Sample


async def rollout(*, num_samples: int, factor: int = 2, **arguments: Any) -> list[Sample]:
    """`num_samples` of `factor` times as many; `arguments` are prompt, generator, sampling and tokenizer."""
    samples = await single_turn(num_samples=factor * num_samples, **arguments)
    longest = sorted(samples, key=lambda sample: -len(sample.response_ids))[:num_samples]
    return [replace(sample, index=index) for index, sample in enumerate(longest)]
