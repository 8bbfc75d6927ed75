"""Where a run's training samples come from: engines that generate, or a file with the answers."""

import math
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from megatron_rl.config.settings import Settings
from megatron_rl.data.batch import make_train_batch
from megatron_rl.data.source import PromptSource
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.observe.console import PhaseProgress
from megatron_rl.observe.metrics import Last, Metric
from megatron_rl.rollout.client import EnginePart
from megatron_rl.rollout.engine import EngineAddress
from megatron_rl.runtime.background import BackgroundLoop
from megatron_rl.runtime.rollouts import MAX_RESAMPLING_ROUNDS, Rollouts
from megatron_rl.runtime.trainers import TrainerGroup
from megatron_rl.runtime.watchdog import Watchdog
from megatron_rl.types import Floats, TrainBatch
from megatron_rl.weights.parity import ParityReport, check_parity, make_probe
from megatron_rl.weights.sync import MakeTransport, WeightSync

Result = TypeVar("Result")

START_TIMEOUT_S = 300.0
CONTROL_TIMEOUT_S = 60.0
PROBE_SEQUENCES = 8
PROBE_TOKENS = 64
PARITY_THRESHOLDS = {"float32": 1e-4, "bfloat16": 2e-2}
"""Mean |difference| in nats that rounding explains, by the engines' dtype."""


def generation_deadline_s(settings: Settings, num_samples: int) -> float:
    """Seconds within which `num_samples` responses and their rewards are there if every single request and call keeps its own deadline.

    One wave more than the samples fill, because groups end unevenly and a baseline may be generated first.
    """
    rollout, reward = settings.rollout, settings.reward
    waves = 1 + math.ceil(num_samples / (rollout.num_engines * rollout.max_concurrent_requests))
    return waves * rollout.request_timeout_s + math.ceil(num_samples / reward.num_workers) * reward.timeout_s


@dataclass(frozen=True, slots=True, eq=False)
class ScoredProbe:
    """The parity probe, and from each engine its log-probs [T] with the probe as that engine has routed it."""

    batch: TrainBatch
    by_engines: list[tuple[Floats, TrainBatch]]


class SampleSource(Protocol):
    """What the loop needs of the side that makes samples."""

    def next_batch(self, step: int, *, progress: PhaseProgress) -> tuple[TrainBatch, dict[str, Metric]]:
        """The sequences of one step, and what they say of the rollout."""
        ...

    @property
    def generates(self) -> bool:
        """True when engines take part, which need weights and can be evaluated; `num_eval_prompts` to `check_parity` are about them."""
        ...

    @property
    def busy_s(self) -> float:
        """Seconds so far in which samples were being generated, also while nobody waited for them."""
        ...

    @property
    def num_eval_prompts(self) -> int:
        """Held-out prompts; 0 when there is nothing to evaluate on."""
        ...

    def evaluate(self, *, progress: PhaseProgress) -> dict[str, Metric]:
        """Metrics `eval/*` of the weights published last."""
        ...

    def publish(self, *, version: int) -> dict[str, Metric]:
        """Give the trainer's weights to whoever generates, as `version`."""
        ...

    def score_probe(self) -> ScoredProbe:
        """Let whoever generates score fixed tokens."""
        ...

    def check_parity(self, scored: ScoredProbe) -> dict[str, Metric]:
        """Compare the trainer with whoever generates about these tokens; ParityError when they disagree."""
        ...

    def state(self) -> dict[str, Any]:
        """Where the data continue, as JSON values, on disk before this returns."""
        ...

    def rewind(self, *, step: int, state: dict[str, Any] | None) -> None:
        """Continue where the checkpoint after `step` steps stood; None: at the start of the data, before any checkpoint."""
        ...

    def forget(self, *, before_step: int) -> None:
        """Free what only a checkpoint older than `before_step` could come back to."""
        ...


