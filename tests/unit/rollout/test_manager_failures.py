"""Rollouts that fail, from the manager to the batch: what is left out, what takes its place, and what every mean then counts."""

import asyncio
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from manager_parts import (
    PROMPTS_PER_STEP,
    Client,
    Engine,
    UnequalRewards,
    opened,
    prompts_of,
    replace_engines,
    settings_for,
    step_of,
)

from megatron_rl.algorithms.advantage import group_advantages
from megatron_rl.algorithms.objective import Objective
from megatron_rl.config.settings import Settings
from megatron_rl.data.buffer import Buffer
from megatron_rl.data.packing import make_shards
from megatron_rl.errors import UserError
from megatron_rl.rollout import manager as module
from megatron_rl.types import Reward, RewardOutcome, Sample, TrainBatch

ROLLOUTS = """
import collections

from megatron_rl.rollout.groups import single_turn

calls = collections.Counter()

async def fails_for_sevens(*, prompt, **arguments):
    samples = await single_turn(prompt=prompt, **arguments)
    if int(prompt.text.rstrip("=")) % 7 == 0:
        raise ZeroDivisionError("tool")
    return samples

async def loses_the_first(*, prompt, **arguments):
    '''Of multiples of four the call for all fails, that for the first trajectory, and its repetition, which is the sixth.'''
    number = calls[prompt.id]
    calls[prompt.id] += 1
    if int(prompt.text.rstrip("=")) % 4 == 0 and number in (0, 1, 5):
        raise ZeroDivisionError("tool")
    return await single_turn(prompt=prompt, **arguments)

rooms = []

async def notes_its_room(*, generator, **arguments):
    rooms.append(generator.context)
    return await single_turn(generator=generator, **arguments)
"""


@pytest.fixture(autouse=True)
def engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    replace_engines(monkeypatch)
    (tmp_path / "failing_rollouts.py").write_text(ROLLOUTS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "failing_rollouts", raising=False)


@pytest.fixture
def make_settings(tiny_model: Callable[..., Path], tmp_path: Path) -> Callable[..., Settings]:
    make = settings_for(tmp_path, tiny_model())
    return lambda name, *overrides: make(f"rollout.function=failing_rollouts:{name}", "data.shuffle=false", *overrides)


async def run(
    settings: Settings, path: Path, *, steps: range = range(6), position: dict[str, Any] | None = None, saved_at: int | None = None
) -> tuple[list[TrainBatch], list[dict[str, float]], dict[str, Any]]:
    Client.engine = engine = Engine(seed=steps.start)
    batches, metrics, saved = [], [], {}
    async with opened(settings, path) as manager:
        if position is not None:
            await manager.rewind(step=steps.start, position=position)
        for step in steps:
            if step == saved_at:
                saved = await manager.position(step=step)
            batch, values = await step_of(manager, engine, step)
            batches.append(batch)
            metrics.append(values)
    return batches, metrics, saved


@pytest.mark.parametrize("override", ["objective.zero_variance=keep", "objective.zero_variance=resample", "rollout.max_staleness=2"])
def test_the_next_prompt_takes_the_place_of_a_group_that_failed(
    make_settings: Callable[..., Settings], tmp_path: Path, override: str
) -> None:
    batches, metrics, _ = asyncio.run(run(make_settings("fails_for_sevens", override), tmp_path / "buffer.sqlite"))
    assert [batch.num_sequences for batch in batches] == [2 * PROMPTS_PER_STEP] * 6
    with sqlite3.connect(tmp_path / "buffer.sqlite") as buffer:
        query = "SELECT consumed_step, prompt_text, trained FROM groups WHERE rejection LIKE 'the rollout failed%' ORDER BY position"
        rows = buffer.execute(query).fetchall()
        (rejection,) = {text for (text,) in buffer.execute("SELECT rejection FROM groups WHERE rejection LIKE 'the rollout failed%'")}
        causes = buffer.execute("SELECT cause, headline, count(*) FROM failures GROUP BY 1, 2").fetchall()
    texts = [text for _, text, _ in rows]
    assert rejection == "the rollout failed for 2 of 2 trajectories: ZeroDivisionError: tool"
    assert texts[:4] == ["0=", "7=", "14=", "21="] and not any(trained for *_, trained in rows)
    assert [values["rollout/left_out_groups"] for values in metrics] == [sum(at == step for at, *_ in rows) for step in range(1, 7)]
    for values in metrics:
        assert values["rollout/failures"] == values.get("rollout/failures/error", 0) == 2 * values["rollout/left_out_groups"]
    assert all(values["rollout/retries"] == values.get("rollout/retries/error", 0) for values in metrics)
    assert sum(values["rollout/retries"] for values in metrics) >= 4 * len(rows)
    assert causes[0][:2] == ("error", "ZeroDivisionError: tool") and causes[0][2] >= 2 * len(rows)
    log = (tmp_path / "run" / "logs" / "rollout.log").read_text()
    assert (
        "step 1: 2 of 8 trajectories: ZeroDivisionError: tool\nrollout.function failing_rollouts:fails_for_sevens failed for prompt 0-0"
        in log
    )
    assert log.count("Traceback") == 1


