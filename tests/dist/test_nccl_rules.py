"""Training, checkpoints and exports keep to what NCCL asks of its callers, which gloo does not: `tests/rehearsal/nccl_rules.py`."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from layout_runs import make_settings, make_trainer, run_cases, train_batches
from layout_table import LAYOUTS, MODELS, Case
from nccl_rules import Call, broken_rules, refuse

pytestmark = pytest.mark.fresh_ranks

CASES = (
    Case("tp2 sp", "tied", "ppo"),
    Case("pp2 vpp2", "tied", "grpo"),
    Case("cp2", "untied", "gspo"),
    Case("dp2 distopt overlap", "untied", "gspo"),
    Case("ep2", "qwen3_moe", "grpo"),
)
MOST_SENT_BY_A_SAVE = 100
"""Numbers in a message: counts and flags, none of the model's."""
WIDE = (
    *(Case(layout, "tied", "ppo") for layout in ("tp2 pp2 vpp2 sp", "pp2 cp2", "pp4", "tp2 dp2 sp distopt", "tp2 cp2 sp")),
    *(Case(layout, "deepseek_v3", "grpo") for layout in ("ep2 pp2", "ep2 tp2 sp etp2", "ep2 dp2 distopt", "ep2 pp2 vpp2")),
)
SAVED = {2: "ep2 distopt", 4: "ep2 dp2 distopt"}
"""Layouts of the last case's model in which data parallel ranks share an optimizer's state, by the number of ranks."""


def run_recorded(
    rank: int, world_size: int, init_method: str, models: dict[str, str], directory: str, cases: Sequence[Case]
) -> tuple[dict[Case, list[Call]], list[Call]]:
    """The collectives of every case, and those of a save."""
    import nccl_rules
    import pretended_gpu

    pretended_gpu.pretend()
    calls = nccl_rules.record()
    found = {}
    for number, case in enumerate(cases):
        calls.clear()
        run_cases(rank, world_size, f"{init_method}-{number}", models, f"{directory}/{number}", [case])
        found[case] = list(calls)
    settings = make_settings(models[cases[-1].model], Path(directory), LAYOUTS[SAVED[world_size]], objective={"policy_loss": "sft"})
    trainer = make_trainer(settings, rank, f"{init_method}-saved")
    train_batches(trainer, settings, [1])
    calls.clear()
    trainer.save(Path(directory) / "saved")
    return found, list(calls)


def check(cases: Sequence[Case], run_ranks: Callable[..., list[Any]], tiny_model: Callable[..., Path], directory: Path) -> None:
    models = {name: str(tiny_model(name=name, **MODELS[name])) for name in sorted({case.model for case in cases})}
    (num_ranks,) = {case.num_ranks for case in cases}
    ranks = run_ranks(run_recorded, num_ranks, models, str(directory), cases, timeout_s=120 + 30 * len(cases))
    for case in cases:
        logs = [found[case] for found, _ in ranks]
        assert min(map(len, logs)) > 20, f"{case}: there was nothing to judge"
        assert not broken_rules(logs), f"{case}: {broken_rules(logs)}"
        # A group bound to a device has a communicator from the start, and so has each that is made beside it: 512 MiB for one of a rank.
        assert not [call for log in logs for call in log if call.name == "split"], f"{case}: groups with communicators that nobody uses"
    saves = [saved for _, saved in ranks]
    assert not broken_rules(saves), f"a save: {broken_rules(saves)}"
    # Upstream's gathers the optimizer's state of a whole buffer on the GPU of one rank.
    assert not [call for saved in saves for call in saved if call.numel > MOST_SENT_BY_A_SAVE], "a save gathers numbers"


