"""A rollout of two turns with a tool between them, whose tokens no engine made: what the contract says of masked tokens is seen in it."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_rl.engines.sampling import Sampling
from megatron_rl.plugins.kinds import Generator
from megatron_rl.types import Prompt, Sample

TOOL_IDS = np.array([7, 7, 9])


async def rollout(*, prompt: Prompt, generator: Generator, sampling: Sampling, num_samples: int, tokenizer: Any) -> Sequence[Sample]:
    """Conversations beside each other: half of the token budget, the tool's answer, and a second turn that sees both."""
    half = replace(sampling, max_tokens=sampling.max_tokens // 2)

    async def conversation(index: int) -> Sample:
        (first,) = await generator.generate(prompt.token_ids, sampling=half, session=str(index))
        seen = np.concatenate([prompt.token_ids, first.token_ids, TOOL_IDS])
        (second,) = await generator.generate(seen, sampling=half, session=str(index))
        response_ids = np.concatenate([first.token_ids, TOOL_IDS, second.token_ids])
        return Sample(
            group_id=prompt.id,
            index=index,
            prompt=prompt,
            response_ids=response_ids,
            loss_mask=np.repeat([True, False, True], [len(first.token_ids), len(TOOL_IDS), len(second.token_ids)]),
            rollout_log_probs=np.concatenate([first.log_probs, np.full(len(TOOL_IDS), np.nan), second.log_probs]),
            weight_versions=np.concatenate([first.weight_versions, np.full(len(TOOL_IDS), -1), second.weight_versions]),
            stop_reason=second.stop_reason,
            response_text=tokenizer.decode(response_ids.tolist(), skip_special_tokens=True),
            routed_experts=second.routed_experts,
        )

    return await asyncio.gather(*map(conversation, range(num_samples)))
