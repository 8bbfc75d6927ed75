"""Coefficients that move from step to step, and survive a checkpoint."""

import pytest

from megatron_rl.algorithms.coefficients import Coefficients, Controllers, StepMeasurements
from megatron_rl.algorithms.objective import AdvantageSettings, EntropyControl, KLControl, Objective


def test_fixed_coefficients_stay() -> None:
    objective = Objective(entropy_coef=0.01, kl_loss_coef=0.1)
    controllers = Controllers(objective)
    controllers.update(StepMeasurements(entropy=1.0, kl_per_sequence=9.0), num_sequences=4)
    assert controllers.present() == (objective, Coefficients(entropy=0.01, kl_loss=0.1)) == (objective, Coefficients.fixed(objective))


def test_kl_coefficient_follows_its_target() -> None:
    controllers = Controllers(Objective(kl_loss_coef=0.1, kl_control=KLControl(target=6.0, horizon=10000.0)))
    controllers.update(StepMeasurements(entropy=None, kl_per_sequence=3.0), num_sequences=256)
    assert controllers.present()[1].kl_loss == pytest.approx(0.099488)
    controllers.update(StepMeasurements(entropy=None, kl_per_sequence=None), num_sequences=256)
    assert controllers.present()[1].kl_loss == pytest.approx(0.099488)


def test_state_continues_where_it_was_and_settings_rule_what_is_fixed() -> None:
    control = EntropyControl(rule="trl", target=0.2, delta=0.005)
    objective = Objective(entropy_control=control, kl_loss_coef=0.1)
    straight, resumed = Controllers(objective), Controllers(Objective(entropy_control=control, kl_loss_coef=0.3))
    straight.update(StepMeasurements(entropy=0.1, kl_per_sequence=None), num_sequences=1)
    resumed.restore(straight.state())
    assert resumed.present()[1].entropy == straight.present()[1].entropy == pytest.approx(0.005)
    assert resumed.present()[1].kl_loss == 0.3


def test_the_coefficient_of_a_kl_in_the_rewards_adapts_and_is_none_of_the_loss() -> None:
    objective = Objective(
        kl_reward_coef=0.1, kl_control=KLControl(target=0.01, horizon=100), advantage=AdvantageSettings(estimator="reinforce_plus_plus")
    )
    controllers = Controllers(objective)
    assert (controllers.kl_reward_coef, controllers.present()[1].kl_loss) == (0.1, 0.0)
    controllers.update(StepMeasurements(entropy=None, kl_per_sequence=1.0), num_sequences=10)
    assert controllers.kl_reward_coef == pytest.approx(0.1 * (1 + 0.2 * 10 / 100))
    assert controllers.present()[1].kl_loss == 0.0


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
    clip = EntropyControl(actuator="clip_high")
    assert Coefficients.fixed(Objective(clip_high=0.2, entropy_coef=0.01, entropy_control=clip)) == Coefficients(0.01, 0.0)
