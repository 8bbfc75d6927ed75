import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from buffer_parts import finished_samples
from maker_parts import Engine, dead, generator_of, make_maker, make_prompts

from megatron_rl.config.settings import RolloutSettings, SamplingSettings
from megatron_rl.data.buffer import Buffer
from megatron_rl.engines.answers import Generation, MixtureShape
from megatron_rl.engines.engine_pool import EnginePool, Urgency
from megatron_rl.engines.sampling import Sampling
from megatron_rl.errors import EngineError, EngineRefusal, UserError
from megatron_rl.plugins.kinds import Rollout
from megatron_rl.rollout.generator import together
from megatron_rl.rollout.groups import Score, single_turn
from megatron_rl.rollout.opened_rollout import load_rollout
from megatron_rl.rollout.rollout_trial import NumberTokenizer
from megatron_rl.rollout.sample_checks import check_samples
from megatron_rl.system.frozen_arrays import Candidates
from megatron_rl.types import Group, Ints, Prompt, Reward, RewardOutcome, Sample

MIXTURE = MixtureShape(num_layers=2, num_dense_layers=0, num_experts=4, experts_per_token=1)


async def collect(
    prompts: Sequence[Prompt], clients: Sequence[Engine], *, limit: int = 8, score: Score | None = None, rollout: Rollout = single_turn
) -> list[Group]:
    maker = make_maker(EnginePool(clients, max_requests=limit), rollout, score=score)  # type: ignore[arg-type]
    return await together(maker.make(prompt, num_samples=2) for prompt in prompts)


def test_every_prompt_becomes_one_group_with_its_token_data() -> None:
    groups = asyncio.run(collect(make_prompts(9), [Engine()]))
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
    clients = [Engine(delay_s=0.001), Engine(delay_s=0.001)]
    asyncio.run(collect(make_prompts(40), clients, limit=6))
    assert [client.most_running for client in clients] == [6, 6]
    assert sum(client.calls for client in clients) == 40


def test_a_group_larger_than_the_limit_still_runs() -> None:
    client = Engine()
    assert len(asyncio.run(collect(make_prompts(3), [client], limit=1))) == 3
    assert client.most_running == 2


def test_scoring_holds_no_slot_and_its_outcome_is_in_the_group() -> None:
    async def work() -> list[Group]:
        generated = asyncio.Event()
        client = Engine()

        async def score(sample: Sample) -> Reward:
            # The first group is scored only after all prompts were generated for, with room for one group at a time.
            if client.calls == 5:
                generated.set()
            await asyncio.wait_for(generated.wait(), 5)
            return Reward(outcome=RewardOutcome.SCORED, value=float(sample.index))

        return await collect(make_prompts(5), [client], limit=2, score=score)

    groups = asyncio.run(work())
    assert [[sample.reward.value for sample in group.samples if sample.reward] for group in groups] == [[0.0, 1.0]] * 5


def test_answers_that_wait_for_rewards_survive_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_rl.rollout.groups.SLOW_REWARD_S", 0.1)
    prompts, never = make_prompts(2), asyncio.Event()

    async def make(buffer: Buffer, client: Engine, *, patient: bool) -> list[Group]:
        async def score(sample: Sample) -> Reward:
            if patient or sample.group_id == "000":
                return Reward(outcome=RewardOutcome.SCORED, value=float(sample.index))
            await never.wait()
            raise AssertionError

        maker = make_maker(EnginePool([client], max_requests=8), score=score)  # type: ignore[list-item]
        made = [asyncio.create_task(maker.make(prompt, num_samples=2, buffer=buffer)) for prompt in buffer.take_pending(2)]

        async def kept_or_done() -> None:
            while not made[0].done() or not (made[1].done() or finished_samples(buffer, prompts[1])):
                await asyncio.sleep(0.001)

        await asyncio.wait_for(kept_or_done(), 5)
        return [task.result() if task.done() else task.cancel() for task in made]  # type: ignore[misc]

    with Buffer(tmp_path / "buffer.sqlite") as buffer:
        buffer.add_prompts(prompts)
        first = asyncio.run(make(buffer, Engine(), patient=False))
        assert first[0].id == "000" and finished_samples(buffer, prompts[0]) == (), "quick rewards need no write"
    with Buffer(tmp_path / "buffer.sqlite") as buffer:
        client = Engine()
        again = asyncio.run(make(buffer, client, patient=True))
        assert client.calls == 1, "of the group that was not kept"
        assert [sample.reward.value for sample in again[1].samples if sample.reward] == [0.0, 1.0]
        assert again[1].samples[1].response_ids.tolist() == [1, 1]