class SupervisedSamples:
    """Rows with answers, from a file. Nobody generates, so there is nothing to evaluate, to publish to or to compare with."""

    generates = False
    busy_s = 0.0
    num_eval_prompts = 0

    def __init__(self, settings: Settings) -> None:
        tokenizer = load_tokenizer(settings.model.path)
        self._source = PromptSource(settings.data.train, tokenizer, settings=settings.data, seed=settings.run.seed, need_response=True)
        self._count = settings.data.prompts_per_step

    def next_batch(self, step: int, *, progress: PhaseProgress) -> tuple[TrainBatch, dict[str, Metric]]:
        """The next rows of the file."""
        return make_train_batch(self._source.next_supervised(self._count)), {}

    def evaluate(self, *, progress: PhaseProgress) -> dict[str, Metric]:
        """Not for supervised training."""
        raise NotImplementedError("nobody generates in supervised training")

    def publish(self, *, version: int) -> dict[str, Metric]:
        """Not for supervised training."""
        raise NotImplementedError("nobody generates in supervised training")

    def score_probe(self) -> ScoredProbe:
        """Not for supervised training."""
        raise NotImplementedError("nobody generates in supervised training")

    def check_parity(self, scored: ScoredProbe) -> dict[str, Metric]:
        """Not for supervised training."""
        raise NotImplementedError("nobody generates in supervised training")

    def state(self) -> dict[str, Any]:
        """The position in the file."""
        return self._source.state()

    def rewind(self, *, step: int, state: dict[str, Any] | None) -> None:
        """Go back to a position."""
        if state is not None:
            self._source.restore(state)

    def forget(self, *, before_step: int) -> None:
        """Nothing is kept."""


