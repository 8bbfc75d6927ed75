"""A rollout of two samples for each trajectory: the second turn sees the first answer alone, behind a prompt of its own."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_rl.engines.sampling import Sampling
from megatron_rl.plugins.kinds import Generator
from megatron_rl.rollout.groups import single_turn
from megatron_rl.types import Prompt, Sample


async def rollout(*, prompt: Prompt, generator: Generator, sampling: Sampling, num_samples: int, tokenizer: Any) -> Sequence[Sample]:
    """Two answers of each of `num_samples` trajectories."""
    samples: list[Sample] = []
    for trajectory in range(num_samples):
        asked = prompt
        for _ in range(2):
            (made,) = await single_turn(prompt=asked, generator=generator, sampling=sampling, num_samples=1, tokenizer=tokenizer)
            samples.append(replace(made, index=len(samples), trajectory=trajectory))
            history = np.concatenate([prompt.token_ids[:1], made.response_ids])
            asked = replace(prompt, token_ids=history, text=tokenizer.decode(history.tolist()))
    return samples
