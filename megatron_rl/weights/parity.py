"""The parity gate: engine and trainer must give the same probability to the same tokens, or training is silently off-policy.

make_probe ──► score_probe (every engine) ──► check_probe (the trainer scores the same tokens, and the two are compared)

Legend: T tokens of the probe.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.data.batch import with_records
from megatron_rl.errors import EngineError, ParityError
from megatron_rl.observe.metrics import Last, Metric
from megatron_rl.rollout.client import EngineClient, Scores
from megatron_rl.rollout.engine_pool import EnginePool
from megatron_rl.types import Bools, Floats, Ints, Prompt, TrainBatch

PROBE_SEQUENCES = 8
PROBE_TOKENS = 64
"""At most; half the context of an engine where that is less."""
PARITY_THRESHOLDS = {"float32": 1e-4, "bfloat16": 2e-2}
"""Mean |difference| in nats that rounding explains, by the engines' dtype."""
CAUSES = (
    "temperature or sampling transform applied on one side only",
    "another dtype on one side",
    "a weight that the sync did not reach (tied embeddings, a stale checkpoint)",
    "a position or rope setting that the two sides read differently",
)


@dataclass(frozen=True, slots=True)
class ParityReport:
    """|engine - trainer| over the compared tokens, nats: mean, maximum, and how many tokens exceed ten times the mean allowed."""

    mean: float
    maximum: float
    num_tokens: int
    num_outliers: int

    def __str__(self) -> str:
        return f"mean |Δ| {self.mean:.2e}, max {self.maximum:.2e}, {self.num_outliers} outliers of {self.num_tokens} tokens"


@dataclass(frozen=True, slots=True, eq=False)
class ScoredProbe:
    """The probe, and from each engine its log-probs [T] with the probe as that engine has routed it."""

    batch: TrainBatch
    by_engines: list[tuple[Floats, TrainBatch]]


def make_probe(
    prompts: Sequence[Prompt], *, vocab_size: int, seed: int, num_sequences: int = PROBE_SEQUENCES, length: int = PROBE_TOKENS
) -> TrainBatch:
    """Fixed sequences to compare on: real prompts, each continued to `length` tokens by seeded random ids below `vocab_size`."""
    rng = np.random.default_rng(seed)
    rows = [prompts[row % len(prompts)].token_ids[: length - 1] for row in range(num_sequences)]
    tokens = [np.concatenate([row, rng.integers(0, vocab_size, length - len(row))]) for row in rows]
    mask = np.tile(np.arange(length) > 0, num_sequences)
    return TrainBatch(
        tokens=np.concatenate(tokens),
        cu_seqlens=np.arange(num_sequences + 1) * length,
        prompt_lengths=np.array([len(row) for row in rows]),
        loss_mask=mask,
        rollout_log_probs=np.zeros(num_sequences * length, np.float32),
        weight_versions=np.full(num_sequences * length, -1),
        rewards=np.zeros(num_sequences),
        group_ids=np.arange(num_sequences),
        truncated=np.zeros(num_sequences, np.bool_),
    )


def sequences(batch: TrainBatch) -> list[Ints]:
    """The token ids of each sequence of the batch."""
    return [batch.tokens[start:end] for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)]


async def score_probe(prompts: Sequence[Prompt], pool: EnginePool, *, vocab_size: int, seed: int) -> ScoredProbe:
    """Let every member of `pool` score the probe that begins with `prompts`, at temperature 1; `vocab_size` is the tokenizer's.

    A member that dies meanwhile is left out. Raises EngineError when one fails and does not leave the pool, or all have.
    """
    address = pool.address
    length = min(PROBE_TOKENS, address.context_length // 2)
    probe = make_probe(prompts, vocab_size=min(vocab_size, address.vocab_size), seed=seed, length=length)
    by_engines = []
    for client in pool.membership.members:
        scores = await pool.unless_it_leaves(client, _scores(client, probe))
        if scores is not None:
            recorded = with_records(probe, [score.routed_experts for score in scores])
            by_engines.append((np.concatenate([score.log_probs for score in scores]), recorded))
    if not by_engines:
        raise EngineError("no engine is left that could score the parity probe; see the logs of the engines")
    return ScoredProbe(probe, by_engines)


async def _scores(client: EngineClient, probe: TrainBatch) -> list[Scores]:
    return [await client.score(tokens) for tokens in sequences(probe)]


def check_probe(scored: ScoredProbe, log_probs: Callable[[TrainBatch], Floats], *, threshold: float, replays: bool) -> dict[str, Metric]:
    """Compare every engine with `log_probs`, the trainer's [T] of a batch at temperature 1; the metrics are those of the worst engine.

    With `replays` the trainer takes the experts that the engine took; what the two differ by without that is told as well.
    Raises ParityError as `check_parity`.
    """
    free = log_probs(scored.batch)
    mask_T = scored.batch.loss_mask
    reports = [
        check_parity(by_engine, log_probs(recorded) if replays else free, mask_T=mask_T, threshold=threshold)
        for by_engine, recorded in scored.by_engines
    ]
    worst = max(reports, key=lambda report: report.mean)
    metrics: dict[str, Metric] = {"weights/parity_mean": Last(worst.mean), "weights/parity_max": Last(worst.maximum)}
    if replays:
        by_engine, _ = scored.by_engines[0]
        metrics["weights/parity_mean_without_replay"] = Last(float(np.abs(by_engine - free)[mask_T].mean()))
    return metrics


def check_parity(engine_T: Floats, trainer_T: Floats, *, mask_T: Bools, threshold: float) -> ParityReport:
    """Compare log-probs [T] where the mask [T] is True.

    Raises:
        ParityError: the mean absolute difference exceeds `threshold` nats or is not finite.
    """
    difference = np.abs(engine_T[mask_T].astype(np.float64) - trainer_T[mask_T])
    report = ParityReport(
        mean=float(difference.mean()),
        maximum=float(difference.max()),
        num_tokens=len(difference),
        num_outliers=int((difference > 10 * threshold).sum()),
    )
    if not report.mean <= threshold:
        raise ParityError(
            f"engine and trainer disagree about the same tokens: {report}, needs a mean of at most {threshold:.0e} nats;"
            f" usual causes: {'; '.join(CAUSES)}; set weights.parity_threshold only if the difference is explained (bfloat16: about 2e-2)"
        )
    return report
