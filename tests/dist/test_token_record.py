"""Recorded values of tokens are equal under every layout, and each token has them once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from layout_runs import make_batch, make_settings, make_trainer, shards_of
from layout_table import SEQUENCE_PARALLEL, Layout

LAYOUTS = (Layout(), Layout(2, {"cp": 2}), Layout(2, {"pp": 2}), Layout(2, SEQUENCE_PARALLEL), Layout(2, budget=10))
ROWS = [0, 3, 5, 6]


def record(rank: int, world_size: int, init_method: str, model: str, directory: str) -> list[Any]:
    """The values that this rank records under each layout."""
    from megatron_rl.training.token_record import TokenRecord
    from megatron_rl.training.topology import shutdown

    found = []
    for number, layout in enumerate(LAYOUTS):
        if rank < layout.num_ranks:
            settings = make_settings(model, Path(directory) / str(number), layout, objective={"preset": "grpo"})
            trainer = make_trainer(settings, rank, f"{init_method}-{number}")
            shard = shards_of(make_batch(1), settings)[trainer.dp_rank]
            seen = TokenRecord(shard, ROWS)
            trainer.train_shard(shard, record=seen)
            found.append(seen.values())
            shutdown()
    return found


def test_layouts_record_the_same_values(run_ranks: Any, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    from megatron_rl.data.token_values import TokenValues

    first, second = run_ranks(record, 2, str(tiny_model(layers=2)), str(tmp_path), timeout_s=240)
    batch = make_batch(1)
    owners = np.repeat(np.arange(batch.num_sequences), batch.lengths)
    wanted = int((batch.loss_mask & np.isin(owners, ROWS)).sum())
    tables = []
    for values in (first[0], *map(TokenValues.joined, zip(first[1:], second, strict=True))):
        assert len(values.rows) == wanted == len(set(zip(values.rows.tolist(), values.offsets.tolist(), strict=True)))
        order = np.lexsort((values.offsets, values.rows))
        tables.append(values.values[:, order])
    for table in tables[1:]:
        np.testing.assert_allclose(table, tables[0], rtol=2e-4, atol=2e-5)
