"""Controllers of the policy's entropy."""

import json
import math

import pytest

from megatron_rl.algorithms.entropy_control import ClipHighController, CoefficientController, controlled, make_entropy_controller
from megatron_rl.algorithms.objective import EntropyControl, Objective

TRACE = [0.30, 0.25, 0.20, 0.15, 0.10, 0.12, 0.18, 0.22, 0.26, 0.19]


def settings(rule: str) -> EntropyControl:
    return EntropyControl(rule=rule, target=0.2, delta=1e-4, max=5e-3)


@pytest.mark.parametrize(
    ("rule", "applied", "after"),
    [
        ("skywork", [0, 0, 0, 0, 1, 2, 3, 4, 0, 0], [0, 0, 0, 1, 2, 3, 4, 3, 2, 3]),
        ("trl", [0, 0, 0, 1, 2, 3, 4, 5, 0, 0], [0, 0, 1, 2, 3, 4, 5, 4, 3, 4]),
        ("paper", [0, 0, 0, 0, 1, 2, 3, 0, 0, 2], [0, 0, 0, 1, 2, 3, 4, 3, 2, 3]),
    ],
)
@pytest.mark.parametrize("resume_at", [0, 4, 7])
def test_traces_also_across_a_checkpoint(rule: str, applied: list[int], after: list[int], resume_at: int) -> None:
    controller = CoefficientController(settings(rule))
    got_applied, got_after = [], []
    for step, entropy in enumerate(TRACE):
        if step == resume_at:
            state = json.loads(json.dumps(controller.state(), allow_nan=False))
            controller = CoefficientController(settings(rule))
            controller.restore(state)
        got_applied.append(controller.applied(entropy) * 1e4)
        controller.update(entropy)
        got_after.append(controller.coefficient * 1e4)
    assert got_applied == pytest.approx(applied) and got_after == pytest.approx(after)


def test_applying_does_not_move_the_controller() -> None:
    """Many micro-batches, or an evaluation, between two updates see one coefficient."""
    controller = CoefficientController(settings("trl"))
    controller.update(0.1)
    assert {controller.applied() for _ in range(5)} == {1e-4}


def test_only_the_papers_rule_needs_a_pass_before_the_step() -> None:
    assert [CoefficientController(settings(rule)).needs_current_entropy for rule in ("trl", "skywork", "paper")] == [False, False, True]
    assert not ClipHighController(settings("paper"), clip_high=0.2).needs_current_entropy


def test_the_first_gate() -> None:
    first = {rule: EntropyControl(rule=rule, target=0.2, initial=0.5) for rule in ("trl", "skywork")}
    assert CoefficientController(first["trl"]).applied() == 0.0
    assert CoefficientController(first["skywork"]).applied() == 0.5


def test_the_coefficient_stays_in_its_range() -> None:
    controller = CoefficientController(EntropyControl(target=0.2, delta=0.4, max=1.0))
    for _ in range(5):
        controller.update(0.0)
    assert controller.coefficient == 1.0
    for _ in range(5):
        controller.update(9.0)
    assert controller.coefficient == 0.0


def test_the_integral_controller_moves_the_clip_bound() -> None:
    objective = Objective(clip_high=0.5, entropy_control=EntropyControl(actuator="clip_high", target=0.3, delta=0.25, max=0.6))
    controller = make_entropy_controller(objective)
    assert isinstance(controller, ClipHighController)
    seen = []
    for entropy in (0.1, 0.3, 0.1, 0.1, 0.3, 0.5, 0.5, 0.5, 0.5):
        resumed = make_entropy_controller(objective)
        assert isinstance(resumed, ClipHighController)
        resumed.restore(json.loads(json.dumps(controller.state(), allow_nan=False)))
        controller = resumed
        seen.append(controller.applied())
        controller.update(entropy)
    assert seen == pytest.approx([0.5, 0.75, 0.75, 1.0, 1.1, 1.1, 0.85, 0.6, 0.5])
    with pytest.raises(ValueError, match="needs 'widening'"):
        controller.restore({"coefficient": 0.0})
    moved, coefficient = controlled(objective, 1.1)
    assert (moved.clip_high, coefficient, objective.clip_high) == (1.1, 0.0, 0.5)


def test_what_cannot_be_is_refused() -> None:
    controller = CoefficientController(settings("paper"))
    with pytest.raises(ValueError, match="paper"):
        controller.applied()
    with pytest.raises(ValueError, match="finite"):
        controller.update(math.nan)
    with pytest.raises(ValueError, match="coefficient"):
        controller.restore({"widening": 0.0})
    assert make_entropy_controller(Objective()) is None
    assert controlled(Objective(entropy_coef=0.3), 0.0)[1] == 0.3
    assert controlled(Objective(entropy_control=EntropyControl()), 0.2)[1] == 0.2