@pytest.mark.parametrize(("num_samples", "mixture", "calls"), [(2, None, 0), (3, None, 1), (1, None, 1), (2, MIXTURE, 5)])
def test_what_was_kept_under_other_settings_is_generated_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_samples: int, mixture: MixtureShape | None, calls: int
) -> None:
    monkeypatch.setattr("megatron_rl.rollout.groups.SLOW_REWARD_S", 0.0)
    (prompt,) = make_prompts(1)

    async def score(sample: Sample) -> Reward:
        await asyncio.sleep(0.01)
        return Reward(outcome=RewardOutcome.SCORED, value=1.0)

    async def make(buffer: Buffer, client: Engine, num_samples: int) -> Group:
        maker = make_maker(EnginePool([client], max_requests=8), score=score)  # type: ignore[list-item]
        return await maker.make(prompt, num_samples=num_samples, buffer=buffer)

    with Buffer(tmp_path / "buffer.sqlite") as buffer:
        buffer.add_prompts([prompt])
        buffer.take_pending(1)
        asyncio.run(make(buffer, Engine(), 2))
        assert len(finished_samples(buffer, prompt)) == 2
        client = Engine()
        client.address = replace(client.address, mixture=mixture)
        if mixture is None:
            assert len(asyncio.run(make(buffer, client, num_samples)).samples) == num_samples
            assert len(finished_samples(buffer, prompt)) == num_samples, "nothing of before is kept beside it"
        else:
            failures = asyncio.run(make(buffer, client, num_samples)).failures
            assert [failure.cause for failure in failures] == ["contract"] * 2 and "no routed_experts" in failures[0].headline
        assert client.calls == calls


def test_the_end_of_a_group_ends_the_calls_for_its_rewards(tmp_path: Path) -> None:
    async def work(buffer: Buffer) -> None:
        began, ended = asyncio.Event(), []

        async def score(sample: Sample) -> Reward:
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(sample.index)
            raise AssertionError

        maker = make_maker(EnginePool([Engine()], max_requests=8), score=score)  # type: ignore[list-item]
        task = asyncio.create_task(maker.make(buffer.take_pending(1)[0], num_samples=2, buffer=buffer))
        await began.wait()
        task.cancel()
        await asyncio.wait([task])
        await asyncio.sleep(0)
        assert sorted(ended) == [0, 1]

    with Buffer(tmp_path / "buffer.sqlite") as buffer:
        buffer.add_prompts(make_prompts(1))
        asyncio.run(work(buffer))


def test_a_failed_engine_gives_its_prompts_to_the_others() -> None:
    dying = dead(3, delay_s=0.001)
    groups = asyncio.run(collect(make_prompts(20), [dying, Engine(delay_s=0.001)], limit=4))
    assert sorted(group.id for group in groups) == [prompt.id for prompt in make_prompts(20)]


def test_without_any_engine_left_the_reason_is_raised() -> None:
    with pytest.raises(EngineError, match="gone"):
        asyncio.run(collect(make_prompts(20), [dead(3), dead()]))


def test_an_engine_that_failed_gets_another_chance_when_asked() -> None:
    slow, other = dead(delay_s=0.001), Engine(delay_s=0.001)

    async def work() -> None:
        pool = EnginePool([slow, other], max_requests=4)  # type: ignore[list-item]
        for expected in (1, 1, 2):
            if expected == 2:
                slow.error = None
                pool.readmit()
            await make_maker(pool).make(make_prompts(1)[0], num_samples=2)
            assert slow.calls == expected

    asyncio.run(work())


def test_a_refused_request_is_a_failure_and_kills_no_engine() -> None:
    refusing, other = Engine(error=EngineRefusal("gone", status=400)), Engine(delay_s=0.01)
    groups = asyncio.run(collect(make_prompts(4), [refusing, other]))
    assert sum(len(group.failures) for group in groups) > 0 and {failure.headline for group in groups for failure in group.failures} == {
        "gone"
    }
    assert other.calls > 0


