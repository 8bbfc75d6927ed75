"""The parity gate: engine and trainer have to give the same tokens the same probability.

weights   made up at the start ──► first sync ──► `check_replaced`, and `check_read` against the engine's own reading of model.path
log-probs `sample_probe` (tokens of every engine) ──► `check_probe` (log-probs of the trainer, judged by `Limits`)

The first is exact: bit by bit, by SGLang's own checksums of each tensor in the layout of the engine. It sees weights alone.
The second sees everything else (temperature, rope, dtype, kernels), within the rounding of two implementations.

Legend: T tokens of the probe.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import numpy as np

from megatron_rl.algorithms.rounding_limits import Limits
from megatron_rl.data.batch import batch_from_sequences, with_records
from megatron_rl.engines.answers import Generation
from megatron_rl.engines.client import EngineClient
from megatron_rl.engines.engine_pool import EnginePool
from megatron_rl.engines.sampling import Sampling
from megatron_rl.errors import EngineError, ParityError, counted
from megatron_rl.observe.metrics import Last, Metric
from megatron_rl.types import Bools, Floats, Prompt, TrainBatch

PROBE_PROMPTS, PROBE_SAMPLES = 8, 4
PROBE_PROMPT_TOKENS, PROBE_TOKENS = 64, 32
"""Tokens at most of a probe's prompt and of each continuation, and a quarter of an engine's context."""
NAMED_WEIGHTS = 4
"""Of the weights that differ, so many are named."""
CAUSES = (
    "temperature or sampling transform applied on one side only",
    "another dtype on one side",
    "a weight that the sync did not reach (tied embeddings, a stale checkpoint)",
    "a position or rope setting that the two sides read differently",
)

Checksums = Mapping[str, Mapping[str, str]]
"""By the URL of an engine, then by the engine's name of a weight."""


@dataclass(frozen=True, slots=True)
class ParityReport:
    """|engine - trainer| over the compared tokens: median, mean and maximum in nats, and the share of outliers of `num_tokens`."""

    median: float
    mean: float
    maximum: float
    outliers: float
    num_tokens: int

    @classmethod
    def of(cls, engine_T: Floats, trainer_T: Floats, *, outlier: float) -> "ParityReport":
        """Compare log-probs [T], with differences above `outlier` nats counted."""
        difference = np.abs(engine_T.astype(np.float64) - trainer_T)
        return cls(
            median=float(np.median(difference)),
            mean=float(difference.mean()),
            maximum=float(difference.max()),
            outliers=float((difference > outlier).mean()),
            num_tokens=len(difference),
        )

    def within(self, limits: Limits) -> bool:
        """Return True for finite differences within `limits`."""
        healthy = self.median <= limits.median and self.mean <= limits.mean and self.outliers <= limits.share
        return healthy and bool(np.isfinite(self.maximum))

    def __str__(self) -> str:
        return (
            f"median |Δ| {self.median:.2e} nats, mean {self.mean:.2e}, max {self.maximum:.2e},"
            f" {self.outliers:.1%} outliers of {counted(self.num_tokens, 'token')}"
        )


@dataclass(frozen=True, slots=True, eq=False)
class SampledProbe:
    """Continuations with log-probs from engines, `recorded` with the experts too; `engines` [B] are the makers' URLs."""

    batch: TrainBatch
    recorded: TrainBatch
    engines: list[str]
    temperature: float

    def of_engines(self) -> dict[str, Bools]:
        """Return the mask [T] of each engine's sampled tokens, by URL."""
        maker_T = np.repeat(self.engines, self.batch.lengths)
        return {url: self.batch.loss_mask & (maker_T == url) for url in dict.fromkeys(self.engines)}


# Weights


async def weight_checksums(pool: EnginePool) -> Checksums:
    """Return the checksums of the weights of members that live on. Raises EngineError."""
    members = pool.membership.members
    answers = await asyncio.gather(*(pool.unless_it_leaves(client, client.checksums()) for client in members))
    return {client.address.url: answer for client, answer in zip(members, answers, strict=True) if answer is not None}


def check_replaced(before: Checksums, after: Checksums) -> None:
    """Raise ParityError where an engine kept a made-up weight from before the first sync."""
    for url, checksums in after.items():
        kept = [name for name, found in checksums.items() if found == before[url].get(name)]
        _refuse(kept, checksums, f"{url} kept weights over the first sync")


async def check_read(path: Path, pool: EnginePool, after: Checksums, *, timeout_s: float) -> None:
    """Let one engine read the checkpoint at `path`; compare all engines' synced weights with it.

    Raises ParityError for a weight that differs, by a wrong conversion or transport; EngineError or
    DeadlineError where the engine, which needs a sync afterwards, cannot read in `timeout_s` seconds.
    """
    reader = pool.membership.members[0]
    await reader.load_weights(path, version=0, timeout_s=timeout_s)
    expected = await reader.checksums()
    for url, checksums in after.items():
        differing = [name for name in expected if checksums.get(name) != expected[name]]
        _refuse(differing, expected, f"{url} got other bits by the first sync than it reads from {path}")


