"""Which groups a step waits for: the arithmetic of orders, against a search over all choices."""

import itertools

import pytest

from megatron_rl.config.order import FirstComplete, InOrder

PER_STEP = 2


Quotas = list[tuple[int, list[str]]]


def quotas(begun: dict[str, float], *, count: int = PER_STEP, max_staleness: int = 1, step: int = 5, partial: bool = False) -> Quotas:
    order = FirstComplete(partial=partial)
    found = order.quotas(begun, count=count, per_step=PER_STEP, max_staleness=max_staleness, step=step)
    return [(needed, list(among)) for needed, among in found]


def test_the_order_of_prompts_waits_for_the_first() -> None:
    begun = {"a": 5.0, "b": 3.0, "c": 4.0}
    assert InOrder().quotas(begun, count=2, per_step=PER_STEP, max_staleness=1, step=5) == [(2, ["a", "b"])]


def test_only_groups_that_later_steps_cannot_take_in_time_are_awaited() -> None:
    # Begun at version 4 of 5 with a staleness of 1: due now. Three are due by the next step, which takes two.
    assert quotas({"a": 5.0, "b": 4.0, "c": 5.0}) == [(1, ["b"]), (1, ["a", "b", "c"])]
    assert quotas({"a": 5.0, "b": 5.0}) == []
    assert quotas({"a": 3.0, "b": 4.0, "c": 5.0}, max_staleness=3) == []
    # Five are due within two steps, of which the next takes two.
    assert quotas(dict.fromkeys("abcde", 4.0) | {"f": 5.0}, max_staleness=2, count=4) == [(3, list("abcde")), (2, list("abcdef"))]
    assert quotas(dict.fromkeys("abcde", 0.0), count=1) == [(1, list("abcde"))] * 2, "never more than are taken"
    assert quotas({"a": 0.0, "b": 0.0}, partial=True) == [], "older tokens become context"


@pytest.mark.parametrize("max_staleness", [1, 2])
@pytest.mark.parametrize("ages", list(itertools.combinations_with_replacement((0, 1, 2), 5)))
def test_quotas_are_met_exactly_when_the_rest_can_be_taken_in_time(max_staleness: int, ages: tuple[int, ...]) -> None:
    begun = {f"{number}": 5.0 - min(age, max_staleness) for number, age in enumerate(ages)}

    def in_time(left: list[str], step: int) -> bool:
        """Whether steps from the one after `step` on, of PER_STEP groups, take all: the earliest due first."""
        due = sorted(begun[name] + max_staleness for name in left)
        return all(step + place // PER_STEP <= last for place, last in enumerate(due))

    must = quotas(begun, max_staleness=max_staleness)
    for taken in itertools.combinations(begun, PER_STEP if in_time(list(begun), 5) else 0):
        met = all(len(set(taken) & set(among)) >= needed for needed, among in must)
        assert met == in_time([name for name in begun if name not in taken], 6) or not taken


@pytest.mark.parametrize(("oversampling", "ahead"), [(1.5, 5), (1.01, 1), (1.1, 1), (3.0, 20)])
def test_the_last_steps_have_no_group_too_many(oversampling: float, ahead: int) -> None:
    order = FirstComplete(oversampling=oversampling, partial=True)
    assert order.ahead(10, max_staleness=0, steps_left=9) == ahead
    assert order.ahead(10, max_staleness=0, steps_left=0) == 0
    assert [InOrder().ahead(10, max_staleness=2, steps_left=left) for left in (3, 1, 0)] == [20, 10, 0]
