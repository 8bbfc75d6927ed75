"""Log-probs of entropy-aware draws by every layout: those of a float64 loop, held against the engine's before each step."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from layout_runs import make_batch, make_settings, make_trainer, merged_metrics, shards_of
from layout_table import SEQUENCE_PARALLEL, Layout
from shaped_draws import draw_by_definition
from test_routing import QWEN3

from megatron_rl.algorithms.entropy_aware import QUADRANTS, Draw, EntropyAware
from megatron_rl.algorithms.rounding_limits import Expected, Limits

VOCAB, TEMPERATURE = 32, 0.7
LAYOUTS = {"one": Layout(), "tp2 sp": Layout(2, SEQUENCE_PARALLEL), "cp2": Layout(2, {"cp": 2}), "pp2": Layout(2, {"pp": 2})}
ENTROPY = EntropyAware(
    thresholds=(3.2, 0.5),
    quadrants={"argmax": Draw(top_k=20), "branch": Draw(temperature=1.2, top_k=25), "resample": Draw(temperature=2.0, top_p=0.95)},
)
QUADRANT_SHARES = [f"quadrant_{name}" for name in QUADRANTS]
LIMITS = Limits(median=1e-4, outlier=1e-3, share=0.02)


def run(rank: int, world_size: int, init_method: str, model: str, directory: str) -> dict[str, Any]:
    """Log-probs by each layout; the metrics of two steps on tokens with such log-probs, and the refusal of plain ones."""
    from megatron_rl.errors import ParityError
    from megatron_rl.training.topology import shutdown

    outcomes = {}
    for number, (name, layout) in enumerate(LAYOUTS.items()):
        if rank >= layout.num_ranks:
            continue
        print(f"layout {name}", flush=True)
        objective = {"off_policy": {"mode": "truncate", "high": 2.0}, "aggregation": "token_mean"}
        training = {"optimizer_steps_per_batch": 2, "optimizer": {"lr": 0.0, "min_lr": 0.0}}
        settings = make_settings(model, Path(directory) / str(number), layout, objective=objective, training=training)
        sampling = settings.rollout.sampling.model_copy(update={"temperature": TEMPERATURE})
        settings = settings.model_copy(update={"rollout": settings.rollout.model_copy(update={"sampling": sampling})})
        trainer = make_trainer(settings, rank, f"{init_method}-{number}")
        batch = make_batch(1, vocab=VOCAB)
        plain = trainer.own_log_probs(batch, temperature=TEMPERATURE)
        drawn = trainer.own_log_probs(batch, temperature=TEMPERATURE, entropy=ENTROPY)
        expected = Expected(version=0, limits=LIMITS, entropy=ENTROPY)
        shards = [
            shards_of(dataclasses.replace(batch, rollout_log_probs=np.where(batch.loss_mask, values, 0.0)), settings)[trainer.dp_rank]
            for values in (plain, drawn)
        ]
        with pytest.raises(ParityError, match="weight version 0"):
            trainer.train_shard(shards[0], expected=expected)
        outcomes[name] = {"plain": plain, "drawn": drawn, "metrics": trainer.train_shard(shards[1], expected=expected)}
        shutdown()
    return outcomes


def test_draws_mean_the_same_to_every_layout(run_ranks: Callable[..., Any], tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    import transformers

    path, batch = str(tiny_model(**QWEN3)), make_batch(1, vocab=VOCAB)
    results = run_ranks(run, 2, path, str(tmp_path), timeout_s=240)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager")
    wanted, places = np.zeros(len(batch.tokens)), np.full(len(batch.tokens), "", "U8")
    for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor(batch.tokens[start:end])[None]).logits[0].tolist()
        for index in range(start + 1, end):
            row, places[index] = draw_by_definition(logits[index - start - 1], ENTROPY, temperature=TEMPERATURE)
            wanted[index] = row[batch.tokens[index]]
    mask = batch.loss_mask
    shares = {name: float((places[mask] == name).mean()) for name in QUADRANTS}
    assert min(shares.values()) > 0.01, shares
    wanted[np.isinf(wanted)] = -30.0
    log_ratio = float((results[0]["one"]["plain"] - wanted)[mask].mean())
    for result in results:
        for name, found in result.items():
            np.testing.assert_allclose(found["drawn"][mask], wanted[mask], atol=1e-5, err_msg=name)
    for name in LAYOUTS:
        steps = merged_metrics([result[name] for result in results if name in result])
        counts = [step["train/num_tokens"] for step in steps]
        together = {
            key: np.average([step[f"train/{key}"] for step in steps], weights=counts)
            for key in ("draw_log_ratio", "log_prob_diff", *QUADRANT_SHARES)
        }
        assert together["log_prob_diff"] < 1e-6 and max(step["train/log_prob_diff_max"] for step in steps) < 1e-4, name
        assert together["draw_log_ratio"] == pytest.approx(log_ratio, abs=1e-4) and not math.isclose(log_ratio, 0, abs_tol=1e-2)
        assert [together[key] for key in QUADRANT_SHARES] == pytest.approx([shares[quadrant] for quadrant in QUADRANTS])
        assert sum(step["train/log_prob_outliers"] for step in steps) == 0