def test_two_ranks_keep_to_nccls_rules(run_ranks: Callable[..., list[Any]], tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    check(CASES, run_ranks, tiny_model, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_four_ranks_keep_to_nccls_rules(run_ranks: Callable[..., list[Any]], tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    check(WIDE, run_ranks, tiny_model, tmp_path)


def reduce(numel: int = 4, *, dtype: str = "torch.float32", name: str = "all_reduce") -> Call:
    return Call(name, (0, 1), dtype, numel)


def message(name: str, peer: int, *, batch: int | None = None, numel: int = 4) -> Call:
    return Call(name, (0, 1), "torch.float32", numel, peer=peer, batch=batch)


@pytest.mark.parametrize(
    ("logs", "part"),
    [
        ([[reduce()], [reduce(5)]], "collective 0 of ranks (0, 1)"),
        ([[reduce()], [reduce(dtype="torch.bfloat16")]], "collective 0 of ranks (0, 1)"),
        ([[reduce(), reduce(name="broadcast")], [reduce(name="broadcast"), reduce()]], "collective 0 of ranks (0, 1)"),
        ([[reduce(), reduce()], [reduce()]], "collective 1 of ranks (0, 1)"),
        ([[message("isend", 1), message("irecv", 1)], [message("isend", 0), message("irecv", 0)]], "message 0 between ranks 0 and 1"),
        ([[message("send", 1)], [message("recv", 0, numel=5)]], "message 0 between ranks 0 and 1"),
        ([[message("send", 1)], []], "message 0 between ranks 0 and 1"),
    ],
)
def test_a_broken_rule_is_told(logs: list[list[Call]], part: str) -> None:
    (sentence,) = broken_rules(logs)
    assert sentence.startswith(part)


def test_what_nccl_allows_is_no_broken_rule() -> None:
    exchange = [[message("isend", 1, batch=0), message("irecv", 1, batch=0)], [message("isend", 0, batch=3), message("irecv", 0, batch=3)]]
    assert broken_rules(exchange) == []
    assert broken_rules([[message("isend", 1), message("irecv", 1)], [message("irecv", 0), message("isend", 0)]]) == []
    uneven = [[reduce(numel, name="all_to_all_single")] for numel in (3, 5)]
    assert broken_rules(uneven) == broken_rules([[reduce()], [reduce()]]) == []


def accidents(rank: int, world_size: int, init_method: str) -> tuple[str, list[Call]]:
    """What a tensor of host memory is told, and what is written of a group that rank 0 makes alone."""
    import nccl_rules
    import pretended_gpu
    from torch import distributed

    pretended_gpu.pretend()
    calls = nccl_rules.record()
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    distributed.init_process_group("nccl", init_method=init_method, rank=rank, world_size=world_size, device_id=device)
    distributed.all_reduce(torch.ones(2, device=device))
    distributed.all_reduce(torch.from_numpy(np.ones(2)).to(device))
    try:
        distributed.all_reduce(torch.ones(2, device=device).cpu())
    except TypeError as error:
        refused = str(error)
    distributed.new_group([0])
    calls_of_all = len(calls)
    if rank == 0:
        store = distributed.HashStore()
        distributed.distributed_c10d._new_process_group_helper(
            1, 0, [], distributed.Backend("gloo"), store, group_name="alone", timeout=timedelta(seconds=20), backend_options=None
        )
    assert calls_of_all >= 3
    return refused, list(calls)


@pytest.mark.not_under_nccl_rules(reason="its ranks break the rules on purpose")
def test_host_memory_and_a_split_by_one_rank_are_noticed(run_ranks: Callable[..., list[Any]]) -> None:
    """A group of an engine that is made while the trainer's is bound to a device waits for all of the trainer's ranks."""
    (refused, first), (_, second) = run_ranks(accidents, 2)
    assert refused == "NCCL takes tensors of the GPU, all_reduce got one of host memory"
    (sentence,) = broken_rules([first, second])
    assert sentence.startswith("collective 3 of ranks (0, 1)") and "split" in sentence and "None" in sentence


def test_dtypes_and_strides_that_nccl_lacks_are_refused() -> None:
    for name, tensor in (("all_reduce", torch.ones(2, dtype=torch.bool)), ("broadcast", torch.ones(2, dtype=torch.int16))):
        with pytest.raises(TypeError, match=f"NCCL has no {name} of {tensor.dtype}"):
            refuse(name, tensor)
    with pytest.raises(TypeError, match="contiguous"):
        refuse("broadcast", torch.ones(3, 2).t())
    refuse("broadcast", torch.ones(2, dtype=torch.bool))
