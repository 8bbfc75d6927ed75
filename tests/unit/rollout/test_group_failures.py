"""Rollouts that raise, hang or break their contract: what is repeated, what is left out, and what is no fault of theirs."""

import asyncio
import gc
import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from maker_parts import Engine, dead, make_maker, make_prompts

from megatron_rl.config.settings import RolloutSettings, SamplingSettings
from megatron_rl.data.buffer import Buffer
from megatron_rl.engines.engine_pool import EnginePool, Urgency
from megatron_rl.engines.sampling import Sampling
from megatron_rl.errors import EngineError, TrajectoryError
from megatron_rl.plugins.kinds import Rollout
from megatron_rl.rollout import groups
from megatron_rl.rollout.generator import PoolGenerator
from megatron_rl.rollout.groups import GroupMaker, _total, single_turn
from megatron_rl.rollout.rollout_trial import NumberTokenizer
from megatron_rl.types import Failure, Group, Prompt, Reward, RewardOutcome, Sample


async def make_with(
    rollout: Rollout,
    *clients: Engine,
    num_samples: int = 4,
    timeout_s: float = 60.0,
    max_requests: int = 8,
    buffer: Buffer | None = None,
) -> tuple[Group, GroupMaker]:
    maker = make_maker(EnginePool(clients or [Engine()], max_requests=max_requests), rollout, timeout_s=timeout_s)  # type: ignore[arg-type]
    (prompt,) = make_prompts(1)
    return await asyncio.wait_for(maker.make(prompt, num_samples=num_samples, buffer=buffer), 10), maker


def failing(*whens: int, error: BaseException) -> Rollout:
    """A rollout of one request per trajectory whose calls of these numbers raise `error`; calls for all trajectories count as well."""
    calls = itertools.count()

    async def rollout(*, num_samples: int, **arguments: Any) -> list[Sample]:
        number = next(calls)
        made = await single_turn(num_samples=num_samples, **arguments)
        if number in whens:
            raise error
        return list(made)

    return rollout


def test_a_failed_trajectory_is_repeated_alone_with_other_seeds() -> None:
    client = Engine()
    group, maker = asyncio.run(make_with(failing(0, 2, error=ZeroDivisionError("tool")), client))
    assert [sample.index for sample in group.samples] == [0, 1, 2, 3] and group.failures == () and maker.retries == {"error": 5}
    assert [sample.trajectory for sample in group.samples] == [None] * 4
    seeds = [
        sampling.request(index)["sampling_seed"]
        for sampling in client.samplings
        for index in range(4 if sampling is client.samplings[0] else 1)
    ]
    assert len(set(seeds)) == len(seeds) == 4 + 5
    again = Engine()
    asyncio.run(make_with(failing(0, 2, error=ZeroDivisionError("tool")), again))
    assert [sampling.seed for sampling in again.samplings] == [sampling.seed for sampling in client.samplings], (
        "also in a run that is resumed"
    )


def test_a_trajectory_that_keeps_failing_is_dropped_and_counted() -> None:
    """The first call is for all four, calls 1 to 4 are for each alone, 5 and 6 for those of 2 and 4 once more."""
    group, _ = asyncio.run(make_with(failing(0, 2, 4, 5, 6, error=ZeroDivisionError("tool"))))
    assert [sample.index for sample in group.samples] == [0, 1]
    assert [(failure.cause, failure.headline) for failure in group.failures] == [("error", "ZeroDivisionError: tool")] * 2
    assert "in rollout" in group.failures[0].trace


def test_trajectories_of_several_samples_are_numbered_alone() -> None:
    async def rollout(*, prompt: Prompt, num_samples: int, **arguments: Any) -> list[Sample]:
        if num_samples > 1:
            raise ValueError("all together")
        made = await single_turn(prompt=prompt, num_samples=2, **arguments)
        return [replace(sample, trajectory=7, response_text=str(sample.index)) for sample in reversed(made)]

    group, _ = asyncio.run(make_with(rollout, num_samples=3))
    found = [(sample.index, sample.trajectory, sample.response_text) for sample in group.samples]
    assert found == [(0, 0, "0"), (1, 0, "1"), (2, 1, "0"), (3, 1, "1"), (4, 2, "0"), (5, 2, "1")]


