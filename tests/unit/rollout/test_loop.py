import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from megatron_rl.errors import EngineError, UserError
from megatron_rl.rollout.client import Generation
from megatron_rl.rollout.engine import EngineAddress
from megatron_rl.rollout.generate import Rollout, load_rollout, single_turn
from megatron_rl.rollout.loop import EnginePool, GroupMaker, Score, Urgency, make_groups
from megatron_rl.rollout.routing_record import MixtureShape
from megatron_rl.rollout.sampling import Sampling
from megatron_rl.rollout.transport import EngineRefusal
from megatron_rl.types import Group, Ints, Prompt, Reward, RewardOutcome, Sample, StopReason


class FakeClient:
    """An engine that answers with the prompt's tokens; `fail_at` is the call from which on it is dead."""

    def __init__(self, *, delay_s: float = 0.0, fail_at: int | None = None, error: type[EngineError] = EngineError) -> None:
        self.address = EngineAddress("url", "key", vocab_size=100, context_length=64, max_total_tokens=64, has_tokenizer=False)
        self.delay_s, self.fail_at, self.error = delay_s, fail_at, error
        self.calls = self.running = self.most_running = self.cancelled = 0

    async def generate(self, token_ids: Ints, *, sampling: Sampling, num_samples: int = 1) -> tuple[Generation, ...]:
        self.calls += 1
        self.running += num_samples
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= num_samples
        if self.fail_at is not None and self.calls >= self.fail_at:
            raise self.error("gone", status=400) if self.error is EngineRefusal else self.error("gone")
        length = len(token_ids)
        return (Generation(token_ids, np.zeros(length, np.float32), np.full(length, 2), StopReason.STOP),) * num_samples


def make_prompts(number: int) -> list[Prompt]:
    return [Prompt(id=f"{index:03d}", token_ids=np.array([index, 1]), text=str(index)) for index in range(number)]


def make_maker(
    pool: EnginePool,
    *,
    score: Score | None = None,
    rollout: Rollout = single_turn,
    num_samples: int = 2,
    urgency: Urgency = Urgency.TRAINING,
) -> GroupMaker:
    return GroupMaker(
        pool=pool,
        sampling=Sampling(max_tokens=4),
        num_samples=num_samples,
        decode=lambda ids: " ".join(map(str, ids)),
        score=score,
        rollout=rollout,
        urgency=urgency,
    )


async def collect(
    prompts: Sequence[Prompt], clients: Sequence[FakeClient], *, limit: int = 8, score: Score | None = None, rollout: Rollout = single_turn
) -> list[Group]:
    maker = make_maker(EnginePool(clients, max_samples=limit), score=score, rollout=rollout)  # type: ignore[arg-type]
    return [group async for group in make_groups(prompts, maker)]


def test_every_prompt_becomes_one_group_with_all_that_is_known_of_its_tokens() -> None:
    groups = asyncio.run(collect(make_prompts(9), [FakeClient()]))
    assert sorted(group.id for group in groups) == [prompt.id for prompt in make_prompts(9)]
    group = next(group for group in groups if group.id == "003")
    assert [sample.index for sample in group.samples] == [0, 1]
    sample = group.samples[1]
    assert sample.response_ids.tolist() == [3, 1]
    assert sample.response_text == "3 1"
    assert sample.loss_mask.tolist() == [True, True]
    assert sample.weight_versions.tolist() == [2, 2]
    assert sample.reward is None


def test_no_engine_runs_more_samples_than_allowed_and_both_work() -> None:
    clients = [FakeClient(delay_s=0.001), FakeClient(delay_s=0.001)]
    asyncio.run(collect(make_prompts(40), clients, limit=6))
    assert [client.most_running for client in clients] == [6, 6]
    assert sum(client.calls for client in clients) == 40


def test_a_group_larger_than_the_limit_still_runs() -> None:
    client = FakeClient()
    assert len(asyncio.run(collect(make_prompts(3), [client], limit=1))) == 3
    assert client.most_running == 2


def test_scoring_does_not_hold_a_place_and_its_outcome_is_in_the_group() -> None:
    async def work() -> list[Group]:
        generated = asyncio.Event()
        client = FakeClient()

        async def score(sample: Sample) -> Reward:
            # The first group is scored only after all prompts were generated for, with room for one group at a time.
            if client.calls == 5:
                generated.set()
            await asyncio.wait_for(generated.wait(), 5)
            return Reward(outcome=RewardOutcome.SCORED, value=float(sample.index))

        return await collect(make_prompts(5), [client], limit=2, score=score)

    groups = asyncio.run(work())
    assert [[sample.reward.value for sample in group.samples if sample.reward] for group in groups] == [[0.0, 1.0]] * 5


def test_a_failed_engine_gives_its_prompts_to_the_others() -> None:
    dying = FakeClient(delay_s=0.001, fail_at=3)
    groups = asyncio.run(collect(make_prompts(20), [dying, FakeClient(delay_s=0.001)], limit=4))
    assert sorted(group.id for group in groups) == [prompt.id for prompt in make_prompts(20)]


