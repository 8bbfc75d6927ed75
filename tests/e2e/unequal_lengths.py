"""A rollout whose answers have 8 tokens for two prompts of three, and the whole budget for the third, on a machine of any speed."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron_rl.engines.sampling import Sampling
from megatron_rl.rollout.groups import single_turn
from megatron_rl.types import Prompt, Sample

SHORT = 8


async def rollout(*, prompt: Prompt, sampling: Sampling, **arguments: Any) -> Sequence[Sample]:
    """Ask once; ids of training prompts are EPOCH-ROW."""
    row = prompt.id.rpartition("-")[2]
    if not row.isdigit() or int(row) % 3:
        sampling = replace(sampling, max_tokens=SHORT)
    return await single_turn(prompt=prompt, sampling=sampling, **arguments)
