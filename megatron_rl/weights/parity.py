"""The parity gate: engine and trainer have to give the same tokens the same probability.

weights   made up at the start ──► first sync ──► `check_replaced`, and `check_read` against the engine's own reading of model.path
sampled   `sample_probe` (tokens of every engine, at the start) ──► `check_probe` (log-probs of the trainer, judged by `Limits`)
scored    `fixed_tokens` ──► every sync: `score` by every engine ──► `check_scores`

The first is exact: bit by bit, by SGLang's own checksums of each tensor in the layout of the engine. It sees weights alone.
The others see everything else (temperature, rope, dtype, kernels), within the rounding of two implementations.

Legend: T tokens of the probe.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from megatron_rl.algorithms.rounding_limits import Limits
from megatron_rl.data.batch import batch_from_sequences, with_records
from megatron_rl.engines.answers import Generation
from megatron_rl.engines.client import EngineClient
from megatron_rl.engines.engine_pool import EnginePool
from megatron_rl.engines.sampling import Sampling
from megatron_rl.errors import DeadlineError, EngineError, ParityError, counted
from megatron_rl.observe.metrics import Last, Metric
from megatron_rl.types import Bools, Floats, Prompt, TrainBatch

PROBE_PROMPTS, PROBE_SAMPLES = 8, 4
PROBE_PROMPT_TOKENS, PROBE_TOKENS = 64, 32
"""Tokens at most of a probe's prompt and of each continuation, and a quarter of an engine's context."""
NAMED_WEIGHTS = 4
"""Of the weights that differ, so many are named."""
CALIBRATION_STEP, MOST_SHARPENED = 0.05, 5.0
"""Relative change of 1 / temperature for a derivative, and standard errors above those of the stated distribution."""

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
    """Continuations with log-probs from engines, `recorded` with the experts too; `engines` [B] are the makers' URLs.

    `scores` [T] are log-probs of all tokens at temperature 1, by the prompt phase of the maker.
    """

    batch: TrainBatch
    recorded: TrainBatch
    engines: list[str]
    temperature: float
    scores: Floats

    @property
    def engine_log_probs(self) -> Floats:
        """Log-probs [T] of the sampled tokens."""
        assert self.batch.rollout_log_probs is not None, "engines return log-probs"
        return self.batch.rollout_log_probs

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

    async def continued(client: EngineClient) -> tuple[list[Generation], list[Floats]]:
        # Seeds of their own: noise that prompts share would count as many draws.
        samplings = [short.of_sample(number * PROBE_SAMPLES) for number in range(len(starts))]
        asking = zip(starts, samplings, strict=True)
        answers = await asyncio.gather(*(client.generate(ids, sampling=each, num_samples=PROBE_SAMPLES) for ids, each in asking))
        whole = [np.concatenate([ids, one.token_ids]) for ids, answer in zip(starts, answers, strict=True) for one in answer]
        return [generation for answer in answers for generation in answer], await client.score(whole)

    answered = await asyncio.gather(*(pool.unless_it_leaves(client, continued(client)) for client in members))
    sampled = [answers for answers in answered if answers is not None]
    engines = [client.address.url for client, answers in zip(members, answered, strict=True) for _ in (answers or [()])[0]]
    made = [generation for generations, _ in sampled for generation in generations]
    if not made:
        raise EngineError("no engine is left that could sample the parity probe; see the logs of the engines")
    batch = batch_from_sequences(
        prompts=[starts[number // PROBE_SAMPLES % len(starts)] for number in range(len(made))],
        responses=[generation.token_ids for generation in made],
        rollout_log_probs=[generation.log_probs for generation in made],
        candidates=[generation.candidates for generation in made],
    )
    recorded = with_records(batch, [generation.routed_experts for generation in made])
    scores = np.concatenate([values for _, scored in sampled for values in scored])
    return SampledProbe(batch, recorded, engines, short.temperature, scores)


def check_probe(probe: SampledProbe, log_probs: Callable[..., Floats], *, limits: Limits, replays: bool) -> dict[str, Metric]:
    """Compare every engine with `log_probs(batch, temperature=…)`, the trainer's [T]; return metrics of the worst.

    With `replays` the trainer takes the engine's experts; the mean difference without is a metric of its own.
    Raises ParityError for differences over `limits`, and for tokens that were drawn otherwise than the log-probs say.
    """
    batch, engine_T = (probe.recorded if replays else probe.batch), probe.engine_log_probs
    trainer_T = log_probs(batch, temperature=probe.temperature)
    reports = {url: ParityReport.of(engine_T[mask], trainer_T[mask], outlier=limits.outlier) for url, mask in probe.of_engines().items()}
    metrics = check_reports(reports, limits=limits, what="the tokens that it sampled", name="parity")
    _check_calibration(probe, trainer_T, partial(log_probs, batch))
    if replays:
        free_T = log_probs(probe.batch, temperature=probe.temperature)
        metrics["weights/parity_mean_without_replay"] = Last(float(np.abs(engine_T - free_T)[batch.loss_mask].mean()))
    return metrics


def check_reports(reports: Mapping[str, ParityReport], *, limits: Limits, what: str, name: str) -> dict[str, Metric]:
    """Return metrics of the worst of the engines' `reports`, by URL. Raises ParityError that names those over `limits`."""
    if failed := [f"{url} ({report})" for url, report in reports.items() if not report.within(limits)]:
        raise ParityError(
            f"engine and trainer disagree about {what}: {', '.join(failed)}; needs {limits}; set weights.parity_threshold (a median, in "
            "nats) only if the difference is explained"
        )
    ordered = sorted(reports.values(), key=lambda report: report.mean)
    median, mean, maximum, outliers, _ = astuple(ordered[-1])
    values = {"median": median, "mean": mean, "mean_of_best": ordered[0].mean, "max": maximum, "outliers": outliers}
    return {f"weights/{name}_{key}": Last(value) for key, value in values.items()}