def test_closing_early_cancels_what_runs() -> None:
    slow = Engine(delay_s=30)

    async def work() -> None:
        task = asyncio.create_task(collect(make_prompts(10), [Engine(), slow], limit=4))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(work())
    assert slow.aborted == slow.calls == 2


def test_an_evaluation_goes_first_within_the_same_limit() -> None:
    client = Engine(delay_s=0.001)

    async def work() -> list[str]:
        pool, order = EnginePool([client], max_requests=4), []  # type: ignore[list-item]

        async def consume(name: str, num_samples: int, urgency: Urgency) -> None:
            async def consume_one(prompt: Prompt) -> None:
                await make_maker(pool).make(prompt, num_samples=num_samples, urgency=urgency)
                order.append(name)

            await together(map(consume_one, make_prompts(8)))

        training = asyncio.create_task(consume("training", 2, Urgency.TRAINING))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await consume("evaluation", 1, Urgency.EVALUATION)
        await training
        return order

    order = asyncio.run(work())
    # Two groups of two samples were running when the evaluation came.
    assert order[:10].count("evaluation") == 8
    assert client.most_running == 4


def test_a_slot_that_is_given_up_goes_to_the_next() -> None:
    client = Engine(delay_s=0.01)

    async def work() -> None:
        pool = EnginePool([client], max_requests=2)  # type: ignore[list-item]
        for cancel_at in range(6):
            tasks = [asyncio.create_task(make_maker(pool).make(prompt, num_samples=2)) for prompt in make_prompts(3)]
            for _ in range(cancel_at):
                await asyncio.sleep(0)
            tasks[0].cancel()
            tasks[1].cancel()
            await asyncio.wait_for(tasks[2], 5)
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(work())
    assert client.running == 0


def test_a_trajectory_is_scored_once_by_its_last_sample() -> None:
    """Samples come in any order; trajectory 9 is those of index 3, 0 and 1, trajectory 2 the one of index 2."""
    scored: list[int] = []

    async def score(sample: Sample) -> Reward:
        scored.append(sample.index)
        return Reward(outcome=RewardOutcome.SCORED, value=10.0 * sample.index)

    async def four(*, prompt: Prompt, num_samples: int, **arguments: Any) -> list[Sample]:
        made = await single_turn(prompt=prompt, num_samples=4, **arguments)
        own = replace(prompt, token_ids=np.array([4, 5]), text="4 5")
        return [replace(made[index], trajectory=2 if index == 2 else 9, prompt=own if index == 1 else prompt) for index in (3, 0, 2, 1)]

    (group,) = asyncio.run(collect(make_prompts(1), [Engine()], score=score, rollout=four))
    assert sorted(scored) == [2, 3]
    assert [(sample.index, sample.reward.value) for sample in group.samples if sample.reward] == [(3, 30), (0, 30), (2, 20), (1, 30)]
    assert group.samples[3].prompt.token_ids.tolist() == [4, 5]


async def too_few(*, prompt: Prompt, **arguments: Any) -> list[Sample]:
    return []


async def one_trajectory(*, prompt: Prompt, **arguments: Any) -> list[Sample]:
    return [replace(sample, trajectory=0) for sample in await single_turn(prompt=prompt, **arguments)]


async def nothing(**arguments: Any) -> None:
    return None


async def of_dicts(**arguments: Any) -> list[dict[str, str]]:
    return [{"text": "4"}]


async def of_another_group(*, prompt: Prompt, **arguments: Any) -> tuple[Sample, ...]:
    other = Prompt(id="other", token_ids=prompt.token_ids, text="")
    return await single_turn(prompt=other, **arguments)


async def beyond_the_vocabulary(*, prompt: Prompt, **arguments: Any) -> tuple[Sample, ...]:
    samples = await single_turn(prompt=prompt, **arguments)
    return tuple(replace(sample, response_ids=np.full(2, 100)) for sample in samples)


def changed(**changes: Any) -> Rollout:
    """A rollout whose last sample differs from what it should be by `changes`."""

    async def rollout(*, prompt: Prompt, **arguments: Any) -> list[Sample]:
        *others, last = await single_turn(prompt=prompt, **arguments)
        return [*others, replace(last, **changes)]

    return rollout


