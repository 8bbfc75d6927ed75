"""A rollout of two samples for each trajectory, from the engine through checks, rewards and buffer to the batch."""

import asyncio
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from buffer_parts import take_done

from megatron_rl.config.settings import RolloutSettings, SamplingSettings
from megatron_rl.data.batch import make_train_batch
from megatron_rl.data.buffer import Buffer
from megatron_rl.engines.sampling import Sampling
from megatron_rl.errors import UserError
from megatron_rl.rollout.groups import single_turn
from megatron_rl.rollout.rollout_trial import NumberTokenizer, RolloutTrial, ScriptedEngine, scripted_experts
from megatron_rl.rollout.sample_checks import check_samples
from megatron_rl.types import Group, Prompt, Reward, RewardOutcome, Sample, trajectories

PROMPT = Prompt(id="p", token_ids=np.array([1, 2, 3]), text="2+2=", label="4", metadata={"level": 1})


def two_turns_each(num_trajectories: int) -> list[Sample]:
    """The second turn sees the first answer alone, behind a prompt of its own."""
    engine, samples = ScriptedEngine(50), []

    async def work() -> None:
        for trajectory in range(num_trajectories):
            asked = PROMPT
            for _ in range(2):
                (made,) = await single_turn(
                    prompt=asked, generator=engine, sampling=Sampling(max_tokens=5), num_samples=1, tokenizer=NumberTokenizer()
                )
                samples.append(replace(made, index=len(samples), trajectory=trajectory))
                asked = replace(PROMPT, token_ids=np.concatenate([[9], made.response_ids]), text="again")

    asyncio.run(work())
    return samples


async def careless(**arguments: Any) -> list[Sample]:
    return [replace(sample, candidates=None) for sample in await single_turn(**arguments)]


def test_a_trial_looks_for_candidates_where_the_run_needs_them() -> None:
    for name, passes in (("megatron_rl.rollout.groups:single_turn", True), ("test_sample_checks:careless", False)):
        for top_p in (1.0, 0.9):
            trial = RolloutTrial(RolloutSettings(function=name, sampling=SamplingSettings(top_p=top_p)))
            with nullcontext() if passes or top_p == 1 else pytest.raises(UserError, match="with no candidates, which"):
                trial.run()


def test_records_with_own_prompts_reach_the_batch(tmp_path: Path) -> None:
    made = two_turns_each(3)
    checked = check_samples(made, prompt=PROMPT, num_samples=3, vocab_size=50, max_tokens=99, need_experts=True)
    assert checked == tuple(made)
    rewards = {
        sample.index: Reward(RewardOutcome.SCORED, float(number)) for number, parts in enumerate(trajectories(made)) for sample in parts
    }
    group = Group(id="p", prompt=PROMPT, samples=tuple(replace(sample, reward=rewards[sample.index]) for sample in checked))
    with Buffer(tmp_path / "buffer.sqlite") as buffer:
        buffer.add_prompts([PROMPT])
        buffer.take_pending(1)
        buffer.put_done(group)
        batch = make_train_batch(take_done(buffer, 1, step=1))
    assert batch.rewards.tolist() == [0, 0, 1, 1, 2, 2] and batch.trajectory_ids.tolist() == [0, 0, 1, 1, 2, 2]
    assert batch.routed_experts is not None
    for sample, start, end in zip(made, batch.cu_seqlens, batch.cu_seqlens[1:], strict=False):
        tokens = np.concatenate([sample.prompt.token_ids, sample.response_ids])
        np.testing.assert_array_equal(batch.tokens[start:end], tokens)
        np.testing.assert_array_equal(batch.routed_experts[start : end - 1], scripted_experts(tokens)[:-1])
        assert batch.routed[start:end].tolist() == [True] * (len(tokens) - 1) + [False]


def test_the_number_of_trajectories_is_what_was_asked_for() -> None:
    samples = two_turns_each(2)
    for wrong in (1, 3, 4):
        with pytest.raises(UserError, match=rf"returned 4 samples of 2 trajectories, needs {wrong} trajectories"):
            check_samples(samples, prompt=PROMPT, num_samples=wrong, vocab_size=50, max_tokens=99)
    with pytest.raises(UserError, match=r"the index \[0, 1, 2, 4\], needs each of 0 to 3 once"):
        check_samples([*samples[:3], replace(samples[3], index=4)], prompt=PROMPT, num_samples=2, vocab_size=50, max_tokens=99)


def test_each_role_has_as_many_trajectories_as_were_asked_for() -> None:
    made = [replace(sample, role=("proposer", "verifier")[int(sample.trajectory or 0) % 2]) for sample in two_turns_each(4)]
    assert len(check_samples(made, prompt=PROMPT, num_samples=2, vocab_size=50, max_tokens=99)) == 8
    with pytest.raises(
        UserError, match=r"4 trajectories \(2 of role 'proposer', 2 of role 'verifier'\), needs 4 trajectories of each role"
    ):
        check_samples(made, prompt=PROMPT, num_samples=4, vocab_size=50, max_tokens=99)
    with pytest.raises(UserError, match=r"trajectory 0 with samples of the roles \['None', 'proposer'\], needs one role"):
        check_samples([replace(made[0], role=None), *made[1:]], prompt=PROMPT, num_samples=2, vocab_size=50, max_tokens=99)


def test_a_rollout_without_a_trainable_token_is_refused() -> None:
    """As empty answers are; one of several may be."""
    made = two_turns_each(2)
    masked = [replace(sample, loss_mask=np.zeros(len(sample.response_ids), np.bool_)) for sample in made]
    check_samples([*masked[:3], made[3]], prompt=PROMPT, num_samples=2, vocab_size=50, max_tokens=99)
    with pytest.raises(UserError, match="returned 4 samples without any trainable token, needs one at least"):
        check_samples(masked, prompt=PROMPT, num_samples=2, vocab_size=50, max_tokens=99)
