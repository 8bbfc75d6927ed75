"""What a rollout returned for one prompt, checked where it enters: each violation names the rollout, the field, got and needed."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_rl.errors import UserError
from megatron_rl.types import Prompt, Sample, trajectories

MAX_LOG_PROB = 1e-3
"""Nats above 0 that rounding explains: a softmax in bfloat16 need not sum to 1."""


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

    They form `num_samples` trajectories, of a sample or more each.

    Raises:
        UserError: something else than samples, another number of trajectories, an index that comes twice, another group, a prompt of
            another problem, token ids outside the vocabulary, a trainable token that no engine made or with a log-prob above 0, or no
            experts where they are needed.
    """
    samples = _samples(samples, prompt=prompt, rollout=rollout)
    num_trajectories = len(trajectories(samples))
    if num_trajectories != num_samples:
        raise UserError(
            f"{rollout} returned {len(samples)} samples of {num_trajectories} trajectories for prompt {prompt.id}, needs {num_samples} "
            "trajectories; samples that belong together have the same number in Sample.trajectory"
        )
    indices = [sample.index for sample in samples]
    if sorted(indices) != list(range(len(samples))):
        raise UserError(
            f"{rollout} returned samples with the index {indices} for prompt {prompt.id}, needs each of 0 to {len(samples) - 1} once"
        )
    for sample in samples:
        problem = _problem(sample, prompt=prompt, vocab_size=vocab_size, need_experts=need_experts)
        if problem is not None:
            raise UserError(f"{rollout} returned sample {sample.index} of prompt {prompt.id} with {problem}")
    return samples


def _samples(returned: object, *, prompt: Prompt, rollout: str) -> tuple[Sample, ...]:
    if not isinstance(returned, Sequence):
        raise UserError(
            f"{rollout} returned {returned!r:.60} of type {type(returned).__name__} for prompt {prompt.id}, needs a list of Sample"
        )
    strays = [item for item in returned if not isinstance(item, Sample)]
    if strays:
        raise UserError(
            f"{rollout} returned a list with {strays[0]!r:.60} of type {type(strays[0]).__name__} for prompt {prompt.id}, needs Sample"
        )
    return tuple(returned)


def _problem(sample: Sample, *, prompt: Prompt, vocab_size: int, need_experts: bool) -> str | None:
    """What a sample of `prompt` must not have, what it needs and how to mend it; None when it can be trained on."""
    if sample.group_id != prompt.id:
        return f"group_id {sample.group_id!r}, needs {prompt.id!r}, the prompt's id"
    problem = _prompt_problem(sample.prompt, prompt)
    if problem is not None:
        return problem
    for name, ids in (("prompt.token_ids", sample.prompt.token_ids), ("response_ids", sample.response_ids)):
        if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
            return f"token ids {ids.min()} to {ids.max()} in {name}, needs 0 to {vocab_size - 1}"
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


def _prompt_problem(own: Prompt, given: Prompt) -> str | None:
    """Why `own` is not the problem that was `given`, though it may say it in tokens and text of its own; None when it is.

    Trajectories of one group are compared by one label, and the buffer keeps id, label and metadata once for the whole group.
    """
    if own is given:
        return None
    for name in ("id", "label", "metadata"):
        got, needed = getattr(own, name), getattr(given, name)
        if got != needed:
            return (
                f"a prompt whose {name} is {got!r:.60}, needs {needed!r:.60}, that of the prompt which it was given; make one of its own "
                "with dataclasses.replace(prompt, token_ids=.., text=..), and put notes into Sample.metadata"
            )
    return None


def without_outdated_experts(sample: Sample) -> Sample:
    """The sample without the record of its experts when weights of several versions made its tokens.

    A weight update sends what is being generated back to the prompt phase (as a later turn does with earlier ones), so the engine's
    record then tells where the last weights would have routed the tokens of all weights before. The trainer routes such a sample itself.
    """
    versions = sample.weight_versions[sample.weight_versions >= 0]
    if sample.routed_experts is None or len(np.unique(versions)) <= 1:
        return sample
    return replace(sample, routed_experts=sample.routed_experts[:0])
