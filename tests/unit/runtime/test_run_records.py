"""What a run prints at its end besides its files."""

import contextlib

import pytest
from run_parts import MakeRun, Manager

from megatron_rl.errors import UserError
from megatron_rl.observe.metrics import Metric, Sum
from megatron_rl.runtime.loop import train_loop


@pytest.mark.parametrize(("share", "fails_at", "told"), [(0.9, None, 3), (0.9, 8, 3), (0.0, None, 0)], ids=["ill", "failed", "healthy"])
def test_a_run_ends_with_the_most_urgent_advice(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], share: float, fails_at: int | None, told: int
) -> None:
    error = UserError("no samples")

    async def next_batch(self: Manager, step: int, *, progress: object) -> tuple[str, dict[str, Metric]]:
        if step == fails_at:
            raise error
        faults = ("reward_errors", "failures", "aborted_fraction", "truncated_fraction")
        return "", {"rollout/num_samples": Sum(1), "rollout/renewed_groups": Sum(0), **{f"rollout/{name}": Sum(share) for name in faults}}

    monkeypatch.setattr(Manager, "next_batch", next_batch)
    run = make_run("run.num_steps=9")
    with contextlib.suppress(UserError):
        train_loop(run, first_step=0)
    if fails_at is None:
        run.finish()
    else:
        run.break_off(error)
    found = [line for line in capsys.readouterr().out.splitlines() if line.startswith("! ")]
    causes = ("reward.timeout_s", "rollout.timeout_s", "model.deadline_s")
    assert len(found) == told and all(cause in line for cause, line in zip(causes, found, strict=False))
