"""Against a reference that plays megatron-core's own schedule table."""

import pytest

from megatron_rl.planning.in_flight import most_held


@pytest.mark.parametrize(("pp", "stage"), [(1, 0), (2, 0), (2, 1), (4, 0), (4, 2), (4, 3)])
def test_1f1b_holds_one_micro_batch_for_each_later_stage(pp: int, stage: int) -> None:
    assert most_held([10], stage=stage, pp=pp, num_micro_batches=16) == (10 * (pp - stage), pp - stage)


def test_no_more_than_there_are() -> None:
    assert most_held([10], stage=0, pp=8, num_micro_batches=3) == (30, 3)
    assert most_held([5, 7], stage=0, pp=4, num_micro_batches=4) == (48, 4)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("vpp", [2, 3])
def test_interleaved_chunks_follow_megatrons_table(stage: int, vpp: int) -> None:
    from megatron.core.pipeline_parallel.schedules import get_schedule_table

    pp, num_micro_batches = 4, 12
    held = [3, 5, 11][:vpp]
    table = get_schedule_table(num_micro_batches, vpp, pp)
    forwards = [chunk for _, chunk in table]
    ahead = 2 * (pp - stage - 1) + (vpp - 1) * pp
    events = [(chunk, +1) for chunk in forwards[:ahead]]
    for index, chunk in enumerate(forwards[ahead:]):
        events += [(chunk, +1), (vpp - 1 - forwards[index], -1)]
    now = most = 0
    for chunk, sign in events:
        now += sign * held[chunk]
        most = max(most, now)
    assert most_held(held, stage=stage, pp=pp, num_micro_batches=num_micro_batches)[0] == most


def test_interleaving_holds_more_than_1f1b_by_the_published_factor() -> None:
    """Memory grows by 1 + (p - 1) / (p v) on the first stage (Korthikanti et al. 2022, section 4.2)."""
    plain, _ = most_held([12], stage=0, pp=4, num_micro_batches=16)
    interleaved, _ = most_held([6, 6], stage=0, pp=4, num_micro_batches=16)
    assert interleaved / plain == 1 + 3 / (4 * 2)
