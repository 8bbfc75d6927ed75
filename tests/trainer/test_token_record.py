"""Values of tokens when they were trained on, against transformers in float64."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from megatron_rl.data.packing import make_shards
from megatron_rl.data.token_values import TOKEN_VALUES, TokenValues
from megatron_rl.training.token_record import TokenRecord
from megatron_rl.training.trainer import Trainer
from megatron_rl.types import TrainBatch

LOW, HIGH, TEMPERATURE = 0.01, 0.02, 0.7
ROWS = [[3, 9, 4, 4, 30], [8, 2, 17], [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17], [1, 2, 3, 4]]


def make_batch() -> TrainBatch:
    """ROWS with rewards 0, 1, 2 and 3, in groups of two; all behind a prompt of two tokens is trained on."""
    lengths = [len(row) for row in ROWS]
    mask = np.concatenate([np.arange(length) >= 2 for length in lengths])
    return TrainBatch(
        tokens=np.concatenate(ROWS),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]),
        prompt_lengths=np.full(len(ROWS), 2),
        loss_mask=mask,
        rollout_log_probs=np.where(mask, -3.0, 0.0),
        weight_versions=np.where(mask, 0, -1),
        rewards=np.arange(len(ROWS)),
        group_ids=np.arange(len(ROWS)) // 2,
        truncated=np.zeros(len(ROWS)),
    )


def by_definition(model: Any, row: list[int]) -> tuple[list[float], list[float]]:
    """Log-prob and entropy of each token behind the first, a token at a time."""
    logits = model(torch.tensor([row])).logits[0].double() / TEMPERATURE
    log_probs, entropies = [], []
    for place, token in enumerate(row[1:]):
        p = logits[place].softmax(-1)
        log_probs.append(float(p[token].log()))
        entropies.append(-sum(x * math.log(x) for x in p.tolist()))
    return log_probs, entropies


def test_recorded_values_are_those_of_the_step(make_trainer: Callable[..., Trainer], tiny_model: Callable[..., Path]) -> None:
    path = tiny_model(layers=1)
    objective = {"policy_loss": {"kind": "clip", "low": LOW, "high": HIGH}}
    trainer = make_trainer(path, objective, optimizer_steps_per_batch=2, optimizer={"lr": 0.05, "weight_decay": 0.0}, reference_interval=1)
    batch = make_batch()
    shard = make_shards(batch, dp=1, optimizer_steps=2, max_tokens_per_micro_batch=12, seed=0)[0]
    later = {int(row) for rows in shard.steps[1] for row in rows}
    chosen = [0, 2, 3]
    assert later & set(chosen) and set(chosen) - later, "rows of both optimizer steps"
    record = TokenRecord(shard, chosen)
    trainer.train_shard(shard, record=record)
    values = record.values()
    assert sorted(set(values.rows.tolist())) == chosen and len(values.rows) == sum(len(ROWS[row]) - 2 for row in chosen)
    assert values.of_row(1, begin=0, length=3) is None
    before, clipped = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), list[float]()
    for row in chosen:
        table = values.of_row(row, begin=2, length=len(ROWS[row]) - 2)
        assert table is not None
        found = dict(zip(TOKEN_VALUES, table, strict=True))
        with torch.no_grad():
            old, entropy = by_definition(before, ROWS[row])
        np.testing.assert_allclose(found["old_log_probs"], old[1:], atol=1e-5)
        np.testing.assert_allclose(found["ref_log_probs"], old[1:], atol=1e-5)
        pair = np.array([2.0 * (row // 2), 2.0 * (row // 2) + 1])
        np.testing.assert_allclose(found["advantages"], (row - pair.mean()) / pair.std(ddof=1), rtol=1e-4)
        if row in later:
            assert np.abs(found["log_probs"] - found["old_log_probs"]).max() > 0.05, "a step has moved the policy"
        else:
            np.testing.assert_allclose(found["log_probs"], old[1:], atol=1e-5)
            np.testing.assert_allclose(found["entropy"], entropy[1:], atol=1e-5)
        ratio = np.exp(found["log_probs"].astype(np.float64) - found["old_log_probs"])
        outside = np.where(found["advantages"] > 0, ratio > 1 + HIGH, ratio < 1 - LOW)
        np.testing.assert_array_equal(found["clipped"] == 1, outside)
        clipped += found["clipped"].tolist()
    assert {0.0, 1.0} == set(clipped)


def test_tokens_outside_the_mask_have_no_values() -> None:
    parts = [TokenValues(np.array([4, 4]), np.array([5, 3]), np.full((len(TOKEN_VALUES), 2), value, np.float32)) for value in (1.0,)]
    other = TokenValues(np.array([7]), np.array([3]), np.full((len(TOKEN_VALUES), 1), 9.0, np.float32))
    table = TokenValues.joined([*parts, other]).of_row(4, begin=2, length=4)
    assert table is not None and table.shape == (len(TOKEN_VALUES), 4)
    np.testing.assert_array_equal(table[0], [np.nan, 1.0, np.nan, 1.0])
