"""Limits on the differences between log-probs of engine and trainer by rounding alone."""

import math
from dataclasses import dataclass

from megatron_rl.algorithms.entropy_aware import EntropyAware
from megatron_rl.errors import ParityError


@dataclass(frozen=True, slots=True)
class Limits:
    """Largest |engine - trainer| of sampled tokens by rounding: median and mean in nats, `share` above `outlier` nats.

    A mean counts in float32 alone: elsewhere few tokens at a tie of two experts or two logits decide the mean.
    """

    median: float
    outlier: float
    share: float
    mean: float = float("inf")

    def __str__(self) -> str:
        mean = f", a mean of at most {self.mean:.0e}" if self.mean < float("inf") else ""
        return f"a median of at most {self.median:.0e} nats{mean}, at most {self.share:.0%} above {self.outlier:.0e}"

    def clipped_mean(self, num_tokens: float) -> float:
        """Return the largest mean, nats, of the differences of `num_tokens` tokens, each cut off at `outlier`.

        The cut makes a few tokens at ties count little. The chance of a few tokens is allowed for by
        four standard errors: numbers from 0 to `outlier` deviate by at most half of it.
        """
        return self.median + self.share * self.outlier + 2 * self.outlier / math.sqrt(num_tokens)

    @classmethod
    def of(cls, *, dtype: str, mixture: bool, replays: bool, temperature: float = 1.0, median: float | None = None) -> "Limits":
        """Return the limits of a model in `dtype`, a `mixture` of experts or not, all scaled to a `median` of one's own.

        A `temperature` below 1 divides the rounding of logits, too.
        """
        limits = FLOAT32 if dtype == "float32" else DENSE if not mixture else REPLAYED if replays else ROUTED
        scale = (1.0 if median is None else median / limits.median) / min(1.0, temperature)
        return cls(limits.median * scale, limits.outlier * scale, limits.share, limits.mean * scale)


FLOAT32 = Limits(median=1e-4, outlier=1e-3, share=0.02, mean=1e-4)
DENSE = Limits(median=0.04, outlier=0.2, share=0.06)
REPLAYED = Limits(median=0.05, outlier=0.5, share=0.1)
ROUTED = Limits(median=0.1, outlier=2.0, share=0.2)
"""In bfloat16, temperature 1. Published means on sampled tokens of healthy runs: dense 0.005 (32B) and 0.011 (Qwen3-4B, slime with
SGLang); with routing replay 0.041 (DeepSeek-V4-Flash); without 0.14 to 0.34 (Qwen3-30B-A3B). By Markov's inequality no run of such a
mean has a larger share of outliers. weights/PARITY.md has what healthy models and broken ones give on a CPU.
"""


@dataclass(frozen=True, slots=True)
class Expected:
    """The demand on tokens that engines sampled by weights of `version`, the trainer's: log-probs within `limits`.

    `entropy` says what draws each token instead of the policy itself.
    """

    version: int
    limits: Limits
    entropy: EntropyAware | None = None

    def check(self, clipped: float, num_tokens: float, *, mean: float | None) -> None:
        """Raise ParityError for a sum `clipped` of cut-off differences of `num_tokens` tokens; all differ by `mean` nats."""
        if num_tokens and not clipped / num_tokens <= (allowed := self.limits.clipped_mean(num_tokens)):
            raise ParityError(
                f"step {self.version + 1}: engine and trainer disagree about the samples: over {num_tokens:.0f} tokens of weight version "
                f"{self.version}, the trainer's own, mean |Δ log-prob|, cut off at {self.limits.outlier:.0e}, is "
                f"{clipped / num_tokens:.1e} nats, needs at most {allowed:.1e} (weights.parity_threshold scales it); without the cut "
                f"{mean:.1e} over all engine tokens"
            )