def test_each_attempt_alone_makes_a_trajectory_of_each_role() -> None:
    async def rollout(*, num_samples: int, **arguments: Any) -> list[Sample]:
        if num_samples > 1:
            raise ValueError("all together")
        made = await single_turn(num_samples=3, **arguments)
        parts = zip(made, ("proposer", "verifier", "verifier"), (5, 7, 7), strict=True)
        return [replace(sample, role=role, trajectory=number) for sample, role, number in parts]

    group, _ = asyncio.run(make_with(rollout, num_samples=2))
    found = [(sample.index, sample.role, sample.trajectory) for sample in group.samples]
    roles, verifier = ("proposer", "verifier", "verifier"), {1: 1, 2: 1, 4: 3, 5: 3}
    assert found == [(index, roles[index % 3], verifier.get(index)) for index in range(6)] and group.num_made == 2


@pytest.mark.parametrize(
    ("error", "headline"),
    [
        (SystemExit(3), "RuntimeError: the rollout raised SystemExit"),
        (KeyboardInterrupt(), "RuntimeError: the rollout raised KeyboardInterrupt"),
        (asyncio.CancelledError(), "it was cancelled, but not by the run"),
        (ValueError("two\nlines"), "ValueError: two lines"),
    ],
)
def test_an_exit_or_a_cancellation_within_a_rollout_is_a_failure(error: BaseException, headline: str) -> None:
    group, _ = asyncio.run(make_with(failing(*range(9), error=error), num_samples=1))
    assert [(failure.cause, failure.headline) for failure in group.failures] == [("error", headline)]


def test_a_rollout_that_never_returns_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it end when it is cancelled."""
    monkeypatch.setattr("megatron_rl.rollout.groups.CANCEL_S", 0.01)
    released: list[bool] = []

    async def rollout(**_: Any) -> list[Sample]:
        while not released:
            try:
                await asyncio.sleep(0.2)
            except asyncio.CancelledError:
                continue
        return []

    async def work() -> None:
        group, _ = await make_with(rollout, num_samples=2, timeout_s=0.05)
        headline = "no samples after 0.05 s (rollout.timeout_s)"
        assert [(failure.cause, failure.headline) for failure in group.failures] == [("timeout", headline)] * 2
        released.append(True)

    asyncio.run(work())


def test_waiting_for_an_engine_is_not_time_of_the_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of the test: a minute passes while others have the engine, with 0.02 s for the rollout."""
    clock, queued = SimpleNamespace(now_s=0.0, monotonic=lambda: clock.now_s), list[bool]()
    own_s = PoolGenerator.own_s.fget  # type: ignore[attr-defined]

    def look(generator: PoolGenerator) -> float:
        queued.append(generator._own_since_s is None)
        return float(own_s(generator))

    monkeypatch.setattr("megatron_rl.rollout.generator.time", clock)
    monkeypatch.setattr(PoolGenerator, "own_s", property(look))
    pool = EnginePool([Engine()], max_requests=1)  # type: ignore[list-item]

    async def work() -> Group:
        async with pool.slots(1, urgency=Urgency.TRAINING, arrival=pool.arrival()):
            making = asyncio.create_task(make_maker(pool, timeout_s=0.02).make(make_prompts(1)[0], num_samples=1))
            while not any(queued):
                await asyncio.sleep(0.001)
            clock.now_s, queued[:] = 60.0, []
            while len(queued) < 3:
                await asyncio.sleep(0.001)
        return await making

    assert len(asyncio.run(asyncio.wait_for(work(), 60)).samples) == 1


