"""Faults that the rows of a run show, one sentence each, with the setting to turn.

Order: liveness, then learning, and tuning only where neither has anything to say. Shares are
medians of the newest rows, so that no single step speaks.
"""

import bisect
import functools
import itertools
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence

from megatron_rl.config.derived import OneReward
from megatron_rl.observe.live_state import WaitState

Rows = Mapping[int, Mapping[str, float]]
NEWEST, FEWEST_ROWS, FEWEST_OF_A_TREND = 5, 3, 12
"""Rows of a share, rows without which nothing is said, and those of a comparison of the run's ends."""
ABORTED, ZERO_VARIANCE, TRUNCATED, KV_USE, SLOW_ENGINE, REWARD_SHARE = 0.05, 0.5, 0.25, 0.9, 2.0, 0.5
BARREN, LABELS_FOUND, LOST, NOISES, EFFECTIVE, ONE_ANSWER = 0.9, 0.1, 0.25, 3.0, 0.5, 0.02
ENTROPY_LEFT, ENTROPY_LEFT_ALIKE, PARITY_GROWTH, LENGTH_GROWTH, WAIT_SHARE, STALE = 0.15, 0.4, 3.0, 2.0, 0.8, 0.1
"""Bounds: shares of 1, or the newest rows over the first ones; ONE_ANSWER in nats a token, of a policy that hardly draws."""
LONG_S = 60.0
"""A wait for samples that speaks from the first row on."""


def advise(rows: Rows, *, waits: Sequence[WaitState] = (), one_reward: OneReward = "teaches nothing") -> tuple[str, ...]:
    """Return a sentence for each thing that is wrong, the most urgent first; none of a healthy run.

    `rows` are the metrics of steps in rising order, `waits` those in progress, `one_reward` what becomes
    of groups with equal rewards. A sentence on rows has the first of the steps whose rows say so.
    """
    steps = [(step, row) for step, row in rows.items() if step]
    late = [f"{wait}: look at logs/stacks.txt; it ends after {wait.deadline_s:.0f} s (model.deadline_s)" for wait in waits if wait.late]

    @functools.cache
    def found(num_rows: int) -> tuple[str, ...]:
        first = dict(steps[:num_rows])
        return tuple([*_liveness(first), *_learning(first, one_reward)] or ([] if late else [*_tuning(first)]))

    def dated(sentence: str) -> str:
        what, _, fix = sentence.partition(":")
        num_rows = bisect.bisect_left(range(len(steps)), True, key=lambda num: _kind(sentence) in map(_kind, found(num)))
        return f"{what} ({'from the start' if num_rows <= FEWEST_ROWS else f'since step {steps[num_rows - 1][0]}'}):{fix}"

    return (*late, *map(dated, found(len(steps))))


def _kind(sentence: str) -> str:
    """Return the words of a sentence before its cause and setting, without numbers."""
    return re.sub(r"[^a-z ]", "", sentence.partition(":")[0])


def _liveness(rows: Rows) -> Iterator[str]:
    # Of a trajectory with several samples one is scored.
    made = sum(row.get("rollout/num_samples", 0.0) / row.get("rollout/samples_per_trajectory", 1.0) for row in _tail(rows))
    failed = _total(rows, "rollout/reward_errors") + _total(rows, "rollout/reward_timeouts")
    if made and failed > ABORTED * made:
        share, fix = failed / made, "mend reward.function, or raise reward.timeout_s"
        yield f"{share:.0%} of reward calls fail or run out of time: see logs/rewards.log; {fix}"
    failures = _total(rows, "rollout/failures")
    if failures > ABORTED * (made + failures):
        share = failures / (made + failures)
        yield f"{share:.0%} of trajectories are not made: see logs/rollout.log; mend the rollout, or raise rollout.timeout_s"
    if (aborted := _newest(rows, "rollout/aborted_fraction")) > ABORTED:
        yield f"{aborted:.0%} of responses are aborted: see logs/engine-0.log; raise model.deadline_s where requests run out of time"
    if restarts := _total(rows, "engine/restarts"):
        where = f"in {len(_tail(rows))} steps: see logs/engine-*.log; rollout.engine_restarts bounds it"
        yield f"engines were started again {restarts:.0f} times {where}"
    if skipped := _total(rows, "train/skipped_steps"):
        cause = "a non-finite loss or gradient: see dumps; lower training.optimizer.lr"
        yield f"{skipped:.0f} optimizer steps were left out for {cause}"
    if (growth := _growth(rows, "weights/scored_mean")) > PARITY_GROWTH:
        fix = "resume the run, and let weights.parity_threshold end it earlier"
        yield f"engine and trainer drift apart, {growth:.1f} times the first difference: {fix}"


