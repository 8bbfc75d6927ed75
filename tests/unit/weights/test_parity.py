import asyncio
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from megatron_rl.errors import EngineError, ParityError
from megatron_rl.observe.metrics import metric_values
from megatron_rl.rollout import engine_pool
from megatron_rl.rollout.client import Scores
from megatron_rl.rollout.engine import EngineAddress
from megatron_rl.rollout.engine_pool import EnginePool
from megatron_rl.types import Experts, Floats, Ints, Prompt, TrainBatch
from megatron_rl.weights.parity import PROBE_SEQUENCES, ScoredProbe, check_parity, check_probe, make_probe, score_probe, sequences

PROMPTS = [Prompt(id="a", token_ids=np.array([1, 2, 3]), text="abc"), Prompt(id="b", token_ids=np.array([7, 8]), text="de")]


def test_probe_continues_real_prompts_with_valid_tokens() -> None:
    prompts = [Prompt(id="a", token_ids=np.array([1, 2, 3]), text="abc"), Prompt(id="b", token_ids=np.arange(20), text="long")]
    probe = make_probe(prompts, vocab_size=30, num_sequences=3, length=10, seed=0)
    first, second, third = sequences(probe)
    assert first[:3].tolist() == third[:3].tolist() == [1, 2, 3]
    assert second[:9].tolist() == list(range(9))
    assert probe.tokens.max() < 30
    assert probe.loss_mask.sum() == 27
    again = make_probe(prompts, vocab_size=30, num_sequences=3, length=10, seed=0)
    assert np.array_equal(again.tokens, probe.tokens)


def test_equal_log_probs_pass_and_masked_tokens_do_not_count() -> None:
    trainer = np.array([np.nan, -1.0, -2.0], np.float32)
    engine = np.array([7.77, -1.0, -2.0001], np.float32)
    report = check_parity(engine, trainer, mask_T=np.array([False, True, True]), threshold=1e-4)
    assert report.num_tokens == 2
    assert report.mean == pytest.approx(5e-5, rel=1e-2)


@pytest.mark.parametrize("value", [-1.5, np.nan, -np.inf])
def test_a_difference_above_the_threshold_stops_the_run(value: float) -> None:
    trainer = np.full(4, -1.0, np.float32)
    engine = np.array([-1.0, -1.0, -1.0, value], np.float32)
    with pytest.raises(ParityError, match="engine and trainer disagree"):
        check_parity(engine, trainer, mask_T=np.ones(4, np.bool_), threshold=1e-2)


class Client:
    """An engine that scores the token at position t with -t / 100 nats, and `wrong_by` less; `expert` is where it routes everything.

    One that `dies` does not answer, and leaves the pool soon; one that `fails` stays in it.
    """

    pool: EnginePool

    def __init__(
        self, *, wrong_by: float = 0.0, context_length: int = 64, expert: int | None = None, dies: bool = False, fails: bool = False
    ) -> None:
        self.address = EngineAddress("url", "key", vocab_size=32, context_length=context_length, max_total_tokens=64, has_tokenizer=False)
        self._wrong_by, self._expert, self._dies, self._fails = wrong_by, expert, dies, fails

    async def score(self, token_ids: Ints) -> Scores:
        if self._dies:
            asyncio.get_running_loop().call_later(0.01, self.pool.leave, self, EngineError("killed"))
        if self._dies or self._fails:
            raise EngineError("cannot be reached")
        experts: Experts | None = None if self._expert is None else np.full((len(token_ids) - 1, 1, 1), self._expert, np.uint8)
        return Scores((-np.arange(len(token_ids)) / 100 - self._wrong_by).astype(np.float32), experts)


def by_trainer(batch: TrainBatch, *, off_expert_3: float = 0.0) -> Floats:
    """Log-probs [T] of ranks that agree with an engine that is right, but for `off_expert_3` where no token is routed to expert 3."""
    found = np.concatenate([-np.arange(len(tokens)) / 100 for tokens in sequences(batch)])
    on_3 = batch.routed_experts is not None and (batch.routed_experts[batch.routed] == 3).all()
    return (found if on_3 else found - off_expert_3).astype(np.float32)


def scored_by(*clients: Client, prompts: Sequence[Prompt] = PROMPTS, vocab_size: int = 30) -> ScoredProbe:
    async def work() -> ScoredProbe:
        pool = EnginePool(clients, max_requests=1)  # type: ignore[arg-type]
        for client in clients:
            client.pool = pool
        return await score_probe(prompts, pool, vocab_size=vocab_size, seed=0)

    return asyncio.run(work())


def test_the_probe_starts_with_the_prompts_and_keeps_to_the_smaller_vocabulary_and_half_the_context() -> None:
    for vocab_size, context_length, length in ((5, 64, 32), (100, 20, 10), (100, 512, 64)):
        scored = scored_by(Client(context_length=context_length), vocab_size=vocab_size)
        probe = sequences(scored.batch)
        assert [len(tokens) for tokens in probe] == [length] * PROBE_SEQUENCES
        for row, tokens in enumerate(probe):
            prompt = PROMPTS[row % 2].token_ids
            assert tokens[: len(prompt)].tolist() == prompt.tolist()
            assert tokens[len(prompt) :].max() < min(vocab_size, 32)


def test_engines_that_agree_with_the_trainer_pass() -> None:
    values = metric_values(check_probe(scored_by(Client(), Client()), by_trainer, threshold=1e-4, replays=False))
    assert values == {"weights/parity_mean": 0, "weights/parity_max": 0}


def test_an_engine_that_dies_over_the_probe_is_left_out_and_one_that_fails_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    scored = scored_by(Client(dies=True), Client(wrong_by=2e-5))
    values = metric_values(check_probe(scored, by_trainer, threshold=1e-4, replays=False))
    assert values["weights/parity_mean"] == pytest.approx(2e-5, rel=1e-2)
    with pytest.raises(EngineError, match="no engine is left"):
        scored_by(Client(dies=True), Client(dies=True))
    monkeypatch.setattr(engine_pool, "DEATH_S", 0.05)
    with pytest.raises(EngineError, match="cannot be reached"):
        scored_by(Client(), Client(fails=True))


def test_the_metrics_are_those_of_the_worst_engine() -> None:
    scored = scored_by(Client(), Client(wrong_by=5e-5), Client(wrong_by=2e-5))
    values = metric_values(check_probe(scored, by_trainer, threshold=1e-4, replays=False))
    assert values["weights/parity_mean"] == pytest.approx(5e-5, rel=1e-2)


def test_one_engine_of_two_that_disagrees_stops_the_run() -> None:
    with pytest.raises(ParityError, match=r"mean \|Δ\| 2\.00e-04"):
        check_probe(scored_by(Client(), Client(wrong_by=2e-4)), by_trainer, threshold=1e-4, replays=False)


def test_with_routing_replay_the_trainer_takes_the_experts_of_each_engine() -> None:
    """And what the two differ by on routes of their own is told beside."""
    scored, log_probs = scored_by(Client(expert=3)), partial(by_trainer, off_expert_3=0.25)
    values = metric_values(check_probe(scored, log_probs, threshold=1e-4, replays=True))
    assert values["weights/parity_mean"] == 0
    assert values["weights/parity_mean_without_replay"] == pytest.approx(0.25)
    with pytest.raises(ParityError):
        check_probe(scored, log_probs, threshold=1e-4, replays=False)
