"""Answers that were finished when a run was killed, in the middle of a group."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from maker_parts import Engine, make_maker

from megatron_rl.data.buffer import Buffer
from megatron_rl.engines.answers import Generation, MixtureShape
from megatron_rl.engines.client import SHORT_RESPONSE_TOKENS
from megatron_rl.engines.engine_pool import EnginePool
from megatron_rl.engines.sampling import Sampling
from megatron_rl.errors import EngineError, UserError
from megatron_rl.plugins.kinds import Generator
from megatron_rl.rollout import generator
from megatron_rl.rollout.generator import KeptAnswers
from megatron_rl.rollout.groups import single_turn
from megatron_rl.rollout.rollout_trial import NumberTokenizer
from megatron_rl.system.frozen_arrays import Candidates
from megatron_rl.types import Group, Ints, Prompt, Reward, RewardOutcome, Sample, StopReason

PROMPT = Prompt(id="p", token_ids=np.array([1, 2]), text="1 2")
LONG = Sampling(max_tokens=SHORT_RESPONSE_TOKENS + 1)
MIXTURE = MixtureShape(num_layers=2, num_dense_layers=0, num_experts=4, experts_per_token=1)


class Counting(Engine):
    """Its n-th answer is the token 10 + n and the first token of the prompt; calls behind the first `limit` get none, or `error`."""

    def __init__(self, *, limit: int, error: Exception | None = None, first: int = 0) -> None:
        super().__init__(error=error, fail_at=limit + 1)
        self.answered, self.silent = first, asyncio.Event()

    @property
    def seeds(self) -> list[int | None]:
        return [seed for _, seed in self.asked]

    async def work(self, number: int) -> None:
        await super().work(number)
        if number >= self.fail_at and self.error is None:
            self.silent.set()
            await asyncio.Event().wait()

    def answer(self, token_ids: Ints) -> Generation:
        self.answered += 1
        ids, scores = np.array([10 + self.answered, token_ids[0]]), np.array([-0.1 * self.answered, -1.0], np.float32)
        return Generation(ids, scores, np.array([3, 4]), StopReason.LENGTH)


async def two_turns(
    *, prompt: Prompt, generator: Generator, sampling: Sampling, num_samples: int, tokenizer: NumberTokenizer
) -> Sequence[Sample]:
    """One conversation after the other, each of whose second turns has seen the first."""
    samples = []
    for index in range(num_samples):
        (first,) = await generator.generate(prompt.token_ids, sampling=sampling, session=f"{index}")
        (second,) = await generator.generate(first.token_ids, sampling=sampling, session=f"{index}")
        (sample,) = await single_turn(num_samples=1, prompt=prompt, generator=Given(second), sampling=sampling, tokenizer=tokenizer)  # type: ignore[arg-type]
        samples.append(replace(sample, index=index))
    return samples


class Given:
    """A generator that gives one answer."""

    def __init__(self, answer: Generation) -> None:
        self._answer = answer

    async def generate(self, token_ids: Ints, **_: object) -> tuple[Generation, ...]:
        return (self._answer,)


async def make(
    buffer: Buffer, *engines: Counting, num_samples: int = 3, killed: bool = False, due_s: float = 0.0, greedy: bool = False, **changes: Any
) -> Group | None:
    """The group of the prompt, or None when the engine does not answer any more and the run is `killed` `due_s` seconds later."""

    async def score(sample: Sample) -> Reward:
        return Reward(outcome=RewardOutcome.SCORED, value=1.0)

    pool = EnginePool(engines, max_requests=8)  # type: ignore[arg-type]
    maker = make_maker(pool, score=score, **{"max_answer": LONG.max_tokens, **changes})
    making = asyncio.create_task(maker.make(PROMPT, num_samples=num_samples, greedy=greedy, buffer=buffer))
    if not killed:
        return await asyncio.wait_for(making, 5)
    await asyncio.wait_for(engines[0].silent.wait(), 5)
    # What it has answered before has now come to whoever asked, and what is due was written.
    for _ in range(100):
        await asyncio.sleep(0)
    await asyncio.sleep(due_s)
    assert not making.done()
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    return None


def responses(group: Group | None) -> list[list[int]]:
    assert group is not None
    return [sample.response_ids.tolist() for sample in group.samples]


@pytest.fixture
def buffer(tmp_path: Path) -> Any:
    with Buffer(tmp_path / "buffer.sqlite") as opened:
        opened.add_prompts([PROMPT])
        opened.take_pending(1)
        yield opened


def test_only_samples_that_a_kill_cut_off_are_made_again(buffer: Buffer, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing that is done at the end of a process counts: a killed one does nothing.
    monkeypatch.setattr(KeptAnswers, "__exit__", lambda *_: None)
    monkeypatch.setattr(generator, "KEEP_AFTER_S", 0.01)
    before, after = Counting(limit=2), Counting(limit=9, first=50)
    asyncio.run(make(buffer, before, killed=True, due_s=generator.KEEP_AFTER_S))
    assert len(buffer.answers("p")) == 2
    group = asyncio.run(make(buffer, after))
    assert len(before.seeds) == before.most_running == 3 and after.most_running == 1 and after.seeds == before.seeds[2:]
    assert responses(group) == [[11, 1], [12, 1], [61, 1]]
    assert group is not None
    assert group.samples[1].rollout_log_probs.tolist() == np.array([-0.2, -1.0], np.float32).tolist()
    assert group.samples[1].weight_versions.tolist() == [3, 4] and group.samples[1].stop_reason is StopReason.LENGTH
    buffer.put_done(group)
    assert buffer.answers("p") == {}


def test_turns_that_were_finished_are_not_asked_for_again(buffer: Buffer) -> None:
    before, after = Counting(limit=3), Counting(limit=9, first=50)
    asyncio.run(make(buffer, before, killed=True, rollout=two_turns))
    assert responses(asyncio.run(make(buffer, after, rollout=two_turns))) == [[12, 11], [61, 13], [63, 62]]
    assert len(after.seeds) == 3 and after.seeds[0] == before.seeds[3]


@pytest.mark.parametrize(
    "changes",
    [{"greedy": True}, {"max_answer": 40}, {"seed": 1}],
    ids=["temperature", "length", "seed"],
)
def test_an_answer_to_another_request_is_not_taken(buffer: Buffer, changes: dict[str, Any]) -> None:
    asyncio.run(make(buffer, Counting(limit=2), killed=True))
    after = Counting(limit=9, first=50)
    assert responses(asyncio.run(make(buffer, after, **changes))) == [[61, 1], [62, 1], [63, 1]]


def test_an_answer_without_recorded_experts_is_not_taken(buffer: Buffer) -> None:
    asyncio.run(make(buffer, Counting(limit=2), killed=True))
    after = Counting(limit=0)
    after.address = replace(after.address, mixture=MIXTURE)
    asyncio.run(make(buffer, after, killed=True))
    assert len(after.seeds) == 3


def test_soon_finished_groups_and_short_answers_cost_no_write(buffer: Buffer, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr(Buffer, "put_answers", lambda self, group_id, answers: written.append(group_id))
    asyncio.run(make(buffer, Counting(limit=9)))
    short = Counting(limit=9)
    asyncio.run(make(buffer, short, max_answer=SHORT_RESPONSE_TOKENS))
    asyncio.run(make(buffer, Counting(limit=0), max_answer=SHORT_RESPONSE_TOKENS, killed=True))
    assert written == []


@pytest.mark.parametrize(("tokens", "stop_reason"), [([5], StopReason.ABORT), ([], StopReason.STOP)], ids=["aborted", "empty"])
def test_what_is_no_answer_is_not_kept(buffer: Buffer, tokens: list[int], stop_reason: StopReason) -> None:
    async def work() -> None:
        zeros = np.zeros(len(tokens))
        answer = Generation(np.array(tokens), zeros.astype(np.float32), zeros.astype(int), stop_reason)
        with pytest.raises(asyncio.CancelledError), KeptAnswers(buffer, "p") as kept:
            kept.add(PROMPT.token_ids, LONG, answer)
            raise asyncio.CancelledError

    asyncio.run(work())
    assert buffer.answers("p") == {}


def test_a_full_disk_is_told_by_the_finished_group_alone(buffer: Buffer, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise UserError("the disk is full")

    monkeypatch.setattr(Buffer, "put_answers", full)
    asyncio.run(make(buffer, Counting(limit=2), killed=True))


def test_a_failed_engine_s_open_requests_go_to_another(buffer: Buffer) -> None:
    engines = Counting(limit=2, error=EngineError("gone")), Counting(limit=9, first=50)
    assert responses(asyncio.run(make(buffer, *engines))) == [[11, 1], [12, 1], [61, 1]]
    assert engines[1].seeds == engines[0].seeds[2:]


def test_records_come_back(buffer: Buffer) -> None:
    async def work() -> None:
        experts = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
        candidates = Candidates.of([[5, 3, 7]])
        answer = Generation(np.array([5]), np.zeros(1, np.float32), np.array([0]), StopReason.STOP, experts, candidates)
        with pytest.raises(asyncio.CancelledError), KeptAnswers(buffer, "p") as kept:
            kept.add(PROMPT.token_ids, LONG, answer)
            raise asyncio.CancelledError
        found = KeptAnswers(buffer, "p").find(PROMPT.token_ids, LONG)
        assert found is not None and found.routed_experts is not None
        np.testing.assert_array_equal(found.routed_experts, experts, strict=True)
        assert found.candidates is not None and found.candidates.packed().tolist() == [3, 5, 3, 7]

    asyncio.run(work())


@pytest.mark.parametrize(("version", "oldest", "num_kept"), [(4, 0, 2), (3, 0, 0), (4, 3, 2), (4, 4, 0)])
def test_an_answer_is_as_new_as_its_newest_token(buffer: Buffer, version: int, oldest: int, num_kept: int) -> None:
    """Those of this engine are of versions 3 and 4: after a resume from weights of version 3 the newest tokens are of no weights."""
    asyncio.run(make(buffer, Counting(limit=2), killed=True))
    assert len(buffer.answers("p")) == 2
    buffer.recover()
    buffer.rewind(version)
    buffer.renew(0, oldest_version=oldest)
    assert len(buffer.answers("p")) == num_kept
