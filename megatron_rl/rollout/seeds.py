"""A seed of its own for every sample that a rollout asks for, so that samples differ on an engine that draws by seeds, and come again."""

import hashlib
from dataclasses import replace

from megatron_rl.plugins import Generator
from megatron_rl.rollout.client import Generation
from megatron_rl.rollout.sampling import Sampling
from megatron_rl.types import Ints, Prompt


class SeededGenerator:
    """`engine` as one group's rollout sees it: the k-th sample that is asked for gets the seed `seed` + k, over all calls."""

    def __init__(self, engine: Generator, *, seed: int) -> None:
        self._engine = engine
        self._next_seed = seed

    async def generate(self, token_ids: Ints, *, sampling: Sampling, num_samples: int = 1) -> tuple[Generation, ...]:
        """`num_samples` responses to `token_ids` [P], as the engine gives them."""
        seeded = replace(sampling, seed=self._next_seed)
        self._next_seed += num_samples
        return await self._engine.generate(token_ids, sampling=seeded, num_samples=num_samples)


def group_seed(prompt: Prompt, *, run_seed: int) -> int:
    """A seed below 2^56 from the run's seed and the prompt's id, which names its epoch: the same in a run that is resumed."""
    return int.from_bytes(hashlib.blake2b(f"{run_seed} {prompt.id}".encode(), digest_size=7).digest(), "big")
