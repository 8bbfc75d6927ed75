"""A maker of groups, as its tests set it up, and an engine in place of a server."""

import asyncio

import numpy as np

from megatron_rl.config.settings import RolloutSettings, SamplingSettings
from megatron_rl.engines.answers import Generation
from megatron_rl.engines.engine import EngineAddress
from megatron_rl.engines.engine_pool import EnginePool, Urgency
from megatron_rl.engines.sampling import Sampling
from megatron_rl.errors import EngineError
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
    sampling: SamplingSettings | None = None,
    function: str | None = None,
) -> GroupMaker:
    sampling = sampling or SamplingSettings(max_response_tokens=max_answer)
    settings = RolloutSettings(sampling=sampling, timeout_s=timeout_s, function=function)
    tokenizer = NumberTokenizer()
    return GroupMaker(settings, rollout, pool=pool, tokenizer=tokenizer, score=score, seed=seed, max_tokens=max_tokens)  # type: ignore[arg-type]


def generator_of(pool: EnginePool, name: str = "p") -> PoolGenerator:
    group = {"urgency": Urgency.TRAINING, "arrival": pool.arrival(), "kept": KeptAnswers(None, name), "decode": NumberTokenizer().decode}
    return PoolGenerator(pool, seed=f"0 {name}", max_tokens=64, max_answer=4, **group)  # type: ignore[arg-type]


class Engine:
    """An engine that answers with the prompt's tokens, made by `version`, after `delay_s` and once it is `free`.

    Calls from number `fail_at` on raise `error` when there is one by then.
    """

    def __init__(self, *, version: int = 2, delay_s: float = 0.0, fail_at: int = 1, error: Exception | None = None) -> None:
        url = f"http://engine-{version}"
        self.address = EngineAddress(url, "key", vocab_size=100, context_length=64, max_total_tokens=64, has_tokenizer=False)
        self.version, self.delay_s, self.fail_at, self.error = version, delay_s, fail_at, error
        self.stepped_s = 0.0
        self.free = asyncio.Event()
        self.free.set()
        self.calls = self.running = self.most_running = self.aborted = 0
        self.samplings: list[Sampling] = []
        self.asked: list[tuple[list[int], int | None]] = []

    async def generate(self, token_ids: Ints, *, sampling: Sampling, num_samples: int = 1) -> tuple[Generation, ...]:
        self.calls = number = self.calls + 1
        self.samplings.append(sampling)
        self.asked.append((token_ids.tolist(), sampling.seed))
        self.running += num_samples
        self.most_running = max(self.most_running, self.running)
        try:
            await self.work(number)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.running -= num_samples
        if self.error is not None and number >= self.fail_at:
            raise self.error
        return tuple(self.answer(token_ids) for _ in range(num_samples))

    async def work(self, number: int) -> None:
        await asyncio.sleep(self.delay_s)
        await self.free.wait()

    def answer(self, token_ids: Ints) -> Generation:
        length = len(token_ids)
        return Generation(token_ids, np.zeros(length, np.float32), np.full(length, self.version), StopReason.STOP)


def dead(fail_at: int = 1, *, delay_s: float = 0.0) -> Engine:
    """An engine that is dead from call `fail_at` on."""
    return Engine(fail_at=fail_at, error=EngineError("gone"), delay_s=delay_s)


def make_prompts(number: int) -> list[Prompt]:
    return [Prompt(id=f"{index:03d}", token_ids=np.array([index, 1]), text=str(index)) for index in range(number)]