def _check_calibration(probe: SampledProbe, trainer_T: Floats, log_probs: Callable[..., Floats]) -> None:
    """Raise ParityError where an engine drew likelier tokens than its log-probs say, by a top-p or top-k that they do not show.

    With β = 1 / temperature, β ∂ log p / ∂β = log p + entropy, whose mean is 0 over tokens drawn from p,
    and -β² ∂² log p / ∂β² is its variance (score test).
    """
    low_T, high_T = (log_probs(temperature=probe.temperature / (1 + sign * CALIBRATION_STEP)).astype(np.float64) for sign in (-1, 1))
    surprise_T, variance_T = (high_T - low_T) / (2 * CALIBRATION_STEP), (2.0 * trainer_T - high_T - low_T) / CALIBRATION_STEP**2
    for url, mask in probe.of_engines().items():
        error = np.sqrt(max(variance_T[mask].sum(), 1.0))
        if not surprise_T[mask].sum() <= MOST_SHARPENED * error:
            raise ParityError(
                f"the engine at {url} drew likelier tokens than the log-probs say, which engine and trainer agree on: mean log-prob + "
                f"entropy of {counted(int(mask.sum()), 'token')} is {surprise_T[mask].mean():.3f} nats, "
                f"{surprise_T[mask].sum() / error:.0f} standard errors above 0, needs at most {MOST_SHARPENED:g}; likeliest cause: a "
                "top_p, top_k or min_p on the engine alone, since it leaves log-probs as they are"
            )


def fixed_tokens(prompts: Sequence[Prompt], *, context_length: int) -> TrainBatch:
    """Return sequences that are scored at every sync, the same in every life of a run: all prompts from each one on, and again."""
    length = max(2, min(PROBE_PROMPT_TOKENS + PROBE_TOKENS, context_length // 2))
    orders = [(*prompts[number:], *prompts[:number]) for number in range(len(prompts))]
    rows = [np.resize(np.concatenate([prompt.token_ids for prompt in order]), length) for order in orders]
    return batch_from_sequences(prompts=[row[:1] for row in rows], responses=[row[1:] for row in rows])


def scored(batch: TrainBatch) -> Bools:
    """Return the mask [T] of tokens with a log-prob: all but the first of each sequence."""
    mask = np.ones(len(batch.tokens), np.bool_)
    mask[batch.cu_seqlens[:-1]] = False
    return mask


async def score(batch: TrainBatch, pool: EnginePool, clients: Sequence[EngineClient]) -> dict[str, Floats]:
    """Return log-probs [T] at temperature 1 of the tokens of `batch` by each of `clients` that lives on, by URL.

    One that fails is ended where it may be started again. Raises EngineError and DeadlineError otherwise.
    """
    rows = np.split(batch.tokens, batch.cu_seqlens[1:-1])

    async def of(client: EngineClient) -> Floats | None:
        try:
            return np.concatenate(await pool.while_it_stays(client, client.score(rows)))
        except (EngineError, DeadlineError) as error:
            pool.end_failed(client, error)
            if not await pool.loses_one_of([client]):
                raise
            return None

    answers = await asyncio.gather(*map(of, clients))
    return {client.address.url: found for client, found in zip(clients, answers, strict=True) if found is not None}
