import dataclasses

import pytest

from megatron_rl.config.gpus import GIB, GPUS
from megatron_rl.planning.records import Collective, EngineMemory, RunPlan, StageMemory


def make_stage(stage: int, **changes: int) -> StageMemory:
    values = {
        "parameters": 10 * GIB,
        "gradients": 20 * GIB,
        "optimizer": 5 * GIB,
        "activations": 8 * GIB,
        "logits": 1 * GIB,
        "working": 2 * GIB,
        "teacher": 0,
        "reserved": 3 * GIB,
        "host": 16 * GIB,
    }
    return StageMemory(
        stage=stage,
        num_layers=9,
        num_parameters=5 * 10**9,
        in_flight=2.0,
        largest_collective=Collective("all-gather over tp 2", GIB),
        **{**values, **changes},
    )


ENGINE = EngineMemory(
    num_gpus=2,
    num_engines=4,
    weights=8 * GIB,
    cache=60 * GIB,
    reserved=11 * GIB,
    bytes_per_token=73728,
    cache_tokens=900000,
    longest_sequence=8192,
)
PLAN = RunPlan(
    gpu=GPUS["H100-80"],
    attention="transformer_engine, fused",
    layout="8 ranks = tp 2 × pp 4 × cp 1 × dp 1",
    tokens=16384,
    num_nodes=2,
    stages=(make_stage(0), make_stage(1), make_stage(2), make_stage(3, logits=4 * GIB)),
    engine=ENGINE,
    colocated=False,
    asleep=0,
    handover=0,
    host_per_node=128 * GIB,
)


def test_head_and_backward_take_turns() -> None:
    assert make_stage(0).total == (35 + 8 + 2 + 3) * GIB
    assert make_stage(0, logits=4 * GIB).total == (35 + 8 + 4 + 3) * GIB


def test_a_teacher_is_asked_before_there_are_activations() -> None:
    assert make_stage(0, teacher=9 * GIB).total == make_stage(0).total
    asked = make_stage(0, teacher=30 * GIB)
    assert asked.total == (35 + 30 + 3) * GIB
    plan = dataclasses.replace(PLAN, stages=(asked, make_stage(1)))
    assert plan.verdict == "fits: 68.0 of 79.6 GiB on the fullest rank (stage 0), 30.0 GiB for the teacher"
    header, first, second = next(iter(plan.tables().values()))
    column = header.index("teacher")
    assert (first[column], second[column]) == ("30.0", "0.0")
    assert "teacher" not in next(iter(PLAN.tables().values()))[0]


def test_the_fullest_rank_decides() -> None:
    assert PLAN.fits and PLAN.fullest.stage == 3
    assert PLAN.verdict == "fits: 50.0 of 79.6 GiB on the fullest rank (stage 3), 8.0 GiB for activations"
    full = dataclasses.replace(PLAN, stages=(make_stage(0, activations=45 * GIB),))
    assert not full.fits
    assert full.verdict == "does not fit: 85.0 of 79.6 GiB on the fullest rank (stage 0), 45.0 GiB for activations; 5.4 GiB too much"


def test_engines_and_main_memory_decide_too() -> None:
    small = dataclasses.replace(PLAN, engine=dataclasses.replace(ENGINE, cache_tokens=8191))
    assert not small.fits
    assert small.verdict.startswith("does not fit: an engine of 2 GPUs has room for 8191 tokens beside 8.0 GiB of weights")
    crowded = dataclasses.replace(PLAN, host_per_node=2000 * GIB)
    assert not crowded.fits and crowded.verdict == "does not fit: 2000.0 of 1536.0 GiB of a node's main memory"


def test_colocated_engines_leave_something_behind() -> None:
    shared = dataclasses.replace(PLAN, colocated=True, asleep=2 * GIB)
    assert shared.peak == PLAN.peak + 2 * GIB and shared.fits
    assert not dataclasses.replace(shared, handover=90 * GIB).fits


@pytest.mark.parametrize("plan", [PLAN, dataclasses.replace(PLAN, engine=None), dataclasses.replace(PLAN, colocated=True)])
def test_tables_are_rectangular_and_equal_stages_share_a_row(plan: RunPlan) -> None:
    tables = plan.tables()
    for table in tables.values():
        assert len({len(row) for row in table}) == 1
    rows = next(iter(tables.values()))
    assert [row[0] for row in rows] == ["stage", "0-2", "3"]
    assert plan.lines()[0] == f"{plan.layout}, attention transformer_engine, fused" and plan.lines()[-1] == plan.verdict
    assert any("SGLang" in title for title in tables) == (plan.engine is not None)
