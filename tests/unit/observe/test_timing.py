import pytest

from megatron_rl.observe.metrics import Sum, check_metrics
from megatron_rl.observe.timing import PhaseTimer


def test_phases_add_up_per_step_and_over_the_run() -> None:
    ticks = iter([0.0, 2.0, 3.0, 8.0, 10.0, 11.0, 20.0, 24.0])
    timer = PhaseTimer(clock=lambda: next(ticks))
    with timer.measure("rollout"):
        pass
    with timer.measure("rollout"):
        pass
    with pytest.raises(RuntimeError), timer.measure("train"):
        raise RuntimeError
    metrics = timer.take()
    assert metrics == {"time/rollout": Sum(7.0), "time/train": Sum(1.0)}
    check_metrics(metrics)
    with timer.measure("train"):
        pass
    assert timer.totals() == {"rollout": 7.0, "train": 5.0}
    assert timer.take() == {"time/train": Sum(4.0)}
    assert timer.totals() == {"rollout": 7.0, "train": 5.0}
