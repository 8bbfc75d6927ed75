"""Answers that are interrupted and continued: tokens, log-probs, versions and experts of the whole, in value."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from maker_parts import Engine, dead, generator_of, make_maker

from megatron_rl.data.batch import make_train_batch
from megatron_rl.data.buffer import Buffer
from megatron_rl.data.packing import make_shards
from megatron_rl.engines import engine_pool
from megatron_rl.engines.answers import Generation
from megatron_rl.engines.client import SHORT_RESPONSE_TOKENS
from megatron_rl.engines.engine_pool import EnginePool, Urgency
from megatron_rl.engines.sampling import Sampling
from megatron_rl.errors import EngineError
from megatron_rl.rollout.generator import NOTHING, joined
from megatron_rl.rollout.sample_checks import without_outdated_experts, without_stale_tokens
from megatron_rl.system.frozen_arrays import Candidates
from megatron_rl.types import Group, Ints, Prompt, Reward, RewardOutcome, Sample, StepTotals, StopReason

PROMPT = Prompt(id="p", token_ids=np.array([1, 2]), text="1 2")
BUDGET = SHORT_RESPONSE_TOKENS + 8


def decode(token_ids: list[int]) -> str:
    """Characters from a on."""
    return "".join(chr(ord("a") + token) for token in token_ids)


def encode(text: str) -> list[int]:
    return [ord(letter) - ord("a") for letter in text]


def generation(ids: list[int], version: int, reason: StopReason, *, num_seen: int | None = None) -> Generation:
    """Log-probs of -0.01 times the token; experts number the `num_seen` tokens before, and the own ones but the last."""
    experts = None if num_seen is None else np.arange(num_seen + max(0, len(ids) - 1), dtype=np.uint8)[:, None, None]
    candidates = Candidates.of([each] * each for each in ids)
    return Generation(np.array(ids, np.int64), -0.01 * np.array(ids, np.float32), np.full(len(ids), version), reason, experts, candidates)


def test_pieces_are_joined_in_value() -> None:
    first = joined(NOTHING, generation([5, 6, 7], 3, StopReason.ABORT, num_seen=2), prompt_length=2, stop=(), decode=decode)
    assert first.token_ids.tolist() == [5, 6], "the last token of an aborted answer may be its end"
    again = joined(first, generation([], 4, StopReason.ABORT, num_seen=4), prompt_length=2, stop=(), decode=decode)
    assert (again.token_ids.tolist(), again.stop_reason) == ([5, 6], StopReason.ABORT)
    whole = joined(again, generation([8, 9, 4, 1], 5, StopReason.LENGTH, num_seen=4), prompt_length=2, stop=(), decode=decode)
    assert whole.token_ids.tolist() == [5, 6, 8, 9, 4, 1] and whole.weight_versions.tolist() == [3, 3, 5, 5, 5, 5]
    np.testing.assert_allclose(whole.log_probs, [-0.05, -0.06, -0.08, -0.09, -0.04, -0.01], rtol=1e-6)
    assert whole.stop_reason is StopReason.LENGTH
    assert whole.candidates is not None and whole.candidates.counts.tolist() == whole.token_ids.tolist()
    assert whole.candidates.hold(whole.token_ids).all()
    assert whole.routed_experts is not None and whole.routed_experts.ravel().tolist() == list(range(2 + 6 - 1))
    (sample,) = samples_of(whole)
    assert without_outdated_experts(sample).routed_experts.shape[0] == 0, "of other weights than those that chose the tokens"  # type: ignore[union-attr]


@pytest.mark.parametrize(("num_kept", "expected"), [(0, [9] * 5), (1, [7, 7, 9, 9, 9]), (3, [7, 7, 7, 7, 9])])
def test_tokens_of_a_piece_keep_their_experts(num_kept: int, expected: list[int]) -> None:
    """A prompt of 2 tokens, 4 others; without a token of its own the piece was maybe routed by other weights, and chose nothing."""
    ids, versions = np.array([5, 6, 8, 4]), np.full(4, 3)
    made = [np.full((5, 1, 1), number, np.uint8) for number in (7, 9)]
    of = [Generation(ids, -0.01 * ids.astype(np.float32), versions, StopReason.LENGTH, record) for record in made]
    cut = {name: getattr(of[0], name)[:num_kept] for name in ("token_ids", "log_probs", "weight_versions")}
    rest = {name: getattr(of[1], name)[num_kept:] for name in cut}
    # The record of a branch's trunk goes on behind what is kept.
    whole = joined(replace(of[0], **cut), replace(of[1], **rest), prompt_length=2, stop=(), decode=decode)
    assert whole.routed_experts is not None and whole.routed_experts.ravel().tolist() == expected


def samples_of(*generations: Generation) -> list[Sample]:
    return [
        Sample(
            group_id="p",
            index=index,
            prompt=PROMPT,
            response_ids=made.token_ids,
            loss_mask=np.arange(len(made.token_ids)) != 1,
            rollout_log_probs=made.log_probs,
            weight_versions=made.weight_versions,
            stop_reason=made.stop_reason,
            routed_experts=made.routed_experts,
        )
        for index, made in enumerate(generations)
    ]


# The letters that a piece has, those of its continuation, and what the whole is.
@pytest.mark.parametrize(
    ("before", "after", "whole", "reason"),
    [
        ("abc", "de", "abcde", StopReason.LENGTH),
        ("abE", "ND", "abEND", StopReason.STOP),
        ("abEN", "Dxyz", "abEND", StopReason.STOP),
        ("ab", "cEND", "abcEND", StopReason.STOP),
        ("aEN", "END", "aENEND", StopReason.STOP),
        ("abEN", "dz", "abENdz", StopReason.LENGTH),
        ("", "abc", "abc", StopReason.LENGTH),
        ("a#", "#bc", "a##", StopReason.STOP),
    ],
)
def test_a_stop_string_across_the_joint_ends_the_answer(before: str, after: str, whole: str, reason: StopReason) -> None:
    """Strings END and ##; the engine sees only those that begin behind the joint."""
    stop = ("END", "##")
    by_engine = StopReason.STOP if after.endswith("END") else StopReason.LENGTH
    piece = generation(encode(before), 1, StopReason.ABORT, num_seen=2) if before else NOTHING
    found = joined(piece, generation(encode(after), 2, by_engine, num_seen=2 + len(before)), prompt_length=2, stop=stop, decode=decode)
    assert (decode(found.token_ids.tolist()), found.stop_reason) == (whole, reason)
    assert len(found.log_probs) == len(found.weight_versions) == len(whole)
    assert found.routed_experts is not None and len(found.routed_experts) == 2 + len(whole) - 1


