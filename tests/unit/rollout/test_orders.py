"""Steps that take the groups that are done first, and leave the rest to later ones."""

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import manager_parts
import numpy as np
import pytest
from manager_parts import PROMPTS_PER_STEP, Client, Engine, assert_young, opened, prompts_of, replace_engines, settings_for, step_of

from megatron_rl.config.order import InOrder
from megatron_rl.config.settings import Settings
from megatron_rl.engines import engine_pool
from megatron_rl.engines.answers import Generation
from megatron_rl.engines.sampling import Sampling
from megatron_rl.observe.console import PhaseProgress
from megatron_rl.rollout import generator, manager
from megatron_rl.types import Group, Ints, StopReason, TrainBatch

Step = tuple[TrainBatch, dict[str, float]]

FIRST_COMPLETE = "rollout.order={kind: first_complete, oversampling: 2.0}"
PARTIAL = "rollout.order={kind: first_complete, oversampling: 2.0, partial: true}"
NUM_STEPS = 8
BUDGET = 40
"""Longer than the responses that are always asked for together."""


class Unequal(Engine):
    """One prompt of `every` takes the whole budget of tokens, others three; `abort_all` ends all with their tokens so far.

    Long answers end by an abort alone before version `held_until`. A token is its place in prompt and response, made by the present
    version, and certain: copies are no surprise.
    """

    def __init__(self, *, seed: int, every: int = 2, held_until: int = 0) -> None:
        super().__init__(seed=seed)
        self.every, self.held_until, self.aborts = every, held_until, 0
        self.asked: list[tuple[int, int]] = []  # lengths of the input and of the budget
        self.first_budgets: list[int] = []  # before the first abort

    async def generate(self, token_ids: Ints, *, sampling: Sampling, num_samples: int = 1) -> tuple[Generation, ...]:
        self.asked.append((len(token_ids), sampling.max_tokens))
        self.first_budgets += [sampling.max_tokens] * (not self.aborts)
        self.running += 1
        versions: list[int] = []
        aborts = self.aborts
        try:
            # A continued request has the rest of the budget.
            long = is_long(token_ids, self.every)
            length = sampling.max_tokens if long else 3 - (BUDGET - sampling.max_tokens)
            while len(versions) < length and aborts == self.aborts:
                if not long or len(versions) + 1 < length or self.version >= self.held_until:
                    versions.append(self.version)
                for _ in range(1 + self.random.randrange(2)):
                    await asyncio.sleep(0)
        finally:
            self.running -= 1
        reason = StopReason.ABORT if len(versions) < length else StopReason.STOP
        ids = np.arange(len(token_ids), len(token_ids) + len(versions)) % 32
        return tuple(Generation(ids, np.zeros(len(ids), np.float32), np.array(versions, np.int64), reason) for _ in range(num_samples))

    async def abort_all(self) -> None:
        self.aborts += 1


def is_long(token_ids: Ints, every: int = 2) -> bool:
    """By the first two tokens, which the shortest prompts have."""
    return int(token_ids[:2].sum()) % every == 0


class Abortable(Client):
    def __init__(self, *arguments: Any, **timeouts: Any) -> None:
        super().__init__(*arguments, **timeouts)
        self.abort_all = Client.engine.abort_all  # type: ignore[attr-defined]


@pytest.fixture
def make_settings(tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Settings]:
    replace_engines(monkeypatch)
    monkeypatch.setattr(manager, "EngineClient", Abortable)
    monkeypatch.setattr(engine_pool, "ABORT_INTERVAL_S", 0.0)
    make = settings_for(tmp_path, tiny_model())
    return lambda *overrides: make(f"rollout.sampling.max_response_tokens={BUDGET}", *overrides)


def ids_of(path: Path) -> list[tuple[int, int]]:
    """Consuming step and place of each consumed group, in the order of prompts."""
    with sqlite3.connect(path) as buffer:
        return buffer.execute("SELECT consumed_step, position FROM groups WHERE state = 'consumed' ORDER BY position").fetchall()


