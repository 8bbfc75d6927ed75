"""Controllers of the policy's entropy, as functions from one state to the next."""

import json
import math
from dataclasses import asdict

import pytest

from megatron_rl.algorithms.entropy import ClipHighControl, CoefficientControl, Entropy, EntropyState
from megatron_rl.algorithms.objective import Objective

TRACE = [0.30, 0.25, 0.20, 0.15, 0.10, 0.12, 0.18, 0.22, 0.26, 0.19]


def settings(kind: str) -> CoefficientControl | ClipHighControl:
    made = Objective.of(entropy={"control": {"kind": kind, "target": 0.2, "delta": 1e-4, "max": 5e-3}}).entropy
    assert made is not None and made.control is not None
    return made.control


def first(control: CoefficientControl | ClipHighControl, coef: float = 0.0) -> EntropyState:
    state = EntropyState.first(Entropy(coef=coef, control=control))
    assert state is not None
    return state


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
    state = first(control)
    for entropy in TRACE:
        state = EntropyState(**json.loads(json.dumps(asdict(state), allow_nan=False)))
        got_applied.append(state.applied(control, entropy) * 1e4)
        state = state.updated(control, entropy)
        got_after.append(state.value * 1e4)
    assert got_applied == pytest.approx(applied) and got_after == pytest.approx(after)


def test_only_the_papers_rule_needs_a_pass_before_the_step() -> None:
    rules = ("trl", "skywork", "paper", "clip_high")
    assert [Objective(entropy=Entropy(control=settings(rule))).needs_entropy_before_step for rule in rules] == [False, False, True, False]
    assert not Objective().needs_entropy_before_step


def test_the_first_gate() -> None:
    trl, skywork = CoefficientControl(kind="trl", target=0.2), CoefficientControl(kind="skywork", target=0.2)
    assert first(trl, 0.5).applied(trl) == 0.0
    assert first(skywork, 0.5).applied(skywork) == 0.5


@pytest.mark.parametrize(("rule", "applied"), [("trl", 0.5), ("skywork", 0.0), ("paper", 0.5)])
def test_the_gate_at_its_target(rule: str, applied: float) -> None:
    assert EntropyState(rule, 0.5, last_entropy=0.2).applied(settings(rule), 0.2) == applied


def test_the_coefficient_stays_in_its_range() -> None:
    control = CoefficientControl(target=0.2, delta=0.4, max=1.0, min=0.1)
    state = first(control, 0.1)
    for entropy, end in ((0.0, 1.0), (9.0, 0.1)):
        for _ in range(5):
            state = state.updated(control, entropy)
        assert state.value == end


def test_the_integral_of_clip_high_stays_on_target() -> None:
    control = ClipHighControl(target=0.3, delta=0.25, max=0.6)
    state, seen = first(control), []
    for entropy in (0.1, 0.3, 0.1, 0.1, 0.3, 0.5, 0.5, 0.5, 0.5):
        seen.append(state.applied(control))
        state = state.updated(control, entropy)
    assert seen == pytest.approx([0.0, 0.25, 0.25, 0.5, 0.6, 0.6, 0.35, 0.1, 0.0])


def test_what_cannot_be_is_refused() -> None:
    control = settings("paper")
    state = first(control)
    with pytest.raises(ValueError, match="paper"):
        state.applied(control)
    with pytest.raises(ValueError, match="finite"):
        state.updated(control, math.nan)
