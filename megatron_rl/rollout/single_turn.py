"""The default rollout: one request for a prompt, whose answers are the samples. `rollout.function` names another (`plugins.Rollout`)."""

from typing import TYPE_CHECKING

import numpy as np

from megatron_rl.plugins import Generator
from megatron_rl.rollout.sampling import Sampling
from megatron_rl.types import Prompt, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


async def single_turn(
    *, prompt: Prompt, generator: Generator, sampling: Sampling, num_samples: int, tokenizer: "PreTrainedTokenizerBase"
) -> tuple[Sample, ...]:
    """Ask once, and train on every token of the answer."""
    generations = await generator.generate(prompt.token_ids, sampling=sampling, num_samples=num_samples)
    return tuple(
        Sample(
            group_id=prompt.id,
            index=index,
            prompt=prompt,
            response_ids=generation.token_ids,
            loss_mask=np.ones(len(generation.token_ids), np.bool_),
            rollout_log_probs=generation.log_probs,
            weight_versions=generation.weight_versions,
            stop_reason=generation.stop_reason,
            response_text=tokenizer.decode(generation.token_ids.tolist(), skip_special_tokens=True),
            routed_experts=generation.routed_experts,
        )
        for index, generation in enumerate(generations)
    )
