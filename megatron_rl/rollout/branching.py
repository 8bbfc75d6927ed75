"""A rollout whose samples branch: `rollout.function: megatron_rl.rollout.branching:rollout`.

Samples of a prompt grow on trees of `leaves` leaves. The first leaf of a tree, its trunk, is an
answer as by default. Every other leaf keeps the trunk's tokens before one of them and draws on from
there: before the most surprising tokens, or before the first ones. The surprise -log q(token) of a
drawn token is the entropy at its place in expectation, and comes with every token.

Leaves are trajectories of their own, each with its reward. A shared token is trained on in the trunk
alone, as a shared turn of a conversation is in one leaf.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from megatron_rl.engines.answers import Generation
from megatron_rl.engines.sampling import Sampling
from megatron_rl.errors import UserError
from megatron_rl.plugins.kinds import Generator
from megatron_rl.rollout.generator import joined, together
from megatron_rl.rollout.groups import sample_of
from megatron_rl.types import Prompt, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Where = Literal["surprise", "first"]


async def rollout(
    *,
    prompt: Prompt,
    generator: Generator,
    sampling: Sampling,
    num_samples: int,
    tokenizer: "PreTrainedTokenizerBase",
    leaves: int = 4,
    at: Where = "surprise",
) -> tuple[Sample, ...]:
    """Return `num_samples` leaves of as few trees of at most `leaves` as there have to be, trunks first."""
    if leaves < 1:
        raise UserError(f"rollout.args.leaves is {leaves}, needs 1 or more")
    num_trees = -(-num_samples // leaves)
    trunks = await generator.generate(prompt.token_ids, sampling=sampling, num_samples=num_trees)

    async def branch(index: int) -> tuple[Generation, int]:
        trunk = trunks[index % num_trees]
        shared = num_shared(trunk, number=index // num_trees, at=at)
        kept = slice(shared)
        arrays = {name: getattr(trunk, name)[kept] for name in ("token_ids", "log_probs", "weight_versions")}
        piece = replace(trunk, **arrays, candidates=None if trunk.candidates is None else trunk.candidates.take(kept))
        rest = replace(sampling, max_tokens=sampling.max_tokens - shared)
        (new,) = await generator.generate(np.concatenate([prompt.token_ids, piece.token_ids]), sampling=rest)
        length, decode = len(prompt.token_ids), tokenizer.decode
        return joined(piece, new, prompt_length=length, stop=sampling.stop, decode=decode), shared

    branches = await together(branch(index) for index in range(num_trees, num_samples))
    made = [*((trunk, 0) for trunk in trunks), *branches]
    return tuple(sample_of(answer, prompt, index=index, tokenizer=tokenizer, shared=shared) for index, (answer, shared) in enumerate(made))


def num_shared(trunk: Generation, *, number: int, at: Where) -> int:
    """Return how many tokens branch `number`, from 1, shares with `trunk`: 1 or more, 0 of a trunk of one token."""
    later = -trunk.log_probs[1:]
    order = np.argsort(-later, kind="stable") if at == "surprise" else np.arange(len(later))
    return int(order[(number - 1) % len(order)]) + 1 if len(order) else 0
