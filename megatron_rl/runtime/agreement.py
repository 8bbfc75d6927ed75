"""Proof that engines have the trainer's weights and compute as the trainer, and what speaks for a cause where not."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from megatron_rl.algorithms.rounding_limits import Expected, Limits
from megatron_rl.checkpoints.stored_weights import engines_read
from megatron_rl.config.derived import start_deadline_s
from megatron_rl.config.settings import Settings
from megatron_rl.engines.client import EngineClient
from megatron_rl.engines.sampling import make_sampling
from megatron_rl.errors import EngineRefusal
from megatron_rl.models.read_spec import read_model_spec
from megatron_rl.observe.metrics import metric_values
from megatron_rl.rollout.manager import RolloutManager
from megatron_rl.runtime.colocation import Phase
from megatron_rl.runtime.run_records import RunRecords
from megatron_rl.types import Floats, TrainBatch
from megatron_rl.weights.diagnosis import changed_samples, likeliest, weights_apart
from megatron_rl.weights.parity import (
    PROBE_PROMPTS,
    ParityReport,
    SampledProbe,
    check_probe,
    check_read,
    check_replaced,
    check_reports,
    fixed_tokens,
    sample_probe,
    score,
    scored,
    weight_checksums,
)


class Agreement:
    """Compares the engines of `manager` with ranks whose parameters have `dtype`.

    `log_probs` are those of the ranks, `take` brings the memory of a phase onto shared devices, and
    `wait` takes a coroutine with a name and a deadline in seconds.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        dtype: str,
        log_probs: Callable[..., Floats],
        manager: RolloutManager,
        take: Callable[[Phase], None],
        wait: Callable[..., Any],
        records: RunRecords,
    ) -> None:
        self._log_probs, self._take = log_probs, take
        self._settings, self._path, self._dtype = settings, settings.model.path, dtype
        self._sampling, self._entropy = settings.rollout.sampling, settings.rollout.sampling.entropy
        self._manager, self._records, self._replays = manager, records, settings.training.routing_replay
        self._fixed: TrainBatch | None = None
        self.expected: tuple[int, TrainBatch, Floats] | None = None  # the trainer's log-probs of a version
        self._scores: Mapping[str, Floats] = {}
        # Engines read the checkpoint and compile kernels, as at their start.
        self._wait = partial(wait, timeout_s=start_deadline_s(settings.model))

    @cached_property
    def limits(self) -> Limits:
        """Limits on differences of log-probs at the temperature of the run's samples."""
        return self._limits()

    def of_samples(self, version: int) -> Expected:
        """Return the demand on samples of weights of `version`."""
        lowest = 1.0 if self._entropy is None else min(1.0, *(draw.temperature for draw in self._entropy.draws))
        return Expected(version, self._limits(temperature=self._sampling.temperature * lowest), self._entropy)

    def _limits(self, *, scoring: bool = False, temperature: float | None = None) -> Limits:
        """Return limits of tokens sampled at a `temperature`, or of `scoring` at 1 with the trainer's own routing."""
        return Limits.of(
            dtype=self._dtype,
            mixture=read_model_spec(self._path).moe is not None,
            replays=self._replays and not scoring,
            temperature=1.0 if scoring else temperature or self._sampling.temperature,
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
        """Let the engines answer a few prompts by their present weights, with log-probs; leave devices ready to compare."""
        self._take(Phase.GENERATION)
        prompts = self._manager.prompts
        with self._records.phase("parity probe"):
            sampling = make_sampling(self._sampling, eos_token_ids=[prompts.tokenizer.eos_token_id])
            # The policy itself, whose log-probs speak for temperature and support: those of samples are compared before each step.
            sampling = replace(sampling, seed=self._settings.run.seed, entropy=None)
            asked, pool = prompts.for_parity(PROBE_PROMPTS), self._manager.pool
            probe: SampledProbe = self._wait(sample_probe(asked, pool, sampling=sampling), name="parity probe of the engines")
            self._fixed = self._fixed or fixed_tokens(asked, context_length=pool.address.context_length)
            self._scores = self._wait(score(self._fixed, pool, pool.membership.members), name="scores of fixed tokens")
        self._take(Phase.SYNC)
        return probe

    def check_log_probs(self, probe: SampledProbe, *, version: int) -> None:
        """Compare the answers of weights of `version` with log-probs of the trainer. Raises ParityError."""
        with self._records.phase("parity probe"):
            metrics = check_probe(probe, self._log_probs, limits=self.limits, replays=self._replays)
        values = metric_values(metrics)
        free = values.get("weights/parity_mean_without_replay")
        note = "" if free is None else f", mean {free:.1e} without routing replay"
        self._records.say(
            f"parity of engine and trainer on sampled tokens: |Δ log-prob| median {values['weights/parity_median']:.1e}, mean"
            f" {values['weights/parity_mean']:.1e} nats{note}"
        )
        self._records.add(metrics)
        self.expect(version=version)
        self._compare(self._scores)

    def expect(self, *, version: int) -> None:
        """Keep the trainer's log-probs of the fixed tokens by weights of `version`."""
        if self._fixed is not None and (self.expected is None or self.expected[0] != version):
            self.expected = version, self._fixed, self._log_probs(self._fixed, temperature=1.0)

    async def prove(self, clients: Sequence[EngineClient]) -> None:
        """Let engines score the fixed tokens, where log-probs are `expected`. Raises ParityError."""
        if self.expected is not None:
            self._compare(await score(self.expected[1], self._manager.pool, clients))

    def _compare(self, scores: Mapping[str, Floats]) -> None:
        assert self.expected is not None, "the trainer's log-probs come first"
        _, batch, trainer_T = self.expected
        mask, limits = scored(batch), self._limits(scoring=True)
        reports = {url: ParityReport.of(found[mask], trainer_T[mask], outlier=limits.outlier) for url, found in scores.items()}
        if reports:
            self._records.add(check_reports(reports, limits=limits, what="fixed tokens after a sync", name="scored"))

    def likely_cause(self, publish: Callable[[], object], *, samples: tuple[TrainBatch, int] | None = None) -> str:
        """Return the likeliest cause of a disagreement between engines and trainer, by experiments.

        `samples` are a batch to train on and the trainer's version. A fresh probe tells those that were changed from
        engines that compute otherwise, and another `publish` of the same weights stale ones from others.
        """
        spec, pool = read_model_spec(self._path), self._manager.pool
        asking = partial(self._wait, name="checksums of the engines' weights")

        def weights(urls: Sequence[str]) -> str | None:
            before = asking(weight_checksums(pool))
            for client in pool.membership.members:
                client.holds = None  # a delta would leave what is stale
            publish()
            after = asking(weight_checksums(pool))
            found = (weights_apart(before[url], after[url], tied=spec.tie_embeddings) for url in urls if url in before and url in after)
            return next(filter(None, found), None)

        cause = likeliest(
            self.sample(),
            self._log_probs,
            limits=self.limits,
            scoring=self._limits(scoring=True),
            replays=self._replays,
            mixture=spec.moe is not None,
            weights=weights,
        )
        if cause is not None:
            return cause
        if samples is None:
            return "a fresh probe of every engine agrees: the difference came and went"
        drawn = partial(self._log_probs, entropy=self._entropy) if self._entropy else self._log_probs
        kind = changed_samples(samples[0], drawn, version=samples[1], temperature=self._sampling.temperature, limits=self.limits)
        return (
            "likeliest cause: tokens, log-probs or versions of the samples are not as engines returned them, since a fresh probe of "
            f"every engine agrees; look at {self._settings.rollout.name}; it looks like {kind}"
        )
