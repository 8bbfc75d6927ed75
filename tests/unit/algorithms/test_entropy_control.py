"""Controllers of the policy's entropy, as functions from one state to the next."""

import json
import math
from dataclasses import asdict

import pytest

from megatron_rl.algorithms.entropy_control import EntropyState, applied_value, first_entropy_state, updated_entropy_state
from megatron_rl.algorithms.objective import EntropyControl, Objective

TRACE = [0.30, 0.25, 0.20, 0.15, 0.10, 0.12, 0.18, 0.22, 0.26, 0.19]


def settings(rule: str) -> EntropyControl:
    return EntropyControl(rule=rule, target=0.2, args={"delta": 1e-4, "max": 5e-3})


@pytest.mark.parametrize(
    ("rule", "applied", "after"),
    [
        ("skywork", [0, 0, 0, 0, 1, 2, 3, 4, 0, 0], [0, 0, 0, 1, 2, 3, 4, 3, 2, 3]),
        ("trl", [0, 0, 0, 1, 2, 3, 4, 5, 0, 0], [0, 0, 1, 2, 3, 4, 5, 4, 3, 4]),
        ("paper", [0, 0, 0, 0, 1, 2, 3, 0, 0, 2], [0, 0, 0, 1, 2, 3, 4, 3, 2, 3]),
    ],
)
def test_traces_of_the_coefficient(rule: str, applied: list[int], after: list[int]) -> None:
    control, got_applied, got_after = settings(rule), [], []
    state = first_entropy_state(control)
    for entropy in TRACE:
        state = EntropyState(**json.loads(json.dumps(asdict(state), allow_nan=False)))
        got_applied.append(applied_value(control, state, entropy) * 1e4)
        state = updated_entropy_state(control, state, entropy)
        got_after.append(state.value * 1e4)
    assert got_applied == pytest.approx(applied) and got_after == pytest.approx(after)


def test_only_the_papers_rule_needs_a_pass_before_the_step() -> None:
    rules = ("trl", "skywork", "paper", "clip_high")
    assert [Objective(entropy_control=settings(rule)).needs_entropy_before_step for rule in rules] == [False, False, True, False]
    assert not Objective().needs_entropy_before_step


def test_the_first_gate() -> None:
    first = {rule: EntropyControl(rule=rule, target=0.2, args={"initial": 0.5}) for rule in ("trl", "skywork")}
    assert applied_value(first["trl"], first_entropy_state(first["trl"])) == 0.0
    assert applied_value(first["skywork"], first_entropy_state(first["skywork"])) == 0.5


@pytest.mark.parametrize(("rule", "applied"), [("trl", 0.5), ("skywork", 0.0), ("paper", 0.5)])
def test_the_gate_at_its_target(rule: str, applied: float) -> None:
    assert applied_value(settings(rule), EntropyState(rule, 0.5, last_entropy=0.2), 0.2) == applied


def test_the_coefficient_stays_in_its_range() -> None:
    control = EntropyControl(target=0.2, args={"delta": 0.4, "max": 1.0, "min": 0.1, "initial": 0.1})
    state = first_entropy_state(control)
    for entropy, end in ((0.0, 1.0), (9.0, 0.1)):
        for _ in range(5):
            state = updated_entropy_state(control, state, entropy)
        assert state.value == end


def test_the_integral_of_clip_high_has_no_gate_and_stays_on_target() -> None:
    control = EntropyControl(rule="clip_high", target=0.3, args={"delta": 0.25, "max": 0.6})
    state, seen = first_entropy_state(control), []
    for entropy in (0.1, 0.3, 0.1, 0.1, 0.3, 0.5, 0.5, 0.5, 0.5):
        seen.append(applied_value(control, state))
        state = updated_entropy_state(control, state, entropy)
    assert seen == pytest.approx([0.0, 0.25, 0.25, 0.5, 0.6, 0.6, 0.35, 0.1, 0.0])


def test_what_cannot_be_is_refused() -> None:
    control = settings("paper")
    state = first_entropy_state(control)
    with pytest.raises(ValueError, match="paper"):
        applied_value(control, state)
    with pytest.raises(ValueError, match="finite"):
        updated_entropy_state(control, state, math.nan)
