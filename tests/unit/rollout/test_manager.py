"""What a step trains on, whoever is ahead: the real prompts, buffer and rollout loop, with engines whose weights change under them."""

import asyncio
import dataclasses
import gc
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from manager_parts import (
    ADDRESS,
    PROMPTS_PER_STEP,
    Client,
    Engine,
    UnequalRewards,
    assert_young,
    opened,
    prompts_of,
    replace_engines,
    settings_for,
    step_of,
)
from run_parts import Rewards

from megatron_rl.config.settings import Settings
from megatron_rl.data.batch import batch_samples
from megatron_rl.data.source import RunPrompts
from megatron_rl.data.token_values import TOKEN_VALUES, TokenValues
from megatron_rl.engines.answers import Generation
from megatron_rl.engines.sampling import Sampling
from megatron_rl.errors import EngineError, UserError
from megatron_rl.observe.console import PhaseProgress
from megatron_rl.rollout.group_choice import NO_SIGNAL
from megatron_rl.rollout.groups import GroupMaker
from megatron_rl.rollout.manager import RolloutManager
from megatron_rl.types import Group, Ints, Prompt, Reward, RewardOutcome, Sample, TrainBatch


@pytest.fixture
def make_settings(tiny_model: Callable[..., Path], tmp_path: Path) -> Callable[..., Settings]:
    return settings_for(tmp_path, tiny_model())


