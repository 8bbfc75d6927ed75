"""A rollout that makes sure, on a machine of any speed, of answers ahead of training and of one across a weight sync."""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron_rl.rollout.groups import single_turn
from megatron_rl.types import Prompt, Sample

STEP_1, ACROSS_A_SYNC, STEP_3 = 0, 32, 33
"""A prompt of step 1 and two of step 3, counted in the order in which steps, of 16 prompts each, train on them."""

_numbers = itertools.count()
_asking_again, _step_3_has_answers = asyncio.Event(), asyncio.Event()


async def rollout(*, prompt: Prompt, num_samples: int, **arguments: Any) -> Sequence[Sample]:
    """As by default, but step 1 waits for answers of step 3, and one prompt of step 3 asks again until weights change in an answer.

    Needs `rollout.max_staleness` 2, `data.prompts_per_step` 16 and three steps.
    """
    # Ids of training prompts are EPOCH-ROW; others are those of probes and evaluations.
    number = next(_numbers) if prompt.id[0].isdigit() else None
    if number == STEP_1:
        await asyncio.gather(_asking_again.wait(), _step_3_has_answers.wait())
    if number == ACROSS_A_SYNC:
        return await _across_a_sync(prompt=prompt, num_samples=num_samples, **arguments)
    samples = await single_turn(prompt=prompt, num_samples=num_samples, **arguments)
    if number == STEP_3:
        _step_3_has_answers.set()
    return samples


async def _across_a_sync(*, num_samples: int, **arguments: Any) -> list[Sample]:
    """Each sample asks on its own, so that hardly a moment is without a request, until one has tokens of two versions or of the last."""
    found = asyncio.Event()

    async def ask(index: int) -> Sample:
        while True:
            (sample,) = await single_turn(num_samples=1, **arguments)
            _asking_again.set()
            versions = set(sample.weight_versions.tolist())
            if len(versions) > 1 or versions == {2}:
                found.set()
            if found.is_set():
                return replace(sample, index=index)

    return await asyncio.gather(*map(ask, range(num_samples)))
