"""Rows by difficulty: pools of a source, and a source that sees the rewards of its rows."""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_rl.config.data_settings import DataFiles, DataSettings
from megatron_rl.config.settings import RolloutSettings
from megatron_rl.data.buffer import Buffer
from megatron_rl.data.position import position_of, rewind
from megatron_rl.data.row_source import FileRows, OwnRows
from megatron_rl.data.row_table import BadRows
from megatron_rl.data.source import PromptSource
from megatron_rl.engines.engine_pool import EnginePool
from megatron_rl.errors import UserError
from megatron_rl.rollout.production import Production
from megatron_rl.types import Group, Prompt, Reward, RewardOutcome, Sample

POOLS = ({"max_reward": 0.1, "chance": 0.5}, {"min_reward": 0.9, "chance": 0.2})


def sources_of(*paths: Path, pools: Any = POOLS) -> list[DataFiles]:
    return [DataFiles(path=path, pools=pools) for path in paths]


def rows_of(path: Path, *, size: int = 200, pools: Any = POOLS, seed: int = 3, shuffle: bool = True) -> FileRows:
    path.write_text("".join(json.dumps({"prompt": str(number)}) + "\n" for number in range(size)))
    source, settings = DataFiles(path=path, pools=pools), DataSettings(train=path, shuffle=shuffle)
    return FileRows([source], settings=settings, seed=seed, need_response=False, bad=BadRows(0))


def scored(prompt: Prompt, *rewards: float | None) -> Group:
    """A group with a trajectory for each reward, the first one of two samples; None failed."""
    samples = []
    for trajectory, value in enumerate(rewards):
        reward = Reward(RewardOutcome.ERROR) if value is None else Reward(RewardOutcome.SCORED, value)
        for _ in range(2 if trajectory == 0 else 1):
            one = Sample.written(prompt, [1], text="", reward=reward)
            samples.append(replace(one, index=len(samples), trajectory=trajectory))
    return Group(id=prompt.id, prompt=prompt, samples=tuple(samples))


def train(buffer: Buffer, rewards: Callable[[Prompt], tuple[float | None, ...]], *, step: int, count: int) -> None:
    """Make the first `count` groups and consume them in `step`."""
    for prompt in buffer.take_pending(count, among=count):
        buffer.put_done(scored(prompt, *rewards(prompt)))
    buffer.consume(dict.fromkeys([group.id for group in buffer.waiting()][:count]), step=step)


def test_rows_come_by_the_pool_of_their_last_reward(tmp_path: Path) -> None:
    # Never solved, in between, always solved, and never taken: five epochs, whose shares are those of the pools.
    def mean_reward(name: str) -> float | None:
        return (0.0, 0.5, 1.0, None)[int(name.partition("-")[2]) % 4]

    rows = rows_of(tmp_path / "a.jsonl", size=400)
    first = rows.take(400, mean_reward)
    assert sorted(int(name.partition("-")[2]) for name, _ in first) == list(range(400)), "the first epoch is whole"
    taken = [tuple(map(int, name.split("-"))) for name, _ in rows.take(1400, mean_reward)]
    epochs = {epoch for epoch, _ in taken}
    assert epochs >= {1, 2, 3, 4} and len(set(taken)) == 1400
    shares = [np.mean([sum(index % 4 == kind for at, index in taken if at == epoch) / 100 for epoch in (1, 2, 3, 4)]) for kind in range(4)]
    assert shares[1] == shares[3] == 1 and abs(shares[0] - 0.5) < 0.08 and abs(shares[2] - 0.2) < 0.08
    unsolved = [{index for at, index in taken if at == epoch and index % 4 == 0} for epoch in (1, 2)]
    assert len(unsolved[0] & unsolved[1]) < 40, "other rows in another epoch"


@pytest.mark.parametrize(("pools", "expected"), [(({"chance": 0.01},), 0.01), (({"min_reward": 1, "chance": 0.3}, {"chance": 1}), 0.3)])
def test_the_first_pool_that_fits_counts(tmp_path: Path, pools: Any, expected: float) -> None:
    rows = rows_of(tmp_path / "a.jsonl", size=500, pools=pools)
    rows.take(500)
    names = [name for name, _ in rows.take(300, lambda name: 1.0)]
    passed = rows.state()["passed"][0] - 500
    assert abs(300 / passed - expected) < 0.1 * expected + 0.02 and len(set(names)) == 300


def test_the_last_reward_of_a_row_is_of_its_last_epoch(tmp_path: Path) -> None:
    asked: list[str] = []

    def mean_reward(name: str) -> float | None:
        asked.append(name)
        return 0.5 if name == "0-1" else None

    rows = rows_of(tmp_path / "a.jsonl", size=2, shuffle=False)
    rows.take(6, mean_reward)
    assert asked == ["0-0", "0-1", "1-0", "0-0", "1-1", "0-1"]


