"""Rollouts: how one prompt becomes samples. The default is a single turn; `rollout.function` names another (`plugins.Rollout`)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from megatron_rl.config.settings import RolloutSettings
from megatron_rl.errors import UserError
from megatron_rl.plugins import Generator, Rollout, load
from megatron_rl.rollout.sampling import Sampling
from megatron_rl.types import Prompt, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_LOG_PROB = 1e-3
"""Nats above 0 that rounding explains: a softmax in bfloat16 need not sum to 1."""


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


def load_rollout(settings: RolloutSettings) -> Rollout:
    """The rollout that the settings name, with its own arguments; `single_turn` when they name none.

    Raises:
        UserError: it cannot be imported, is not an async function, or does not take the arguments of the contract or of the settings.
    """
    return single_turn if settings.function is None else load(settings.function, kind="rollout", args=settings.args)


def check_samples(
    samples: Sequence[Sample],
    *,
    prompt: Prompt,
    num_samples: int,
    vocab_size: int,
    need_experts: bool = False,
    rollout: str = "rollout.function",
) -> tuple[Sample, ...]:
    """The samples that a rollout returned, when they keep the contract; `rollout` names it in messages.

    Raises:
        UserError: another number of samples, an index that comes twice, another group or prompt, token ids outside the vocabulary, a
            trainable token that no engine made or with a log-prob above 0, or no experts where they are needed.
    """
    if len(samples) != num_samples:
        raise UserError(f"{rollout} returned {len(samples)} samples for prompt {prompt.id}, needs {num_samples}")
    indices = [sample.index for sample in samples]
    if sorted(indices) != list(range(num_samples)):
        raise UserError(
            f"{rollout} returned samples with the index {indices} for prompt {prompt.id}, needs each of 0 to {num_samples - 1} once"
        )
    for sample in samples:
        problem = _problem(sample, prompt=prompt, vocab_size=vocab_size, need_experts=need_experts)
        if problem is not None:
            raise UserError(f"{rollout} returned sample {sample.index} of prompt {prompt.id} with {problem}")
    return tuple(samples)


def _problem(sample: Sample, *, prompt: Prompt, vocab_size: int, need_experts: bool) -> str | None:
    """What a sample of `prompt` must not have, what it needs and how to mend it; None when it can be trained on."""
    if sample.group_id != prompt.id:
        return f"group_id {sample.group_id!r}, needs {prompt.id!r}, the prompt's id"
    if not _same_prompt(sample.prompt, prompt):
        return (
            f"a prompt of its own ({len(sample.prompt.token_ids)} tokens, text {sample.prompt.text[:40]!r}), needs that which it was "
            f"given ({len(prompt.token_ids)} tokens, text {prompt.text[:40]!r}), behind which it is trained; put tokens that follow it "
            "into response_ids with loss_mask False, and notes into Sample.metadata"
        )
    ids = sample.response_ids
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
        return f"token ids {ids.min()} to {ids.max()}, needs 0 to {vocab_size - 1}"
    strays = np.flatnonzero(sample.loss_mask & (sample.weight_versions < 0))
    if len(strays):
        return (
            f"weight_versions {sample.weight_versions[strays[0]]} at token {strays[0]}, which loss_mask trains on, needs the version and "
            "the log-prob from the Generation that made it; set loss_mask False on tokens that no engine made"
        )
    above = np.flatnonzero(sample.loss_mask & (sample.rollout_log_probs > MAX_LOG_PROB))
    if len(above):
        return f"the rollout log-prob {sample.rollout_log_probs[above[0]]:g} at token {above[0]}, needs at most 0, the log of a probability"
    if need_experts and sample.routed_experts is None and (sample.weight_versions >= 0).any():
        return (
            "no routed_experts, which training.routing_replay needs; give it those of the last Generation, which cover all tokens before "
            "it, or turn training.routing_replay off"
        )
    return None


def _same_prompt(own: Prompt, given: Prompt) -> bool:
    """True when nothing differs that is trained on, scored or stored: the buffer keeps one prompt for the whole group."""
    if own is given:
        return True
    named = [(prompt.id, prompt.text, prompt.label, dict(prompt.metadata)) for prompt in (own, given)]
    return named[0] == named[1] and np.array_equal(own.token_ids, given.token_ids)


def without_outdated_experts(sample: Sample) -> Sample:
    """The sample without the record of its experts when weights of several versions made its tokens.

    A weight update sends what is being generated back to the prompt phase (as a later turn does with earlier ones), so the engine's
    record then tells where the last weights would have routed the tokens of all weights before. The trainer routes such a sample itself.
    """
    versions = sample.weight_versions[sample.weight_versions >= 0]
    if sample.routed_experts is None or len(np.unique(versions)) <= 1:
        return sample
    return replace(sample, routed_experts=sample.routed_experts[:0])