def test_a_request_beyond_room_or_answer_limit_is_a_failure() -> None:
    rooms: list[int] = []

    async def rollout(*, prompt: Prompt, generator: Any, sampling: Sampling, **arguments: Any) -> list[Sample]:
        rooms.append(generator.context)
        tokens = np.full(generator.context - sampling.max_tokens + 1, 5)
        await generator.generate(tokens, sampling=sampling)
        raise AssertionError

    async def longer(*, sampling: Sampling, **arguments: Any) -> list[Sample]:
        return list(await single_turn(sampling=replace(sampling, max_tokens=5), **arguments))

    group, _ = asyncio.run(make_with(rollout, num_samples=1))
    (failure,) = group.failures
    assert rooms == [64] * 3 and failure.headline.startswith("a prompt of 61 tokens + 4 response tokens = 65, a micro-batch holds 64")
    group, _ = asyncio.run(make_with(longer, num_samples=1))
    (failure,) = group.failures
    assert "max_tokens 5, rollout.sampling.max_response_tokens 4 bounds one answer" in failure.headline


@pytest.mark.parametrize("limits", [(40, 64, 64), (64, 40, 64), (64, 64, 40)], ids=["context", "cache", "micro-batch"])
def test_a_trajectory_beyond_the_smallest_limit_is_a_failure(limits: tuple[int, int, int]) -> None:
    """Also where no request was too long: what tools answer counts as well."""
    client = Engine()
    client.address = replace(client.address, context_length=limits[0], max_total_tokens=limits[1])
    rooms: list[int] = []

    async def rollout(*, prompt: Prompt, generator: Any, **arguments: Any) -> list[Sample]:
        rooms.append(generator.context)
        (sample,) = await single_turn(prompt=prompt, generator=generator, **arguments)
        length = generator.context - len(prompt.token_ids) + 1
        return [
            replace(
                sample,
                response_ids=np.resize(sample.response_ids, length),
                loss_mask=np.resize(sample.loss_mask, length),
                rollout_log_probs=np.resize(sample.rollout_log_probs, length),
                weight_versions=np.resize(sample.weight_versions, length),
            )
        ]

    maker = make_maker(EnginePool([client], max_requests=8), rollout, max_tokens=limits[2])  # type: ignore[list-item]
    group = asyncio.run(maker.make(make_prompts(1)[0], num_samples=1))
    (failure,) = group.failures
    assert rooms == [40] * 3 and failure.cause == "contract"
    assert "41 tokens, prompt and response together, needs at most 40 (generator.context" in failure.headline


def test_the_end_of_the_last_engine_is_no_failure_of_the_rollout() -> None:
    async def wrapping(**arguments: Any) -> list[Sample]:
        try:
            return list(await single_turn(**arguments))
        except EngineError as error:
            raise RuntimeError("the turn failed") from error

    with pytest.raises(EngineError, match="gone"):
        asyncio.run(make_with(wrapping, dead()))


def test_failures_are_kept_with_what_waits_for_its_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_rl.rollout.groups.SLOW_REWARD_S", 0.0)

    async def score(sample: Sample) -> Reward:
        await asyncio.sleep(0.01)
        return Reward(outcome=RewardOutcome.SCORED, value=1.0)

    async def make(buffer: Buffer, client: Engine) -> Group:
        rollout = failing(0, 1, 3, error=ValueError("no"))
        maker = make_maker(EnginePool([client], max_requests=8), rollout, score=score)  # type: ignore[list-item]
        return await maker.make(make_prompts(1)[0], num_samples=2, buffer=buffer)

    with Buffer(tmp_path / "buffer.sqlite") as buffer:
        buffer.add_prompts(make_prompts(1))
        buffer.take_pending(1)
        first = asyncio.run(make(buffer, Engine()))
        assert (len(first.samples), len(first.failures)) == (1, 1)
        client = Engine()
        again = asyncio.run(make(buffer, client))
        assert client.calls == 0 and again.failures == first.failures


