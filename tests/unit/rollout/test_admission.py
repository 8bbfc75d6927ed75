"""Admission as arithmetic, against a run that is played through: whatever is filtered out, no token is too old."""

import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.rollout.manager import num_admitted


def test_synchronous_runs_make_nothing_ahead() -> None:
    admission = Admission(groups_per_step=8, max_staleness=0, num_steps=10)
    assert admission.num_admitted(step=3, missing=8, version=3) == 8
    assert admission.num_admitted(step=3, missing=2, version=3) == 2
    assert admission.num_admitted(step=4, missing=8, version=3) == 0


def test_a_staleness_of_two_is_two_steps_ahead_until_the_end() -> None:
    admission = Admission(groups_per_step=8, max_staleness=2, num_steps=10)
    assert admission.num_admitted(step=3, missing=8, version=3) == 24
    assert admission.num_admitted(step=4, missing=8, version=3) == 16
    assert admission.num_admitted(step=9, missing=8, version=9) == 8
    assert admission.num_admitted(step=8, missing=3, version=8) == 11
    assert admission.num_admitted(step=6, missing=8, version=3) == 0


@dataclass(kw_only=True)
class Admission:
    """What a run has of steps, groups and staleness."""

    groups_per_step: int
    max_staleness: int
    num_steps: int

    def num_admitted(self, *, step: int, missing: int, version: int) -> int:
        return num_admitted(step=step, missing=missing, version=version, **vars(self))


@dataclass
class Played:
    """A group of the played run: the version of its first token, and whether it has a signal."""

    version: int
    signal: bool


def play(admission: Admission, *, chance_of_signal: float, seed: int, resample: bool) -> list[tuple[int, Played]]:
    """Every group that a run trains on or filters out, with its step. Whatever is admitted starts at once, at the version of that time."""
    rng = random.Random(seed)
    waiting: list[Played] = []
    taken: list[tuple[int, Played]] = []
    for step in range(admission.num_steps):
        missing = admission.groups_per_step
        while missing:
            admitted = admission.num_admitted(step=step, missing=missing, version=step)
            assert admitted >= missing, "what a step waits for must be on its way"
            waiting += [Played(step, rng.random() < chance_of_signal) for _ in range(admitted - len(waiting))]
            front, waiting = waiting[:missing], waiting[missing:]
            taken += [(step, group) for group in front]
            missing -= sum(group.signal for group in front) if resample else len(front)
        # While this step trains and until its weights are there, nothing more may begin.
        assert admission.num_admitted(step=step + 1, missing=admission.groups_per_step, version=step) <= len(waiting)
    assert not waiting or resample, "a run ends without groups that nobody trains on"
    return taken


@given(
    groups_per_step=st.integers(1, 6),
    max_staleness=st.integers(0, 5),
    num_steps=st.integers(1, 12),
    chance_of_signal=st.floats(0.3, 1.0),
    seed=st.integers(0, 2**16),
    resample=st.booleans(),
)
def test_no_group_is_trained_later_than_its_first_token_allows(
    groups_per_step: int, max_staleness: int, num_steps: int, chance_of_signal: float, seed: int, resample: bool
) -> None:
    admission = Admission(groups_per_step=groups_per_step, max_staleness=max_staleness, num_steps=num_steps)
    for step, group in play(admission, chance_of_signal=chance_of_signal, seed=seed, resample=resample):
        assert step - max_staleness <= group.version <= step


@pytest.mark.parametrize("max_staleness", [1, 3])
def test_the_bound_is_reached_when_nothing_is_filtered_out(max_staleness: int) -> None:
    admission = Admission(groups_per_step=4, max_staleness=max_staleness, num_steps=20)
    ages = {step - group.version for step, group in play(admission, chance_of_signal=1.0, seed=0, resample=False) if step >= max_staleness}
    assert ages == {max_staleness}
