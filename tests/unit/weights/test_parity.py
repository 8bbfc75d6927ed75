import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_rl.algorithms.rounding_limits import DENSE, FLOAT32, REPLAYED, ROUTED, Limits
from megatron_rl.engines import engine_pool
from megatron_rl.engines.answers import Generation
from megatron_rl.engines.engine import EngineAddress
from megatron_rl.engines.engine_pool import EnginePool
from megatron_rl.engines.sampling import Sampling
from megatron_rl.errors import EngineError, ParityError
from megatron_rl.observe.metrics import metric_values
from megatron_rl.system.frozen_arrays import Candidates
from megatron_rl.types import Floats, Ints, Prompt, StopReason, TrainBatch
from megatron_rl.weights.parity import (
    PROBE_SAMPLES,
    ParityReport,
    SampledProbe,
    check_probe,
    check_read,
    check_replaced,
    check_reports,
    fixed_tokens,
    sample_probe,
    score,
    scored,
    weight_checksums,
)

PROMPTS = [Prompt(id="a", token_ids=np.array([1, 2, 3]), text="abc"), Prompt(id="b", token_ids=np.arange(40), text="long")]
LIMITS = Limits(median=1e-2, outlier=0.1, share=0.25)


class Client:
    """An engine that gives its r-th sampled token -r / 100 nats, and `wrong_by` less; `expert` is the one to which it routes everything.

    One that `dies` does not answer, and leaves the pool soon; one that `fails` stays in it. `weights` are its checksums.
    """

    pool: EnginePool

    def __init__(
        self, *, wrong_by: float = 0.0, context_length: int = 64, expert: int | None = None, dies: bool = False, fails: bool = False
    ) -> None:
        self.address = EngineAddress(
            f"url{id(self)}", "", vocab_size=50, context_length=context_length, max_total_tokens=64, has_tokenizer=False
        )
        self._wrong_by, self._expert, self._dies, self._fails = wrong_by, expert, dies, fails
        self.asked: list[tuple[list[int], Sampling]] = []
        self.weights = {"embedding": "e", "layer": "l"}

    async def generate(self, token_ids: Ints, *, sampling: Sampling, num_samples: int) -> tuple[Generation, ...]:
        if self._dies:
            asyncio.get_running_loop().call_later(0.01, self.pool.leave, self, EngineError("killed"))
        if self._dies or self._fails:
            raise EngineError("cannot be reached")
        self.asked.append((token_ids.tolist(), sampling))
        length = sampling.max_tokens
        log_probs = (-np.arange(length) / 100 - self._wrong_by).astype(np.float32)
        experts = None if self._expert is None else np.full((len(token_ids) + length - 1, 1, 1), self._expert, np.uint8)
        candidates = Candidates.of([each, each + 1] for each in range(length))
        sample = Generation(np.arange(length), log_probs, np.zeros(length, np.int64), StopReason.LENGTH, experts, candidates)
        return (sample,) * num_samples

    async def score(self, sequences: Sequence[Ints]) -> list[Floats]:
        if self._dies or self._fails:
            raise EngineError("cannot be reached")
        return [np.arange(len(ids), dtype=np.float32) - self._wrong_by for ids in sequences]

    async def checksums(self) -> dict[str, str]:
        return dict(self.weights)

    async def load_weights(self, path: Path, *, version: int, timeout_s: float) -> None:
        assert version == 0
        self.weights = {"embedding": "E", "layer": path.name}


def by_trainer(batch: TrainBatch, *, temperature: float, off_expert_3: float = 0.0) -> Floats:
    """Log-probs [T] of ranks that agree with an engine that is right, but for `off_expert_3` where no token is routed to expert 3."""
    found = -np.concatenate([np.arange(length) - prompt for length, prompt in zip(batch.lengths, batch.prompt_lengths, strict=True)]) / 100
    on_3 = batch.routed_experts is not None and (batch.routed_experts[batch.routed] == 3).all()
    return (found if on_3 else found - off_expert_3).astype(np.float32)


def sampled_by(*clients: Client, prompts: Sequence[Prompt] = PROMPTS, max_tokens: int = 8) -> SampledProbe:
    async def work() -> SampledProbe:
        pool = EnginePool(clients, max_requests=1)  # type: ignore[arg-type]
        for client in clients:
            client.pool = pool
        sampling = Sampling(max_tokens=max_tokens, temperature=0.7, stop=("no",), stop_token_ids=(5,), seed=3)
        return await sample_probe(prompts, pool, sampling=sampling)

    return asyncio.run(work())