def test_trajectories_with_an_environment_fail_alone() -> None:
    settings = RolloutSettings(environment="a:B", sampling=SamplingSettings(max_response_tokens=4))
    calls = itertools.count()

    async def rollout(*, num_samples: int, **arguments: Any) -> tuple[Sample, ...]:
        assert num_samples == 1
        if next(calls) in (1, 4, 5):
            raise TrajectoryError("environment", "KeyError: 'x'", "the trace")
        samples = await single_turn(num_samples=1, **arguments)
        return tuple(replace(sample, reward=Reward(RewardOutcome.SCORED, 0.5, components={"own": 0.5})) for sample in samples)

    async def score(sample: Sample) -> Reward:
        return Reward(RewardOutcome.SCORED, 2.0, components={"other": 2.0})

    client = Engine()
    pool = EnginePool([client], max_requests=8)  # type: ignore[list-item]
    maker = GroupMaker(settings, rollout, pool=pool, tokenizer=NumberTokenizer(), score=score, seed=0, max_tokens=64)  # type: ignore[arg-type]
    group = asyncio.run(maker.make(make_prompts(1)[0], num_samples=4))
    assert maker.name == "rollout.environment a:B" and maker.retries == {"environment": 2}
    assert group.failures == (Failure("environment", "KeyError: 'x'", "the trace"),)
    # The first attempts have seeds of their own, too.
    assert len({sampling.seed for sampling in client.samplings}) == len(client.samplings) == 3
    for sample in group.samples:
        assert sample.reward == Reward(RewardOutcome.SCORED, 2.5, components={"own": 0.5, "other": 2.0})


def test_rewards_of_rollout_and_function_are_apart() -> None:
    own, plain = Reward(RewardOutcome.SCORED, 0.5, components={"own": 0.5}), Reward(RewardOutcome.SCORED, 2.0)
    assert _total(own, plain).components == {"own": 0.5, "function": 2.0}
    lost = _total(own, replace(plain, components={"own": 2.0}))
    assert (lost.outcome, lost.value) == (RewardOutcome.ERROR, None) and "'own'" in lost.message and "rename" in lost.message


def test_a_failed_reward_function_is_no_sum() -> None:
    failed = Reward(RewardOutcome.ERROR, message="the trace")

    async def rollout(**arguments: Any) -> tuple[Sample, ...]:
        return tuple(replace(sample, reward=Reward(RewardOutcome.SCORED, 0.5)) for sample in await single_turn(**arguments))

    async def score(sample: Sample) -> Reward:
        return failed

    maker = make_maker(EnginePool([Engine()], max_requests=8), rollout, score=score)  # type: ignore[list-item]
    (sample,) = asyncio.run(maker.make(make_prompts(1)[0], num_samples=1)).samples
    assert sample.reward == failed


def test_a_bounded_number_of_trajectories_is_alone_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "MOST_ALONE", 2)
    running = most = 0

    async def rollout(**arguments: Any) -> tuple[Sample, ...]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        samples = await single_turn(**arguments)
        running -= 1
        return samples

    settings = RolloutSettings(environment="a:B", sampling=SamplingSettings(max_response_tokens=4))
    pool = EnginePool([Engine(delay_s=0.01)], max_requests=8)  # type: ignore[list-item]
    maker = GroupMaker(settings, rollout, pool=pool, tokenizer=NumberTokenizer(), score=None, seed=0, max_tokens=64)  # type: ignore[arg-type]
    group = asyncio.run(maker.make(make_prompts(1)[0], num_samples=6))
    assert len(group.samples) == 6 and most == 2


def test_a_place_is_held_over_all_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "MOST_ALONE", 1)
    calls: list[str] = []

    async def rollout(*, prompt: Prompt, **arguments: Any) -> tuple[Sample, ...]:
        calls.append(prompt.id)
        if calls.count(prompt.id) < 3:
            raise TrajectoryError("environment", "KeyError: 'x'", "the trace")
        return await single_turn(prompt=prompt, **arguments)

    async def make() -> None:
        await asyncio.gather(*(maker.make(prompt, num_samples=1) for prompt in (first, second)))

    first, second = make_prompts(2)
    settings = RolloutSettings(environment="a:B", sampling=SamplingSettings(max_response_tokens=4))
    pool = EnginePool([Engine()], max_requests=8)  # type: ignore[list-item]
    maker = GroupMaker(settings, rollout, pool=pool, tokenizer=NumberTokenizer(), score=None, seed=0, max_tokens=64)  # type: ignore[arg-type]
    asyncio.run(make())
    assert calls == [first.id] * 3 + [second.id] * 3


