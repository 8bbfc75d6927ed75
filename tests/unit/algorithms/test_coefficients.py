"""Coefficients that move from step to step, and survive a checkpoint."""

import json

import pytest

from megatron_rl.algorithms.coefficients import (
    Coefficients,
    ControlState,
    StepMeasurements,
    first_state,
    kl_reward_coef,
    of_step,
    restored_state,
    updated_state,
)
from megatron_rl.algorithms.objective import AdvantageSettings, EntropyControl, KLControl, Objective
from megatron_rl.errors import UserError


def after(objective: Objective, *, entropy: float | None = None, kl: float | None = None, num_sequences: int = 1) -> ControlState:
    measured = StepMeasurements(entropy=entropy, kl_per_sequence=kl)
    return updated_state(objective, first_state(objective), measured, num_sequences=num_sequences)


def plain(state: ControlState) -> dict:
    return json.loads(json.dumps(state.plain(), allow_nan=False))


def test_fixed_coefficients_stay() -> None:
    objective = Objective(entropy_coef=0.01, kl_loss_coef=0.1)
    made = of_step(objective, after(objective, entropy=1.0, kl=9.0, num_sequences=4))
    assert made == (objective, Coefficients(entropy=0.01, kl_loss=0.1)) == (objective, Coefficients.fixed(objective))


def test_kl_coefficient_follows_its_target() -> None:
    objective = Objective(kl_loss_coef=0.1, kl_control=KLControl(target=6.0, horizon=10000.0))
    state = after(objective, kl=3.0, num_sequences=256)
    assert of_step(objective, state)[1].kl_loss == pytest.approx(0.099488)
    assert updated_state(objective, state, StepMeasurements(entropy=None, kl_per_sequence=None), num_sequences=256) == state
    assert restored_state(objective, plain(state)) == state


def test_state_continues_where_it_was_and_settings_rule_what_is_fixed() -> None:
    control = EntropyControl(rule="trl", target=0.2, args={"delta": 0.005})
    objective, other = (Objective(entropy_control=control, kl_loss_coef=coef) for coef in (0.1, 0.3))
    straight = after(objective, entropy=0.1)
    resumed = restored_state(other, plain(straight))
    assert of_step(other, resumed)[1].entropy == of_step(objective, straight)[1].entropy == pytest.approx(0.005)
    assert of_step(other, resumed)[1].kl_loss == 0.3


def test_a_controller_that_the_checkpoint_lacks_starts_anew_and_another_rule_is_refused() -> None:
    objective = Objective(entropy_control=EntropyControl(rule="skywork", args={"initial": 0.25}))
    assert restored_state(objective, plain(first_state(Objective()))) == first_state(objective)
    moved = Objective(entropy_control=EntropyControl(rule="clip_high"))
    with pytest.raises(UserError, match=r"objective\.entropy_control\.rule is clip_high, was skywork when the checkpoint was written"):
        restored_state(moved, plain(first_state(objective)))


def test_the_step_s_objective_has_the_clip_that_the_controller_moved() -> None:
    control = EntropyControl(rule="clip_high", target=0.3, args={"delta": 0.25})
    objective = Objective(clip_high=0.5, entropy_coef=0.01, entropy_control=control)
    step, coefficients = of_step(objective, after(objective, entropy=0.1))
    assert (step.clip_high, objective.clip_high, coefficients.entropy) == (0.75, 0.5, 0.01)


def test_the_coefficient_of_a_kl_in_the_rewards_adapts_and_is_none_of_the_loss() -> None:
    objective = Objective(
        kl_reward_coef=0.1, kl_control=KLControl(target=0.01, horizon=100), advantage=AdvantageSettings(estimator="reinforce_plus_plus")
    )
    first = first_state(objective)
    assert (kl_reward_coef(objective, first), of_step(objective, first)[1].kl_loss) == (0.1, 0.0)
    state = after(objective, kl=1.0, num_sequences=10)
    assert kl_reward_coef(objective, state) == pytest.approx(0.1 * (1 + 0.2 * 10 / 100))
    assert of_step(objective, state)[1].kl_loss == 0.0


@pytest.mark.parametrize(
    ("objective", "name"),
    [
        (Objective(entropy_control=EntropyControl()), "entropy_control"),
        (Objective(kl_loss_coef=0.1, kl_control=KLControl(target=6.0, horizon=10.0)), "kl_control"),
    ],
)
def test_coefficients_that_move_are_not_those_of_the_settings(objective: Objective, name: str) -> None:
    with pytest.raises(ValueError, match=rf"Objective\.{name} moves a coefficient"):
        Coefficients.fixed(objective)
    reward = Objective(
        kl_reward_coef=0.1, kl_control=KLControl(target=6.0, horizon=10.0), advantage=AdvantageSettings(estimator="reinforce_plus_plus")
    )
    assert Coefficients.fixed(reward) == Coefficients(0.0, 0.0)
    clip = EntropyControl(rule="clip_high")
    assert Coefficients.fixed(Objective(clip_high=0.2, entropy_coef=0.01, entropy_control=clip)) == Coefficients(0.01, 0.0)