@contextmanager
def opened(directory: Path, **changes: Any) -> Iterator[tuple[PromptSource, Buffer]]:
    rows = rows_of(directory / "a.jsonl", size=12, **changes)
    source = PromptSource.__new__(PromptSource)
    source.rows = rows
    source._prompts = lambda named: [Prompt(name, np.array([1]), row.prompt) for name, row in named]  # type: ignore[method-assign]
    with Buffer(directory / "buffer.sqlite") as buffer:
        yield source, buffer


def run(directory: Path, *, steps: range, position: dict[str, Any] | None, ahead: int, kill: bool = False) -> tuple[list[str], Any]:
    """The ids that each step takes, with `ahead` groups begun before their step, and the position behind them."""
    with opened(directory) as (source, buffer):
        rewind(source, buffer, step=steps.start, position=position)
        for step in steps:
            lacking = 4 + ahead - buffer.counts().waiting
            rewards = lambda name, step=step: buffer.mean_reward(name, until=step)  # noqa: E731
            buffer.add_prompts(source.next_prompts(max(0, lacking), mean_reward=rewards))
            train(buffer, lambda prompt: (float(int(prompt.text) % 3), None), step=step + 1, count=4)
        ids = buffer.ids_after(0)
        return ids, None if kill else position_of(source, buffer, step=steps.stop)


@pytest.mark.parametrize("ahead", [0, 3])
@pytest.mark.parametrize("killed_at", [4, 7, 10, 12])
def test_a_killed_run_takes_the_rows_of_an_unhurt_one(tmp_path: Path, ahead: int, killed_at: int) -> None:
    whole, hurt = tmp_path / "whole", tmp_path / "hurt"
    whole.mkdir()
    hurt.mkdir()
    expected, _ = run(whole, steps=range(13), position=None, ahead=ahead)
    assert len({name.partition("-")[2] for name in expected[12:24]}) < 12, "pools left rows out"
    _, position = run(hurt, steps=range(4), position=None, ahead=ahead)
    position = json.loads(json.dumps(position))
    run(hurt, steps=range(4, killed_at), position=position, ahead=ahead, kill=True)
    assert run(hurt, steps=range(4, 13), position=position, ahead=ahead)[0] == expected


def test_rows_in_another_order_are_not_followed(tmp_path: Path) -> None:
    run(tmp_path, steps=range(8), position=None, ahead=0)
    for changes in ({"seed": 4}, {"shuffle": False}, {"seed": 4, "pools": ()}):
        with opened(tmp_path, **changes) as (source, buffer), pytest.raises(UserError, match=r"does not follow .* restore run\.seed"):
            rewind(source, buffer, step=0, position=None)
    with pytest.raises(UserError, match="does not follow"):
        rows_of(tmp_path / "b.jsonl", size=3).follow(["0-7"])
    with pytest.raises(UserError, match="prompt '1' of the buffer does not follow"):
        rows_of(tmp_path / "b.jsonl", size=3).follow(["1"])


def test_a_run_goes_on_without_its_pools(tmp_path: Path) -> None:
    _, position = run(tmp_path, steps=range(6), position=None, ahead=0)
    before, _ = run(tmp_path, steps=range(6, 9), position=position, ahead=0, kill=True)
    with opened(tmp_path, pools=()) as (source, buffer):
        rewind(source, buffer, step=6, position=position)
        assert buffer.ids_after(0) == before, "what was taken is taken again, whatever the pools"
        names = [prompt.id for prompt in source.next_prompts(24)]
        assert not set(names) & set(before) and len(set(names)) == 24


def test_rows_that_were_taken_count_for_the_mixture(tmp_path: Path) -> None:
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path in paths:
        path.write_text("".join(json.dumps({"prompt": str(number)}) + "\n" for number in range(5)))
    settings = DataSettings(train=tuple(sources_of(*paths)))
    one, other = (FileRows(settings.sources, settings=settings, seed=1, need_response=False, bad=BadRows(0)) for _ in range(2))
    names = [name for name, _ in one.take(7)]
    assert [name for name, _ in other.follow(names)] == names and other.state() == one.state()
    assert [name for name, _ in other.take(9)] == [name for name, _ in one.take(9)]
    old = {name: value for name, value in one.state().items() if name != "passed"}
    other.restore(old)
    assert other.state() == one.state(), "nothing was left out by a run without pools"