def test_an_evaluation_needs_no_room_in_a_micro_batch_and_counts_no_retry() -> None:
    """Its answers are not trained on, and its failures are none of training."""
    (prompt,) = make_prompts(1)
    settings = RolloutSettings(sampling=SamplingSettings(max_response_tokens=4))
    pool = EnginePool([Engine()], max_requests=8)  # type: ignore[list-item]

    async def made(urgency: Urgency) -> tuple[int, int]:
        maker = GroupMaker(settings, single_turn, pool=pool, tokenizer=NumberTokenizer(), score=None, seed=0, max_tokens=4)  # type: ignore[arg-type]
        group = await maker.make(prompt, num_samples=1, urgency=urgency)
        return len(group.samples), maker.retries.total()

    assert asyncio.run(made(Urgency.EVALUATION)) == (1, 0)
    assert asyncio.run(made(Urgency.TRAINING)) == (0, 2)

    async def fails() -> int:
        async def broken(**_: Any) -> tuple[Sample, ...]:
            raise ValueError("broken")

        maker = GroupMaker(settings, broken, pool=pool, tokenizer=NumberTokenizer(), score=None, seed=0, max_tokens=64)  # type: ignore[arg-type]
        group = await maker.make(prompt, num_samples=1, urgency=Urgency.EVALUATION)
        assert [failure.cause for failure in group.failures] == ["error"]
        return maker.retries.total()

    assert asyncio.run(fails()) == 0


def test_an_evaluation_needs_no_place_of_a_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step has ended: its trajectories hold all places until the next step, and no request of theirs goes out."""
    monkeypatch.setattr(groups, "MOST_ALONE", 1)

    async def evaluated() -> Group:
        await pool.interrupt()
        tail = asyncio.create_task(maker.make(first, num_samples=2))
        await asyncio.sleep(0.01)
        group = await asyncio.wait_for(maker.make(second, num_samples=1, urgency=Urgency.EVALUATION), 5)
        assert not tail.done()
        pool.readmit()
        await tail
        return group

    first, second = make_prompts(2)
    settings = RolloutSettings(environment="a:B", sampling=SamplingSettings(max_response_tokens=4))
    pool = EnginePool([Engine()], max_requests=8)  # type: ignore[list-item]
    maker = GroupMaker(settings, single_turn, pool=pool, tokenizer=NumberTokenizer(), score=None, seed=0, max_tokens=64)  # type: ignore[arg-type]
    assert len(asyncio.run(evaluated()).samples) == 1


def test_a_group_that_ends_while_it_is_scored_leaves_nothing(tmp_path: Path) -> None:
    """As each surplus group of a step: nothing that asyncio would print, and no call that goes on."""
    said: list[Any] = []
    scoring = ended = 0

    async def score(sample: Sample) -> Reward:
        nonlocal scoring, ended
        scoring += 1
        try:
            await asyncio.Event().wait()
        finally:
            ended += 1
        raise AssertionError

    async def work(buffer: Buffer) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: said.append(context["message"]))
        maker = make_maker(EnginePool([Engine()], max_requests=8), score=score)  # type: ignore[list-item]
        making = asyncio.create_task(maker.make(buffer.take_pending(1)[0], num_samples=2, buffer=buffer))
        while scoring < 2:
            await asyncio.sleep(0.001)
        making.cancel()
        await asyncio.wait([making])
        assert ended == 2
        del making
        gc.collect()

    with Buffer(tmp_path / "buffer.sqlite") as buffer:
        buffer.add_prompts(make_prompts(1))
        asyncio.run(work(buffer))
    assert said == []
