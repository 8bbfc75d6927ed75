"""What a manager works with in its tests: an engine that takes a random number of turns of the event loop, and rewards."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from run_parts import Rewards

from megatron_rl.config.load import load_settings
from megatron_rl.config.settings import Settings
from megatron_rl.data.source import RunPrompts
from megatron_rl.engines.answers import Generation
from megatron_rl.engines.engine import EngineAddress
from megatron_rl.engines.sampling import Sampling
from megatron_rl.errors import EngineError
from megatron_rl.observe.console import PhaseProgress
from megatron_rl.observe.metrics import check_metrics, metric_values
from megatron_rl.rollout import manager as module
from megatron_rl.rollout.manager import RolloutManager
from megatron_rl.types import Ints, Reward, RewardOutcome, Sample, StopReason, TrainBatch

PROMPTS_PER_STEP = 4
NUM_PROMPTS = 60
GREEDY_LOG_PROB = -0.25
ADDRESS = EngineAddress("url", "key", vocab_size=32, context_length=64, max_total_tokens=64, has_tokenizer=False)


class Engine:
    """An engine at `version` that makes three tokens, each after a random number of turns of the event loop."""

    def __init__(self, *, seed: int) -> None:
        self.version = 0
        self.broken = False
        self.random = random.Random(seed)
        self.started: list[tuple[bool, int]] = []
        self.running = 0

    async def generate(self, token_ids: Ints, *, sampling: Sampling, num_samples: int = 1) -> tuple[Generation, ...]:
        greedy = sampling.temperature == 0
        self.started.append((greedy, self.version))
        self.running += 1
        versions = []
        try:
            for _ in range(3):
                versions.append(self.version)
                for _ in range(self.random.randrange(6)):
                    await asyncio.sleep(0)
                if self.broken:
                    raise EngineError("gone")
        finally:
            self.running -= 1
        ids = [np.concatenate([token_ids[:2], [1 + index]]) for index in range(num_samples)]
        log_probs = np.full(3, GREEDY_LOG_PROB if greedy else -1.0, np.float32)
        return tuple(Generation(each, log_probs, np.array(versions), StopReason.STOP) for each in ids)


class Client:
    """What the manager sees of the engine."""

    engine: Engine

    def __init__(self, address: EngineAddress, *, request_timeout_s: float, control_timeout_s: float) -> None:
        self.address = address
        self.timeouts = request_timeout_s, control_timeout_s
        self.generate = Client.engine.generate
        self.served: Counter[str] = Counter()
        self.is_paused, self.pending, self.num_ended, self.stepped_s = False, Counter[bool](), 0, 0.0

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def load(self) -> None:
        """Nothing is known; a test on a busy machine is long enough to be asked."""


class UnequalRewards(Rewards):
    """A third of the prompts gives all samples the same."""

    async def score(self, sample: Sample) -> Reward:
        await asyncio.sleep(0)
        return Reward(RewardOutcome.SCORED, 0.5 if is_constant(sample.prompt.text) else float(sample.index))


def is_constant(text: str) -> bool:
    return int(text.rstrip("=")) % 3 == 0


@asynccontextmanager
async def opened(settings: Settings, path: Path, *, say: Callable[[str], None] = print) -> AsyncIterator[RolloutManager]:
    prompts = RunPrompts.read(settings.model.path, settings.data, sets=settings.eval.sets, seed=settings.run.seed)
    async with RolloutManager.open(settings, prompts=prompts, buffer=path, say=say) as manager:
        await manager.join([ADDRESS], serve_current=True)
        yield manager


def settings_for(directory: Path, model: Path) -> Callable[..., Settings]:
    """`settings_for(..)("key=value")`: the settings of a run in `directory` on NUM_PROMPTS prompts that are written there."""
    rows = [json.dumps({"prompt": f"{number}=", "label": "1", "answer": "2"}) for number in range(NUM_PROMPTS)]
    # What is noted of failures goes there.
    (directory / "run" / "logs").mkdir(parents=True)
    (directory / "train.jsonl").write_text("\n".join(rows) + "\n")

    def make(*overrides: str) -> Settings:
        paths = (f"run.directory={directory}/run", f"model.path={model}", f"data.train={directory}/train.jsonl", "run.num_steps=8")
        sizes = (f"data.prompts_per_step={PROMPTS_PER_STEP}", "data.samples_per_prompt=2", "rollout.max_concurrent_requests=6")
        # The rewards that stand here score no label.
        corrected = ("objective.off_policy={mode: truncate, high: 2.0}", "reward.check_labels=false")
        return load_settings(None, [*paths, *sizes, *corrected, "rollout.sampling.max_response_tokens=8", *overrides])

    return make


def replace_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let managers have clients and rewards of this file."""
    monkeypatch.setattr(module, "EngineClient", Client)
    monkeypatch.setattr(module, "RewardRunner", UnequalRewards)


async def step_of(manager: RolloutManager, engine: Engine, step: int) -> tuple[TrainBatch, dict[str, float]]:
    """A step as the loop does it: the engines get version `step`, the batch is taken, and training takes a while."""
    engine.version = step
    batch, metrics = await manager.next_batch(step, progress=PhaseProgress("rollout", total=None, unit=""))
    check_metrics(metrics)
    for _ in range(engine.random.randrange(12)):
        await asyncio.sleep(0)
    return batch, metric_values(metrics)


def prompts_of(batch: TrainBatch) -> list[tuple[int, ...]]:
    """The prompt tokens of every group, in order."""
    spans = zip(batch.cu_seqlens[:-1:2], batch.prompt_lengths[::2], strict=True)
    return [tuple(batch.tokens[start : start + length]) for start, length in spans]


def assert_young(batch: TrainBatch, *, step: int, max_staleness: int) -> None:
    made = batch.weight_versions[batch.loss_mask]
    assert step - max_staleness <= made.min() <= made.max() <= step