@pytest.fixture(autouse=True)
def engines(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_engines(monkeypatch)


def test_a_control_call_may_take_as_long_as_a_weight_sync(make_settings: Callable[..., Settings], tmp_path: Path) -> None:
    """An engine may read all of a large model from a slow disk in one of them."""
    Client.engine = Engine(seed=0)
    settings = make_settings("model.deadline_s=7200")

    async def work() -> tuple[float, float]:
        async with opened(settings, tmp_path / "buffer.sqlite") as manager:
            (client,) = manager.clients
            return client.timeouts  # type: ignore[attr-defined,no-any-return]

    assert asyncio.run(work()) == (7200, 7200)


def test_the_manager_is_whole_before_an_engine_joins(make_settings: Callable[..., Settings], tmp_path: Path) -> None:
    """A step that is asked for before waits for the first engine that serves the current weights."""
    Client.engine = engine = Engine(seed=0)
    settings = make_settings()

    async def run() -> int:
        prompts = RunPrompts.read(settings.model.path, settings.data, seed=settings.run.seed)
        async with RolloutManager.open(settings, prompts=prompts, buffer=tmp_path / "buffer.sqlite") as manager:
            assert manager.busy_s == 0 and (await manager.position(step=0))["taken"] == [0]
            step = asyncio.create_task(step_of(manager, engine, 0))
            await asyncio.sleep(0.01)
            await manager.join([ADDRESS])
            await asyncio.sleep(0.01)
            assert not engine.started and not step.done(), "nothing is known yet of its weights"
            manager.pool.admit(manager.clients)
            batch, _ = await step
            # One that was too slow for a step gets requests of the next.
            manager.pool.retire(manager.clients[0], EngineError("too slow"))
            await step_of(manager, engine, 1)
            return batch.num_sequences

    assert asyncio.run(run()) == 2 * PROMPTS_PER_STEP


def test_a_reward_that_fails_on_its_probe_leaves_no_buffer(
    make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(self: Rewards, prompt: Prompt) -> None:
        raise UserError(f"no reward for {prompt.id}")

    async def run() -> None:
        async with opened(make_settings(), tmp_path / "buffer.sqlite"):
            raise AssertionError("it opens nothing")

    monkeypatch.setattr(Rewards, "probe", refuse)
    with pytest.raises(UserError, match="no reward for eval-0"):
        asyncio.run(run())
    assert not (tmp_path / "buffer.sqlite").exists()


def test_the_stand_in_of_an_engine_can_be_looked_at(
    make_settings: Callable[..., Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which happens in any test that is slow enough, and fails it at its end."""
    monkeypatch.setattr("megatron_rl.rollout.engine_watch.POLL_S", 0.0)

    async def run() -> int:
        Client.engine = engine = Engine(seed=0)
        async with opened(make_settings(), tmp_path / "buffer.sqlite") as manager:
            batch, _ = await step_of(manager, engine, 0)
            return batch.num_sequences

    assert asyncio.run(run()) == 2 * PROMPTS_PER_STEP


@pytest.mark.parametrize("zero_variance", ["keep", "drop", "resample"])
def test_every_staleness_trains_on_the_synchronous_groups(
    make_settings: Callable[..., Settings], tmp_path: Path, zero_variance: str
) -> None:
    async def run(max_staleness: int, seed: int) -> tuple[list[Any], list[dict[str, float]]]:
        Client.engine = engine = Engine(seed=seed)
        settings = make_settings(f"rollout.max_staleness={max_staleness}", f"objective.zero_variance={zero_variance}")
        async with opened(settings, tmp_path / f"{zero_variance}-{max_staleness}-{seed}.sqlite") as manager:
            batches, metrics = [], []
            for step in range(settings.run.num_steps):
                batch, values = await step_of(manager, engine, step)
                assert_young(batch, step=step, max_staleness=max_staleness)
                batches.append(prompts_of(batch))
                metrics.append(values)
                if max_staleness == 0:
                    assert engine.running == 0, "nothing is made while a synchronous run trains"
            return batches, metrics

    expected, metrics = asyncio.run(run(0, 0))
    assert all(values["rollout/staleness_max"] == 0 for values in metrics)
    for max_staleness, seed in ((1, 1), (2, 2), (5, 1)):
        got, metrics = asyncio.run(run(max_staleness, seed))
        assert got == expected
        assert 1 <= max(values["rollout/staleness_max"] for values in metrics) <= max_staleness
        assert all(values["rollout/renewed_groups"] == 0 for values in metrics)


@pytest.mark.parametrize("override", ("rollout.max_staleness=0", "rollout.max_staleness=1", "rollout.function=cut_history:rollout"))
def test_failing_rewards_end_the_step_with_the_first_traceback(
    make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, override: str
) -> None:
    """A trajectory of two samples is one call."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "contract")

    async def fail(self: Rewards, sample: Sample) -> Reward:
        return Reward(RewardOutcome.ERROR, message="Traceback: the grader is broken")

    async def run() -> None:
        Client.engine = engine = Engine(seed=0)
        async with opened(make_settings(override), tmp_path / "failing.sqlite") as manager:
            await step_of(manager, engine, 0)

    monkeypatch.setattr(UnequalRewards, "score", fail)
    message = r"8 of 8 reward calls failed .* = 100.0%, more than reward.max_error_rate 5.0%; mend (.|\n)*is:\nTraceback: the grader"
    with pytest.raises(UserError, match=message):
        asyncio.run(run())


def test_greedy_baselines_come_with_the_groups_of_later_steps(make_settings: Callable[..., Settings], tmp_path: Path) -> None:
    async def run() -> list[TrainBatch]:
        Client.engine = engine = Engine(seed=3)
        async with opened(make_settings("rollout.max_staleness=1", "objective.advantage=remax"), tmp_path / "buffer.sqlite") as manager:
            batches = [(await step_of(manager, engine, step))[0] for step in range(4)]
            assert sum(greedy for greedy, _ in engine.started) >= 4 * PROMPTS_PER_STEP
            return batches

    for batch in asyncio.run(run()):
        assert batch.component_names == ("greedy_baseline",)
        assert np.isin(batch.reward_components[:, 0], (0.0, 0.5)).all()


def test_a_failure_while_nobody_waits_is_raised_by_the_next_step(make_settings: Callable[..., Settings], tmp_path: Path) -> None:
    async def run() -> None:
        Client.engine = engine = Engine(seed=1)
        async with opened(make_settings("rollout.max_staleness=2"), tmp_path / "buffer.sqlite") as manager:
            await step_of(manager, engine, 0)
            engine.broken = True
            for _ in range(100):
                await asyncio.sleep(0)
            with pytest.raises(EngineError, match="gone"):
                await step_of(manager, engine, 1)

    asyncio.run(run())


@pytest.mark.parametrize("abandons", [False, True])
def test_closing_in_the_middle_aborts_what_is_being_made(make_settings: Callable[..., Settings], tmp_path: Path, abandons: bool) -> None:
    async def run() -> int:
        Client.engine = engine = Engine(seed=2)
        async with opened(make_settings("rollout.max_staleness=5"), tmp_path / "buffer.sqlite") as manager:
            await manager.next_batch(0, progress=PhaseProgress("rollout", total=None, unit=""))
            assert engine.running
            if abandons:
                return await manager.abandon() or engine.running
        return engine.running

    assert asyncio.run(run()) == 0


def test_a_step_with_all_groups_dropped_trains_on_nothing(
    make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def same(self: Rewards, sample: Sample) -> Reward:
        return Reward(RewardOutcome.SCORED, 0.5)

    async def run() -> TrainBatch:
        Client.engine = engine = Engine(seed=0)
        async with opened(make_settings("objective.zero_variance=drop"), tmp_path / "buffer.sqlite") as manager:
            return (await step_of(manager, engine, 0))[0]

    monkeypatch.setattr(UnequalRewards, "score", same)
    batch = asyncio.run(run())
    assert batch.num_sequences == 2 * PROMPTS_PER_STEP and not batch.loss_mask.any()
    assert consumed(tmp_path / "buffer.sqlite") == [(1, 0, NO_SIGNAL)] * PROMPTS_PER_STEP


def test_the_buffer_separates_trained_from_dropped_groups(make_settings: Callable[..., Settings], tmp_path: Path) -> None:
    async def run() -> None:
        Client.engine = engine = Engine(seed=0)
        async with opened(make_settings("objective.zero_variance=resample"), tmp_path / "buffer.sqlite") as manager:
            for step in range(3):
                await step_of(manager, engine, step)

    asyncio.run(run())
    rows = consumed(tmp_path / "buffer.sqlite")
    assert {step for step, _, _ in rows} == {1, 2, 3}, "as the console counts"
    assert [sum(trained for at, trained, _ in rows if at == step) for step in (1, 2, 3)] == [PROMPTS_PER_STEP] * 3
    rejected = [reason for _, trained, reason in rows if not trained]
    assert rejected and set(rejected) == {NO_SIGNAL}


def test_values_of_tokens_go_to_the_samples_of_their_rows(
    make_settings: Callable[..., Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_experts(groups: list[Group]) -> list[Sample]:
        return [dataclasses.replace(each, routed_experts=np.zeros((2, 1, 1), np.uint8)) for each in batch_samples(groups)]

    async def run() -> None:
        Client.engine = engine = Engine(seed=0)
        async with opened(make_settings("objective.zero_variance=resample", "run.keep_groups=2"), tmp_path / "buffer.sqlite") as manager:
            batch, _ = await step_of(manager, engine, 0)
            rows, row_of = list(manager.looked_at), np.repeat(np.arange(batch.num_sequences), batch.lengths)
            assert len({sample.group_id for sample in manager.looked_at.values()}) == 2 and len(rows) == 4
            for row, sample in manager.looked_at.items():
                assert sample.routed_experts is None, "gigabytes that would stay through the training"
                start = batch.cu_seqlens[row] + batch.prompt_lengths[row]
                np.testing.assert_array_equal(batch.tokens[start : batch.cu_seqlens[row + 1]], sample.response_ids)
            chosen = np.flatnonzero(np.isin(row_of, rows) & batch.loss_mask)
            offsets = chosen - batch.cu_seqlens[row_of[chosen]]
            values = np.tile(batch.tokens[chosen].astype(np.float32), (len(TOKEN_VALUES), 1))
            await manager.keep(TokenValues(row_of[chosen], offsets, values))

    monkeypatch.setattr("megatron_rl.rollout.manager.batch_samples", with_experts)
    asyncio.run(run())
    with sqlite3.connect(tmp_path / "buffer.sqlite") as connection:
        found = connection.execute("SELECT response_ids, loss_mask, token_values FROM samples WHERE token_values IS NOT NULL").fetchall()
    assert len(found) == 4
    for ids, mask, values in found:
        table = np.frombuffer(values, "<f4").reshape(len(TOKEN_VALUES), -1)
        expected = np.where(np.frombuffer(mask, "?"), np.frombuffer(ids, "<i4"), np.nan)
        np.testing.assert_array_equal(table, np.tile(expected, (len(TOKEN_VALUES), 1)))


@pytest.mark.parametrize("prints", [0, 1])
def test_a_sample_is_printed_where_no_group_is_kept(make_settings: Callable[..., Settings], tmp_path: Path, prints: int) -> None:
    async def run() -> None:
        Client.engine = engine = Engine(seed=0)
        settings = make_settings("run.keep_groups=0", f"observe.print_samples={prints}")
        async with opened(settings, tmp_path / "buffer.sqlite") as manager:
            await step_of(manager, engine, 0)
            assert len({sample.group_id for sample in manager.looked_at.values()}) == prints

    asyncio.run(run())


FILTERS = """
def keep(*, group, digit: int):
    return "its number ends with the digit" if group.prompt.text.rstrip("=").endswith(str(digit)) else None
"""


@pytest.mark.parametrize("zero_variance", ["keep", "resample"])
def test_a_filtered_group_is_noted_counted_and_replaced(
    make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, zero_variance: str
) -> None:
    (tmp_path / "filters_of_user.py").write_text(FILTERS)
    monkeypatch.syspath_prepend(tmp_path)
    words = (f"objective.zero_variance={zero_variance}", "rollout.filter={function: filters_of_user:keep, args: {digit: 1}}")

    async def run() -> list[tuple[TrainBatch, dict[str, float]]]:
        Client.engine = engine = Engine(seed=0)
        async with opened(make_settings(*words), tmp_path / "buffer.sqlite") as manager:
            return [await step_of(manager, engine, step) for step in range(6)]

    steps = asyncio.run(run())
    reason = "rollout.filter.function filters_of_user:keep: its number ends with the digit"
    rows = consumed(tmp_path / "buffer.sqlite")
    left_out = [sum(found == reason for at, _, found in rows if at == step + 1) for step in range(6)]
    assert sum(left_out) > 0 and [metrics["rollout/filtered_groups"] for _, metrics in steps] == left_out
    trained = [PROMPTS_PER_STEP - (num if zero_variance == "keep" else 0) for num in left_out]
    assert [batch.num_sequences for batch, _ in steps] == [2 * num for num in trained]


def consumed(path: Path) -> list[tuple[Any, ...]]:
    with sqlite3.connect(path) as buffer:
        return buffer.execute("SELECT consumed_step, trained, rejection FROM groups WHERE state = 'consumed' ORDER BY position").fetchall()


def test_samples_that_share_a_seed_stop_the_run(make_settings: Callable[..., Settings], tmp_path: Path) -> None:
    class SharedSeed(Engine):
        async def generate(self, token_ids: Ints, *, sampling: Sampling, num_samples: int = 1) -> tuple[Generation, ...]:
            return (await super().generate(token_ids, sampling=sampling)) * num_samples

    async def run() -> None:
        Client.engine = engine = SharedSeed(seed=0)
        settings = make_settings("data.prompts_per_step=16", "data.samples_per_prompt=4", "rollout.max_concurrent_requests=64")
        async with opened(settings, tmp_path / "buffer.sqlite") as manager:
            await step_of(manager, engine, 0)

    with pytest.raises(UserError, match=r"step 1: in 16 of the last 16 groups all samples are the same.* rollout\.function single_turn"):
        asyncio.run(run())


def test_an_engine_that_fails_is_told_once(make_settings: Callable[..., Settings], tmp_path: Path, capsys: Any) -> None:
    told: list[dict[str, Any]] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        Client.engine = engine = Engine(seed=1)
        async with opened(make_settings("data.prompts_per_step=30"), tmp_path / "buffer.sqlite") as manager:
            engine.broken = True
            with pytest.raises(EngineError, match="gone"):
                await step_of(manager, engine, 0)
            for _ in range(100):
                await asyncio.sleep(0)

    asyncio.run(run())
    gc.collect()
    assert told == [], "asyncio prints the traceback of each failure that nobody has asked for"
    assert capsys.readouterr().err == ""


def test_a_later_success_hides_no_failure(make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A group of the third step fails while nobody waits, and others are finished before the second step is asked for."""
    make = GroupMaker.make
    released, failed = asyncio.Event(), asyncio.Event()

    async def failing(self: GroupMaker, prompt: Prompt, **arguments: Any) -> Group:
        number = int(prompt.text.rstrip("="))
        if number == 8:
            await released.wait()
            failed.set()
            raise EngineError("gone")
        if number > 8:
            await failed.wait()
            await asyncio.sleep(0.01)
        return await make(self, prompt, **arguments)

    async def run() -> None:
        Client.engine = engine = Engine(seed=0)
        async with opened(make_settings("rollout.max_staleness=2", "data.shuffle=false"), tmp_path / "buffer.sqlite") as manager:
            await step_of(manager, engine, 0)
            released.set()
            while manager._buffer.counts().done < 7:
                await asyncio.sleep(0.001)
            for step in (1, 2):
                await asyncio.wait_for(step_of(manager, engine, step), 5)

    monkeypatch.setattr(GroupMaker, "make", failing)
    with pytest.raises(EngineError, match="gone"):
        asyncio.run(run())


def test_no_group_beyond_admission_is_made(make_settings: Callable[..., Settings], tmp_path: Path) -> None:
    """The groups of one step are done, those of two more are pending, as after a kill, and the run goes on without any staleness."""
    path = tmp_path / "buffer.sqlite"

    async def run(max_staleness: int) -> int:
        Client.engine = engine = Engine(seed=0)
        async with opened(make_settings(f"rollout.max_staleness={max_staleness}"), path) as manager:
            batch, _ = await step_of(manager, engine, 0)
            assert batch.num_sequences == 2 * PROMPTS_PER_STEP
            while engine.running:
                await asyncio.sleep(0)
            return len(engine.started)

    assert asyncio.run(run(2)) == 3 * PROMPTS_PER_STEP
    with sqlite3.connect(path) as buffer:
        buffer.execute("UPDATE groups SET state = 'done', consumed_step = NULL, trained = NULL")
        buffer.execute("UPDATE groups SET state = 'pending' WHERE position > ?", (PROMPTS_PER_STEP,))
        buffer.execute("DELETE FROM samples WHERE group_id IN (SELECT id FROM groups WHERE state = 'pending')")
    assert asyncio.run(run(0)) == 0


@pytest.mark.parametrize(
    ("limit", "overrides", "expected"),
    [("null", (), 528), ("null", ("rollout.function=megatron_rl.rollout.groups:single_turn",), 33), ("6", (), 6)],
)
def test_limits_follow_the_engines_where_none_is_set(
    make_settings: Callable[..., Settings], tmp_path: Path, limit: str, overrides: tuple[str, ...], expected: int
) -> None:
    """The KV pool's 33,792 tokens over the longest sequence of 64; a rollout of one's own may make longer ones, of a micro-batch."""
    Client.engine = engine = Engine(seed=0)

    async def work() -> None:
        settings = make_settings(
            f"rollout.max_concurrent_requests={limit}", "data.max_prompt_tokens=56", "training.max_tokens_per_micro_batch=1024", *overrides
        )
        async with opened(settings, tmp_path / "buffer.sqlite") as manager:
            await manager.join([dataclasses.replace(ADDRESS, max_total_tokens=33_792)])
            client = manager.clients[-1]
            client.served.update(answers=1, prompt_tokens=4, cached_tokens=1)
            _, metrics = await step_of(manager, engine, 0)
            assert manager.pool.limit(client) == expected
            assert metrics["engine/prefix_hits"] == 0.25
            assert ("engine/request_limit" in metrics) is (limit == "null")

    asyncio.run(work())