def test_engines_continue_the_prompts_as_a_run_samples() -> None:
    for context_length, prompt_tokens, max_tokens, length in ((64, 16, 8, 8), (64, 16, 100, 16), (512, 40, 100, 32), (3, 1, 100, 1)):
        client = Client(context_length=context_length)
        probe = sampled_by(client, max_tokens=max_tokens)
        sampling = Sampling(max_tokens=length, temperature=0.7, stop_token_ids=(5,), seed=3)
        seeded = [sampling, sampling.of_sample(PROBE_SAMPLES)]
        assert client.asked == [(prompt.token_ids[:prompt_tokens].tolist(), own) for prompt, own in zip(PROMPTS, seeded, strict=True)]
        assert probe.temperature == 0.7 and probe.batch.num_sequences == 2 * PROBE_SAMPLES
        assert probe.batch.loss_mask.sum() == 2 * PROBE_SAMPLES * length, "the sampled tokens alone"
        assert probe.batch.candidates.counts.tolist() == (2 * probe.batch.loss_mask).tolist() == (2 * probe.recorded.loss_mask).tolist()
        first, last = probe.batch.tokens[: 3 + length], probe.batch.tokens[-length - prompt_tokens : -length]
        assert first.tolist() == [1, 2, 3][:prompt_tokens] + list(range(length)) + first.tolist()[min(3, prompt_tokens) + length :]
        assert last.tolist() == PROMPTS[1].token_ids[:prompt_tokens].tolist()


def test_engines_that_agree_with_the_trainer_pass() -> None:
    values = metric_values(check_probe(sampled_by(Client(), Client()), by_trainer, limits=FLOAT32, replays=False))
    names = ("median", "mean", "mean_of_best", "max", "outliers")
    assert values == {f"weights/parity_{name}": pytest.approx(0, abs=1e-6) for name in names}


def test_the_trainer_scores_at_the_temperature_of_the_samples() -> None:
    def at(batch: TrainBatch, *, temperature: float) -> Floats:
        return by_trainer(batch, temperature=temperature) + np.float32(temperature - 0.7)

    check_probe(sampled_by(Client()), at, limits=FLOAT32, replays=False)


def test_a_dead_engine_is_left_out_and_a_failing_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = sampled_by(Client(dies=True), Client(wrong_by=2e-5))
    values = metric_values(check_probe(probe, by_trainer, limits=FLOAT32, replays=False))
    assert values["weights/parity_mean"] == pytest.approx(2e-5, rel=1e-2)
    with pytest.raises(EngineError, match="no engine is left"):
        sampled_by(Client(dies=True), Client(dies=True))
    monkeypatch.setattr(engine_pool, "DEATH_S", 0.05)
    with pytest.raises(EngineError, match="cannot be reached"):
        sampled_by(Client(), Client(fails=True))


def test_the_metrics_are_those_of_the_worst_engine() -> None:
    probe = sampled_by(Client(), Client(wrong_by=5e-5), Client(wrong_by=2e-5))
    values = metric_values(check_probe(probe, by_trainer, limits=FLOAT32, replays=False))
    assert values["weights/parity_mean"] == pytest.approx(5e-5, rel=1e-2)


def test_one_engine_of_two_that_disagrees_stops_the_run() -> None:
    with pytest.raises(ParityError, match=r"mean 2\.00e-04.*needs .*mean of at most 1e-04.*weights\.parity_threshold"):
        check_probe(sampled_by(Client(), Client(wrong_by=2e-4)), by_trainer, limits=FLOAT32, replays=False)


def test_with_replay_the_trainer_takes_each_engine_s_experts() -> None:
    """The difference without is a metric of its own."""
    probe, log_probs = sampled_by(Client(expert=3)), partial(by_trainer, off_expert_3=0.25)
    values = metric_values(check_probe(probe, log_probs, limits=FLOAT32, replays=True))
    assert values["weights/parity_median"] == pytest.approx(0, abs=1e-6)
    assert values["weights/parity_mean_without_replay"] == pytest.approx(0.25)
    with pytest.raises(ParityError):
        check_probe(probe, log_probs, limits=FLOAT32, replays=False)


def test_the_engines_that_disagree_are_named() -> None:
    clients = Client(), Client(wrong_by=2e-4), Client()
    with pytest.raises(ParityError, match=rf"sampled: {clients[1].address.url} \(median [^;]*\); needs"):
        check_probe(sampled_by(*clients), by_trainer, limits=FLOAT32, replays=False)


