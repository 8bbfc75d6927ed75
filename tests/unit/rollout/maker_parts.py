"""A maker of groups, as its tests set it up, and an engine in place of a server."""

import asyncio

import numpy as np

from megatron_rl.config.settings import RolloutSettings, SamplingSettings
from megatron_rl.engines.answers import Generation
from megatron_rl.engines.engine import EngineAddress
from megatron_rl.engines.engine_pool import EnginePool, Urgency
from megatron_rl.engines.sampling import Sampling
from megatron_rl.errors import EngineError, EngineRefusal
from megatron_rl.plugins.kinds import Rollout
from megatron_rl.rollout.generator import KeptAnswers, PoolGenerator
from megatron_rl.rollout.groups import GroupMaker, Score, single_turn
from megatron_rl.rollout.rollout_trial import NumberTokenizer
from megatron_rl.types import Ints, Prompt, StopReason


def make_maker(
    pool: EnginePool,
    rollout: Rollout = single_turn,
    *,
    score: Score | None = None,
    max_answer: int = 4,
    max_tokens: int = 64,
    seed: int = 0,
    timeout_s: float = 60.0,
) -> GroupMaker:
    settings = RolloutSettings(sampling=SamplingSettings(max_response_tokens=max_answer), timeout_s=timeout_s)
    tokenizer = NumberTokenizer()
    return GroupMaker(settings, rollout, pool=pool, tokenizer=tokenizer, score=score, seed=seed, max_tokens=max_tokens)  # type: ignore[arg-type]


def generator_of(pool: EnginePool, name: str = "p") -> PoolGenerator:
    group = {"urgency": Urgency.TRAINING, "arrival": pool.arrival(), "kept": KeptAnswers(None, name)}
    return PoolGenerator(pool, seed=f"0 {name}", max_tokens=64, max_answer=4, **group)  # type: ignore[arg-type]


class FakeClient:
    """An engine that answers with the prompt's tokens; `fail_at` is the call from which on it is dead."""

    def __init__(self, *, delay_s: float = 0.0, fail_at: int | None = None, error: type[EngineError] = EngineError) -> None:
        self.address = EngineAddress("url", "key", vocab_size=100, context_length=64, max_total_tokens=64, has_tokenizer=False)
        self.delay_s, self.fail_at, self.error = delay_s, fail_at, error
        self.calls = self.running = self.most_running = self.cancelled = 0
        self.samplings: list[Sampling] = []

    async def generate(self, token_ids: Ints, *, sampling: Sampling, num_samples: int = 1) -> tuple[Generation, ...]:
        self.calls += 1
        self.samplings.append(sampling)
        self.running += num_samples
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= num_samples
        if self.fail_at is not None and self.calls >= self.fail_at:
            raise self.error("gone", status=400) if self.error is EngineRefusal else self.error("gone")
        length = len(token_ids)
        return (Generation(token_ids, np.zeros(length, np.float32), np.full(length, 2), StopReason.STOP),) * num_samples


def make_prompts(number: int) -> list[Prompt]:
    return [Prompt(id=f"{index:03d}", token_ids=np.array([index, 1]), text=str(index)) for index in range(number)]
