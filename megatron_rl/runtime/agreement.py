"""Proof that engines have the trainer's weights and compute as the trainer, and what speaks for a cause where not."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from megatron_rl.algorithms.rounding_limits import DENSE, Limits
from megatron_rl.config.derived import start_deadline_s
from megatron_rl.config.settings import Settings
from megatron_rl.engines.sampling import make_sampling
from megatron_rl.errors import EngineRefusal, counted
from megatron_rl.observe.metrics import metric_values
from megatron_rl.rollout.manager import RolloutManager
from megatron_rl.runtime.run_records import RunRecords
from megatron_rl.system.device import quiet_megatron_imports
from megatron_rl.types import Floats
from megatron_rl.weights.parity import (
    CAUSES,
    PROBE_PROMPTS,
    SampledProbe,
    check_probe,
    check_read,
    check_replaced,
    disagreeing,
    sample_probe,
    weight_checksums,
)

with quiet_megatron_imports():
    from megatron_rl.checkpoints.stored_weights import engines_read
    from megatron_rl.models.read_spec import read_model_spec

OTHER_TEMPERATURES = (0.5, 0.6, 0.7, 0.8, 0.9)
"""Usual temperatures of a generation_config.json, tried for log-probs that do not agree."""


class Agreement:
    """Compares the engines of `manager` with ranks whose parameters have `dtype`.

    `wait` takes a coroutine with a name and a deadline in seconds.
    """

    def __init__(self, settings: Settings, *, dtype: str, manager: RolloutManager, wait: Callable[..., Any], records: RunRecords) -> None:
        self._settings, self._path, self._dtype = settings, settings.model.path, dtype
        self._manager, self._records, self._replays = manager, records, settings.training.routing_replay
        # Engines read the checkpoint and compile kernels, as at their start.
        self._wait = partial(wait, timeout_s=start_deadline_s(settings.model))

    @cached_property
    def limits(self) -> Limits:
        """Limits on differences of log-probs at the temperature of the run's samples."""
        return Limits.of(
            dtype=self._dtype,
            mixture=read_model_spec(self._path).moe is not None,
            replays=self._replays,
            temperature=self._settings.rollout.sampling.temperature,
            median=self._settings.weights.parity_threshold,
        )

    def check_weights(self, publish: Callable[[], None], *, resumed: bool) -> None:
        """Sync by `publish`; compare the engines' weights before and after, bit by bit. Raises ParityError."""
        path, pool = self._path, self._manager.pool
        checksums = partial(self._wait, name="checksums of the engines' weights")
        before = checksums(weight_checksums(pool))
        publish()
        with self._records.phase("weight check"):
            after = checksums(weight_checksums(pool))
            check_replaced(before, after)
            said = f"all {len(next(iter(after.values())))} weights of each engine came by the first sync"
            try:
                if resumed:
                    said += "; they are not compared with a file, because the run is resumed"
                elif not engines_read(path):
                    said += f"; they are not compared with a file, because engines cannot read {path}"
                else:
                    reading = check_read(path, pool, after, timeout_s=self._wait.keywords["timeout_s"])
                    self._wait(reading, name=f"an engine's reading of {path}")
                    said += f", bit for bit as an engine reads {path}"
            except EngineRefusal as error:
                said += f"; they are not compared with a file, because an engine cannot read {path} while it runs ({error})"
                publish()
        self._records.say(said)

    def sample(self) -> SampledProbe:
        """Let the engines answer a few prompts, with log-probs."""
        prompts = self._manager.prompts
        with self._records.phase("parity probe"):
            sampling = make_sampling(self._settings.rollout.sampling, eos_token_ids=[prompts.tokenizer.eos_token_id])
            sampling = replace(sampling, seed=self._settings.run.seed)
            asking = sample_probe(prompts.for_parity(PROBE_PROMPTS), self._manager.pool, sampling=sampling)
            probe: SampledProbe = self._wait(asking, name="parity probe of the engines")
            return probe

    def check_log_probs(self, probe: SampledProbe, log_probs: Callable[..., Floats]) -> None:
        """Compare the answers with `log_probs` of the trainer. Raises ParityError."""
        with self._records.phase("parity probe"):
            metrics = check_probe(probe, log_probs, limits=self.limits, replays=self._replays)
        values = metric_values(metrics)
        free = values.get("weights/parity_mean_without_replay")
        note = "" if free is None else f", mean {free:.1e} without routing replay"
        self._records.say(
            f"parity of engine and trainer on sampled tokens: |Δ log-prob| median {values['weights/parity_median']:.1e}, mean"
            f" {values['weights/parity_mean']:.1e} nats{note}"
        )
        self._records.add(metrics)

    def likely_cause(self, probe: Callable[[], SampledProbe], log_probs: Callable[..., Floats], publish: Callable[[], None]) -> str:
        """Return the likeliest cause of samples on which engines and trainer disagree, found by experiments.

        A fresh `probe` tells samples that were changed from engines that compute otherwise. Other
        temperatures, another dtype's rounding, and another `publish` of the same weights tell the
        causes of the latter apart.
        """

        def failing(probe: SampledProbe, limits: Limits = self.limits) -> list[str]:
            return disagreeing(probe, log_probs, limits=limits, replays=self._replays)

        first = probe()
        failed, set_to = failing(first), first.temperature
        if not failed:
            return (
                "likeliest cause: tokens, log-probs or versions of the samples are not as engines returned them, since a fresh probe of "
                f"every engine agrees; look at {self._settings.rollout.name}"
            )
        for temperature in (1.0, set_to**2, *OTHER_TEMPERATURES):
            if temperature != set_to and not failing(replace(first, temperature=temperature)):
                return (
                    f"likeliest cause: a temperature on one side alone, since log-probs of the engines are those of temperature "
                    f"{temperature:g}, and rollout.sampling.temperature is {set_to:g}"
                )
        if self._dtype == "float32" and not failing(first, DENSE):
            return "likeliest cause: another dtype on one side, since ranks have float32 and differences are those of bfloat16's rounding"
        publish()
        named, others = ", ".join(failed), len(set(first.engines)) - len(failed)
        if not failing(probe()):
            return f"likeliest cause: stale or half-applied weights on {named}, since another sync of them mended it"
        if others > 0:
            return f"likeliest cause: {named}, since a fresh probe disagrees there and agrees with {counted(others, 'other engine')}"
        return f"every engine disagrees in a fresh probe, also after another sync; usual causes: {'; '.join(CAUSES)}"