def assert_each_once(path: Path) -> None:
    rows = ids_of(path)
    assert [sum(at == step for at, _ in rows) for step in range(1, NUM_STEPS + 1)] == [PROMPTS_PER_STEP] * NUM_STEPS
    assert [place for _, place in rows] == list(range(1, NUM_STEPS * PROMPTS_PER_STEP + 1)), "lost, or one too many"
    with sqlite3.connect(path) as buffer:
        assert buffer.execute("SELECT count(*) FROM groups WHERE state <> 'consumed'").fetchone() == (0,)


async def run(
    settings: Settings, path: Path, *, seed: int, steps: range = range(NUM_STEPS), state: Any = None, **engine: int
) -> tuple[list[Step], Any]:
    """Batch and metrics of the steps, and the data cursors before each of them and behind the last."""
    Client.engine = made_by = Unequal(seed=seed, **engine)
    async with opened(settings, path) as made:
        if state is not None:
            await made.rewind(step=steps.start, position=state)
        found, positions = [], {}
        for step in steps:
            positions[step] = await made.position(step=step)
            found.append(await step_of(made, made_by, step))
        return found, positions | {steps.stop: await made.position(step=steps.stop)}


class Counted(list[str]):
    """Ids that count how often all were looked at."""

    looks = 0

    def __iter__(self) -> Iterator[str]:
        Counted.looks += 1
        return super().__iter__()


def test_a_group_that_is_done_costs_no_look_at_all_others(
    make_settings: Callable[..., Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InOrder, "quotas", lambda self, begun, *, count, **_: [(count, Counted(list(begun)[:count]))])
    progress = PhaseProgress("rollout", total=40, unit="groups")

    async def run() -> None:
        Client.engine = Unequal(seed=0)
        async with opened(make_settings(), tmp_path / "buffer.sqlite") as made:
            await made.generate(40, progress=progress)

    asyncio.run(run())
    assert Counted.looks == 2 and progress.completed == 40, "before the first and behind the last"


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("max_staleness", "oversampling"), [(1, 1.5), (1, 2.0), (2, 3.0), (3, 2.0)])
def test_every_group_is_trained_on_once_within_the_bound(
    make_settings: Callable[..., Settings], tmp_path: Path, max_staleness: int, oversampling: float, seed: int
) -> None:
    order = f"rollout.order={{kind: first_complete, oversampling: {oversampling}}}"
    steps, _ = asyncio.run(run(make_settings(order, f"rollout.max_staleness={max_staleness}"), tmp_path / "b.sqlite", seed=seed))
    for step, (batch, metrics) in enumerate(steps):
        assert_young(batch, step=step, max_staleness=max_staleness)
        assert metrics["rollout/renewed_groups"] == metrics["rollout/surplus_groups"] == 0, "awaited too late"
    assert_each_once(tmp_path / "b.sqlite")
    assert steps[0][1]["rollout/carried_groups"] > 0 == steps[-1][1]["rollout/carried_groups"]


def test_quick_groups_go_before_slow_ones(make_settings: Callable[..., Settings], tmp_path: Path) -> None:
    asyncio.run(run(make_settings(FIRST_COMPLETE, "rollout.max_staleness=1"), tmp_path / "b.sqlite", seed=1))
    steps = [step for step, _ in ids_of(tmp_path / "b.sqlite")]
    assert steps != sorted(steps)