def test_fixed_tokens_are_scored_by_every_engine_that_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = fixed_tokens(PROMPTS, context_length=26)
    assert np.split(fixed.tokens, 2)[0].tolist() == [1, 2, 3, *range(10)] and np.split(fixed.tokens, 2)[1].tolist() == [*range(13)]
    assert fixed_tokens(PROMPTS, context_length=9999).tokens[:96].tolist() == [1, 2, 3, *range(40)] * 2 + [1, 2, 3, *range(7)]
    # All but the first token of each, which has no log-prob.
    assert np.flatnonzero(~scored(fixed)).tolist() == [0, 13]
    probe = sampled_by(Client(), Client())
    assert probe.scores.tolist() == [number for length in probe.batch.lengths for number in range(length)]
    monkeypatch.setattr(engine_pool, "DEATH_S", 0.05)

    async def scores(*clients: Client) -> list[Floats]:
        pool, ended = EnginePool(clients, max_requests=1), []  # type: ignore[arg-type, var-annotated]

        def end_failed(client: Any, error: Exception) -> bool:
            ended.append(client)
            pool.leave(client, error)
            return True

        pool.end_failed = end_failed
        found = await score(fixed, pool, pool.membership.members)
        assert len(ended) == len(clients) - len(found)
        return [found[client.address.url] for client in clients if client not in ended]

    first, last = asyncio.run(scores(Client(), Client(fails=True), Client(wrong_by=1.0)))
    assert first.tolist() == [*range(13), *range(13)] and (first - last == 1.0).all()


@pytest.mark.parametrize(
    ("apart", "passes"),
    [
        ([0.0, 0.0, 0.0, 50.0], True),  # One of four may be anything finite.
        ([0.0, 0.0, 0.2, 0.2], False),
        ([0.0, 0.0, 0.0, 0.2, 0.2], False),  # The median is that of a sound engine.
        ([0.011, 0.011, 0.011, 0.0], False),
        ([0.0, 0.009, 0.009, 0.05], True),
        ([0.0, 0.0, 0.0, np.nan], False),
        ([0.0, 0.0, 0.0, np.inf], False),
    ],
)
def test_median_outliers_and_non_finite_values_are_judged(apart: list[float], passes: bool) -> None:
    trainer = np.full(len(apart) + 1, -1.0, np.float32)
    engine = trainer - np.array([*apart, 7.77], np.float32)
    mask = np.array([True] * len(apart) + [False])
    report = ParityReport.of(engine[mask], trainer[mask], outlier=LIMITS.outlier)
    if passes:
        check_reports({"url": report}, limits=LIMITS, what="tokens", name="parity")
        assert report.num_tokens == len(apart) and report.maximum == pytest.approx(max(apart), rel=1e-5)
    else:
        with pytest.raises(ParityError, match="needs a median of at most 1e-02 nats, at most 25% above 1e-01"):
            check_reports({"url": report}, limits=LIMITS, what="tokens", name="parity")


def test_float32_keeps_a_limit_of_its_mean() -> None:
    trainer = np.zeros(100, np.float32)
    engine = trainer - np.repeat([0.0, 1.2e-2], [99, 1]).astype(np.float32)
    assert Limits.of(dtype="float32", mixture=True, replays=False) == FLOAT32 and FLOAT32.mean == 1e-4
    assert not ParityReport.of(engine, trainer, outlier=FLOAT32.outlier).within(FLOAT32)
    assert ParityReport.of(engine, trainer, outlier=DENSE.outlier).within(DENSE)


def test_limits_go_by_the_kind_of_model_and_scale() -> None:
    for mixture, replays, limits in ((False, False, DENSE), (True, True, REPLAYED), (True, False, ROUTED)):
        assert Limits.of(dtype="bfloat16", mixture=mixture, replays=replays) == limits
    scaled = Limits.of(dtype="bfloat16", mixture=False, replays=False, temperature=0.5, median=0.08)
    assert scaled == Limits(median=0.16, outlier=0.8, share=DENSE.share)
    assert Limits.of(dtype="bfloat16", mixture=False, replays=False, temperature=2.0) == DENSE


def test_a_weight_that_stays_over_the_first_sync_is_named() -> None:
    before = {"url": {"embedding": "a", "layer": "b"}}
    check_replaced(before, {"url": {"embedding": "c", "layer": "d"}})
    with pytest.raises(ParityError, match="engine at url kept weights over the first sync: 1 of 2 weights, needs 0: layer;"):
        check_replaced(before, {"url": {"embedding": "c", "layer": "b"}})


def test_a_weight_that_an_engine_reads_otherwise_is_named() -> None:
    clients = [Client(), Client()]
    clients[0].weights = {"embedding": "E", "layer": "model"}

    async def work() -> None:
        pool = EnginePool(clients, max_requests=1)  # type: ignore[arg-type]
        await check_read(Path("a/model"), pool, await weight_checksums(pool), timeout_s=1.0)

    with pytest.raises(
        ParityError, match=rf"engine at {clients[1].address.url} got other bits .*a/model: 2 of 2 weights, needs 0: embedding"
    ):
        asyncio.run(work())
    clients[1].weights = {"embedding": "E", "layer": "model"}
    asyncio.run(work())
