"""Stand-ins of what a run asks: engines and ranks that note the calls."""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np

from megatron_rl.algorithms.rounding_limits import Expected
from megatron_rl.data.token_values import NOTHING_RECORDED, TokenValues
from megatron_rl.engines.answers import Generation
from megatron_rl.engines.engine import EngineAddress
from megatron_rl.engines.engine_pool import EnginePool
from megatron_rl.engines.sampling import Sampling
from megatron_rl.errors import DeadlineError, EngineRefusal
from megatron_rl.evaluation.estimates import Estimate
from megatron_rl.evaluation.evaluator import SetResult
from megatron_rl.observe.metrics import Last, Metric, Sum
from megatron_rl.observe.spans import Spans
from megatron_rl.runtime.colocation import Phase
from megatron_rl.runtime.run import Run
from megatron_rl.types import Doubles, Floats, Ints, Prompt, Reward, RewardOutcome, Sample, StopReason, TrainBatch
from megatron_rl.weights.sync import Prove

Calls = list[tuple[Any, ...]]


class Manager:
    """Engines that generate; they sample a probe with log-probs of `Ranks`. `fails_at` is the step whose rollout raises `error`.

    `weights` are their checksums, `read` those after they read a checkpoint themselves, None where they refuse.
    """

    busy_s = 0.0
    log_prob = 0.0
    renewed_at = -1
    read: str | None = "synced"
    looked_at: Mapping[int, Sample] = MappingProxyType({})
    spread: Mapping[str, Doubles] = MappingProxyType({"rollout/reward": np.array([0.5, np.nan])})

    def __init__(self, calls: Calls, *, fails_at: int | None, error: BaseException | None) -> None:
        self.calls = calls
        prompt = Prompt(id="p", token_ids=np.array([1, 2, 3]), text="abc")
        self.prompts = SimpleNamespace(tokenizer=SimpleNamespace(eos_token_id=1), for_parity=lambda count: [prompt])
        self.address = EngineAddress("url", "key", vocab_size=32, context_length=64, max_total_tokens=64, has_tokenizer=False)
        self.pool = EnginePool([self], max_requests=1)  # type: ignore[list-item]
        self._fails_at, self._error = fails_at, error
        self._head = "made up"

    async def next_batch(self, step: int, *, progress: object) -> tuple[str, dict[str, Metric]]:
        self.calls.append(("rollout", step))
        if step == self._fails_at and self._error is not None:
            raise self._error
        return f"batch {step}", {"rollout/reward": Last(step / 10), "rollout/renewed_groups": Sum(3 * (step == self.renewed_at))}

    async def generate(self, token_ids: Ints, *, sampling: Sampling, num_samples: int) -> tuple[Generation, ...]:
        self.calls.append(("probe",))
        return (Generation(np.array([2]), np.full(1, self.log_prob, np.float32), np.zeros(1, np.int64), StopReason.STOP),) * num_samples

    async def score(self, sequences: Sequence[Ints]) -> list[Floats]:
        self.calls.append(("score", len(sequences)))
        return [np.full(len(ids), self.log_prob, np.float32) for ids in sequences]

    async def checksums(self) -> dict[str, str]:
        # As many answers as there may be questions: before the first sync, after it, after the reading.
        self._head, head = {"made up": "synced"}.get(self._head, str(self.read)), self._head
        return {"head": head}

    async def load_weights(self, path: Path, *, version: int, timeout_s: float) -> None:
        self.calls.append(("read", path.name))
        if self.read is None:
            raise EngineRefusal("cannot read while quantized", status=400)

    async def position(self, *, step: int) -> dict[str, Any]:
        return {"cursor": 7}

    async def rewind(self, *, step: int, position: dict[str, Any] | None) -> tuple[str, ...]:
        self.calls.append(("rewind", step, position))
        return ("5 groups to be made anew, because of a setting",)

    async def abandon(self) -> None:
        self.calls.append(("abandon",))

    async def distrust(self, *, step: int) -> None:
        self.calls.append(("distrust", step))

    async def keep(self, values: TokenValues) -> None:
        assert values is NOTHING_RECORDED

    async def forget(self, *, before_step: int) -> None:
        self.calls.append(("forget", before_step))


