"""A deterministic engine and a batch-invariant trainer on a CPU in float32: the same log-probs, to the last bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_run import metrics, rl_arguments
from test_engine_weights import serving, talking

from megatron_rl.config.settings import Settings
from megatron_rl.data.batch import batch_from_sequences
from megatron_rl.engines.sampling import Sampling
from megatron_rl.training.topology import shutdown
from megatron_rl.training.trainer import Trainer
from megatron_rl.types import Prompt
from megatron_rl.weights.parity import sample_probe, scored

EXACT = {"batch_invariant_mode": True, "attention_backend": "flash"}


def exact_trainer(model: Path, directory: Path) -> Trainer:
    settings = {
        "run": {"directory": directory / "run"},
        "model": {"path": model, "dtype": "float32", "megatron": EXACT},
        "data": {"train": "unused.jsonl"},
        "objective": {"policy_loss": {"kind": "sft"}, "aggregation": "token_mean"},
        "training": {"max_tokens_per_micro_batch": 900},
    }
    return Trainer.of(Settings.model_validate(settings), rank=0, init_method=f"file://{directory}/rendezvous")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_deterministic_engine_and_the_trainer_agree_to_the_bit(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Sampled tokens at two temperatures, their scores, and scores of sequences of up to 700 tokens."""
    model = tiny_model(layers=8, hidden=128, vocab=256, tied=False, max_position_embeddings=1024)
    random = np.random.default_rng(0)

    def sequence(length: int) -> np.ndarray:
        return random.integers(2, 250, length)

    prompts = [Prompt(id=str(length), token_ids=sequence(length), text="") for length in (1, 2, 5, 17, 30, 61, 63, 64, 110, 180, 240)]
    long = [sequence(length) for length in (200, 256, 257, 300, 511, 700)]
    whole = batch_from_sequences(prompts=[ids[:1] for ids in long], responses=[ids[1:] for ids in long])
    with (
        serving(model, tmp_path / "engine.log", enable_deterministic_inference=True) as address,
        talking(address) as (runner, client, pool),
    ):
        settings = [Sampling(max_tokens=32, seed=0, temperature=temperature) for temperature in (1.0, 0.7)]
        probes = [runner.run(sample_probe(prompts, pool, sampling=sampling)) for sampling in settings]
        scores = np.concatenate(runner.run(client.score(long)))
        (biased,) = runner.run(client.generate(sequence(3), sampling=Sampling(max_tokens=6, logit_bias={7: 100.0})))
    assert biased.token_ids.tolist() == [7] * 6, "as evaluations may ask"
    trainer = exact_trainer(model, tmp_path)
    compared = {}
    for probe in probes:
        ours, mask = trainer.own_log_probs(probe.batch, temperature=probe.temperature), probe.batch.loss_mask
        compared[f"sampled at {probe.temperature}"] = ours[mask], probe.engine_log_probs[mask]
        mask = scored(probe.batch)
        compared[f"their scores, {probe.temperature}"] = trainer.own_log_probs(probe.batch, temperature=1.0)[mask], probe.scores[mask]
    compared["long"] = trainer.own_log_probs(whole, temperature=1.0)[scored(whole)], scores[scored(whole)]
    shutdown()
    for name, (ours, theirs) in compared.items():
        print(name, f"{(ours == theirs).mean():.2%} of {len(ours)} equal, mean {np.abs(ours - theirs).mean():.1e}")
    assert all(np.array_equal(ours, theirs) for ours, theirs in compared.values())


@pytest.mark.slow
def test_a_run_trains_on_the_bits_that_were_sampled(task: Path, tmp_path: Path, start: Callable[..., Any]) -> None:
    """With a threshold below the rounding of any single log-prob."""
    exact = ("rollout.sglang.enable_deterministic_inference=true", f"model.megatron={EXACT}", "weights.parity_threshold=1e-9")
    run = start(*rl_arguments(task, tmp_path / "run", "run.num_steps=2", "eval={}", *exact))
    assert run.wait() == 0, run.output
    steps = metrics(tmp_path / "run")
    names = ("weights/parity_max", "weights/scored_max", "train/log_prob_diff_max")
    found = [{name: row[name] for name in names if name in row} for _, row in sorted(steps.items())]
    assert found[0].keys() >= set(names[:2]) and all(names[2] in each for each in found[1:]) and len(found) == 3, found
    assert {value for each in found for value in each.values()} == {0}, found
