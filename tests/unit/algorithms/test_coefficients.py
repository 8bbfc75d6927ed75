"""Coefficients that move from step to step, and survive a checkpoint."""

import json

import pytest

from megatron_rl.algorithms.coefficients import Coefficients, ControlState
from megatron_rl.algorithms.objective import Objective
from megatron_rl.errors import UserError


def after(objective: Objective, *, entropy: float | None = None, kl: float | None = None, num_trajectories: int = 1) -> ControlState:
    return ControlState.first(objective).updated(objective, entropy=entropy, kl=kl, num_trajectories=num_trajectories)


def plain(state: ControlState) -> dict:
    return json.loads(json.dumps(state.plain(), allow_nan=False))


def test_fixed_coefficients_stay() -> None:
    objective = Objective.of(entropy={"coef": 0.01}, kl={"coef": 0.1})
    made = after(objective, entropy=1.0, kl=9.0, num_trajectories=4).of_step(objective)
    assert made == (objective, Coefficients(entropy=0.01, kl_loss=0.1)) == (objective, Coefficients.fixed(objective))


def test_kl_coefficient_follows_its_target() -> None:
    objective = Objective.of(kl={"coef": 0.1, "control": {"target": 6.0, "horizon": 10000.0}})
    state = after(objective, kl=3.0, num_trajectories=256)
    assert state.of_step(objective)[1].kl_loss == pytest.approx(0.099488)
    assert state.updated(objective, entropy=None, kl=None, num_trajectories=256) == state
    assert ControlState.restored(objective, plain(state)) == state


def test_state_continues_and_settings_rule_the_fixed_parts() -> None:
    control = {"kind": "trl", "target": 0.2, "delta": 0.005}
    objective, other = (Objective.of(entropy={"control": control}, kl={"coef": coef}) for coef in (0.1, 0.3))
    straight = after(objective, entropy=0.1)
    resumed = ControlState.restored(other, plain(straight))
    assert resumed.of_step(other)[1].entropy == straight.of_step(objective)[1].entropy == pytest.approx(0.005)
    assert resumed.of_step(other)[1].kl_loss == 0.3


def test_a_new_controller_starts_anew_another_rule_is_refused() -> None:
    objective = Objective.of(entropy={"coef": 0.25, "control": {"kind": "skywork"}})
    assert ControlState.restored(objective, plain(ControlState.first(Objective()))) == ControlState.first(objective)
    with_kl = Objective.of(kl={"coef": 0.1, "control": {}})
    assert ControlState.restored(with_kl, plain(ControlState.first(Objective()))) == ControlState.first(with_kl), "0 would stay 0"
    moved = Objective.of(entropy={"control": {"kind": "clip_high"}})
    with pytest.raises(UserError, match=r"objective\.entropy\.control\.kind is clip_high, was skywork when the checkpoint was written"):
        ControlState.restored(moved, plain(ControlState.first(objective)))


def test_the_objective_of_a_step_has_the_controller_s_clip() -> None:
    control = {"kind": "clip_high", "target": 0.3, "delta": 0.25}
    objective = Objective.of(policy_loss={"high": 0.5}, entropy={"coef": 0.01, "control": control})
    step, coefficients = after(objective, entropy=0.1).of_step(objective)
    assert (step.policy_loss.high, objective.policy_loss.high, coefficients.entropy) == (0.75, 0.5, 0.01)


def test_the_coefficient_of_a_kl_in_rewards_adapts_outside_loss() -> None:
    objective = Objective.of(
        kl_reward={"coef": 0.1, "control": {"target": 0.01, "horizon": 100}}, advantage={"kind": "reinforce_plus_plus"}
    )
    first = ControlState.first(objective)
    assert (first.kl_reward_coef(objective), first.of_step(objective)[1].kl_loss) == (0.1, 0.0)
    state = after(objective, kl=1.0, num_trajectories=10)
    assert state.kl_reward_coef(objective) == pytest.approx(0.1 * (1 + 0.2 * 10 / 100))
    assert state.of_step(objective)[1].kl_loss == 0.0


@pytest.mark.parametrize(
    ("objective", "name"),
    [
        (Objective.of(entropy={"control": {"kind": "trl"}}), "entropy"),
        (Objective.of(kl={"coef": 0.1, "control": {"target": 6.0, "horizon": 10.0}}), "kl"),
    ],
)
def test_coefficients_that_move_are_not_those_of_the_settings(objective: Objective, name: str) -> None:
    with pytest.raises(ValueError, match=rf"Objective\.{name}\.control moves a coefficient"):
        Coefficients.fixed(objective)
    reward = Objective.of(kl_reward={"coef": 0.1, "control": {"target": 6.0, "horizon": 10.0}}, advantage={"kind": "reinforce_plus_plus"})
    assert Coefficients.fixed(reward) == Coefficients(0.0, 0.0)
    clip = {"kind": "clip_high"}
    assert Coefficients.fixed(Objective.of(policy_loss={"high": 0.2}, entropy={"coef": 0.01, "control": clip})) == Coefficients(0.01, 0.0)