def test_baselines_and_denominators_count_kept_trajectories(make_settings: Callable[..., Settings], tmp_path: Path) -> None:
    """Of 4 groups of 4 the first has 3 trajectories, with the rewards 0, 1, 2; the next has 4, one reward throughout, or 0 to 3."""
    settings = make_settings("loses_the_first", "data.samples_per_prompt=4")
    (batch,), (values,), _ = asyncio.run(run(settings, tmp_path / "buffer.sqlite", steps=range(1)))
    # A prompt of a multiple of three has one reward throughout (`UnequalRewards`).
    rewards = [[0.5] * 3, [0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0], [0.5] * 4]
    assert batch.rewards.tolist() == [reward for group in rewards for reward in group]
    assert batch.group_ids.tolist() == [number for number, group in enumerate(rewards) for _ in group]
    assert batch.trajectory_ids.tolist() == list(range(15))
    assert values["rollout/reward"] == sum(batch.rewards) / 15 and values["rollout/num_samples"] == 15
    assert (values["rollout/failures"], values["rollout/left_out_groups"]) == (1, 0)
    shards = make_shards(batch, dp=2, optimizer_steps=1, max_tokens_per_micro_batch=64, seed=0)
    (totals,) = shards[0].totals
    assert (totals.num_trajectories, totals.num_sequences, totals.num_tokens) == (15, 15, 15 * 3)


@pytest.mark.parametrize("estimator", ["group", "rloo", "unscaled"])
def test_advantages_of_unequal_groups_follow_the_formula(estimator: str) -> None:
    groups = [[0.0, 1.0, 5.0], [3.0, 1.0], [2.0, 0.0, 0.0, 7.0]]
    expected = []
    for rewards in groups:
        mean = sum(rewards) / len(rewards)
        spread = (sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1)) ** 0.5
        for reward in rewards:
            others = (sum(rewards) - reward) / (len(rewards) - 1)
            expected.append({"group": (reward - mean) / (spread + 1e-6), "unscaled": reward - mean, "rloo": reward - others}[estimator])
    flat = torch.tensor([reward for rewards in groups for reward in rewards], dtype=torch.float64)
    ids = torch.tensor([number for number, rewards in enumerate(groups) for _ in rewards])
    chosen = Objective.of(advantage={"kind": "group", "scale": "none"} if estimator == "unscaled" else estimator)
    made = group_advantages(
        chosen.advantage,
        rewards=flat,
        group_ids=ids,
        lengths=torch.ones(len(ids), dtype=torch.int64),
    )
    np.testing.assert_allclose(made.numpy(), expected, rtol=1e-12)


def test_too_many_failures_end_the_step_with_the_first_traceback(make_settings: Callable[..., Settings], tmp_path: Path) -> None:
    """Two of the prompts 0 to 8, at once the first of four: 2 of 8 trajectories are 25 %."""
    settings = make_settings("fails_for_sevens", "rollout.max_error_rate=0.2")
    message = (
        r"2 of 8 trajectories failed \(2 error\) = 25\.0%, more than rollout\.max_error_rate 20\.0%; mend rollout\.function "
        r"failing_rollouts:fails_for_sevens, or raise rollout\.max_error_rate\n2 x ZeroDivisionError: tool\nthe first failure is:\n"
        r"rollout\.function failing_rollouts:fails_for_sevens failed for prompt 0-0: ZeroDivisionError: tool\nTraceback"
    )
    with pytest.raises(UserError, match=message):
        asyncio.run(run(settings, tmp_path / "buffer.sqlite"))