def _learning(rows: Rows, one_reward: OneReward) -> Iterator[str]:
    # Each has the next ones as consequences.
    yield from [*_off_policy(rows), *_collapse(rows)] or [*_lost_reward(rows)] or _no_signal(rows, one_reward)
    if (share := _newest(rows, "rollout/truncated_fraction")) > TRUNCATED and not _is_barren(rows):
        yield f"{share:.0%} of responses are cut by the token budget: raise rollout.sampling.max_response_tokens"
    if (growth := _growth(rows, "rollout/response_length")) > LENGTH_GROWTH and not _gain(rows, "rollout/reward") > 0:
        fix = "bound them by the reward or objective.aggregation"
        yield f"responses are {growth:.1f} times as long as at first without more reward: {fix}"
    if (share := _newest(rows, "rollout/stale_context_fraction")) > STALE:
        yield f"{share:.0%} of tokens are too old to be trained on: raise rollout.max_staleness"


def _lost_reward(rows: Rows) -> Iterator[str]:
    """Yield a sentence where the newest rewards are below earlier ones by far more than from step to step."""
    rewards, alike = _values(rows, "rollout/reward"), _values(rows, "rollout/zero_variance_fraction")
    # A run without a signal from the start had nothing to lose.
    if len(rewards) < NEWEST + FEWEST_ROWS or (alike and alike[0] > ZERO_VARIANCE):
        return
    medians = [statistics.median(rewards[first : first + NEWEST]) for first in range(len(rewards) - NEWEST + 1)]
    best, now = max(medians), medians[-1]
    noise = statistics.median(abs(after - before) for before, after in itertools.pairwise(rewards))
    if best - now > max(LOST * abs(best), NOISES * noise):
        yield f"the reward has fallen from {best:.3g} to {now:.3g}: lower training.optimizer.lr{_lr(rows)}"


def _off_policy(rows: Rows) -> Iterator[str]:
    age, square = _newest(rows, "rollout/staleness"), _newest(rows, "train/off_policy_ratio_square")
    if age > 0 and square > 1 / EFFECTIVE:
        what = f"tokens made {age:.1f} versions ago are worth {1 / square:.0%} of their number, so far has the policy moved"
        yield f"{what}: lower rollout.max_staleness or training.optimizer.lr{_lr(rows)}"


def _collapse(rows: Rows) -> Iterator[str]:
    alike = _newest(rows, "rollout/zero_variance_fraction") > ZERO_VARIANCE
    # Supervised training has no reward, and learns to be sure.
    if not _values(rows, "rollout/reward") or _is_solved(rows):
        return
    if 0 < (left := _growth(rows, "train/entropy")) < (ENTROPY_LEFT_ALIKE if alike else ENTROPY_LEFT):
        fix = f"raise objective.policy_loss.high or objective.entropy.coef, or lower training.optimizer.lr{_lr(rows)}"
        yield f"entropy has collapsed to {left:.0%} of the first steps': {fix}"


def _no_signal(rows: Rows, one_reward: OneReward) -> Iterator[str]:
    share, common = _newest(rows, "rollout/zero_variance_fraction"), _common_reward(rows)
    if not share > ZERO_VARIANCE or _is_solved(rows):
        return
    if _is_barren(rows):
        yield f"{share:.0%} of groups have the reward {common} alone and teach nothing: {_why_barren(rows)}"
        return
    if one_reward == "teaches":
        return
    now, first = _newest(rows, "rollout/reward"), _values(rows, "rollout/reward")[:1]
    if first and now < first[0] and _values(rows, "rollout/zero_variance_fraction")[0] <= ZERO_VARIANCE:
        return  # the prompts were right, and training has spoilt the answers
    if (entropy := statistics.median(_values(rows, "train/entropy") or [math.nan])) < ONE_ANSWER:
        fix = "raise rollout.sampling.temperature, or start from a policy that is less sure"
        what = f"{share:.0%} of groups have one reward and teach nothing"
        yield f"{what}: answers to a prompt are the same, at {entropy:.2g} nats a token; {fix}"
        return
    above = 0.0 if common is None else float(common) - now
    kind = "harder" if above > 0 else "easier" if above < 0 else "other"
    fix = "" if one_reward == "is replaced" else ", or objective.zero_variance: resample"
    yield f"{share:.0%} of groups have one reward and teach nothing: {kind} prompts{fix}"


def _why_barren(rows: Rows) -> str:
    """Return the likeliest cause of no reward for nearly all answers, with its setting."""
    cut, found = _newest(rows, "rollout/truncated_fraction"), _newest(rows, "rollout/label_found_fraction")
    if cut > TRUNCATED:
        prompts, budget = (
            "mend data.prompt_key or the chat template where prompts lack their end",
            "raise rollout.sampling.max_response_tokens",
        )
        if _held_out(rows, "truncated") > TRUNCATED:
            return f"{cut:.0%} of responses do not end, nor do held-out ones; {budget}, or {prompts}"
        return f"{cut:.0%} of responses do not end; {prompts}, or {budget}"
    if found > LABELS_FOUND:
        return f"{found:.0%} of answers have their label in them; mend reward.function where `megatron-rl samples` shows right ones"
    if math.isnan(found):
        return "no prompt has a label; set data.label_key, or mend reward.function where it needs none"
    if (earned := _held_out(rows, "reward")) > _newest(rows, "rollout/reward") + LABELS_FOUND:
        return f"held-out answers earn {earned:.2f}; mend the labels of data.train, which `megatron-rl samples` shows beside answers"
    return "look at `megatron-rl samples`; mend data.prompt_key, the chat template or data.label_key, or take easier prompts"


