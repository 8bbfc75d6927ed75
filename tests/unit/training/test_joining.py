"""How a process finds its training: explicitly, through torchrun's environment, in a group that exists, or alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from megatron_rl import ModelSettings, Trainer, UserError
from megatron_rl.training.joining import Meeting, find_meeting

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node", "MASTER_PORT": "29500"}


def find(num_ranks: int, *, environment: dict[str, str] | None = None, existing: int | None = None, **given: Any) -> Meeting:
    return find_meeting(num_ranks, Meeting(**given), environment=environment or {}, existing=existing)


def test_where_ranks_meet() -> None:
    assert find(1) == Meeting(0, 0, None)
    assert find(1, environment={"MASTER_ADDR": "node", "MASTER_PORT": "29500"}) == Meeting(0, 0, None)
    assert find(4, environment=TORCHRUN) == Meeting(3, 1, "env://")
    assert find(4, environment=TORCHRUN, local_rank=0) == Meeting(3, 0, "env://")
    assert find(4, environment=TORCHRUN, rank=1, init_method="file:///x", local_rank=2) == Meeting(1, 2, "file:///x")
    assert find(4, environment=TORCHRUN, existing=4) == Meeting(0, 1, None)


@pytest.mark.parametrize(
    ("num_ranks", "given", "message"),
    [
        (2, {}, r"num_ranks is 2, but this process was told of no other; start it with `torchrun --nproc-per-node 2`"),
        (2, {"rank": 0}, r"Trainer got rank without init_method"),
        (2, {"init_method": "file:///x"}, r"Trainer got init_method without rank"),
        (2, {"rank": 2, "init_method": "file:///x"}, r"got rank 2, but training\.topology\.num_ranks is 2; pass one of 0 to 1"),
        (2, {"rank": -1, "init_method": "file:///x"}, r"got rank -1"),
        (2, {"environment": TORCHRUN}, r"^WORLD_SIZE is 4, but training\.topology\.num_ranks is 2; [^.]*$"),
        (1, {"environment": TORCHRUN}, r"WORLD_SIZE is 4, but training\.topology\.num_ranks is 1"),
        (
            4,
            {"environment": {"RANK": "0", "WORLD_SIZE": "4"}},
            r"has RANK and WORLD_SIZE without LOCAL_RANK and MASTER_ADDR and MASTER_PORT",
        ),
        (4, {"environment": {**TORCHRUN, "RANK": "one"}}, r"RANK is 'one', needs a whole number"),
        (4, {"existing": 2}, r"initialised has 2 ranks, but training\.topology\.num_ranks is 4"),
    ],
)
def test_what_does_not_fit_is_one_sentence(num_ranks: int, given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        find(num_ranks, **given)


def test_a_foreign_process_group_is_joined_and_left_alone(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ModelSettings(path=tiny_model())
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/theirs", rank=0, world_size=1)
    try:
        for _ in range(2):
            with Trainer(model=model) as trainer:
                assert trainer.dp_rank == 0
        theirs = torch.ones(1)
        distributed.all_reduce(theirs)
        assert float(theirs) == 1
    finally:
        distributed.destroy_process_group()
