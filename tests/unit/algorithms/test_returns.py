"""Token rewards, GAE and whitening against loops in Python."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithms.kl import KLControl, kl_estimate, updated_kl_coef
from megatron_rl.algorithms.returns import discounted_returns, gae, last_trainable, token_rewards, whiten


def loop_gae(rewards, values, mask, cu_seqlens, gamma: float, lam: float, bootstrap) -> torch.Tensor:
    advantages = torch.zeros_like(rewards)
    for row in range(len(cu_seqlens) - 1):
        following, carried = bootstrap[row], 0.0
        for t in reversed(range(cu_seqlens[row], cu_seqlens[row + 1])):
            if mask[t]:
                carried = rewards[t] + gamma * following - values[t] + gamma * lam * carried
                following, advantages[t] = values[t], carried
    return advantages


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=6),
    seed=st.integers(0, 10**6),
    gamma=st.sampled_from([0.0, 0.3, 0.99, 1.0]),
    lam=st.sampled_from([0.0, 0.95, 1.0]),
    holes=st.sampled_from([0.0, 0.4, 1.0]),
)
def test_gae_against_the_recurrence(lengths: list[int], seed: int, gamma: float, lam: float, holes: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    rewards, values = torch.randn(2, sum(lengths), generator=generator, dtype=torch.float64)
    mask = torch.rand(sum(lengths), generator=generator) >= holes
    bootstrap = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    expected = loop_gae(rewards, values, mask, cu_seqlens.tolist(), gamma, lam, bootstrap)
    spoiled = [torch.where(mask, x, torch.nan) for x in (rewards, values)]
    advantages, returns = gae(
        rewards=spoiled[0], values=spoiled[1], loss_mask=mask, cu_seqlens=cu_seqlens, gamma=gamma, lam=lam, bootstrap=bootstrap
    )
    torch.testing.assert_close(advantages, expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(returns, torch.where(mask, expected + values, 0.0), rtol=1e-11, atol=1e-11)


def test_long_rows_keep_their_precision_in_float32() -> None:
    rewards = torch.randn(3 * 5000, generator=torch.Generator().manual_seed(0))
    rows = {"loss_mask": torch.ones(3 * 5000, dtype=torch.bool), "cu_seqlens": torch.tensor([0, 5000, 10000, 15000])}
    for gamma in (0.5, 0.95, 1.0):
        got, exact = (discounted_returns(rewards=wide, gamma=gamma, **rows) for wide in (rewards, rewards.double()))
        assert (got.dtype, exact.dtype) == (torch.float32, torch.float64)
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-3 if gamma == 1.0 else 1e-5)


def test_discounted_returns_step_over_observations() -> None:
    rewards = torch.tensor([0.0, 5.0, 0.0, 1.0], dtype=torch.float64)
    mask = torch.tensor([True, False, True, True])
    got = discounted_returns(rewards=rewards, loss_mask=mask, cu_seqlens=torch.tensor([0, 4]), gamma=0.5)
    assert got.tolist() == [0.25, 0.0, 0.5, 1.0]


def test_the_reward_sits_on_the_last_trainable_token() -> None:
    mask = torch.tensor([0, 1, 1, 0, 1, 0, 0, 0, 0, 1]).bool()
    cu_seqlens = torch.tensor([0, 4, 6, 8, 10])
    assert last_trainable(mask, cu_seqlens).tolist() == [2, 4, -1, 9]
    rewards = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    got = token_rewards(rewards=rewards, loss_mask=mask, cu_seqlens=cu_seqlens)
    assert got.tolist() == [0, 0, 1, 0, 2, 0, 0, 0, 0, 4]


def test_shaped_rewards_leave_the_raw_kl_alone() -> None:
    """The aliasing bug of two trainers: the logged KL was the shaped reward."""
    kl = torch.tensor([0.5, 0.25, torch.nan, 1.0], dtype=torch.float64)
    before = kl.clone()
    mask = torch.tensor([True, True, False, True])
    got = token_rewards(
        rewards=torch.tensor([1.0], dtype=torch.float64), loss_mask=mask, cu_seqlens=torch.tensor([0, 4]), kl=kl, kl_coef=0.1
    )
    torch.testing.assert_close(got, torch.tensor([-0.05, -0.025, 0.0, 0.9], dtype=torch.float64))
    assert torch.equal(kl.nan_to_num(-1), before.nan_to_num(-1)) and got.data_ptr() != kl.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_whitening_is_safe(dtype: torch.dtype) -> None:
    mask = torch.ones(1000, dtype=torch.bool)
    for value in (0.0, 0.1, 1000.0, -1e-8):
        assert whiten(torch.full((1000,), value, dtype=dtype), mask=mask).tolist() == [0.0] * 1000
    small = 1000 + 0.01 * torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    got = whiten(small.to(dtype), mask=mask).double()
    assert float(got.std()) == pytest.approx(1.0, abs=1e-5) and float(got.mean()) == pytest.approx(0.0, abs=1e-6)


def test_whitening_survives_squares_that_overflow() -> None:
    values = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) + 3
    mask = torch.arange(50) % 3 > 0
    expected = whiten(values, mask=mask)
    for factor in (1e38, 1e200):
        torch.testing.assert_close(whiten(values * factor, mask=mask), expected)


def test_whitening_over_ranks_one_of_them_empty() -> None:
    values = torch.randn(10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    parts = [values[:3], values[3:10], torch.full((2,), torch.nan, dtype=torch.float64)]
    masks = [torch.ones(3).bool(), torch.ones(7).bool(), torch.zeros(2).bool()]
    count, mean = 10.0, values.mean()
    centred = values - mean
    answers = iter([torch.tensor([count, values.sum()]), centred.sum(), centred.square().sum()] * 3)
    for part, mask in zip(parts, masks, strict=True):
        got = whiten(part, mask=mask, all_reduce_sum=lambda _: next(answers))
        torch.testing.assert_close(got, torch.where(mask, (part - mean) / values.std(), 0.0))


def test_kl_estimators() -> None:
    log_probs = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    reference = torch.tensor([-1.5, -0.5], dtype=torch.float64)
    d = reference - log_probs
    for name, expected in (("k1", -d), ("k2", d**2 / 2), ("k3", d.exp() - 1 - d), ("low_variance", d.exp() - 1 - d)):
        torch.testing.assert_close(kl_estimate(log_probs, reference=reference, estimator=name), expected)
    far = kl_estimate(torch.tensor([-1000.0, 0.0]), reference=torch.tensor([0.0, -1000.0]), estimator="low_variance")
    assert far.tolist() == [10.0, 10.0]


def test_adaptive_kl() -> None:
    control, coef, after = KLControl(target=6.0, horizon=1e4), 0.1, []
    for kl in (3.0, 6.0, 12.0, 6.6):
        coef = updated_kl_coef(coef, kl=kl, num_trajectories=256, control=control)
        after.append(coef)
    assert after == pytest.approx([0.099488, 0.099488, 0.09999737856, 0.10025337184911], abs=1e-12)