OTHER_PROMPT = Prompt(id="000", token_ids=np.array([0, 1]), text="0", metadata={"turn": 2})


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        (changed(index=0), r"it returned samples with the index \[0, 0\], needs each of 0 to 1 once"),
        (changed(index=2), r"the index \[0, 2\]"),
        (changed(prompt=OTHER_PROMPT), r"sample 1 with a prompt whose metadata is {'turn': 2}, needs {}, .*Sample.metadata"),
        (
            changed(prompt=replace(OTHER_PROMPT, metadata={}, label="1")),
            "a prompt whose label is '1', needs None, that of the prompt which",
        ),
        (changed(prompt=replace(OTHER_PROMPT, metadata={}, id="1")), "a prompt whose id is '1', needs '000'"),
        (changed(prompt=replace(OTHER_PROMPT, metadata={}, token_ids=[-1, 1])), "token ids -1 to 1 in prompt.token_ids, needs 0 to 99"),
        (changed(trajectory=1, index=0), r"the index \[0, 0\]"),
        (changed(weight_versions=[2, -1]), "weight_versions -1 at token 1, which loss_mask trains on, needs the version"),
        (changed(rollout_log_probs=[-1.0, 0.5]), "the rollout log-prob 0.5 at token 1, needs at most 0"),
        (too_few, "returned 0 samples of 0 trajectories, needs 2 trajectories; samples that belong together"),
        (one_trajectory, "returned 2 samples of 1 trajectories, needs 2"),
        (nothing, "it returned None of type NoneType, needs a list of Sample"),
        (of_dicts, r"it returned a list with {'text': '4'} of type dict, needs Sample"),
        (of_another_group, "group_id 'other', needs '000'"),
        (beyond_the_vocabulary, "token ids 100 to 100 in response_ids, needs 0 to 99"),
        (
            changed(prompt=replace(OTHER_PROMPT, metadata={}, token_ids=[5] * 63)),
            r"sample 1 with 65 tokens, .* needs at most 64 \(generator.context: .* training.max_tokens_per_micro_batch × cp\); end it",
        ),
    ],
)
def test_a_rollout_that_breaks_its_contract_is_one_sentence(rollout: Rollout, message: str) -> None:
    async def work() -> None:
        (prompt,), pool = make_prompts(1), EnginePool([Engine()], max_requests=8)  # type: ignore[list-item]
        async with generator_of(pool) as generator:
            sampling, tokenizer = Sampling(max_tokens=4), NumberTokenizer()
            made = await rollout(prompt=prompt, generator=generator, sampling=sampling, num_samples=2, tokenizer=tokenizer)  # type: ignore[arg-type]
        check_samples(made, prompt=prompt, num_samples=2, vocab_size=100, max_tokens=64)

    with pytest.raises(UserError, match=message):
        asyncio.run(work())


@pytest.mark.parametrize(
    "changes",
    [
        {"weight_versions": [2, -1], "loss_mask": [True, False]},
        {"rollout_log_probs": [0.0, 1e-6]},
        {"rollout_log_probs": [0.0, np.nan], "loss_mask": [True, False]},
        {"prompt": replace(OTHER_PROMPT, metadata={})},
        {"prompt": replace(OTHER_PROMPT, token_ids=[5, 6, 7], text="what came before", metadata={})},
    ],
)
def test_untrained_tokens_and_rounding_are_accepted(changes: dict[str, Any]) -> None:
    (group,) = asyncio.run(collect(make_prompts(1), [Engine()], rollout=changed(**changes)))
    assert len(group.samples) == 2


def test_a_non_finite_trained_log_prob_names_the_value() -> None:
    (group,) = asyncio.run(collect(make_prompts(1), [Engine()], rollout=changed(rollout_log_probs=[-np.inf, np.nan])))
    words = "ValueError: Sample 0 of group 000 has the rollout log-prob -inf on a trainable token, needs a finite number"
    assert group.samples == () and [failure.headline for failure in group.failures] == [words] * 2


def test_experts_recorded_across_an_update_are_not_replayed() -> None:
    client = Engine()
    client.address = replace(client.address, mixture=MIXTURE)
    record = np.ones((3, 2, 1), np.uint8)
    for versions, num_kept in (([2, 2], 3), ([2, -1], 3), ([1, 2], 0)):
        mixed = changed(weight_versions=versions, loss_mask=[version >= 0 for version in versions], routed_experts=record)

        async def rollout(*, mixed=mixed, **arguments: Any) -> list[Sample]:
            return [replace(sample, routed_experts=record) for sample in await mixed(**arguments)]

        (group,) = asyncio.run(collect(make_prompts(1), [client], rollout=rollout))
        assert [len(sample.routed_experts) for sample in group.samples if sample.routed_experts is not None] == [3, num_kept]


