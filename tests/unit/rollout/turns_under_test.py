"""A rollout of several turns, for runs whose requests are interrupted."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_rl.engines.sampling import Sampling
from megatron_rl.plugins.kinds import Generator
from megatron_rl.types import Prompt, Sample

TOLD = np.array([7, 7])


async def rollout(*, prompt: Prompt, generator: Generator, sampling: Sampling, num_samples: int, tokenizer: Any) -> Sequence[Sample]:
    async def play(index: int) -> Sample:
        ids, arrays = prompt.token_ids, list[tuple[Any, Any, Any]]()
        for turn in range(3):
            if turn:
                ids = np.concatenate([ids, TOLD])
                arrays.append(([False] * 2, [0.0] * 2, [-1] * 2))
            (made,) = await generator.generate(ids, sampling=replace(sampling, max_tokens=36), session=f"{index}")
            ids = np.concatenate([ids, made.token_ids])
            arrays.append(([True] * len(made.token_ids), made.log_probs, made.weight_versions))
        mask, log_probs, versions = (np.concatenate(each) for each in zip(*arrays, strict=True))
        return Sample(
            group_id=prompt.id,
            index=index,
            prompt=prompt,
            response_ids=ids[len(prompt.token_ids) :],
            loss_mask=mask,
            rollout_log_probs=log_probs.astype(np.float32),
            weight_versions=versions,
            stop_reason=made.stop_reason,
            response_text="",
        )

    return await asyncio.gather(*map(play, range(num_samples)))