@pytest.mark.parametrize("overrides", [("rollout.max_staleness=0",), ("rollout.max_staleness=1", "runtime.colocate=true")])
@pytest.mark.parametrize("seed", range(3))
def test_partial_answers_wait_for_the_next_step_and_go_on(
    make_settings: Callable[..., Settings], tmp_path: Path, overrides: tuple[str, ...], seed: int
) -> None:
    settings = make_settings(PARTIAL, *overrides)
    path, staleness = tmp_path / "b.sqlite", settings.rollout.max_staleness

    async def work() -> tuple[list[Step], Unequal]:
        Client.engine = engine = Unequal(seed=seed)
        steps = []
        async with opened(settings, path) as made:
            for step in range(NUM_STEPS):
                steps.append(await step_of(made, engine, step))
                assert engine.running == 0 == made.pool.num_running, "nothing is made while the trainer has the devices"
                busy_s = made.busy_s
                await asyncio.sleep(0.002)
                assert made.busy_s == busy_s
        return steps, engine

    steps, engine = asyncio.run(work())
    assert_each_once(path)
    mixed = 0
    for step, (batch, metrics) in enumerate(steps):
        assert_young(batch, step=step, max_staleness=staleness)
        assert metrics["rollout/renewed_groups"] == 0
        for start, end, prompt in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], batch.prompt_lengths, strict=True):
            tokens, versions = batch.tokens[start + prompt : end], batch.weight_versions[start + prompt : end]
            # Each token names its place: nothing is lost, doubled or in another order at a joint.
            assert tokens.tolist() == [place % 32 for place in range(prompt, end - start)]
            assert len(tokens) == (BUDGET if is_long(batch.tokens[start:end]) else 3) and (np.diff(versions) >= 0).all()
            assert (batch.loss_mask[start + prompt : end] == (versions >= step - staleness)).all()
            mixed += len(set(versions)) > 1
        made = batch.weight_versions[batch.weight_versions >= 0]
        assert metrics["rollout/stale_context_fraction"] == pytest.approx((made < step - staleness).mean())
        assert metrics["rollout/trained_length"] == pytest.approx(batch.loss_mask.sum() / batch.num_sequences)
    assert mixed > 0 and any(budget < BUDGET for _, budget in engine.asked)
    whole = {length + budget for length, budget in engine.asked if budget == BUDGET}
    assert {length + budget for length, budget in engine.asked} <= whole, "more than the rest of the budget"


class Coded(Unequal):
    """Answers of random lengths, of random tokens that `made` has by their log-probs: each is unique, and comes with all before."""

    def __init__(self, *, seed: int) -> None:
        super().__init__(seed=seed)
        self.made: dict[float, tuple[int, int, list[int]]] = {}

    async def generate(self, token_ids: Ints, *, sampling: Sampling, num_samples: int = 1) -> tuple[Generation, ...]:
        assert num_samples == 1
        ids, made, aborts = token_ids.tolist(), list[float](), self.aborts
        length = 1 + self.random.randrange(min(sampling.max_tokens, 34))
        while len(made) < length and aborts == self.aborts:
            made.append(-(1 + len(self.made)) / 2**20)
            self.made[made[-1]] = self.random.randrange(2, 30), self.version, list(ids)
            ids.append(self.made[made[-1]][0])
            for _ in range(1 + self.random.randrange(2)):
                await asyncio.sleep(0)
        versions = np.array([self.made[each][1] for each in made], np.int64)
        reason = StopReason.STOP if len(made) == length else StopReason.ABORT
        return (Generation(np.array(ids[len(token_ids) :], np.int64), np.array(made, np.float32), versions, reason),)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("order", "max_staleness"), [(PARTIAL, 0), (PARTIAL, 1), (FIRST_COMPLETE, 1)])
