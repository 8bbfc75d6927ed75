"""Estimates from the answers of a set, with denominators and intervals. Pure.

A prompt has n scored answers, of which c are correct. Failed answers have no verdict and are in no
denominator but their own. Each prompt counts once, whatever the number of its answers.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from megatron_rl.evaluation.graded_answers import Answer
from megatron_rl.types import Doubles

CONFIDENCE = 0.95
RESAMPLES = 2000
_RESAMPLES_AT_ONCE = 100
Prompts = Sequence[Sequence[Answer]]
"""All answers to each prompt."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with a bootstrap interval over prompts, of CONFIDENCE, and the denominator: `num` of `unit`."""

    value: float
    low: float
    high: float
    num: int
    unit: str

    def __str__(self) -> str:
        return f"{self.value:.4f}  [{self.low:.4f}, {self.high:.4f}]  of {self.num} {self.unit}"


def pass_at(k: int, *, n: int, c: int) -> float:
    """Return the chance that k of n answers, drawn without replacement, have a correct one.

    1 - C(n - c, k) / C(n, k) (Chen et al. 2021, https://arxiv.org/abs/2107.03374, eq. 1).
    """
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def pass_all(k: int, *, n: int, c: int) -> float:
    """Return the chance that k of n answers, drawn without replacement, are all correct.

    C(c, k) / C(n, k) (Yao et al. 2024, https://arxiv.org/abs/2406.12045, section 4).
    """
    return math.comb(c, k) / math.comb(n, k)


def majority_at(k: int, *, votes: Sequence[str], correct: Sequence[bool]) -> float:
    """Return the chance that of k of the n `votes`, drawn without replacement, a right answer has most.

    An empty text is no vote, and a tie is no majority. Exact: for an answer with c votes and each
    winning number t of them, the other k - t votes are counted by generating functions, in which
    no other answer has t votes or more. An answer counts by the share of its votes that are correct.
    """
    counts = Counter(vote for vote in votes if vote)
    num_right = Counter(vote for vote, right in zip(votes, correct, strict=True) if right and vote)
    blank, total = len(votes) - counts.total(), 0.0
    for answer, right in num_right.items():
        others = [count for other, count in counts.items() if other != answer]
        ways = 0.0
        for t in range(1, min(k, counts[answer]) + 1):
            ways += math.comb(counts[answer], t) * _ways(others, blank, chosen=k - t, below=t)
        total += right / counts[answer] * ways
    return total / math.comb(len(votes), k)


def _ways(others: Sequence[int], blank: int, *, chosen: int, below: int) -> float:
    """Count the choices of `chosen` votes with less than `below` of each of the `others`."""
    series = np.array([math.comb(blank, j) for j in range(min(blank, chosen) + 1)], np.float64)
    for count in others:
        series = np.convolve(series, [math.comb(count, j) for j in range(min(count, below - 1) + 1)])[: chosen + 1]
    return float(series[chosen]) if chosen < len(series) else 0.0


def powers_of_two(n: int) -> list[int]:
    """Return 2, 4, 8, ... up to n: with k = 1 all of these estimates are the accuracy."""
    return [2**i for i in range(1, n.bit_length())]


def estimates(prompts: Prompts, *, num_samples: int, seed: int) -> dict[str, Estimate]:
    """Return the estimates of a set asked for `num_samples` answers to each prompt, by name.

    Those of verdicts are there where every scored answer has one, and maj@k where every scored
    answer has an extracted one, maybe empty. A prompt with less than k scored answers is not in the
    denominator of an estimate of k.
    """
    scored = [[answer for answer in answers if answer.cause is None] for answers in prompts]
    every = [answer for answers in scored for answer in answers]
    shares: dict[str, tuple[list[float], list[float], str]] = {}

    def of_prompts(name: str, value: Callable[[Sequence[Answer]], float], least: int = 1) -> None:
        counted = [float(len(answers) >= least) for answers in scored]
        shares[name] = [value(answers) if has else 0.0 for answers, has in zip(scored, counted, strict=True)], counted, "prompts"

    def of_answers(name: str, among: Prompts, chosen: Callable[[Answer], float]) -> None:
        shares[name] = [sum(map(chosen, answers)) for answers in among], [float(len(answers)) for answers in among], "answers"

    of_prompts("reward", lambda answers: sum(answer.reward or 0.0 for answer in answers) / len(answers))
    if every and all(answer.correct is not None for answer in every):
        of_prompts("accuracy", lambda answers: _num_correct(answers) / len(answers))
        votes = all(answer.answer is not None for answer in every)
        for k in powers_of_two(num_samples):
            of_prompts(f"pass@{k}", partial(_drawn, pass_at, k), k)
            of_prompts(f"pass^{k}", partial(_drawn, pass_all, k), k)
            if votes:
                of_prompts(f"maj@{k}", partial(_voted, k), k)
    made = [[answer for answer in answers if answer.is_made] for answers in prompts]
    of_answers("response_length", made, lambda answer: answer.num_tokens)
    of_answers("truncated", made, lambda answer: answer.stop_reason == "length")
    if any(answer.answer is not None for answer in every):
        of_answers("unextracted", scored, lambda answer: answer.answer == "")
    of_answers("failed", prompts, lambda answer: answer.cause is not None)
    return _bootstrapped(shares, seed=seed)


def _num_correct(answers: Sequence[Answer]) -> int:
    return sum(bool(answer.correct) for answer in answers)


def _drawn(chance: Callable[..., float], k: int, answers: Sequence[Answer]) -> float:
    return chance(k, n=len(answers), c=_num_correct(answers))


def _voted(k: int, answers: Sequence[Answer]) -> float:
    return majority_at(k, votes=[answer.answer or "" for answer in answers], correct=[bool(answer.correct) for answer in answers])


def _bootstrapped(shares: Mapping[str, tuple[list[float], list[float], str]], *, seed: int) -> dict[str, Estimate]:
    """Return sum / weight of each pair of lists [P], with the interval of sums over resampled prompts."""
    shares = {name: share for name, share in shares.items() if any(share[1])}
    sums, weights = (np.array([share[index] for share in shares.values()], np.float64) for index in (0, 1))
    values = _ratio(sums.sum(axis=1), weights.sum(axis=1))
    low, high = interval(lambda times: _ratio(times @ sums.T, times @ weights.T), num_prompts=sums.shape[1], seed=seed)
    return {
        name: Estimate(float(values[row]), float(low[row]), float(high[row]), round(float(weights[row].sum())), unit)
        for row, (name, (_, _, unit)) in enumerate(shares.items())
    }


def interval(statistic: Callable[[Doubles], Doubles], *, num_prompts: int, seed: int) -> tuple[Doubles, Doubles]:
    """Return both ends of the percentile interval of `statistic`, of CONFIDENCE, by RESAMPLES bootstraps over prompts.

    `statistic` gets how often each prompt is drawn, [B, P], and returns [B, K]; the ends are [K].
    """
    rng, even, found = np.random.default_rng(seed), np.full(num_prompts, 1.0 / num_prompts), []
    for _ in range(0, RESAMPLES, _RESAMPLES_AT_ONCE):
        found.append(statistic(rng.multinomial(num_prompts, even, size=_RESAMPLES_AT_ONCE).astype(np.float64)))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.nanquantile(np.concatenate(found), (tail, 1 - tail), axis=0)
    return low, high


def _ratio(sums: Doubles, weights: Doubles) -> Doubles:
    """Return sums / weights, NaN where there is no weight."""
    return np.divide(sums, weights, out=np.full_like(sums, np.nan), where=weights > 0)