class Evaluations:
    """An evaluator whose accuracy is a tenth of the trained steps; it takes until `may_end` is set."""

    def __init__(self, calls: Calls) -> None:
        self.calls, self.may_end = calls, threading.Event()
        self.may_end.set()

    def num_prompts(self, names: Sequence[str]) -> int:
        return len(names)

    num_answers = num_prompts

    async def run(
        self, names: Sequence[str], *, directory: Path, facts: Mapping[str, Any], goes_on: bool, advance: object
    ) -> list[SetResult]:
        accuracy = Estimate(sum(call[0] == "train" for call in self.calls) / 10, 0.0, 1.0, 4, "prompts")
        self.calls.append(("evaluate", directory.name, goes_on))
        await asyncio.to_thread(self.may_end.wait)
        return [SetResult(name, {"accuracy": accuracy}, {}, "", directory) for name in names]


class Sync:
    """The way of the weights to the engines."""

    def __init__(self, calls: Calls, manager: Manager) -> None:
        self.calls, self._manager = calls, manager

    async def run(self, *, version: int, prove: Prove | None = None) -> dict[str, Metric]:
        self.calls.append(("publish", version))
        if prove is not None:
            await prove(self._manager.pool.membership.members)
        return {"weights/version": Last(version)}


class Ranks:
    """Megatron ranks."""

    answers = True
    recorded = NOTHING_RECORDED

    def __init__(self, calls: Calls, *, written: bool = True, save_error: Exception | None = None) -> None:
        self.calls, self.spans = calls, Spans()
        self.written, self.save_error = written, save_error

    def train(self, batch: str, *, step: int, expected: Expected | None, rows: Any = ()) -> list[dict[str, Metric]]:
        assert expected is None or expected.version == step
        self.expected = expected
        self.calls.append(("train", batch, step))
        return [{"train/loss": Last(1.0 - step / 10), "train/num_tokens": Sum(8)}]

    def log_probs(self, batch: TrainBatch, *, temperature: float) -> Floats:
        # Of the run, of scores, and those of a derivative.
        self.calls += {0.8: [("parity",)], 1.0: [("expect",)]}.get(temperature, [])
        return np.zeros(len(batch.tokens), np.float32)

    def call(self, method: str, *args: Any, **keywords: Any) -> list[Any]:
        return [getattr(self, method)(*args, **keywords)]

    def begin_save(self, directory: Path | None = None, *, hf: Path) -> None:
        hf.mkdir()
        if directory is not None:
            self.calls.append(("save", directory.parent.name))
            directory.mkdir()
            (directory / "manifest.json").touch()

    def check_answers(self) -> None:
        if not self.answers:
            raise DeadlineError("still waiting for: Megatron rank 1")

    def save_is_written(self) -> bool:
        return self.written

    def finish_save(self) -> None:
        self.calls.append(("saved",))
        if self.save_error is not None:
            raise self.save_error

    def load(self, directory: Path, *, weights_only: bool) -> tuple[str, ...]:
        self.calls.append(("load", directory.parent.name, weights_only))
        return ("training.optimizer.lr is 2 from now on, was 1 in the checkpoint",)


class Rewards:
    """Rewards in place of worker processes: the first token of the response."""

    def __init__(self, _: object, *, num_workers: int, log_path: Path, note: object) -> None:
        pass

    def __enter__(self) -> "Rewards":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def find_form(self) -> None:
        """It is of one sample."""

    def probe(self, prompt: Prompt) -> None:
        return None

    async def score(self, sample: Sample) -> Reward:
        # A label as the response has no tokens.
        return Reward(RewardOutcome.SCORED, float(sample.response_ids[0]) if len(sample.response_ids) else 1.0)


class Devices:
    """Shared devices: a phase is taken when it is another than the last."""

    def __init__(self, calls: Calls) -> None:
        self.calls, self.phase = calls, Phase.SYNC

    def changes(self, phase: Phase) -> bool:
        return phase is not self.phase

    def take(self, phase: Phase) -> None:
        self.calls.append(("phase", phase.name))
        self.phase = phase


MakeRun = Callable[..., Run]