def test_turns_of_several_steps_keep_what_was_sampled(
    make_settings: Callable[..., Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str, max_staleness: int, seed: int
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setattr(manager_parts, "ADDRESS", replace(manager_parts.ADDRESS, context_length=512, max_total_tokens=4096))
    lengths = ("data.max_prompt_tokens=100", "training.max_tokens_per_micro_batch=512")
    overrides = (order, f"rollout.max_staleness={max_staleness}", "rollout.function=turns_under_test:rollout", *lengths)
    Client.engine = engine = Coded(seed=seed)

    async def work() -> list[Step]:
        async with opened(make_settings(*overrides), tmp_path / "b.sqlite") as made:
            return [await step_of(made, engine, step) for step in range(NUM_STEPS)]

    found, num_mixed = list[float](), 0
    for step, (batch, _) in enumerate(asyncio.run(work())):
        for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
            ids, versions = batch.tokens[start:end].tolist(), batch.weight_versions[start:end]
            sampled = np.flatnonzero(versions >= 0)
            keys = batch.rollout_log_probs[start:end][sampled].tolist()  # type: ignore[index]
            assert [engine.made[key] for key in keys] == [(ids[place], versions[place], ids[:place]) for place in sampled]
            assert (batch.loss_mask[start:end] == (versions >= max(0, step - max_staleness))).all()
            found += keys
            num_mixed += len(np.unique(versions[sampled])) > 1
    assert len(found) == len(set(found)) and (num_mixed > 0 or order == FIRST_COMPLETE)
    assert_each_once(tmp_path / "b.sqlite")


def test_groups_without_a_token_that_a_step_may_train_on_are_made_anew(make_settings: Callable[..., Settings], tmp_path: Path) -> None:
    """All answers are short and of one moment, so that a step leaves done groups, whose tokens the next step may not train on."""
    Client.engine = engine = Unequal(seed=0, every=10**6)
    engine.random.randrange = lambda *_: 2  # type: ignore[method-assign]

    async def work() -> list[Step]:
        async with opened(make_settings(PARTIAL, "rollout.max_concurrent_requests=64"), tmp_path / "b.sqlite") as made:
            return [await step_of(made, engine, step) for step in range(NUM_STEPS)]

    steps = asyncio.run(work())
    assert_each_once(tmp_path / "b.sqlite")
    assert sum(metrics["rollout/surplus_groups"] for _, metrics in steps) > 0
    assert all(metrics["rollout/renewed_groups"] == 0 for _, metrics in steps)
    assert all(batch.trainable_tokens.all() for batch, _ in steps)


def test_evaluation_does_not_wait_for_the_next_step(make_settings: Callable[..., Settings], tmp_path: Path) -> None:
    async def work() -> Group:
        Client.engine = engine = Unequal(seed=0)
        async with opened(make_settings(PARTIAL), tmp_path / "b.sqlite") as made:
            _, metrics = await step_of(made, engine, 0)
            assert metrics["rollout/carried_groups"] > 0
            prompt = replace(made.prompts.source.first(1)[0], id="held_out-0")
            asking = made.answer(prompt, name="held_out", num_samples=2, sampling=Sampling(temperature=0.0, max_tokens=BUDGET))
            answered = await asyncio.wait_for(asking, 5)
            assert made.production.tasks
            return answered

    assert len(asyncio.run(work()).samples) == 2


def test_a_killed_run_continues_the_pieces(make_settings: Callable[..., Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, path = make_settings(PARTIAL), tmp_path / "b.sqlite"
    monkeypatch.setattr(generator, "KEEP_AFTER_S", 0.0)
    kept = "SELECT group_id, max_version FROM answers"
    first, positions = asyncio.run(run(settings, path, seed=2, steps=range(2), every=4, held_until=2))
    with sqlite3.connect(path) as buffer:
        pieces = buffer.execute(kept).fetchall()
    assert pieces and {version for _, version in pieces} <= {0, 1}
    rest, _ = asyncio.run(run(settings, path, seed=3, steps=range(2, NUM_STEPS), state=positions[2], every=4))
    assert_each_once(path)
    # What becomes of it may be too old once it has its rewards, and is then made anew.
    assert any(budget < BUDGET for budget in Client.engine.first_budgets), "made from the start"  # type: ignore[attr-defined]
    for step, (batch, _) in enumerate([*first, *rest]):
        assert_young(batch, step=step, max_staleness=0)


def test_a_resumed_run_trains_on_the_same_groups_again(make_settings: Callable[..., Settings], tmp_path: Path) -> None:
    """Where their weights still exist: those of a step of another order than that of prompts are consumed together again."""
    settings, path = make_settings(FIRST_COMPLETE, "rollout.max_staleness=2"), tmp_path / "b.sqlite"
    before, positions = asyncio.run(run(settings, path, seed=4, steps=range(3)))
    with sqlite3.connect(path) as buffer:
        made = dict(buffer.execute("SELECT id, max_version FROM groups JOIN samples ON id = group_id WHERE consumed_step = 3"))
    (again, *_), _ = asyncio.run(run(settings, path, seed=5, steps=range(2, 4), state=positions[2]))
    kept = [name for name, version in made.items() if version < 3]
    with sqlite3.connect(path) as buffer:
        now = {name for (name,) in buffer.execute("SELECT id FROM groups WHERE consumed_step = 3")}
    assert len(kept) > 1 and set(kept) <= now
    if len(kept) == PROMPTS_PER_STEP:
        assert prompts_of(again[0]) == prompts_of(before[2][0])
