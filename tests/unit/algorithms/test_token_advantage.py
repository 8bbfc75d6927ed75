"""The way from rewards to token advantages, for every estimator."""

import pytest
import torch

from megatron_rl.algorithms.advantage import Advantage, Samples, TokenPlaces
from megatron_rl.algorithms.objective import Objective
from megatron_rl.algorithms.returns import gae, whiten

LENGTHS = torch.tensor([3, 1, 4, 2])
CU_SEQLENS = torch.tensor([0, 3, 4, 8, 10])
MASK = torch.tensor([0, 1, 1, 1, 0, 1, 0, 1, 1, 1]).bool()
TRAINABLE = torch.tensor([2, 1, 2, 2])
REWARDS = torch.tensor([1.0, 0.0, 0.5, 0.25], dtype=torch.float64)
GROUPS = torch.tensor([0, 1, 0, 1])


CRITIC_FREE = ("group", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "opo", "gdpo", "pass@k")


def estimator_of(kind: str, **args) -> Advantage:
    return Objective.of(advantage={"kind": kind, **args}).advantage


def samples_for(estimator: Advantage) -> Samples:
    rewards = REWARDS.unsqueeze(1) if estimator.needs_components else REWARDS
    return Samples(rewards=rewards, group_ids=GROUPS, lengths=TRAINABLE, baselines=torch.zeros(4, dtype=torch.float64))


def run(estimator: Advantage, **known) -> tuple[torch.Tensor, torch.Tensor | None]:
    return estimator.of_tokens(estimator.scores(samples_for(estimator)), TokenPlaces(loss_mask=MASK, cu_seqlens=CU_SEQLENS, **known))


@pytest.mark.parametrize("kind", CRITIC_FREE)
@pytest.mark.parametrize("whitened", [True, False])
def test_critic_free_estimators_give_tokens_the_sample_s_value(kind: str, whitened: bool) -> None:
    whitens = kind == "gdpo" or kind.startswith("reinforce")
    estimator = estimator_of(kind, **({"whiten": whitened} if whitens else {}))
    expected = estimator.of_samples(samples_for(estimator))
    advantages, returns = run(estimator)
    torch.testing.assert_close(advantages, torch.where(MASK, expected.repeat_interleave(LENGTHS), 0.0))
    assert returns is None


def test_a_kl_in_the_reward_counts_per_token() -> None:
    kl = torch.arange(10, dtype=torch.float64).masked_fill(~MASK, torch.nan)
    settings = estimator_of("reinforce_plus_plus", whiten=False)
    advantages, _ = run(settings, kl=kl, kl_coef=0.1)
    torch.testing.assert_close(advantages[MASK], torch.tensor([0.7, 0.8, -0.3, -0.7, -0.2, -1.45, -0.65], dtype=torch.float64))
    centred = REWARDS - torch.tensor([0.75, 0.125, 0.75, 0.125], dtype=torch.float64)
    advantages, _ = run(estimator_of("reinforce_plus_plus_baseline", whiten=False), kl=kl, kl_coef=0.1)
    torch.testing.assert_close(advantages[MASK], (centred.repeat_interleave(LENGTHS) - 0.1 * kl)[MASK])


@pytest.mark.parametrize(
    ("estimator", "without"),
    [
        (estimator_of("group"), estimator_of("group")),
        (estimator_of("reinforce_plus_plus"), estimator_of("reinforce_plus_plus", whiten=False)),
        (estimator_of("reinforce_plus_plus_baseline", whiten=False), estimator_of("reinforce_plus_plus_baseline", whiten=False)),
    ],
)
def test_distillation_takes_the_log_ratio_to_the_teacher(estimator: Advantage, without: Advantage) -> None:
    log_ratio = torch.arange(10, dtype=torch.float64).masked_fill(~MASK, torch.nan)
    advantages, _ = run(estimator, distillation_coef=0.5, teacher_log_ratio=log_ratio)
    plain, _ = run(without)
    expected = torch.where(MASK, plain - 0.5 * log_ratio, 0.0)
    torch.testing.assert_close(advantages, whiten(expected, mask=MASK) if estimator != without else expected)
    with pytest.raises(ValueError, match="needs that of every token to the teacher"):
        run(estimator, distillation_coef=0.5)


@pytest.mark.parametrize("bootstrapped", [True, False])
def test_ppo(bootstrapped: bool) -> None:
    settings = Objective.of(advantage={"kind": "gae", "gamma": 0.9, "lam": 0.8, "bootstrap_truncated": bootstrapped}).advantage
    values, end = torch.linspace(-1, 1, 10, dtype=torch.float64), torch.tensor([0.0, 2.0, 0.0, 1.0], dtype=torch.float64)
    shaped = torch.zeros(10, dtype=torch.float64)
    shaped[[2, 3, 7, 9]] = REWARDS
    expected = gae(
        rewards=shaped, values=values, loss_mask=MASK, cu_seqlens=CU_SEQLENS, gamma=0.9, lam=0.8, bootstrap=end if bootstrapped else None
    )
    advantages, returns = run(settings, values=values, bootstrap=end)
    torch.testing.assert_close(advantages, whiten(expected[0], mask=MASK))
    torch.testing.assert_close(returns, expected[1])


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        *[(name, [True, True, False, False, False, True, False, False]) for name in ("group", "rloo", "opo")],
        ("reinforce_plus_plus_baseline", [True, True, False, False, False, True, False, False]),
        ("pass@k", [True, True, True, True, True, True, False, False]),
        ("remax", [True, True, False, False, False, False, False, False]),
        ("gae", [True, True, False, False, False, False, False, False]),
        ("reinforce_plus_plus", [True, True, False, False, False, False, False, False]),
    ],
)
def test_a_group_without_signal_is_one_whose_advantages_are_zero(estimator: str, expected: list[bool]) -> None:
    """Equal rewards; two best of three; a lone sample; two that differ. The greedy responses got 0.3, 0, 0.5 and 0.25."""
    rewards = torch.tensor([0.3, 0.3, 1.0, 1.0, 0.0, 0.7, 0.25, 0.5], dtype=torch.float64)
    groups = torch.tensor([5, 5, 2, 2, 2, 9, 0, 0])
    baselines = torch.tensor([0.3, 0.3, 0.0, 0.0, 0.0, 0.5, 0.25, 0.25], dtype=torch.float64)
    samples = Samples(rewards=rewards, group_ids=groups, lengths=torch.arange(1, 9), baselines=baselines)
    assert estimator_of(estimator).without_signal(samples).tolist() == expected


def test_gdpo_learns_from_every_component_that_differs() -> None:
    components = torch.tensor([[1.0, 0.5], [1.0, 0.5], [1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    given = {"group_ids": torch.tensor([0, 0, 1, 1]), "lengths": torch.ones(4)}
    assert estimator_of("gdpo").without_signal(Samples(rewards=components, **given)).tolist() == [True, True, False, False]
    components[2:, 1] = 0.5
    weighted = estimator_of("gdpo", reward_weights=(0.0, 1.0))
    assert weighted.without_signal(Samples(rewards=components, **given)).tolist() == [True] * 4


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match="critic"):
        run(estimator_of("gae"))
    with pytest.raises(ValueError, match="raw KL"):
        run(estimator_of("reinforce_plus_plus"), kl_coef=0.1)
    with pytest.raises(ValueError, match=r"gdpo got rewards \(4,\), needs components"):
        estimator_of("gdpo").scores(samples_for(estimator_of("group")))
    with pytest.raises(ValueError, match=r"group got rewards \(4, 1\), needs \[B\]"):
        estimator_of("group").scores(samples_for(estimator_of("gdpo")))