def test_without_any_engine_left_the_reason_is_raised() -> None:
    with pytest.raises(EngineError, match="gone"):
        asyncio.run(collect(make_prompts(20), [FakeClient(fail_at=3), FakeClient(fail_at=1)]))


def test_an_engine_that_failed_gets_another_chance_when_asked() -> None:
    slow, other = FakeClient(delay_s=0.001, fail_at=1), FakeClient(delay_s=0.001)

    async def work() -> None:
        pool = EnginePool([slow, other], max_samples=4)  # type: ignore[list-item]
        for expected in (1, 1, 2):
            if expected == 2:
                slow.fail_at = None
                pool.readmit()
            assert len([group async for group in make_groups(make_prompts(1), make_maker(pool))]) == 1
            assert slow.calls == expected

    asyncio.run(work())


def test_a_refused_request_is_raised_and_kills_no_engine() -> None:
    refusing, other = FakeClient(fail_at=1, error=EngineRefusal), FakeClient(delay_s=0.01)
    with pytest.raises(EngineRefusal):
        asyncio.run(collect(make_prompts(4), [refusing, other]))


def test_closing_early_cancels_what_runs() -> None:
    slow = FakeClient(delay_s=30)

    async def work() -> None:
        task = asyncio.create_task(collect(make_prompts(10), [FakeClient(), slow], limit=4))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(work())
    assert slow.cancelled == slow.calls == 2


def test_an_evaluation_goes_before_what_is_made_for_training_and_keeps_to_the_same_limit() -> None:
    client = FakeClient(delay_s=0.001)

    async def work() -> list[str]:
        pool, order = EnginePool([client], max_samples=4), []  # type: ignore[list-item]

        async def consume(name: str, maker: GroupMaker) -> None:
            async for _ in make_groups(make_prompts(8), maker):
                order.append(name)

        training = asyncio.create_task(consume("training", make_maker(pool)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await consume("evaluation", make_maker(pool, num_samples=1, urgency=Urgency.EVALUATION))
        await training
        return order

    order = asyncio.run(work())
    # Two groups of two samples were running when the evaluation came.
    assert order[:10].count("evaluation") == 8
    assert client.most_running == 4


def test_a_place_that_is_given_up_goes_to_the_next() -> None:
    client = FakeClient(delay_s=0.01)

    async def work() -> None:
        pool = EnginePool([client], max_samples=2)  # type: ignore[list-item]
        for cancel_at in range(6):
            tasks = [asyncio.create_task(make_maker(pool).make(prompt)) for prompt in make_prompts(3)]
            for _ in range(cancel_at):
                await asyncio.sleep(0)
            tasks[0].cancel()
            tasks[1].cancel()
            await asyncio.wait_for(tasks[2], 5)
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(work())
    assert client.running == 0


async def too_few(prompt: Prompt, *, engine, sampling, num_samples, decode) -> list[Sample]:
    return []


async def of_another_group(prompt: Prompt, *, engine, sampling, num_samples, decode) -> tuple[Sample, ...]:
    other = Prompt(id="other", token_ids=prompt.token_ids, text="")
    return await single_turn(other, engine=engine, sampling=sampling, num_samples=num_samples, decode=decode)


async def beyond_the_vocabulary(prompt: Prompt, *, engine, sampling, num_samples, decode) -> tuple[Sample, ...]:
    strange = Prompt(id=prompt.id, token_ids=np.array([100]), text="")
    return await single_turn(strange, engine=engine, sampling=sampling, num_samples=num_samples, decode=decode)


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        (too_few, "returned 0 samples for prompt 000, needs 2"),
        (of_another_group, "group_id 'other', needs '000'"),
        (beyond_the_vocabulary, "token ids 100 to 100, needs 0 to 99"),
    ],
)
def test_a_rollout_that_breaks_its_contract_is_one_sentence(rollout: Rollout, message: str) -> None:
    with pytest.raises(UserError, match=message):
        asyncio.run(collect(make_prompts(1), [FakeClient()], rollout=rollout))


def test_a_rollout_without_experts_is_refused_where_the_engine_records_them() -> None:
    client = FakeClient()
    mixture = MixtureShape(num_layers=2, num_dense_layers=0, num_experts=4, experts_per_token=1)
    client.address = replace(client.address, mixture=mixture)
    with pytest.raises(UserError, match=r"without routed_experts, which training\.routing_replay needs"):
        asyncio.run(collect(make_prompts(1), [client]))


def test_a_rollout_is_found_by_its_path() -> None:
    assert load_rollout(None) is single_turn
    assert load_rollout("megatron_rl.rollout.generate:single_turn") is single_turn


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("megatron_rl.rollout.generate:load_rollout", "not an async function"),
        ("asyncio:sleep", r"is called as \(argument 1, engine=.., sampling=.., num_samples=.., decode=..\)"),
    ],
)
def test_a_function_that_is_no_rollout_is_one_sentence(path: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_rollout(path)
