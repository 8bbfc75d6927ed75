"""Every rank joins every collective, whatever share of the batch it has: no sequence, no token, none that is trained on.

A rank that stays away hangs its peers, so the hard deadline of the launcher is part of the test; and the numbers are those of one
rank. The objective is ppo, so that policy, reference and critic all pass over every batch.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layout_runs import (
    LONGEST,
    MASKED,
    ONE_TOKEN_RESPONSE,
    Outcome,
    compare,
    make_batch,
    make_settings,
    make_trainer,
    merged_metrics,
    outcome_of,
    shards_of,
)
from layout_table import BASE, LAYOUTS, MODELS, OBJECTIVES, Layout

TOLERANCE = 1e-5
SINGLE_TOKEN = 4
# Model, and layouts of as many ranks as the first of them has.
GROUPS = {
    "dense, 2 ranks": ("tied", ("dp2", "dp2 distopt overlap", "tp2 sp", "pp2", "pp2 vpp2", "cp2")),
    "dense, 4 ranks": ("tied", ("dp2 cp2", "pp2 vpp2 dp2 distopt overlap")),
    "experts, 2 ranks": ("qwen3_moe", ("ep2", "ep2 all-gather", "ep2 tp2 sp etp1")),
    "experts, 4 ranks": ("glm4_moe", ("ep2 dp2 distopt", "ep2 pp2", "ep2 cp2 dp2")),
}
# Rows of `make_batch` that a batch consists of.
SHARES: dict[str, list[int]] = {
    "all sequences": list(range(8)),
    "one sequence": [LONGEST],
    "one sequence and one without a trainable token": [LONGEST, MASKED],
    "one response of one token": [ONE_TOKEN_RESPONSE],
    "no trainable token": [MASKED, SINGLE_TOKEN],
    "a single token": [SINGLE_TOKEN],
    "no sequence": [],
}
NOTHING_TO_LEARN = ("no trainable token", "a single token", "no sequence")


def train_shares(
    rank: int, world_size: int, init_method: str, model: str, directory: str, layouts: dict[str, Layout]
) -> dict[str, Outcome]:
    """One optimizer step on each of `SHARES`, one after the other, under every layout; the metrics of each step."""
    from megatron_rl.training.topology import shutdown

    outcomes = {}
    for number, (name, layout) in enumerate(layouts.items()):
        if rank >= layout.num_ranks:
            continue
        training = {**OBJECTIVES["ppo"].training, "optimizer_steps_per_batch": 1}
        settings = make_settings(
            model, Path(directory) / f"{world_size}-{number}", layout, objective=OBJECTIVES["ppo"].objective, training=training
        )
        trainer = make_trainer(settings, rank, f"{init_method}-{number}")
        metrics = []
        for share, rows in SHARES.items():
            print(f"{name}: {share}", flush=True)
            batch = make_batch(1).select(np.array(rows, np.int64))
            metrics += trainer.train_shard(shards_of(batch, settings)[trainer.dp_rank])
        outcomes[name] = outcome_of(trainer, metrics, log_probs=[trainer.log_probs(make_batch(7).select(np.array([LONGEST])))])
        shutdown()
    return outcomes


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("model", "names"),
    [pytest.param(*group, id=name, marks=() if name == "experts, 2 ranks" else pytest.mark.slow) for name, group in GROUPS.items()],
)
def test_ranks_without_a_share_join(
    model: str, names: tuple[str, ...], run_ranks: Callable[..., list[Any]], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    layouts = {name: LAYOUTS[name] for name in (BASE, *names)}
    num_ranks = LAYOUTS[names[0]].num_ranks
    ranks = run_ranks(train_shares, num_ranks, str(tiny_model(**MODELS[model])), str(tmp_path), layouts, timeout_s=240)
    base = [ranks[0][BASE]]
    for share, step in zip(SHARES, merged_metrics(base), strict=True):
        assert step["train/skipped_steps"] == int(share in NOTHING_TO_LEARN), share
        assert share in NOTHING_TO_LEARN or step["train/grad_norm"] > 0, share
    for name in names:
        differences = compare([rank[name] for rank in ranks], base)
        assert differences.largest <= TOLERANCE, f"{name}: {differences}"


def poisoned_step(rank: int, world_size: int, init_method: str, model: str, directory: str) -> dict[str, Any]:
    """Supervised steps of two data-parallel ranks, the second with a token of infinite embedding on one of them."""
    from megatron_rl.training.topology import shutdown
    from megatron_rl.types import TrainBatch

    sft = OBJECTIVES["sft"]
    settings = make_settings(model, Path(directory), LAYOUTS["dp2"], objective=sft.objective, training=sft.training)
    trainer = make_trainer(settings, rank, init_method)
    # In memory: weights that are read may not be infinite.
    embedding = next(tensor for name, tensor in trainer.weights() if name == "model.embed_tokens.weight")
    embedding[31] = np.inf
    batch = make_batch(1, vocab=31)
    sound = trainer.train_shard(shards_of(batch, settings)[trainer.dp_rank])
    before = {name: tensor.numpy().copy() for name, tensor in trainer.weights()}
    tokens = batch.tokens.copy()
    tokens[batch.cu_seqlens[LONGEST] + 2] = 31
    fields = {name: getattr(batch, name) for name in TrainBatch.__slots__}
    poisoned = trainer.train_shard(shards_of(TrainBatch(**{**fields, "tokens": tokens}), settings)[trainer.dp_rank])
    after = {name: tensor.numpy().copy() for name, tensor in trainer.weights()}
    shutdown()
    return {"sound": sound, "poisoned": poisoned, "before": before, "after": after}


def test_a_non_finite_loss_on_one_rank_stops_all(
    run_ranks: Callable[..., list[Any]], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny_model(tied=False)
    outcomes = run_ranks(poisoned_step, 2, str(model), str(tmp_path), timeout_s=120)
    steps = {name: merged_metrics([{"metrics": outcome[name]} for outcome in outcomes])[0] for name in ("sound", "poisoned")}
    assert (steps["sound"]["train/skipped_steps"], steps["poisoned"]["train/skipped_steps"]) == (0, 1)
    assert np.isinf(outcomes[0]["after"]["model.embed_tokens.weight"][31]).all(), "the weights of the steps were poisoned"
    for outcome in outcomes:
        for name, want in outcomes[0]["before"].items():
            np.testing.assert_array_equal(outcome["before"][name], want, err_msg=name)
            np.testing.assert_array_equal(outcome["after"][name], want, err_msg=name)
    dumped = {path.stem for path in (tmp_path / "run" / "dumps").iterdir()}
    assert len(dumped) == 1, f"one micro-batch of one rank is broken, but {sorted(dumped)} were written"