def test_failures_below_the_rate_and_long_waits_reach_the_console(
    make_settings: Callable[..., Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    notes: list[Any] = []

    async def score(self: UnequalRewards, sample: Sample) -> Reward:
        if sample.prompt.text == "1=":
            return Reward(RewardOutcome.ERROR, message="KeyError: 'answer'\nTraceback")
        return Reward(RewardOutcome.SCORED, float(sample.index))

    def noted(owner: type) -> type:
        def init(self: Any, *arguments: Any, note: Any, **others: Any) -> None:
            notes.append(note)
            owner.__init__(self, *arguments, note=note, **others)

        return type(owner.__name__, (owner,), {"__init__": init})

    monkeypatch.setattr(UnequalRewards, "score", score)
    monkeypatch.setattr(module, "RewardRunner", noted(UnequalRewards))
    monkeypatch.setattr(module, "Buffer", noted(Buffer))
    settings = make_settings("fails_for_sevens", "reward.max_error_rate=0.5")

    async def work() -> None:
        Client.engine = engine = Engine(seed=0)
        async with opened(settings, tmp_path / "buffer.sqlite", say=said.append) as manager:
            await step_of(manager, engine, 0)

    asyncio.run(work())
    assert notes == [said.append] * 2, "of waits for the reward workers and for the buffer"
    assert any(text.startswith("step 1: 2 of 8 trajectories failed: ZeroDivisionError: tool") for text in said), said
    assert any("reward calls failed: KeyError: 'answer'" in text for text in said), said


def test_a_rollout_is_told_what_a_micro_batch_holds(make_settings: Callable[..., Settings], tmp_path: Path) -> None:
    """20 tokens on each of two context parallel ranks; the engine would take 64."""
    import failing_rollouts  # type: ignore[import-not-found]

    budget = "training={max_tokens_per_micro_batch: 20, topology: {num_ranks: 2, cp: 2}}"
    asyncio.run(run(make_settings("notes_its_room", "data.max_prompt_tokens=16", budget), tmp_path / "buffer.sqlite", steps=range(1)))
    assert set(failing_rollouts.rooms) == {40}


def test_failures_without_end_are_one_sentence_at_any_rate(make_settings: Callable[..., Settings], tmp_path: Path) -> None:
    settings = make_settings("fails_for_sevens", "rollout.max_error_rate=1", f"data.train={tmp_path}/sevens.jsonl")
    rows = [json.dumps({"prompt": f"{7 * number}=", "label": "1"}) for number in range(60)]
    (tmp_path / "sevens.jsonl").write_text("\n".join(rows))
    with pytest.raises(
        UserError, match=r"step 1: 0 of 0 groups .* the rollout failed for 40 others, after 10 rounds of .*, needs 4; .*mend"
    ):
        asyncio.run(run(settings, tmp_path / "buffer.sqlite"))


def test_a_resume_after_dropped_groups_is_the_unbroken_run(make_settings: Callable[..., Settings], tmp_path: Path) -> None:
    """Killed when the step after the checkpoint has its batch."""
    settings, path, killed = make_settings("fails_for_sevens"), tmp_path / "buffer.sqlite", tmp_path / "killed.sqlite"
    whole, counted, _ = asyncio.run(run(settings, path))
    _, _, position = asyncio.run(run(settings, killed, steps=range(4), saved_at=3))
    after, metrics, _ = asyncio.run(run(settings, killed, steps=range(3, 6), position=position))
    assert [prompts_of(batch) for batch in after] == [prompts_of(batch) for batch in whole[3:]]
    assert [batch.rewards.tolist() for batch in after] == [batch.rewards.tolist() for batch in whole[3:]]
    names = ("rollout/failures", "rollout/left_out_groups")
    assert [[values[name] for name in names] for values in metrics] == [[values[name] for name in names] for values in counted[3:]]


def test_a_baseline_that_fails_leaves_out_the_group(make_settings: Callable[..., Settings], tmp_path: Path) -> None:
    settings = make_settings("fails_for_sevens", "objective.advantage=remax")
    (batch,), (values,), _ = asyncio.run(run(settings, tmp_path / "buffer.sqlite", steps=range(1)))
    assert batch.num_sequences == 2 * PROMPTS_PER_STEP and values["rollout/failures"] == 2


FILTERS = """
import sqlite3, threading

released = threading.Event()

def waits_for_the_loop(*, group, path: str):
    with sqlite3.connect(path, timeout=0) as buffer:
        buffer.execute("BEGIN IMMEDIATE")
    return None if released.wait(10) else "the event loop stood still"
"""


def test_a_filter_stops_neither_the_event_loop_nor_the_buffer(make_settings: Callable[..., Settings], tmp_path: Path) -> None:
    (tmp_path / "waiting_filters.py").write_text(FILTERS)
    path = tmp_path / "buffer.sqlite"
    words = f"rollout.filter={{function: waiting_filters:waits_for_the_loop, args: {{path: {path}}}}}"

    async def work() -> list[TrainBatch]:
        import waiting_filters  # type: ignore[import-not-found]

        asyncio.get_running_loop().call_later(0.2, waiting_filters.released.set)
        return (await run(make_settings("fails_for_sevens", words), path, steps=range(1)))[0]

    (batch,) = asyncio.run(work())
    assert batch.num_sequences == 2 * PROMPTS_PER_STEP
    with sqlite3.connect(path) as buffer:
        assert buffer.execute("SELECT count(*) FROM groups WHERE trained").fetchone() == (PROMPTS_PER_STEP,)