class GeneratedSamples:
    """Prompts from a file, answers from the engines. Waits for the coroutines of `Rollouts` under the watchdog's eyes."""

    generates = True

    def __init__(self, settings: Settings, *, background: BackgroundLoop, watchdog: Watchdog) -> None:
        self._settings = settings
        self.background, self._watchdog = background, watchdog
        self.rollouts = Rollouts(settings)
        self._sync: WeightSync
        self._trainers: TrainerGroup

    def _wait(self, coroutine: Coroutine[Any, Any, Result], *, name: str, timeout_s: float) -> Result:
        result: Result = self._watchdog.wait([self.background.submit(coroutine)], name=name, timeout_s=timeout_s)[0]
        return result

    def open(self, buffer: Path | None) -> None:
        """Check the reward function on a probe and open the buffer; nothing expensive has started yet."""
        self._wait(self.rollouts.start_rewards(), name="checking the reward function", timeout_s=START_TIMEOUT_S)
        if buffer is not None:
            self._wait(self.rollouts.open_buffer(buffer), name="opening the buffer", timeout_s=START_TIMEOUT_S)

    def connect(self, addresses: list[EngineAddress]) -> None:
        """Open clients to the engines."""
        self._wait(self.rollouts.connect(addresses), name="connecting to the engines", timeout_s=CONTROL_TIMEOUT_S)

    def attach(self, make_transport: MakeTransport, trainers: TrainerGroup, *, dtype: str) -> None:
        """Connect to the trainer whose weights the engines serve, in `dtype`, and for which samples are to be made."""
        self._trainers, self._dtype = trainers, dtype
        timeout_s = self._settings.weights.sync_timeout_s
        self._sync = WeightSync(make_transport, ranks=trainers, pool=self.rollouts.pool, timeout_s=timeout_s)
        self._wait(self._sync.connect(), name="joining trainer and engines", timeout_s=timeout_s + CONTROL_TIMEOUT_S)
        self._wait(self.rollouts.begin_production(), name="preparing the rollout", timeout_s=CONTROL_TIMEOUT_S)

    def close(self) -> None:
        """Close clients, reward workers and buffer."""
        self.background.submit(self.rollouts.close()).result(timeout=CONTROL_TIMEOUT_S)

    @property
    def busy_s(self) -> float:
        """Seconds so far in which engines or reward workers were making groups for training."""
        return self.rollouts.busy_s

    @property
    def num_eval_prompts(self) -> int:
        """Rows of data.eval."""
        return len(self.rollouts.eval_prompts)

    def next_batch(self, step: int, *, progress: PhaseProgress) -> tuple[TrainBatch, dict[str, Metric]]:
        """Wait for what the buffer does not hold yet."""
        data = self._settings.data
        rounds = MAX_RESAMPLING_ROUNDS if self._settings.objective.zero_variance == "resample" else 1
        timeout_s = rounds * generation_deadline_s(self._settings, data.prompts_per_step * data.samples_per_prompt)
        return self._wait(self.rollouts.next_batch(step, progress=progress), name=f"rollout of step {step + 1}", timeout_s=timeout_s)

    def evaluate(self, *, progress: PhaseProgress) -> dict[str, Metric]:
        """Greedy and sampled answers to every held-out prompt."""
        timeout_s = 2 * generation_deadline_s(self._settings, self.num_eval_prompts)
        return self._wait(self.rollouts.evaluate(progress=progress), name="evaluation", timeout_s=timeout_s)

    def publish(self, *, version: int) -> dict[str, Metric]:
        """Sync the engines' weights."""
        # The sync keeps its own deadline, and names who misses it.
        timeout_s = self._settings.weights.sync_timeout_s + CONTROL_TIMEOUT_S
        return self._wait(self._sync.run(version=version), name=f"weight sync to version {version}", timeout_s=timeout_s)

    def score_probe(self) -> ScoredProbe:
        """Score fixed tokens on every engine."""
        address = self.rollouts.clients[0].address
        probe = make_probe(
            self.rollouts.probe_prompts(PROBE_SEQUENCES),
            vocab_size=min(self.rollouts.vocab_size, address.vocab_size),
            num_sequences=PROBE_SEQUENCES,
            length=min(PROBE_TOKENS, address.context_length // 2),
            seed=self._settings.run.seed,
        )
        by_engines = self._wait(self.rollouts.score(probe), name="parity probe of the engines", timeout_s=CONTROL_TIMEOUT_S)
        return ScoredProbe(probe, by_engines)

    def check_parity(self, scored: ScoredProbe) -> dict[str, Metric]:
        """Score the same tokens with the trainer, and compare."""
        probe, by_engines = scored.batch, scored.by_engines
        free = self._trainers.log_probs(probe, temperature=1.0)
        replays = self._settings.training.routing_replay
        threshold = self._settings.weights.parity_threshold or PARITY_THRESHOLDS[self._dtype]
        reports: list[ParityReport] = []
        for by_engine, recorded in by_engines:
            by_trainer = self._trainers.log_probs(recorded, temperature=1.0) if replays else free
            reports.append(check_parity(by_engine, by_trainer, mask_T=probe.loss_mask, threshold=threshold))
        worst = max(reports, key=lambda report: report.mean)
        metrics: dict[str, Metric] = {"weights/parity_mean": Last(worst.mean), "weights/parity_max": Last(worst.maximum)}
        if replays:
            difference = np.abs(by_engines[0][0] - free)[probe.loss_mask]
            metrics["weights/parity_mean_without_replay"] = Last(float(difference.mean()))
        return metrics

    def release_memory(self, parts: frozenset[EnginePart]) -> None:
        """Let every engine free these parts of its memory; their content is lost."""
        self._wait(self.rollouts.release_memory(parts), name="releasing the engines' memory", timeout_s=CONTROL_TIMEOUT_S)

    def restore_memory(self, parts: frozenset[EnginePart]) -> None:
        """Let every engine take these parts of its memory again."""
        self._wait(self.rollouts.restore_memory(parts), name="restoring the engines' memory", timeout_s=CONTROL_TIMEOUT_S)

    def state(self) -> dict[str, Any]:
        """The position in the prompts; the buffer is flushed to disk first, so that a checkpoint never knows more than it."""
        self._wait(self.rollouts.flush(), name="flushing the buffer", timeout_s=CONTROL_TIMEOUT_S)
        return self.rollouts.source.state()

    def rewind(self, *, step: int, state: dict[str, Any] | None) -> None:
        """Take back what was consumed after the checkpoint."""
        self._wait(self.rollouts.rewind(step=step, source_state=state), name="rewinding the buffer", timeout_s=CONTROL_TIMEOUT_S)

    def forget(self, *, before_step: int) -> None:
        """Drop the token arrays of older groups from the buffer."""
        self._wait(self.rollouts.prune(before_step), name="pruning the buffer", timeout_s=CONTROL_TIMEOUT_S)
