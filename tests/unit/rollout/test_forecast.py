"""Dynamic sampling by a forecast: how many groups are asked for at once, and that it changes no step's groups."""

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from manager_parts import PROMPTS_PER_STEP, Client, Engine, opened, prompts_of, replace_engines, settings_for, step_of

from megatron_rl.config.settings import Settings
from megatron_rl.data.batch import make_train_batch
from megatron_rl.data.buffer import Buffer
from megatron_rl.data.recorded import Recorded
from megatron_rl.rollout.manager import RolloutManager
from megatron_rl.rollout.production import FORECAST_STEPS, Production
from megatron_rl.types import TrainBatch

RESAMPLE = "objective.zero_variance=resample"
NUM_STEPS = 6


@pytest.fixture
def make_settings(tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Settings]:
    replace_engines(monkeypatch)
    return settings_for(tmp_path, tiny_model())


# Trained and consumed groups of the last steps, missing ones, and those to ask for.
@pytest.mark.parametrize(
    ("trained", "consumed", "missing", "asked"),
    [
        (0, 0, 4, 4),
        (16, 16, 4, 4),
        (7, 15, 4, 8),
        (3, 7, 3, 6),
        (4, 15, 1, 4),
        (4, 16, 4, 14),
        (1, 15, 4, 16),
        (0, 16, 4, 16),
        (0, 16, 1, 16),
    ],
)
def test_as_many_groups_are_asked_for_as_are_probably_needed(
    make_settings: Callable[..., Settings],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trained: int,
    consumed: int,
    missing: int,
    asked: int,
) -> None:
    """missing x (consumed + 1) / (trained + 1), rounded up, and never more than the groups of FORECAST_STEPS steps."""
    monkeypatch.setattr(
        Buffer, "recently_trained", lambda self, limit: (trained, consumed) if limit == FORECAST_STEPS * PROMPTS_PER_STEP else None
    )

    Client.engine = Engine(seed=0)

    async def work() -> list[int]:
        async with opened(make_settings(RESAMPLE), tmp_path / "a.sqlite") as made, opened(make_settings(), tmp_path / "b.sqlite") as other:
            return [each.production._forecast(missing) for each in (made, other)]

    assert asyncio.run(work()) == [asked, missing]


async def steps_of(settings: Settings, path: Path, *, killed_at: int | None = None) -> tuple[list[Any], list[dict[str, float]], int]:
    """Prompts and metrics of the steps, and the number of requests; with a checkpoint before and a kill after step `killed_at`."""
    Client.engine = engine = Engine(seed=0)
    batches, metrics, position = [], [], None

    async def go_on(manager: RolloutManager, step: int) -> None:
        batch, values = await step_of(manager, engine, step)
        assert engine.running == 0 == manager.pool.num_running and not manager.production.tasks
        batches.append(prompts_of(batch))
        metrics.append(values)

    async with opened(settings, path) as manager:
        for step in range(NUM_STEPS if killed_at is None else killed_at + 1):
            position = await manager.position(step=step)
            await go_on(manager, step)
    if killed_at is not None:
        del batches[killed_at:], metrics[killed_at:]
        async with opened(settings, path) as manager:
            await manager.rewind(step=killed_at, position=position)
            for step in range(killed_at, NUM_STEPS):
                await go_on(manager, step)
    return batches, metrics, len(engine.started)


def test_a_forecast_changes_no_group_of_a_step(
    make_settings: Callable[..., Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither does a resume; less is asked for one after the other, and what was asked for in vain is counted."""
    settings, waits = make_settings(RESAMPLE), []
    admit = Production._begin_groups

    def noting(self: Production, num_groups: int, *, step: int) -> None:
        before = len(self.tasks)
        admit(self, num_groups, step=step)
        waits.append(len(self.tasks) > before)

    monkeypatch.setattr(Production, "_begin_groups", noting)
    got, metrics, _ = asyncio.run(steps_of(settings, tmp_path / "a.sqlite"))
    with_forecast = sum(waits)
    assert asyncio.run(steps_of(settings, tmp_path / "b.sqlite", killed_at=3))[0] == got
    monkeypatch.setattr(Production, "_forecast", lambda self, count: count)
    waits.clear()
    rounds, _, _ = asyncio.run(steps_of(settings, tmp_path / "c.sqlite"))
    assert got == rounds and with_forecast < sum(waits)
    surplus = sum(values["rollout/surplus_groups"] for values in metrics)
    assert surplus > 0 == sum(values["rollout/renewed_groups"] for values in metrics)
    with sqlite3.connect(tmp_path / "a.sqlite") as buffer:
        assert buffer.execute("SELECT count(*) FROM groups WHERE state IN ('done', 'in_flight')").fetchone() == (0,)


def test_groups_of_all_rounds_come_in_the_order_of_prompts(make_settings: Callable[..., Settings], tmp_path: Path) -> None:
    """So a replay, which knows the prompts' order alone, makes the same batch."""
    order = ("rollout.order={kind: first_complete, oversampling: 2}", "rollout.max_staleness=2")
    Client.engine = engine = Engine(seed=1)

    async def work() -> list[TrainBatch]:
        async with opened(make_settings(RESAMPLE, *order), tmp_path / "a.sqlite") as manager:
            return [(await step_of(manager, engine, step))[0] for step in range(NUM_STEPS)]

    batches = asyncio.run(work())
    with Recorded(tmp_path / "a.sqlite") as recorded:
        for step, batch in enumerate(batches):
            groups, rejections = recorded.batch_groups(step + 1, records=False)
            kept = [group for group, rejection in zip(groups, rejections, strict=True) if rejection is None]
            np.testing.assert_array_equal(make_train_batch(kept).tokens, batch.tokens)