def test_production_hands_on_the_rewards_of_whole_steps(tmp_path: Path) -> None:
    seen: list[float | None] = []

    class Source:
        def next_prompts(self, count: int, *, mean_reward: Callable[[str], float | None]) -> list[Prompt]:
            seen.append(mean_reward("0-0"))
            return [Prompt(f"1-{len(seen)}", np.array([1]), "") for _ in range(count)]

    async def begin(buffer: Buffer) -> None:
        options: dict[str, Any] = {"pool": EnginePool(max_requests=1), "source": Source(), "buffer": buffer}
        made = Production(None, RolloutSettings(), **options, per_step=1, num_steps=9, forecasts=False)  # type: ignore[arg-type]
        buffer.take_pending = lambda *_, **__: []  # type: ignore[method-assign]
        for step, waiting in ((2, 1), (3, 2)):
            made._begin_groups(waiting, step=step)

    with Buffer(tmp_path / "buffer.sqlite") as buffer:
        buffer.add_prompts([Prompt("0-0", np.array([1]), "0")])
        train(buffer, lambda prompt: (1.0, 0.0), step=3, count=1)
        asyncio.run(begin(buffer))
    assert seen == [None, 0.5], "step 3 is not whole while it takes groups"


def test_mean_rewards_are_of_trajectories(tmp_path: Path) -> None:
    with Buffer(tmp_path / "buffer.sqlite") as buffer:
        buffer.add_prompts(Prompt(name, np.array([1]), name) for name in "abcd")
        rewards: Mapping[str, tuple[float | None, ...]] = {"a": (1.0, 0.0, None), "b": (None, None), "c": (-1.0,), "d": (3.0, 1.0, 2.0)}
        train(buffer, lambda prompt: rewards[prompt.id], step=1, count=2)
        train(buffer, lambda prompt: rewards[prompt.id], step=2, count=1)
        assert buffer.mean_rewards(0, 2) == {"a": 0.5, "c": -1.0} and buffer.mean_rewards(1, 2) == {"c": -1.0}
        assert [buffer.mean_reward(name, until=1) for name in "abcd"] == [0.5, None, None, None]


CURRICULUM = """
class Curriculum:
    def __init__(self, *, seed: int) -> None:
        self.state = {"at": 0, "level": 0}

    def see(self, rewards):
        solved = [number for number, reward in rewards.items() if reward > 0]
        self.state = {**self.state, "level": self.state["level"] + len(solved)}

    def next_rows(self, count):
        first, level = self.state["at"], self.state["level"]
        self.state = {"at": first + count, "level": level}
        return [{"prompt": f"{level}+{number}="} for number in range(first, first + count)]
"""


def test_a_source_sees_rewards_at_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_curriculum.py").write_text(CURRICULUM)
    monkeypatch.syspath_prepend(tmp_path)
    settings = DataSettings(source="my_curriculum:Curriculum")

    def source() -> PromptSource:
        made = PromptSource.__new__(PromptSource)
        made.rows = OwnRows(settings=settings, seed=1, need_response=False)
        made._prompts = lambda named: [Prompt(name, np.array([*row.prompt.encode()]), row.prompt) for name, row in named]  # type: ignore[method-assign]
        return made

    with Buffer(tmp_path / "buffer.sqlite") as buffer:
        first = source()
        buffer.add_prompts(first.next_prompts(4))
        train(buffer, lambda prompt: (float(prompt.id in "02"),), step=1, count=4)
        assert [prompt.text for prompt in first.next_prompts(0)] == []
        position = json.loads(json.dumps(position_of(first, buffer, step=1)))
        assert position["own"] == {"at": 4, "level": 2} and position["seen"] == 1
        assert position_of(first, buffer, step=1)["own"] == position["own"], "no reward is shown twice"
        drawn = first.next_prompts(3)
        buffer.add_prompts(drawn)
        train(buffer, lambda prompt: (1.0,), step=2, count=3)
        assert [prompt.text for prompt in drawn] == ["2+4=", "2+5=", "2+6="]
        again = source()
        rewind(again, buffer, step=1, position=position)
        assert [prompt.text for prompt in again.next_prompts(1)] == ["2+7="], "what was drawn is drawn alike, nothing new is seen"
        # An older place, from before a reward was seen: the buffer keeps the rows that were drawn after it.
        older = source()
        rewind(older, buffer, step=0, position={**position, "own": {"at": 0, "level": 0}, "taken": 0, "num_groups": 0, "num_consumed": 0})
        assert [group.prompt.text for group in buffer.groups(buffer.ids_after(0))] == [
            f"{level}+{number}=" for number, level in enumerate([0] * 4 + [2] * 3)
        ]
        assert buffer.counts().total == 7


def test_pools_without_rewards_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    settings = DataSettings(train=({"path": path, "pools": POOLS},))  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"data\.train has pools, .* supervised training has none; remove the pools"):
        PromptSource(settings.sources, None, settings=settings, seed=1, need_response=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs min_reward <= max_reward"):
        DataFiles(path=path, pools=({"min_reward": 1, "max_reward": 0, "chance": 1},))  # type: ignore[arg-type]