def test_a_stop_string_is_found_in_an_aborted_continuation() -> None:
    piece, new = generation(encode("EN"), 1, StopReason.ABORT), generation(encode("Dab"), 2, StopReason.ABORT)
    found = joined(piece, new, prompt_length=2, stop=("END",), decode=decode)
    assert (len(found.token_ids), found.stop_reason) == (3, StopReason.STOP)


class Interrupted(Engine):
    """Counts up from the number of tokens seen, and answers with half of the budget when `abort_all` comes before `free`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.aborted_all = 0
        self.num_missed = 0  # aborts that come before a request that is on its way
        self.free.clear()

    async def generate(self, token_ids: Ints, *, sampling: Sampling, num_samples: int = 1) -> tuple[Generation, ...]:
        self.samplings.append(sampling)
        self.asked.append((token_ids.tolist(), sampling.seed))
        before = self.aborted_all
        while not self.free.is_set() and before == self.aborted_all:
            await asyncio.sleep(0)
        whole = before == self.aborted_all
        length = sampling.max_tokens if whole else sampling.max_tokens // 2
        ids, reason = list(range(len(token_ids), len(token_ids) + length)), StopReason.LENGTH if whole else StopReason.ABORT
        return (generation(ids, self.version, reason),) * num_samples

    async def abort_all(self) -> None:
        if self.num_missed:
            self.num_missed -= 1
            return
        self.aborted_all += 1
        if self.error is not None:
            raise self.error


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_pool, "ABORT_INTERVAL_S", 0.0)


async def settle() -> None:
    for _ in range(40):
        await asyncio.sleep(0)


@pytest.mark.parametrize("num_tokens", [BUDGET, SHORT_RESPONSE_TOKENS])
def test_an_interrupted_request_asks_for_the_rest(num_tokens: int) -> None:
    """Also where the samples of one prompt share a call: with the seed of each, behind its own tokens, for what is left of the budget."""

    async def work() -> None:
        engine = Interrupted(error=EngineError("the answer to the abort was lost"))
        engine.num_missed = 2
        pool = EnginePool([engine], max_requests=8)  # type: ignore[list-item]
        async with generator_of(pool) as generator:
            generator._max_answer = BUDGET
            asking = asyncio.create_task(generator.generate(np.array([7, 8, 9]), sampling=Sampling(max_tokens=num_tokens), num_samples=2))
            await settle()
            await asyncio.wait_for(pool.interrupt(), 5)
            assert not asking.done() and pool.num_running == 0
            own_s = generator.own_s
            await asyncio.sleep(0.01)
            assert generator.own_s == own_s, "a wait for the next step is no time of the rollout's own"
            assert len(engine.asked) == 1
            engine.version = 5
            engine.free.set()
            pool.readmit()
            answers = await asyncio.wait_for(asking, 5)
        kept = num_tokens // 2 - 1
        (_, seed), first, second = engine.asked
        assert seed is not None and [first[1], second[1]] == [seed, seed + 1]
        assert first[0] == second[0] == [7, 8, 9, *range(3, 3 + kept)]
        assert [sampling.max_tokens for sampling in engine.samplings] == [num_tokens, num_tokens - kept, num_tokens - kept]
        for answer in answers:
            assert answer.token_ids.tolist() == list(range(3, 3 + num_tokens)) and answer.stop_reason is StopReason.LENGTH
            assert answer.weight_versions.tolist() == [2] * kept + [5] * (num_tokens - kept)

    asyncio.run(work())


def test_an_answer_that_nobody_interrupted_is_continued() -> None:
    async def work() -> None:
        engine = Interrupted()
        pool = EnginePool([engine], max_requests=8)  # type: ignore[list-item]
        async with generator_of(pool) as generator:
            asking = asyncio.create_task(generator.generate(np.array([7]), sampling=Sampling(max_tokens=4)))
            await settle()
            await engine.abort_all()
            await settle()
            engine.free.set()
            (answer,) = await asyncio.wait_for(asking, 5)
        assert answer.stop_reason is StopReason.LENGTH and len(answer.token_ids) == 4
        assert [sampling.max_tokens for sampling in engine.samplings] == [4, 3]

    asyncio.run(work())


def test_an_engine_that_aborts_without_a_token_has_failed() -> None:
    async def work() -> None:
        engine = Interrupted()
        pool = EnginePool([engine], max_requests=8)  # type: ignore[list-item]
        async with generator_of(pool) as generator:
            asking = asyncio.create_task(generator.generate(np.array([7]), sampling=Sampling(max_tokens=2)))
            await settle()
            await engine.abort_all()
            with pytest.raises(EngineError, match="aborted a request without a token, and nobody asked it to"):
                await asyncio.wait_for(asking, 5)

    asyncio.run(work())


def test_only_evaluation_gets_slots_during_an_interruption() -> None:
    async def work() -> None:
        engine = Interrupted()
        pool = EnginePool([engine], max_requests=1)  # type: ignore[list-item]
        await pool.interrupt()
        waiting = [asyncio.create_task(take(pool, urgency)) for urgency in Urgency]
        await settle()
        assert [each.done() for each in waiting] == [urgency is Urgency.EVALUATION for urgency in Urgency]
        pool.readmit()
        await asyncio.wait_for(asyncio.gather(*waiting), 5)

    asyncio.run(work())


def test_evaluation_is_repeated_during_an_interruption() -> None:
    async def work() -> None:
        pool = EnginePool([dead(), Engine(version=3)], max_requests=1)  # type: ignore[list-item]
        await pool.interrupt()
        async with generator_of(pool) as generator:
            generator._urgency = Urgency.EVALUATION
            calls = [generator.generate(np.array([7]), sampling=Sampling(max_tokens=4)) for _ in range(2)]
            assert len(await asyncio.wait_for(asyncio.gather(*calls), 5)) == 2

    asyncio.run(work())


async def take(pool: EnginePool, urgency: Urgency) -> None:
    async with pool.slots(1, urgency=urgency):
        pass


def test_a_resumed_group_continues_its_pieces(tmp_path: Path) -> None:
    """One of three samples is finished when the step ends, and the run is killed before the next."""

    async def until_killed(buffer: Buffer) -> Interrupted:
        engine = Interrupted()
        pool = EnginePool([engine], max_requests=8)  # type: ignore[list-item]
        making = asyncio.create_task(make_maker(pool, max_answer=BUDGET).make(PROMPT, num_samples=3, buffer=buffer))
        await settle()
        await pool.interrupt()
        making.cancel()
        await asyncio.gather(making, return_exceptions=True)
        return engine

    async def resumed(buffer: Buffer) -> tuple[Interrupted, Group]:
        engine = Interrupted(version=6)
        engine.free.set()
        pool = EnginePool([engine], max_requests=8)  # type: ignore[list-item]
        return engine, await make_maker(pool, max_answer=BUDGET).make(PROMPT, num_samples=3, buffer=buffer)

    with Buffer(tmp_path / "buffer.sqlite") as buffer:
        buffer.add_prompts([PROMPT])
        buffer.take_pending(1)
        before = asyncio.run(until_killed(buffer))
        buffer.recover()
        assert buffer.renew(1, oldest_version=6, by_newest=True) == 0 and len(buffer.answers("p")) == 3
        assert [group.oldest_version for group in buffer.waiting()] == [2]
        buffer.take_pending(1)
        after, group = asyncio.run(resumed(buffer))
    kept = BUDGET // 2 - 1
    assert [ids for ids, _ in after.asked] == [[1, 2, *range(2, 2 + kept)]] * 3
    assert [seed for _, seed in after.asked] == [seed for _, seed in before.asked]
    for sample in group.samples:
        assert sample.response_ids.tolist() == list(range(2, 2 + BUDGET))
        assert sample.weight_versions.tolist() == [2] * kept + [6] * (BUDGET - kept)


def test_stale_tokens_become_context() -> None:
    first, second = generation([5, 6, 7, 8], 0, StopReason.STOP), generation([1, 2, 3], 1, StopReason.STOP)
    third = Generation(np.arange(4), np.zeros(4, np.float32), np.array([0, -1, 1, 2]), StopReason.STOP)
    samples = samples_of(first, second, third)
    # Position 1 is no token to train on in any of them, whatever made it.
    masks = [sample.loss_mask.tolist() for sample in without_stale_tokens(Group("p", PROMPT, tuple(samples)), oldest_version=1).samples]
    assert masks == [[False] * 4, [True, False, True], [False, False, True, True]]


def test_a_sample_without_a_trained_token_is_in_no_denominator() -> None:
    """Of answers with 4, 3 and 4 tokens the first is too old: 2 of the second and 1 of the third are trained on; all rewards count."""
    answers = [generation([5, 6, 7, 8], 0, StopReason.STOP), generation([1, 2, 3], 1, StopReason.STOP)]
    answers.append(Generation(np.arange(4), np.zeros(4, np.float32), np.array([0, 0, 0, 1]), StopReason.STOP))
    rewards = [Reward(RewardOutcome.SCORED, value) for value in (1.0, 0.5, 0.0)]
    samples = tuple(replace(sample, reward=reward) for sample, reward in zip(samples_of(*answers), rewards, strict=True))
    group = without_stale_tokens(Group("p", PROMPT, samples), oldest_version=1)
    (shard,) = make_shards(make_train_batch([group], version=1), dp=1, optimizer_steps=1, max_tokens_per_micro_batch=99, seed=0)
    (totals,) = shard.totals
    # Tokens with the prompts of 2 that the counted sequences have.
    assert totals == StepTotals(num_tokens=3, num_trajectories=2, num_sequences=2, num_sequence_tokens=5 + 6)
    assert sorted(shard.all_rewards) == [0.0, 0.5, 1.0] and sorted(shard.all_trainable_tokens) == [0, 1, 2]
