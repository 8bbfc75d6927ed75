"""No rank of any layout makes an optimizer step on log-probs of other weights than the engines should serve."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

LAYOUTS = [{}, {"tp": 2}, {"cp": 2}, {"pp": 2}]


def run(rank: int, world_size: int, init_method: str, model: str) -> list[tuple[float, str, bool]]:
    """For each layout the clipped difference of a batch that passes, the refusal of one that does not, and whether weights stayed."""
    from megatron_rl import Meeting, ModelSettings, TopologySettings, Trainer, TrainingSettings, batch_from_sequences
    from megatron_rl.algorithms.rounding_limits import Expected, Limits
    from megatron_rl.errors import ParityError
    from megatron_rl.training.whole_batch import divide, merge_over_ranks

    random = np.random.default_rng(0)
    prompts = [random.integers(2, 32, 3) for _ in range(6)]
    responses = [random.integers(2, 32, length) for length in (4, 1, 9, 13, 6, 2)]
    said = []
    for number, topology in enumerate(LAYOUTS):
        settings = TopologySettings(num_ranks=world_size, **topology)
        training = TrainingSettings(topology=settings, max_tokens_per_micro_batch=20)
        meeting = Meeting(rank=rank, init_method=f"{init_method}-{number}")
        with Trainer(model=ModelSettings(path=model, dtype="float32"), training=training, meeting=meeting) as trainer:
            plain = batch_from_sequences(prompts=prompts, responses=responses, rewards=random.random(6))
            log_probs = trainer.log_probs(plain)
            # All wrong ones are of one sequence, so that with dp one rank alone sees them.
            row_of = np.repeat(np.arange(6), plain.lengths)
            versions = np.where(plain.loss_mask, np.where(row_of == 5, 1, 2), -1)
            wrong = np.where(plain.loss_mask, log_probs + 3.0 * (row_of == 3), 0.0).astype(np.float32)
            batch = dataclasses.replace(plain, rollout_log_probs=wrong, weight_versions=versions)
            shard = divide(batch, training, seed=0)[trainer.dp_rank]
            before = {name: tensor.clone() for name, tensor in trainer.weights()}
            refusal = ""
            try:
                trainer.train_shard(shard, expected=Expected(version=2, limits=Limits(median=0.0, outlier=0.25, share=0.0)))
            except ParityError as error:
                refusal = str(error)
            stayed = all(bool((tensor == before[name]).all()) for name, tensor in trainer.weights())
            allowing = Expected(version=2, limits=Limits(median=0.1, outlier=0.25, share=0.0))
            (metrics,) = merge_over_ranks(trainer.train_shard(shard, expected=allowing))
        said.append((metrics["train/log_prob_diff_clipped"], refusal, stayed))
    return said


def test_every_rank_stops_before_the_step(run_ranks: Callable[..., list[Any]], tiny_model: Callable[..., Path]) -> None:
    ranks = run_ranks(run, 2, str(tiny_model()), timeout_s=240)
    # 33 tokens of version 2, of which 13 are cut off at 0.25: more than 2 * 0.25 / sqrt(33) = 0.087.
    for rank in ranks:
        for layout, (clipped, refusal, stayed) in zip(LAYOUTS, rank, strict=True):
            assert clipped == pytest.approx(13 * 0.25 / 33, rel=1e-3), layout
            assert "over 33 tokens of weight version 2" in refusal and "needs at most 8.7e-02" in refusal, (layout, refusal)
            assert stayed, layout