def _held_out(rows: Rows, name: str) -> float:
    """Return the largest value of a metric of the newest evaluation of the trained policy, NaN without."""
    found = ([value for key, value in row.items() if re.fullmatch(rf"eval/[^/]+/{name}", key)] for row in reversed(list(rows.values())))
    return max(filter(math.isfinite, next(filter(None, found), [])), default=math.nan)


def _one_reward(rows: Rows) -> dict[str, float]:
    """Return the rewards of groups with one reward, rounded to a tenth, and their weight in the newest rows."""
    prefix = "rollout/zero_variance_fraction/"
    return {name.removeprefix(prefix): _total(rows, name) for row in _tail(rows) for name in row if name.startswith(prefix)}


def _common_reward(rows: Rows) -> str | None:
    shares = _one_reward(rows)
    return max(shares, key=lambda reward: shares[reward], default=None)


def _is_barren(rows: Rows) -> bool:
    """Return True where nearly all groups have one and the same reward of at most 0."""
    common, shares = _common_reward(rows), _one_reward(rows)
    # With roles a group has one reward for each of them.
    most = max(len(_tail(rows)), sum(shares.values()))
    return common is not None and float(common) <= 0 and shares[common] > BARREN * most


def _is_solved(rows: Rows) -> bool:
    """Return True where the run itself has brought groups to one reward, nearly all of them to a higher one than at first."""
    rewards, shares, alike = _values(rows, "rollout/reward"), _one_reward(rows), _values(rows, "rollout/zero_variance_fraction")
    if not rewards or not alike or not alike[0] <= ZERO_VARIANCE < _newest(rows, "rollout/zero_variance_fraction"):
        return False
    high = sum(share for reward, share in shares.items() if float(reward) > rewards[0])
    return _newest(rows, "rollout/reward") > rewards[0] and high > BARREN * sum(shares.values())


def _lr(rows: Rows) -> str:
    """Return the learning rate in brackets, where it is known."""
    rate = _newest(rows, "train/lr")
    return "" if math.isnan(rate) else f" ({rate:.2g} now)"


def _tuning(rows: Rows) -> Iterator[str]:
    if (use := _newest(rows, "engine/kv_use_max")) > KV_USE:
        yield f"engines fill {use:.0%} of their key-value memory: lower rollout.max_concurrent_requests, or leave it null"
    fast, slow = _newest(rows, "engine/token_s_of_fastest"), _newest(rows, "engine/token_s_of_slowest")
    if slow > SLOW_ENGINE * fast > 0:
        fix = "look at its node, or lower rollout.num_engines"
        yield f"one engine takes {slow / fast:.1f} times as long for a token as the fastest: {fix}"
    waits, train = _values(rows, "time/rollout_wait"), _newest(rows, "time/train")
    fewest = 1 if waits and min(waits) > LONG_S else FEWEST_ROWS
    wait = _newest(rows, "time/rollout_wait", fewest=fewest)
    if (share := _newest(rows, "rollout/reward_wait_fraction", fewest=fewest)) > REWARD_SHARE and wait > 0 and not wait <= train:
        yield f"groups spend {share:.0%} of their time with rewards: a faster reward.function, or more CPUs for its workers"
    if _newest(rows, "rollout/staleness") > 0 and wait > WAIT_SHARE * (wait + train):
        fix = "more GPUs for rollout.num_engines, fewer ranks"
        yield f"training waits {wait:.1f} s a step for samples that are made ahead: {fix}"


def _tail(rows: Rows) -> list[Mapping[str, float]]:
    return list(rows.values())[-NEWEST:]


def _values(rows: Rows, name: str) -> list[float]:
    """Return the finite values of a metric, in order."""
    return [row[name] for row in rows.values() if math.isfinite(row.get(name, math.nan))]


def _total(rows: Rows, name: str) -> float:
    """Return the sum over the newest rows."""
    return sum(row[name] for row in _tail(rows) if math.isfinite(row.get(name, math.nan)))


def _newest(rows: Rows, name: str, *, fewest: int = FEWEST_ROWS) -> float:
    """Return the median over the newest rows, NaN with fewer than `fewest`."""
    values = _values(rows, name)[-NEWEST:]
    return statistics.median(values) if len(values) >= fewest else math.nan


def _ends(rows: Rows, name: str) -> tuple[float, float]:
    """Return the median of the first and of the newest rows, NaN with fewer than FEWEST_OF_A_TREND."""
    values = _values(rows, name)
    if len(values) < FEWEST_OF_A_TREND:
        return math.nan, math.nan
    return statistics.median(values[:NEWEST]), statistics.median(values[-NEWEST:])


def _growth(rows: Rows, name: str) -> float:
    first, last = _ends(rows, name)
    return last / first if first > 0 else math.nan


def _gain(rows: Rows, name: str) -> float:
    first, last = _ends(rows, name)
    return last - first
