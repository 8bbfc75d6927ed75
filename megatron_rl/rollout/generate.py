"""Rollouts: how one prompt becomes samples. The default is a single turn; `rollout.function` names another.

A rollout is `async def rollout(prompt, *, engine, sampling, num_samples, decode) -> Sequence[Sample]`. Its samples carry token ids
that engines returned, never text that was tokenised again.
"""

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import numpy as np

from megatron_rl.errors import UserError
from megatron_rl.rewards.loading import check_arguments, load_function
from megatron_rl.rollout.client import Generation
from megatron_rl.rollout.sampling import Sampling
from megatron_rl.types import Ints, Prompt, Sample

Decode = Callable[[Sequence[int]], str]
"""Response ids to the text that people and reward functions read: without special tokens."""


class Generator(Protocol):
    """What a rollout may ask of an engine."""

    async def generate(self, token_ids: Ints, *, sampling: Sampling, num_samples: int = 1) -> tuple[Generation, ...]:
        """`num_samples` responses to `token_ids` [P]."""
        ...


class Rollout(Protocol):
    """The contract of `rollout.function`; `megatron_rl.rollout.generate:single_turn` is an example."""

    def __call__(
        self, prompt: Prompt, *, engine: Generator, sampling: Sampling, num_samples: int, decode: Decode
    ) -> Awaitable[Sequence[Sample]]:
        """`num_samples` samples of `prompt`, each with its `group_id`, `index` and response text."""
        ...


async def single_turn(prompt: Prompt, *, engine: Generator, sampling: Sampling, num_samples: int, decode: Decode) -> tuple[Sample, ...]:
    """Ask once, and train on every token of the answer."""
    generations = await engine.generate(prompt.token_ids, sampling=sampling, num_samples=num_samples)
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
            response_text=decode(generation.token_ids.tolist()),
            routed_experts=generation.routed_experts,
        )
        for index, generation in enumerate(generations)
    )


def load_rollout(path: str | None) -> Rollout:
    """The rollout at `package.module:function`, `single_turn` when None.

    Raises:
        UserError: it cannot be imported, is not an async function, or does not take the arguments of the contract.
    """
    if path is None:
        return single_turn
    function = load_function(path, setting="rollout.function")
    if not inspect.iscoroutinefunction(function):
        raise UserError(f"rollout.function {path} is not an async function; write `async def`, or other prompts would wait for it")
    check_arguments(function, path=path, setting="rollout.function", positional=1, names=("engine", "sampling", "num_samples", "decode"))
    return function


def check_samples(
    samples: Sequence[Sample], *, prompt: Prompt, num_samples: int, vocab_size: int, need_experts: bool = False
) -> tuple[Sample, ...]:
    """The samples that a rollout returned, when they keep the contract.

    Raises:
        UserError: another number of samples, another group, token ids outside the vocabulary, or no experts where they are needed.
    """
    if len(samples) != num_samples:
        raise UserError(f"the rollout function returned {len(samples)} samples for prompt {prompt.id}, needs {num_samples}")
    for sample in samples:
        if sample.group_id != prompt.id:
            raise UserError(f"the rollout function returned group_id {sample.group_id!r}, needs {prompt.id!r}, the prompt's id")
        ids = sample.response_ids
        if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
            raise UserError(f"the rollout function returned token ids {ids.min()} to {ids.max()}, needs 0 to {vocab_size - 1}")
        if need_experts and sample.routed_experts is None and (sample.weight_versions >= 0).any():
            raise UserError(
                "the rollout function returned a sample without routed_experts, which training.routing_replay needs; give it those of the "
                "last Generation, which cover all tokens before it, or turn training.routing_replay off"
            )
    return tuple(samples)
