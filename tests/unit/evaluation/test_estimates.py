"""Values against brute force over all draws, and the wrong ways of other programs."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from megatron_rl.evaluation.estimates import estimates, interval, majority_at, pass_all, pass_at, powers_of_two
from megatron_rl.evaluation.graded_answers import Answer, by_prompt


def answers(prompt: str, verdicts: Sequence[bool | None], *, text: str = "x", **changes: Any) -> list[Answer]:
    """One answer for each verdict, None for a failed one; the extracted answer is the verdict."""
    given = [
        {"cause": "reward_timeout"} if right is None else {"reward": float(right), "correct": right, "answer": str(right)}
        for right in verdicts
    ]
    return [
        Answer(
            **{"prompt_id": prompt, "index": index, "prompt": text, "label": None, "stop_reason": "stop", "num_tokens": 3, **one, **changes}
        )
        for index, one in enumerate(given)
    ]


def mean_of_draws(n: int, k: int, value: Any) -> float:
    found = [float(value(draw)) for draw in itertools.combinations(range(n), k)]
    return math.fsum(found) / len(found)


@pytest.mark.parametrize(("n", "c"), [(1, 0), (1, 1), (4, 1), (5, 3), (7, 0), (7, 7), (8, 2)])
def test_draws_without_replacement(n: int, c: int) -> None:
    for k in range(1, n + 1):
        assert pass_at(k, n=n, c=c) == pytest.approx(mean_of_draws(n, k, lambda draw: any(index < c for index in draw)), abs=1e-12)
        assert pass_all(k, n=n, c=c) == pytest.approx(mean_of_draws(n, k, lambda draw: all(index < c for index in draw)), abs=1e-12)


def winner(votes: Sequence[str]) -> str | None:
    top = Counter(vote for vote in votes if vote).most_common(2)
    return top[0][0] if top and (len(top) == 1 or top[0][1] > top[1][1]) else None


@pytest.mark.parametrize("seed", range(6))
def test_majorities_of_all_draws(seed: int) -> None:
    """Of unequal votes, some of them blank, and two texts that are both right."""
    chosen = random.Random(seed)
    votes = [chosen.choice(["a", "a", "b", "c", ""]) for _ in range(9)]
    right = [vote in ("a", "c") for vote in votes]
    for k in range(1, 10):
        expected = mean_of_draws(9, k, lambda draw: winner([votes[index] for index in draw]) in ("a", "c"))
        assert majority_at(k, votes=votes, correct=right) == pytest.approx(expected, abs=1e-12)


def test_a_tie_is_no_majority_and_a_blank_no_vote() -> None:
    assert majority_at(2, votes=["a", "b"], correct=[True, False]) == 0.0
    assert majority_at(4, votes=["", "", "", "a"], correct=[False] * 3 + [True]) == 1.0
    assert majority_at(2, votes=["", ""], correct=[False, False]) == 0.0


def test_votes_are_over_answers_and_not_over_verdicts() -> None:
    """Two of five are right, and no wrong answer has two votes: a vote over right and wrong would lose."""
    assert majority_at(5, votes=["r", "r", "x", "y", "z"], correct=[True, True, False, False, False]) == 1.0


def test_best_of_draws_with_replacement_is_another_number() -> None:
    """verl#7240: one right answer of four is 0.684 there."""
    assert pass_at(4, n=4, c=1) == 1.0 != pytest.approx(1 - (3 / 4) ** 4)
    assert pass_at(2, n=4, c=1) == 0.5


def test_powers_of_two_up_to_n() -> None:
    assert [powers_of_two(n) for n in (1, 2, 7, 8)] == [[], [2], [2, 4], [2, 4, 8]]


def test_each_prompt_counts_once() -> None:
    """The mean of means of batches, or of all answers, is another number where prompts have failures."""
    prompts = [answers("s-0", [True, None, None, None]), answers("s-1", [False] * 4), answers("s-2", [True, True, False, False])]
    found = estimates(prompts, num_samples=4, seed=0)
    assert (found["accuracy"].value, found["accuracy"].num, found["accuracy"].unit) == (0.5, 3, "prompts")
    batches = [np.mean([1.0]), np.mean([0.0, 0.5])]
    assert found["accuracy"].value != np.mean(batches) and found["accuracy"].value != 3 / 9


def test_failures_have_no_verdict_and_a_share_of_their_own() -> None:
    prompts = [answers("s-0", [True, None]), answers("s-1", [None, None], stop_reason=None), answers("s-2", [False, True])]
    found = estimates(prompts, num_samples=2, seed=0)
    assert (found["accuracy"].value, found["accuracy"].num) == (0.75, 2)
    assert (found["pass@2"].value, found["pass@2"].num) == (1.0, 1), "a prompt with one scored answer has no pass@2"
    assert (found["failed"].value, found["failed"].num, found["failed"].unit) == (0.5, 6, "answers")
    assert found["truncated"].num == found["response_length"].num == 4, "of answers that were made"
    every = estimates([answers("s-0", [None, None], stop_reason=None)], num_samples=2, seed=0)
    assert list(every) == ["failed"] and every["failed"].value == 1.0


def test_two_rows_of_one_text_are_two_prompts() -> None:
    """verl#3238: grouped by text they would be one prompt, with another pass@2."""
    both = [*answers("s-0", [True, True], text="same"), *answers("s-1", [False, False], text="same")]
    found = estimates(list(by_prompt(both).values()), num_samples=2, seed=0)
    assert (found["pass@2"].value, found["pass@2"].num) == (0.5, 2)
    assert estimates([both], num_samples=2, seed=0)["pass@2"].value == pytest.approx(5 / 6)


def test_shares_of_answers() -> None:
    cut = answers("s-0", [True, False], stop_reason="length")
    blank = answers("s-1", [False, False], answer="")
    found = estimates([cut, blank], num_samples=2, seed=0)
    assert (found["truncated"].value, found["unextracted"].value, found["response_length"].value) == (0.5, 0.5, 3.0)
    without = estimates([answers("s-0", [True, True], answer=None)], num_samples=2, seed=0)
    assert "maj@2" not in without and "unextracted" not in without


def test_rewards_that_are_no_verdict_have_a_mean_alone() -> None:
    found = estimates([answers("s-0", [True, False], reward=0.3, correct=None)], num_samples=2, seed=0)
    assert found["reward"].value == pytest.approx(0.3) and "accuracy" not in found and "pass@2" not in found


def test_intervals_are_seeded_and_over_prompts() -> None:
    """Sixteen answers to a prompt that are all alike are no sixteen prompts."""
    values = [True] * 30 + [False] * 10
    once = estimates([answers(f"s-{row}", [right]) for row, right in enumerate(values)], num_samples=1, seed=3)["accuracy"]
    often = estimates([answers(f"s-{row}", [right] * 16) for row, right in enumerate(values)], num_samples=16, seed=3)["accuracy"]
    assert (once.low, once.high) == (often.low, often.high)
    normal = 1.96 * math.sqrt(0.75 * 0.25 / 40)
    assert once.low == pytest.approx(0.75 - normal, abs=0.03) and once.high == pytest.approx(0.75 + normal, abs=0.03)
    low, high = interval(lambda times: times @ np.eye(2), num_prompts=2, seed=0)
    assert low.tolist() == [0.0, 0.0] and high.tolist() == [2.0, 2.0]
