"""The contract of a rollout function. Check your own: `pytest tests/contract/test_rollout.py --rollout package.module:function`."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.rollout.client import Generation
from megatron_rl.rollout.generate import check_samples, load_rollout
from megatron_rl.rollout.sampling import Sampling
from megatron_rl.types import Experts, Ints, Prompt, Sample, StopReason

VOCAB_SIZE = 50
TWO_TURNS = "two_turns:rollout"
OURS = ("megatron_rl.rollout.generate:single_turn", TWO_TURNS)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Check the rollout function that is asked for; else ours, one of them with tokens that no engine made."""
    if "path" in metafunc.fixturenames:
        asked = metafunc.config.getoption("--rollout", default=None)
        metafunc.parametrize("path", [str(asked)] if asked else OURS)


@pytest.fixture(autouse=True)
def _two_turns_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)


class ScriptedEngine:
    """An engine that answers with seeded random tokens, and remembers each token's log-prob and version.

    It routes a token to an expert of the token's number and to one that tells the position.
    """

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)
        self.made: dict[float, tuple[int, int]] = {}

    async def generate(self, token_ids: Ints, *, sampling: Sampling, num_samples: int = 1) -> tuple[Generation, ...]:
        await asyncio.sleep(0)
        return tuple(self._answer(token_ids, sampling) for _ in range(num_samples))

    def _answer(self, prompt: Ints, sampling: Sampling) -> Generation:
        length = int(self.random.integers(1, sampling.max_tokens + 1))
        tokens = self.random.integers(0, VOCAB_SIZE, length)
        log_probs = -self.random.random(length).astype(np.float32)
        versions = np.full(length, 3)
        self.made.update((float(log_prob), (int(token), 3)) for log_prob, token in zip(log_probs, tokens, strict=True))
        return Generation(tokens, log_probs, versions, StopReason.STOP, experts_of(np.concatenate([prompt, tokens]))[:-1])


def experts_of(tokens: Ints) -> Experts:
    """The scripted engine's experts [tokens, 1, 2] of a sequence."""
    return np.stack([tokens, VOCAB_SIZE + np.arange(len(tokens))], axis=-1).astype(np.uint8)[:, None]


def run(path: str, engine: ScriptedEngine, *, num_samples: int) -> tuple[Sample, ...]:
    prompt = Prompt(id="contract", token_ids=np.array([1, 2, 3]), text="2+2=", label="4")
    work = load_rollout(path)(
        prompt, engine=engine, sampling=Sampling(max_tokens=8), num_samples=num_samples, decode=lambda ids: " ".join(map(str, ids))
    )

    async def wait() -> tuple[Sample, ...]:
        return check_samples(await work, prompt=prompt, num_samples=num_samples, vocab_size=VOCAB_SIZE, need_experts=True)

    return asyncio.run(wait())


@pytest.mark.parametrize("num_samples", [1, 4])
def test_a_prompt_becomes_the_asked_number_of_samples(path: str, num_samples: int) -> None:
    samples = run(path, ScriptedEngine(), num_samples=num_samples)
    assert sorted(sample.index for sample in samples) == list(range(num_samples))


def test_trained_tokens_are_exactly_what_the_engine_made(path: str) -> None:
    engine = ScriptedEngine()
    for sample in run(path, engine, num_samples=4):
        assert sample.loss_mask.any(), "a sample without a trainable token teaches nothing"
        made = [engine.made.get(float(log_prob)) for log_prob in sample.rollout_log_probs[sample.loss_mask]]
        kept = zip(sample.response_ids[sample.loss_mask].tolist(), sample.weight_versions[sample.loss_mask].tolist(), strict=True)
        assert made == list(kept), "a trained token, its log-prob and its version need to come from the engine together"


def test_tokens_that_no_engine_made_are_masked_and_have_no_version(path: str) -> None:
    engine = ScriptedEngine()
    for sample in run(path, engine, num_samples=4):
        made = [engine.made.get(float(log_prob)) for log_prob in sample.rollout_log_probs]
        tokens = zip(made, sample.response_ids.tolist(), sample.loss_mask.tolist(), sample.weight_versions.tolist(), strict=True)
        for position, (origin, token, trained, version) in enumerate(tokens):
            if origin is None or origin[0] != token:
                assert (trained, version) == (False, -1), f"token {position} was made by no engine, so it is masked and has version -1"


def test_our_rollout_of_two_turns_has_tokens_that_no_engine_made() -> None:
    for sample in run(TWO_TURNS, ScriptedEngine(), num_samples=4):
        kinds = sample.loss_mask.astype(int)
        assert np.abs(np.diff(kinds)).sum() == 2 and not kinds[1:-1].all(), "masked tokens stand between trained ones"
        assert np.isnan(sample.rollout_log_probs[~sample.loss_mask]).all()


def test_experts_come_along_for_all_tokens_before_the_last_that_was_made(path: str) -> None:
    for sample in run(path, ScriptedEngine(), num_samples=4):
        assert sample.routed_experts is not None, "training.routing_replay needs the experts of the last Generation"
        tokens = np.concatenate([sample.prompt.token_ids, sample.response_ids])
        last_made = len(sample.prompt.token_ids) + int(np.flatnonzero(sample.weight_versions >= 0)[-1])
        np.testing.assert_array_equal(sample.routed_experts, experts_of(tokens)[:last_made])