def _refuse(names: Sequence[str], checksums: Mapping[str, str], which: str) -> None:
    if names:
        named = ", ".join([*names[:NAMED_WEIGHTS], *(["…"] if len(names) > NAMED_WEIGHTS else [])])
        raise ParityError(
            f"the engine at {which}: {len(names)} of {counted(len(checksums), 'weight')}, needs 0: {named};"
            " usual causes: tied embeddings, a tensor without a rule in the weight table, another release of the engine"
        )


# Log-probs


async def sample_probe(prompts: Sequence[Prompt], pool: EnginePool, *, sampling: Sampling) -> SampledProbe:
    """Let every member of `pool` that does not die continue `prompts` with `sampling`, at most PROBE_TOKENS far.

    Raises EngineError when one fails and stays in the pool, or all have died.
    """
    members, quarter = pool.membership.members, max(1, pool.address.context_length // 4)
    starts = [prompt.token_ids[: min(PROBE_PROMPT_TOKENS, quarter)] for prompt in prompts]
    short = replace(sampling, max_tokens=min(PROBE_TOKENS, quarter, sampling.max_tokens), stop=())

    async def continued(client: EngineClient) -> list[Generation]:
        answers = await asyncio.gather(*(client.generate(ids, sampling=short, num_samples=PROBE_SAMPLES) for ids in starts))
        return [generation for answer in answers for generation in answer]

    sampled = await asyncio.gather(*(pool.unless_it_leaves(client, continued(client)) for client in members))
    engines = [client.address.url for client, answers in zip(members, sampled, strict=True) for _ in answers or ()]
    made = [generation for answers in sampled for generation in answers or ()]
    if not made:
        raise EngineError("no engine is left that could sample the parity probe; see the logs of the engines")
    batch = batch_from_sequences(
        prompts=[starts[number // PROBE_SAMPLES % len(starts)] for number in range(len(made))],
        responses=[generation.token_ids for generation in made],
        rollout_log_probs=[generation.log_probs for generation in made],
        candidates=[generation.candidates for generation in made],
    )
    recorded = with_records(batch, [generation.routed_experts for generation in made])
    return SampledProbe(batch, recorded, engines, short.temperature)


def check_probe(probe: SampledProbe, log_probs: Callable[..., Floats], *, limits: Limits, replays: bool) -> dict[str, Metric]:
    """Compare every engine with `log_probs(batch, temperature=…)`, the trainer's [T]; return metrics of the worst.

    With `replays` the trainer takes the engine's experts; the mean difference without is a metric of its own.
    Raises ParityError as `check_parity`.
    """
    batch, engine_T = probe.batch, probe.batch.rollout_log_probs
    assert engine_T is not None, "engines return log-probs"
    free_T = log_probs(batch, temperature=probe.temperature)
    trainer_T = log_probs(probe.recorded, temperature=probe.temperature) if replays else free_T
    reports = [check_parity(engine_T, trainer_T, mask_T=mask_T, limits=limits) for mask_T in probe.of_engines().values()]
    worst = max(reports, key=lambda report: report.median)
    median, mean, maximum, outliers, _ = astuple(worst)
    values = {"median": median, "mean": mean, "max": maximum, "outliers": outliers}
    if replays:
        values["mean_without_replay"] = float(np.abs(engine_T - free_T)[batch.loss_mask].mean())
    return {f"weights/parity_{name}": Last(value) for name, value in values.items()}


def disagreeing(probe: SampledProbe, log_probs: Callable[..., Floats], *, limits: Limits, replays: bool) -> list[str]:
    """Return the URLs of engines that disagree with the trainer's `log_probs`, as `check_probe` compares them."""
    engine_T = probe.batch.rollout_log_probs
    assert engine_T is not None, "engines return log-probs"
    trainer_T = log_probs(probe.recorded if replays else probe.batch, temperature=probe.temperature)
    masks = probe.of_engines().items()
    return [url for url, mask in masks if not ParityReport.of(engine_T[mask], trainer_T[mask], outlier=limits.outlier).within(limits)]


def check_parity(engine_T: Floats, trainer_T: Floats, *, mask_T: Bools, limits: Limits) -> ParityReport:
    """Compare log-probs [T] where the mask [T] is True. Raises ParityError for differences not finite or over `limits`."""
    report = ParityReport.of(engine_T[mask_T], trainer_T[mask_T], outlier=limits.outlier)
    if not report.within(limits):
        raise ParityError(
            f"engine and trainer disagree about the tokens that the engine sampled: {report}; needs {limits};"
            f" usual causes: {'; '.join(CAUSES)}; set weights.parity_threshold (a median, in nats) only if the difference is explained"
        )
    return report
