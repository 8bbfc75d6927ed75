import math

import pytest

from megatron_rl.algorithms.rounding_limits import DENSE, FLOAT32, Expected, Limits
from megatron_rl.errors import ParityError

LIMITS = Limits(median=0.01, outlier=0.5, share=0.1)


@pytest.mark.parametrize(("num_tokens", "allowed"), [(1, 0.06 + 1.0), (100, 0.06 + 0.1), (40_000, 0.06 + 0.005)])
def test_a_mean_of_few_tokens_may_be_larger(num_tokens: int, allowed: float) -> None:
    assert LIMITS.clipped_mean(num_tokens) == pytest.approx(allowed)


def test_tokens_over_the_limit_are_refused_and_others_pass() -> None:
    expected = Expected(version=6, limits=LIMITS)
    expected.check(15.9, 100, mean=3.0)
    expected.check(0.0, 0, mean=None)
    with pytest.raises(ParityError, match=r"step 7: .* 100 tokens of weight version 6.* 5e-01, is 1\.6e-01 nats, .* 1\.6e-01"):
        expected.check(16.1, 100, mean=3.0)
    with pytest.raises(ParityError):
        expected.check(math.nan, 100, mean=math.nan)


def test_what_has_been_seen_to_be_trained_on_is_told_from_rounding() -> None:
    # |Δ| of real runs whose answers were changed, with the tokens of a small step; healthy means in bfloat16 are published ones.
    for limits, num_tokens, differences in (
        (FLOAT32, 128, {"noise of 2e-3": 0.0008, "log-prob 0 on one engine of two": 0.0005}),
        (DENSE, 4096, {"tokens reversed": 0.17, "tokens at random": 0.19, "log-prob 0 on every engine": 0.12}),
    ):
        for name, clipped_mean in differences.items():
            assert clipped_mean > limits.clipped_mean(num_tokens), name
    for limits, healthy in ((FLOAT32, 1e-5), (DENSE, 0.035)):
        assert all(healthy < limits.clipped_mean(num_tokens) for num_tokens in (1, 32, 10**6))
