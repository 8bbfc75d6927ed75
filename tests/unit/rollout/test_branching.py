"""Samples that branch: what they share, where, what is trained on, and what a run asks of a rollout."""

import asyncio
from typing import Any

import numpy as np
import pytest

from megatron_rl.config.settings import RolloutSettings, SamplingSettings
from megatron_rl.engines.answers import Generation
from megatron_rl.engines.sampling import Sampling
from megatron_rl.errors import UserError
from megatron_rl.rollout.branching import num_shared, rollout
from megatron_rl.rollout.rollout_trial import NumberTokenizer, RolloutTrial, ScriptedEngine
from megatron_rl.types import Prompt, Sample, StopReason

PROMPT = Prompt(id="p", token_ids=np.array([1, 2, 3]), text="2+2=")
NAME = "megatron_rl.rollout.branching:rollout"


class NotedEngine(ScriptedEngine):
    """One that keeps what it was asked and answered."""

    def __init__(self) -> None:
        super().__init__(50)
        self.asked: list[tuple[list[int], Sampling]] = []
        self.answers: list[Generation] = []

    async def generate(self, token_ids: Any, *, sampling: Sampling, num_samples: int = 1, session: str | None = None) -> Any:
        answers = await super().generate(token_ids, sampling=sampling, num_samples=num_samples)
        self.asked.append((token_ids.tolist(), sampling))
        self.answers += answers
        return answers


def grown(num_samples: int, **options: Any) -> tuple[tuple[Sample, ...], NotedEngine]:
    engine = NotedEngine()
    sampling = Sampling(max_tokens=12, top_k=5, records_candidates=True)
    asked = {"prompt": PROMPT, "generator": engine, "sampling": sampling, "num_samples": num_samples, "tokenizer": NumberTokenizer()}
    return asyncio.run(rollout(**asked, **options)), engine


def trunk_of(*log_probs: float) -> Generation:
    length = len(log_probs)
    return Generation(np.arange(length), np.array(log_probs, np.float32), np.zeros(length, np.int64), StopReason.STOP)


@pytest.mark.parametrize(
    ("at", "log_probs", "shared"),
    [
        ("surprise", (-9.0, -0.1, -2.0, -0.1, -1.0), [2, 4, 1, 3, 2]),
        ("first", (-9.0, -0.1, -2.0, -0.1, -1.0), [1, 2, 3, 4, 1]),
        ("surprise", (-9.0,), [0, 0]),
        ("first", (-9.0, -1.0), [1, 1]),
    ],
)
def test_branches_begin_before_the_most_surprising_or_first_tokens(at: Any, log_probs: tuple[float, ...], shared: list[int]) -> None:
    assert [num_shared(trunk_of(*log_probs), number=number + 1, at=at) for number in range(len(shared))] == shared


def test_a_shared_token_is_trained_on_in_the_trunk_alone() -> None:
    samples, engine = grown(7, leaves=4)
    assert [sample.index for sample in samples] == list(range(7)) and len({sample.group_id for sample in samples}) == 1
    assert all(sample.trajectory is None for sample in samples), "leaves are trajectories of their own"
    assert len(engine.asked) == 1 + 5 and engine.asked[0][0] == [1, 2, 3]
    for index, sample in enumerate(samples):
        trunk, answer = samples[index % 2], engine.answers[index]
        shared = len(sample.response_ids) - len(answer.token_ids)
        assert (shared == 0) == (index < 2 or len(trunk.response_ids) == 1)
        for name in ("response_ids", "rollout_log_probs", "weight_versions"):
            np.testing.assert_array_equal(getattr(sample, name)[:shared], getattr(trunk, name)[:shared])
        np.testing.assert_array_equal(sample.rollout_log_probs[shared:], answer.log_probs)
        assert sample.loss_mask.tolist() == [False] * shared + [True] * len(answer.token_ids)
        assert sample.candidates is not None and len(sample.candidates) == len(sample.response_ids)
        if index >= 2:
            tokens, sampling = engine.asked[index - 1]
            assert tokens == [1, 2, 3, *sample.response_ids[:shared].tolist()] and sampling.max_tokens == 12 - shared
        assert sample.response_text == " ".join(map(str, sample.response_ids))


def test_one_sample_is_a_trunk_and_one_leaf_is_plain_sampling() -> None:
    assert [len(grown(count, leaves=leaves)[1].asked) for count, leaves in ((1, 4), (6, 1))] == [1, 1]
    with pytest.raises(UserError, match="leaves is 0, needs 1 or more"):
        grown(4, leaves=0)


@pytest.mark.parametrize("args", [{}, {"at": "first", "leaves": 3}])
def test_a_run_takes_its_samples(args: dict[str, Any]) -> None:
    trial = RolloutTrial(RolloutSettings(function=NAME, args=args, sampling=SamplingSettings(top_p=0.9)))
    trial.run()
    for check in (trial.check_trained, trial.check_seen, trial.check_masked, trial.check_experts):
        check()
