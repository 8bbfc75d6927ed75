"""The parity gate: engine and trainer must give the same probability to the same tokens, or training is silently off-policy."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.errors import ParityError
from megatron_rl.types import Bools, Floats, Ints, Prompt, TrainBatch

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


def make_probe(prompts: Sequence[Prompt], *, vocab_size: int, num_sequences: int, length: int, seed: int) -> TrainBatch:
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
