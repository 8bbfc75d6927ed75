"""A manager that goes on with the buffer of an earlier life: what it keeps, and what it makes anew."""

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from manager_parts import (
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
from megatron_rl.errors import UserError
from megatron_rl.rollout import groups
from megatron_rl.types import Reward, RewardOutcome, Sample


@pytest.fixture
def make_settings(tiny_model: Callable[..., Path], tmp_path: Path) -> Callable[..., Settings]:
    return settings_for(tmp_path, tiny_model())


@pytest.fixture(autouse=True)
def engines(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_engines(monkeypatch)


@pytest.mark.parametrize("seed", range(4))
def test_a_killed_run_keeps_finished_groups_under_the_same_rule(make_settings: Callable[..., Settings], tmp_path: Path, seed: int) -> None:
    settings = make_settings("rollout.max_staleness=2", "objective.zero_variance=resample")
    path, killed = tmp_path / "buffer.sqlite", tmp_path / "killed.sqlite"
    checkpoint_step, killed_step = 2 + seed % 2, 4

    async def first() -> tuple[list[Any], dict[str, Any]]:
        Client.engine = engine = Engine(seed=seed)
        async with opened(settings, path) as manager:
            batches, state = [], {}
            for step in range(killed_step):
                if step == checkpoint_step:
                    state = await manager.position(step=step)
                batches.append(prompts_of((await step_of(manager, engine, step))[0]))
            # What `kill -9` leaves of the file at this moment.
            with sqlite3.connect(path) as source, sqlite3.connect(killed) as copy:
                source.backup(copy)
            return batches, state

    async def second(state: dict[str, Any]) -> list[Any]:
        Client.engine = engine = Engine(seed=seed + 10)
        async with opened(settings, killed) as manager:
            await manager.rewind(step=checkpoint_step, position=state)
            batches = []
            for step in range(checkpoint_step, settings.run.num_steps):
                batch, values = await step_of(manager, engine, step)
                assert_young(batch, step=step, max_staleness=2)
                assert values["rollout/renewed_groups"] == 0
                batches.append(prompts_of(batch))
            return batches

    before, state = asyncio.run(first())
    finished = finished_by_old_weights(killed, version=checkpoint_step)
    after = asyncio.run(second(state))
    assert after[: killed_step - checkpoint_step] == before[checkpoint_step:]
    made_again = {sample for sample in tokens_of(killed) if sample[0] in finished} - tokens_of(path)
    assert finished and not made_again, "what the weights of the checkpoint had finished was not made again"


def finished_by_old_weights(path: Path, *, version: int) -> set[str]:
    with sqlite3.connect(path) as copy:
        states = "SELECT group_id FROM samples JOIN groups ON id = group_id WHERE state IN ('done', 'consumed')"
        return {group_id for (group_id,) in copy.execute(f"{states} GROUP BY 1 HAVING max(max_version) <= ?", (version,))}


def tokens_of(path: Path) -> set[tuple[str, bytes]]:
    """(group, weight versions) of every sample: the versions tell one generation from another."""
    with sqlite3.connect(path) as copy:
        return set(copy.execute("SELECT group_id, weight_versions FROM samples"))


@pytest.fixture
def saved(make_settings: Callable[..., Settings], tmp_path: Path) -> tuple[Settings, Path, dict[str, Any]]:
    """The settings, the buffer and the position of a run with staleness that was saved after 3 steps and killed after 4."""
    settings, path = make_settings("rollout.max_staleness=1"), tmp_path / "buffer.sqlite"

    async def run() -> dict[str, Any]:
        Client.engine = engine = Engine(seed=0)
        async with opened(settings, path) as manager:
            for step in range(4):
                if step == 3:
                    state = await manager.position(step=3)
                await step_of(manager, engine, step)
            return state

    return settings, path, asyncio.run(run())


async def resumed(settings: Settings, path: Path, position: dict[str, Any], *, step: int = 3) -> tuple[tuple[str, ...], list[Any]]:
    """What is said, and the prompts of two steps."""
    Client.engine = engine = Engine(seed=1)
    async with opened(settings, path) as manager:
        said = await manager.rewind(step=step, position=position)
        return said, [prompts_of((await step_of(manager, engine, number))[0]) for number in (step, step + 1)]


def test_a_checkpoint_with_the_next_batch_ready_is_resumed(saved: tuple[Settings, Path, dict[str, Any]]) -> None:
    """As one is that SIGTERM asks for before the ranks train on that batch, or before all of it is there."""
    settings, path, position = saved

    async def late() -> dict[str, Any]:
        async with opened(settings, path) as manager:
            return await manager.position(step=3)

    assert asyncio.run(late())["num_consumed"] == position["num_consumed"] == 3 * PROMPTS_PER_STEP
    assert asyncio.run(late())["num_groups"] >= position["num_groups"]


@pytest.mark.parametrize("lost", ["consumed", "added"])
def test_a_buffer_of_an_earlier_moment_is_refused(saved: tuple[Settings, Path, dict[str, Any]], lost: str) -> None:
    """As one is that was copied without its -wal file: what it forgot would be trained on again, or left out."""
    settings, path, position = saved
    with sqlite3.connect(path) as copy:
        if lost == "consumed":
            copy.execute("UPDATE groups SET state = 'done', consumed_step = NULL WHERE consumed_step = 3")
        else:
            copy.execute("DELETE FROM groups WHERE state <> 'consumed' OR consumed_step = 4")
    with pytest.raises(UserError, match=r"buffer\.sqlite is not the buffer of the checkpoint of step 3: it has .*-wal file beside it"):
        asyncio.run(resumed(settings, path, position))


def test_a_run_continues_without_its_buffer_and_names_the_loss(saved: tuple[Settings, Path, dict[str, Any]], tmp_path: Path) -> None:
    settings, _, position = saved
    path = tmp_path / "new.sqlite"
    said, first = asyncio.run(resumed(settings, path, position))
    waiting = position["num_groups"] - position["num_consumed"]
    (sentence,) = said
    assert "is gone" in sentence and "from step 4 on" in sentence and f"{waiting} prompts that waited" in sentence and waiting == 4

    async def again() -> tuple[dict[str, Any], list[Any]]:
        Client.engine = engine = Engine(seed=2)
        async with opened(settings, path) as manager:
            # A kill came before the next checkpoint.
            assert await manager.rewind(step=3, position=position) == ()
            batches = [prompts_of((await step_of(manager, engine, 3))[0])]
            return await manager.position(step=4), [*batches, prompts_of((await step_of(manager, engine, 4))[0])]

    middle, batches = asyncio.run(again())
    assert batches == first, "no prompt comes twice, and none is left out"
    assert asyncio.run(resumed(settings, path, middle, step=4))[1][0] == first[1]


def test_a_resume_with_less_staleness_makes_what_is_too_old_anew(make_settings: Callable[..., Settings], tmp_path: Path) -> None:
    path = tmp_path / "buffer.sqlite"

    async def run(max_staleness: int, steps: range, state: dict[str, Any] | None) -> tuple[dict[str, Any], list[dict[str, float]]]:
        Client.engine = engine = Engine(seed=0)
        async with opened(make_settings(f"rollout.max_staleness={max_staleness}"), path) as manager:
            if state is not None:
                await manager.rewind(step=steps.start, position=state)
            metrics = []
            for step in steps:
                batch, values = await step_of(manager, engine, step)
                assert_young(batch, step=step, max_staleness=max_staleness)
                metrics.append(values)
            while manager.production.tasks:
                await asyncio.sleep(0)
            return await manager.position(step=steps.stop), metrics

    state, _ = asyncio.run(run(2, range(3), None))
    _, metrics = asyncio.run(run(0, range(3, 6), state))
    assert metrics[0]["rollout/renewed_groups"] == PROMPTS_PER_STEP


def test_a_group_finished_with_too_old_answers_is_made_again(
    make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One of step 4, whose samples of version 1 wait for their rewards, is killed, and goes on with a max_staleness of 1 instead of 2."""
    path, late = tmp_path / "buffer.sqlite", f"{2 * PROMPTS_PER_STEP}="
    released: list[asyncio.Event] = []

    async def wait_for_late(self: Rewards, sample: Sample) -> Reward:
        if sample.prompt.text == late and sample.weight_versions.max() < 2:
            await released[-1].wait()
        return Reward(RewardOutcome.SCORED, float(sample.index))

    async def run(max_staleness: int, steps: range, state: dict[str, Any] | None) -> tuple[dict[str, Any], list[dict[str, float]]]:
        Client.engine = engine = Engine(seed=0)
        released.append(asyncio.Event())
        metrics = []
        async with opened(make_settings(f"rollout.max_staleness={max_staleness}", "data.shuffle=false"), path) as manager:
            if state is not None:
                await manager.rewind(step=steps.start, position=state)
            for step in steps:
                if step == 2:
                    asyncio.get_running_loop().call_later(0.1, released[-1].set)
                batch, values = await step_of(manager, engine, step)
                assert_young(batch, step=step, max_staleness=max_staleness)
                metrics.append(values)
            if state is None:
                await asyncio.wait_for(until_late_is_kept_and_all_others_are_done(), 5)
            return await manager.position(step=steps.stop), metrics

    async def until_late_is_kept_and_all_others_are_done() -> None:
        kept = "SELECT min(min_version), max(max_version) FROM samples JOIN groups ON id = group_id WHERE prompt_text = ?"
        unfinished = "SELECT prompt_text FROM groups WHERE state NOT IN ('done', 'consumed')"
        with sqlite3.connect(path) as copy:
            while copy.execute(kept, (late,)).fetchone() != (0, 0) or copy.execute(unfinished).fetchall() != [(late,)]:
                await asyncio.sleep(0.001)

    monkeypatch.setattr(UnequalRewards, "score", wait_for_late)
    monkeypatch.setattr(groups, "SLOW_REWARD_S", 0.01)
    state, _ = asyncio.run(run(2, range(1), None))
    _, metrics = asyncio.run(run(1, range(1, 4), state))
    assert [values["rollout/renewed_groups"] for values in metrics] == [0, PROMPTS_PER_STEP, 0]


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("rollout.sampling.temperature=0.5", "rollout.sampling.temperature is 0.5 now and was 1.0"),
        ("rollout.sampling.max_response_tokens=9", "rollout.sampling.max_response_tokens is 9 now and was 8"),
        ("data.samples_per_prompt=3", "data.samples_per_prompt is 3 now and was 2"),
        ("reward.args={bonus: 1}", r"reward.args is {'bonus': 1} now and was {}"),
        ("objective.advantage=remax", "objective.advantage.kind is remax is True now and was False"),
        ("rollout.max_turns=3", "rollout.max_turns is 3 now and was 16"),
        ("rollout.renderer=qwen3", "rollout.renderer is qwen3 now and was None"),
        ("run.num_steps=9", None),
    ],
)
def test_finished_groups_of_other_settings_are_made_at_a_resume(
    make_settings: Callable[..., Settings], tmp_path: Path, override: str, sentence: str | None
) -> None:
    path = tmp_path / "buffer.sqlite"

    async def run(*overrides: str, state: dict[str, Any] | None = None) -> tuple[dict[str, Any], tuple[str, ...]]:
        Client.engine = engine = Engine(seed=0)
        notes: tuple[str, ...] = ()
        async with opened(make_settings(*overrides), path) as manager:
            if state is not None:
                # The step of the checkpoint was the first; the second is trained on again.
                notes = await manager.rewind(step=1, position=state)
                counts = manager._buffer.counts()
                assert (counts.pending, counts.done) == ((PROMPTS_PER_STEP, 0) if notes else (0, PROMPTS_PER_STEP))
                await step_of(manager, engine, 1)
                return state, notes
            await step_of(manager, engine, 0)
            state = await manager.position(step=1)
            await step_of(manager, engine, 1)
            return state, notes

    state, _ = asyncio.run(run())
    _, notes = asyncio.run(run(override, state=state))
    assert notes == (() if sentence is None else (f"{PROMPTS_PER_STEP} groups to be made anew, because {sentence}",))
    assert asyncio.run(run(override, state=state))[1] == ()


def test_a_refused_resume_loses_no_sample(make_settings: Callable[..., Settings], tmp_path: Path) -> None:
    """Other prompts, and other settings with which finished groups would be made anew: with the old ones, the run goes on."""
    path, refused = tmp_path / "buffer.sqlite", ("data.overlong=truncate", "data.max_prompt_tokens=1", "reward.args={bonus: 1}")

    async def run(*overrides: str, state: dict[str, Any] | None = None) -> dict[str, Any]:
        Client.engine = engine = Engine(seed=0)
        async with opened(make_settings("rollout.max_staleness=2", *overrides), path) as manager:
            if state is not None:
                assert await manager.rewind(step=1, position=state) == ()
                assert manager._buffer.counts().done >= PROMPTS_PER_STEP
                return state
            await step_of(manager, engine, 0)
            state = await manager.position(step=1)
            await step_of(manager, engine, 1)
            return state

    state = asyncio.run(run())
    with pytest.raises(UserError, match=r"has other tokens than in .*system_prompt, chat_template_kwargs, max_prompt_tokens"):
        asyncio.run(run(*refused, state=state))
    asyncio.run(run(state=state))


def test_groups_that_wait_get_the_labels_of_the_present_settings(make_settings: Callable[..., Settings], tmp_path: Path) -> None:
    """Also those whose prompts were taken before the checkpoint, and those that nothing was made of yet."""
    path = tmp_path / "buffer.sqlite"

    async def run(*overrides: str, state: dict[str, Any] | None = None) -> tuple[dict[str, Any], tuple[str, ...]]:
        Client.engine = engine = Engine(seed=0)
        notes: tuple[str, ...] = ()
        async with opened(make_settings("rollout.max_staleness=2", *overrides), path) as manager:
            if state is not None:
                notes = await manager.rewind(step=1, position=state)
            else:
                await step_of(manager, engine, 0)
                state = await manager.position(step=1)
            taken = manager._buffer.counts().total
            await step_of(manager, engine, 1)
            return state | {"groups": taken}, notes

    def labels() -> dict[str, set[tuple[str, str]]]:
        found: dict[str, set[tuple[str, str]]] = {"old": set(), "new": set()}
        with sqlite3.connect(path) as copy:
            for step, label, metadata in copy.execute("SELECT consumed_step, label, metadata FROM groups"):
                found["old" if step == 1 else "new"].add((label, metadata))
        return found

    state, _ = asyncio.run(run())
    assert state.pop("groups") > PROMPTS_PER_STEP, "some wait from before the checkpoint"
    _, notes = asyncio.run(run("data.label_key=answer", state=state))
    (note,) = notes
    assert note.endswith("groups to be made anew, because data.label_key is answer now and was label")
    assert labels() == {"old": {("1", '{"answer": "2"}')}, "new": {("2", '{"label": "1"}')}}
