"""Rewards that failed and are given again after a resume, shares of failed calls, and answers of an evaluation."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from maker_parts import Engine, make_maker, make_prompts
from manager_parts import Client, opened, replace_engines, settings_for, step_of
from manager_parts import Engine as ManagerEngine
from run_parts import Rewards

from megatron_rl.data.buffer import Buffer
from megatron_rl.engines.engine_pool import EnginePool, Urgency
from megatron_rl.errors import UserError
from megatron_rl.plugins.kinds import Rollout
from megatron_rl.rollout import manager
from megatron_rl.rollout.branching import rollout as branching
from megatron_rl.rollout.groups import single_turn
from megatron_rl.types import Group, Reward, RewardOutcome, Sample

LATE = Reward(RewardOutcome.TIMEOUT, message="late")


async def own_rewards(**arguments: Any) -> tuple[Sample, ...]:
    """Samples whose own reward is 10."""
    made = await single_turn(**arguments)
    return tuple(replace(sample, reward=Reward(RewardOutcome.SCORED, 10.0)) for sample in made)


def made_twice(path: Path, rollout: Rollout, function: str | None) -> tuple[Group, Group, int]:
    """A group whose second reward came too late, the same one after a resume, and the answers asked for by then."""
    client, life = Engine(), 0

    async def score(sample: Sample) -> Reward:
        return LATE if sample.index == 1 and life == 0 else Reward(RewardOutcome.SCORED, 1.0 + sample.index)

    async def make(buffer: Buffer) -> Group:
        maker = make_maker(EnginePool([client], max_requests=4), rollout, score=score, function=function)  # type: ignore[list-item]
        (prompt,) = buffer.take_pending(1)
        group = await maker.make(prompt, num_samples=3, buffer=buffer)
        buffer.put_done(group)
        return group

    with Buffer(path) as buffer:
        buffer.add_prompts(make_prompts(1))
        first = asyncio.run(make(buffer))
    life = 1
    with Buffer(path) as buffer:
        buffer.rewind(step=2)
        return first, asyncio.run(make(buffer)), client.calls


@pytest.mark.parametrize(("rollout", "function", "own"), [(single_turn, None, 0.0), (own_rewards, "a:own_rewards", 10.0)])
def test_a_failed_reward_is_given_again_and_no_other_twice(tmp_path: Path, rollout: Rollout, function: str | None, own: float) -> None:
    first, again, calls = made_twice(tmp_path / "buffer.sqlite", rollout, function)
    values: Sequence[list[float | None]] = [[sample.reward and sample.reward.value for sample in group.samples] for group in (first, again)]
    assert values == [[own + 1.0, None, own + 3.0], [own + 1.0, own + 2.0, own + 3.0]]
    assert calls == (1 if function is None else 2), "answers whose rewards are the function's alone are kept"


def test_answers_of_an_evaluation_share_no_trunk() -> None:
    client = Engine()

    async def asked(urgency: Urgency) -> list[int]:
        client.asked.clear()
        maker = make_maker(EnginePool([client], max_requests=4), branching, function="megatron_rl.rollout.branching:rollout")  # type: ignore[list-item]
        group = await maker.make(make_prompts(1)[0], num_samples=4, urgency=urgency)
        assert len(group.samples) == 4
        return [len(ids) for ids, _ in client.asked]

    training, evaluation = (asyncio.run(asked(urgency)) for urgency in (Urgency.TRAINING, Urgency.EVALUATION))
    assert training == [2, 3, 3, 3] and evaluation == [2, 2, 2, 2], "leaves begin behind a token of the trunk"


class LateInASmallRound(Rewards):
    """The third prompt's samples are alike; of the two prompts that come in its place one reward each is too late."""

    order: list[str] = []  # noqa: RUF012, of one test

    async def score(self, sample: Sample) -> Reward:
        await asyncio.sleep(0)
        if sample.group_id not in self.order:
            self.order.append(sample.group_id)
        place = self.order.index(sample.group_id)
        if place in (4, 5) and sample.index == 1:
            return LATE
        return Reward(RewardOutcome.SCORED, 0.5 if place == 2 else float(sample.index))


@pytest.mark.parametrize(("rate", "ends"), [(0.2, False), (0.05, True)])
def test_the_share_of_failed_rewards_is_of_all_rounds(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rate: float, ends: bool
) -> None:
    replace_engines(monkeypatch)
    monkeypatch.setattr(LateInASmallRound, "order", [])
    monkeypatch.setattr(manager, "RewardRunner", LateInASmallRound)
    settings = settings_for(tmp_path, tiny_model())("objective.zero_variance=resample", f"reward.max_error_rate={rate}")
    Client.engine = engine = ManagerEngine(seed=0)

    async def step() -> float:
        async with opened(settings, tmp_path / "buffer.sqlite") as own:
            _, values = await step_of(own, engine, 0)
            return values["rollout/reward_timeouts"]

    if ends:
        with pytest.raises(UserError, match="1 of 10 reward calls failed"):
            asyncio.run(step())
    else:
        assert asyncio.run(step()) >= 1, "half of the calls of its round, and a tenth of the step's"