def test_every_sample_has_a_reproducible_seed_of_its_own() -> None:
    async def two_requests(*, num_samples: int, **arguments: Any) -> list[Sample]:
        samples: list[Sample] = []
        for index in range(num_samples):
            made = await single_turn(num_samples=2, **arguments)
            samples.append(replace(made[0], index=index))
        return samples

    def seeds(run_seed: int) -> list[int]:
        client = Engine()
        maker = make_maker(EnginePool([client], max_requests=8), two_requests, seed=run_seed)  # type: ignore[list-item]

        async def work() -> None:
            for prompt in make_prompts(20):
                await maker.make(prompt, num_samples=2)

        asyncio.run(work())
        return [sampling.request(index)["sampling_seed"] for sampling in client.samplings for index in range(2)]

    first = seeds(0)
    assert len(set(first)) == len(first) == 20 * 2 * 2
    assert all(0 <= seed < 2**63 for seed in first)
    assert seeds(0) == first
    assert not set(seeds(1)) & set(first)


class Recording(Engine):
    """Answers come with candidates where they are asked for."""

    def answer(self, token_ids: Ints) -> Generation:
        recorded = Candidates.of([each] for each in token_ids.tolist()) if self.samplings[-1].records_candidates else None
        return replace(super().answer(token_ids), candidates=recorded)


def test_a_rollout_without_recorded_candidates_is_refused() -> None:
    async def careless(**arguments: Any) -> list[Sample]:
        return [replace(sample, candidates=None) for sample in await single_turn(**arguments)]

    for rollout, num_made in ((single_turn, 2), (careless, 0)):
        pool = EnginePool([Recording()], max_requests=8)  # type: ignore[list-item]
        maker = make_maker(pool, rollout, sampling=SamplingSettings(max_response_tokens=4, top_k=2))
        greedy = asyncio.run(maker.make(make_prompts(1)[0], num_samples=2, greedy=True))
        assert len(greedy.samples) == 2, "no greedy response is trained on"
        group = asyncio.run(maker.make(make_prompts(1)[0], num_samples=2))
        assert len(group.samples) == num_made
        assert all("with no candidates, which rollout.sampling.top_p, top_k or min_p need" in each.headline for each in group.failures)


def test_a_rollout_without_recorded_experts_is_refused() -> None:
    client = Engine()
    client.address = replace(client.address, mixture=MIXTURE)
    (group,) = asyncio.run(collect(make_prompts(1), [client]))
    assert group.samples == () and "with no routed_experts, which training.routing_replay needs" in group.failures[0].headline


def test_a_rollout_is_found_by_its_path() -> None:
    assert load_rollout(RolloutSettings()) is single_turn
    assert load_rollout(RolloutSettings(function="megatron_rl.rollout.groups:single_turn")) is single_turn


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("rollouts_by_path:not_async", "not an async function"),
        ("asyncio:sleep", r"is called as \(prompt=.., generator=.., sampling=.., num_samples=.., tokenizer=..\)"),
    ],
)
def test_a_function_that_is_no_rollout_is_one_sentence(path: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rollouts_by_path.py").write_text("def not_async(*, prompt, generator, sampling, num_samples, tokenizer): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=message):
        load_rollout(RolloutSettings(function=path))


def test_the_time_of_training_groups_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds on a clock that engine and reward move."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("megatron_rl.rollout.groups.time", clock)

    class Slow(Engine):
        async def generate(self, *args: Any, **keywords: Any) -> Any:
            clock.now += 3
            return await super().generate(*args, **keywords)

    async def score(sample: Sample) -> Reward:
        clock.now += 2
        return Reward(RewardOutcome.SCORED, 1.0)

    async def work() -> None:
        maker = make_maker(EnginePool([Slow()], max_requests=8), score=score)  # type: ignore[list-item]
        prompt = Prompt(id="p", token_ids=np.array([1, 2]), text="")
        await maker.make(prompt, num_samples=2)
        await maker.make(prompt, num_samples=2, urgency=Urgency.EVALUATION)
        assert (maker.generation_s, maker.reward_s) == (3.0, 4.0)

    asyncio.run(work())
