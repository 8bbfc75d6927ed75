"""The way from rewards to token advantages, for every estimator."""

import dataclasses

import pytest
import torch

from megatron_rl.algorithms.advantage import group_advantages
from megatron_rl.algorithms.objective import AdvantageSettings, Estimator, Objective
from megatron_rl.algorithms.returns import gae, whiten
from megatron_rl.algorithms.token_advantage import sample_scores, token_advantages, without_signal

LENGTHS = torch.tensor([3, 1, 4, 2])
CU_SEQLENS = torch.tensor([0, 3, 4, 8, 10])
MASK = torch.tensor([0, 1, 1, 1, 0, 1, 0, 1, 1, 1]).bool()
TRAINABLE = torch.tensor([2, 1, 2, 2])
REWARDS = torch.tensor([1.0, 0.0, 0.5, 0.25], dtype=torch.float64)
GROUPS = torch.tensor([0, 1, 0, 1])


def run(settings: AdvantageSettings, **keywords) -> tuple[torch.Tensor, torch.Tensor | None]:
    rewards = REWARDS.unsqueeze(1) if settings.estimator == "gdpo" else REWARDS
    scores = sample_scores(settings, rewards=rewards, group_ids=GROUPS, lengths=TRAINABLE, baselines=torch.zeros(4, dtype=torch.float64))
    return token_advantages(Objective(advantage=settings), scores=scores, loss_mask=MASK, cu_seqlens=CU_SEQLENS, **keywords)


@pytest.mark.parametrize("estimator", [name for name in Estimator.__args__ if name != "ppo"])
@pytest.mark.parametrize("whitened", [True, False])
def test_critic_free_estimators_give_each_token_its_sample_s_advantage(estimator: str, whitened: bool) -> None:
    settings = AdvantageSettings(estimator=estimator)
    settings = settings if whitened else settings.without_whitening()
    rewards = REWARDS.unsqueeze(1) if estimator == "gdpo" else REWARDS
    baselines = torch.zeros(4, dtype=torch.float64)
    expected = group_advantages(settings, rewards=rewards, group_ids=GROUPS, lengths=TRAINABLE, baselines=baselines)
    advantages, returns = run(settings)
    torch.testing.assert_close(advantages, torch.where(MASK, expected.repeat_interleave(LENGTHS), 0.0))
    assert returns is None


def test_a_kl_in_the_reward_counts_per_token() -> None:
    kl = torch.arange(10, dtype=torch.float64).masked_fill(~MASK, torch.nan)
    settings = AdvantageSettings(estimator="reinforce_plus_plus", args={"whiten": False})
    advantages, _ = run(settings, kl=kl, kl_coef=0.1)
    torch.testing.assert_close(advantages[MASK], torch.tensor([0.7, 0.8, -0.3, -0.7, -0.2, -1.45, -0.65], dtype=torch.float64))
    centred = REWARDS - torch.tensor([0.75, 0.125, 0.75, 0.125], dtype=torch.float64)
    advantages, _ = run(dataclasses.replace(settings, estimator="reinforce_plus_plus_baseline"), kl=kl, kl_coef=0.1)
    torch.testing.assert_close(advantages[MASK], (centred.repeat_interleave(LENGTHS) - 0.1 * kl)[MASK])


@pytest.mark.parametrize(
    ("estimator", "whitened"), [("grpo", False), ("reinforce_plus_plus", True), ("reinforce_plus_plus_baseline", False)]
)
def test_distillation_takes_the_log_ratio_to_the_teacher_from_each_token(estimator: Estimator, whitened: bool) -> None:
    settings = AdvantageSettings(estimator=estimator)
    settings = settings if whitened else settings.without_whitening()
    without = settings.without_whitening()
    log_ratio = torch.arange(10, dtype=torch.float64).masked_fill(~MASK, torch.nan)
    scores = sample_scores(settings, rewards=REWARDS, group_ids=GROUPS, lengths=TRAINABLE)
    fixed = {"scores": scores, "loss_mask": MASK, "cu_seqlens": CU_SEQLENS}
    objective = Objective(advantage=settings, distillation_coef=0.5)
    advantages, _ = token_advantages(objective, teacher_log_ratio=log_ratio, **fixed)
    plain, _ = token_advantages(Objective(advantage=without), **fixed)
    expected = torch.where(MASK, plain - 0.5 * log_ratio, 0.0)
    torch.testing.assert_close(advantages, whiten(expected, mask=MASK) if whitened else expected)
    with pytest.raises(ValueError, match="needs that of every token to the teacher"):
        token_advantages(objective, **fixed)


@pytest.mark.parametrize("bootstrapped", [True, False])
def test_ppo(bootstrapped: bool) -> None:
    settings = AdvantageSettings(estimator="ppo", args={"gamma": 0.9, "lam": 0.8, "bootstrap_truncated": bootstrapped})
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
        *[(name, [True, True, False, False, False, True, False, False]) for name in ("grpo", "dr_grpo", "rloo", "opo")],
        ("reinforce_plus_plus_baseline", [True, True, False, False, False, True, False, False]),
        ("pass@k", [True, True, True, True, True, True, False, False]),
        ("remax", [True, True, False, False, False, False, False, False]),
        ("ppo", [True, True, False, False, False, False, False, False]),
        ("reinforce_plus_plus", [True, True, False, False, False, False, False, False]),
    ],
)
def test_a_group_without_signal_is_one_whose_advantages_are_zero(estimator: Estimator, expected: list[bool]) -> None:
    """Equal rewards; two best of three; a lone sample; two that differ. The greedy responses got 0.3, 0, 0.5 and 0.25."""
    rewards = torch.tensor([0.3, 0.3, 1.0, 1.0, 0.0, 0.7, 0.25, 0.5], dtype=torch.float64)
    groups = torch.tensor([5, 5, 2, 2, 2, 9, 0, 0])
    baselines = torch.tensor([0.3, 0.3, 0.0, 0.0, 0.0, 0.5, 0.25, 0.25], dtype=torch.float64)
    got = without_signal(
        AdvantageSettings(estimator=estimator), rewards=rewards, group_ids=groups, lengths=torch.arange(1, 9), baselines=baselines
    )
    assert got.tolist() == expected


def test_gdpo_learns_from_every_component_that_differs() -> None:
    components = torch.tensor([[1.0, 0.5], [1.0, 0.5], [1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    groups, lengths = torch.tensor([0, 0, 1, 1]), torch.ones(4)
    settings = AdvantageSettings(estimator="gdpo")
    assert without_signal(settings, rewards=components, group_ids=groups, lengths=lengths).tolist() == [True, True, False, False]
    first = dataclasses.replace(settings, args={"reward_weights": [0.0, 1.0]})
    components[2:, 1] = 0.5
    assert without_signal(first, rewards=components, group_ids=groups, lengths=lengths).tolist() == [True] * 4


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match="critic"):
        run(AdvantageSettings(estimator="ppo"))
    with pytest.raises(ValueError, match="raw KL"):
        run(AdvantageSettings(estimator="reinforce_plus_plus"), kl_coef=0.1)
