"""TransformerEngine's layers train as torch's do, under every layout: its Python sources on a pretended GPU, against one rank of torch.

A mark that is missing on a parameter shows as another norm of the gradients, a norm or a rotation that is applied twice as other log-probs.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from layout_runs import (
    Differences,
    Outcome,
    batch_with_record,
    check_ranks_agree,
    compare,
    make_settings,
    make_trainer,
    run_cases,
    shards_of,
    train_batches,
)
from layout_table import BASE, LAYOUTS, OBJECTIVES, Case
from layout_table import MODELS as TINY_MODELS
from te_sources import NEWEST, OLDEST, Pair

pytestmark = pytest.mark.fresh_ranks

MODELS = {
    **TINY_MODELS,
    "windows and YaRN": {
        "layers": 4,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 2,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    },
}
SAME = Differences(loss=2e-5, metrics=2e-5, grad_norm=2e-5, log_probs=2e-5, weights=2e-5)
NOT_ON_GPUS = "algorithms/log_prob.py"
"""The rows of logits, which a GPU gives to Triton's kernels."""
CASES_PER_LAUNCH = 10
GATE = (
    Case(BASE, "windows and YaRN", "grpo"),
    Case("tp2 sp", "tied", "grpo"),
    Case("tp2 sp", "deepseek_v3", "grpo"),
    Case("ep2 tp2 sp etp1", "qwen3_moe", "grpo"),
)
DENSE = (
    "tp2",
    "tp2 distopt",
    "tp2 sp recompute",
    "pp2",
    "pp2 vpp2",
    "dp2 distopt overlap",
    "tp2 pp2",
    "cp2",
    "tp2 cp2 sp",
    "tp2 dp2 sp distopt",
)
MIXTURE = (BASE, "tp2 sp", "pp2", "ep2", "ep2 distopt", "ep2 all-gather", "ep2 pp2", "ep2 cp2", "ep2 tp2 sp etp1", "ep2 tp2 sp etp2")
WIDE = (
    *(Case(layout, model, objective) for layout in DENSE for model, objective in (("tied", "grpo"), ("untied", "ppo"))),
    *(Case(layout, model, "grpo") for layout in MIXTURE for model in ("qwen3_moe", "glm4_moe", "deepseek_v3")),
)
CASES = tuple(dict.fromkeys((*GATE, *WIDE)))


def run_on_te(
    rank: int, world_size: int, init_method: str, models: dict[str, str], directory: str, cases: Sequence[Case], sources: Sequence[str]
) -> dict[Case, Outcome]:
    """`run_cases` with TransformerEngine's layers, which a process with a GPU chooses by itself."""
    import pretended_gpu

    pretended_gpu.pretend()
    pretended_gpu.load_te(sources)
    from megatron_rl.models.attention.attention_choice import resolve_attention
    from megatron_rl.models.read_spec import read_model_spec

    for case in cases:
        spec, cp = read_model_spec(Path(models[case.model])), LAYOUTS[case.layout].topology.get("cp", 1)
        assert resolve_attention("auto", spec, overrides={}, cp=cp, capability=(9, 0)) == "transformer_engine", f"{case} would run on torch"
    return run_cases(rank, world_size, init_method, models, directory, cases)


def run_on_torch_layers(
    rank: int, world_size: int, init_method: str, models: dict[str, str], directory: str, case: Case
) -> tuple[Outcome, dict[str, bool], dict[str, int]]:
    """A case with torch's layers on a GPU that has no TransformerEngine, which weights came back out of a checkpoint, and which lines
    waited for the GPU how often in a batch of two optimizer steps of many micro-batches.
    """
    import device_waits
    import pretended_gpu
    import torch

    import megatron_rl

    pretended_gpu.pretend()
    outcome = run_cases(rank, world_size, init_method, models, directory, [case])[case]
    settings = make_settings(
        models[case.model],
        Path(directory) / "checkpoint",
        dataclasses.replace(LAYOUTS[case.layout], budget=10),
        objective=OBJECTIVES[case.objective].objective,
        training={**OBJECTIVES[case.objective].training, "routing_replay": True},
    )
    trainer = make_trainer(settings, rank, f"{init_method}-saved")
    train_batches(trainer, settings, [1])
    trainer.save(Path(directory) / "saved")
    saved = {name: tensor.clone() for name, tensor in trainer.weights()}
    recorded = batch_with_record(2, num_layers=3, num_experts=8, top_k=4)
    shard = shards_of(recorded, settings, seed=2)[trainer.dp_rank]
    with device_waits.counted_waits(Path(megatron_rl.__file__).parent) as lines:
        steps = trainer.train_shard(shard)
    assert len(steps) == 2
    if rank == 0:
        assert all(0.2 < step["train/routing_replayed"].value < 1 for step in steps), "nothing was replayed"
        assert sum(step["train/num_micro_batches"].value for step in steps) >= 6, "steps of few micro-batches show nothing"
    trainer.load(Path(directory) / "saved")
    return outcome, {name: torch.equal(tensor, saved[name]) for name, tensor in trainer.weights()}, dict(lines)


def copies_to_the_gpu(rank: int, world_size: int, init_method: str) -> list[bool]:
    """Whether each of four copies out of page-locked memory waits: of all of it, of rows, of columns, and into another type."""
    import device_waits
    import pretended_gpu
    import torch

    pretended_gpu.pretend()
    locked = torch.arange(6, dtype=torch.uint8, device="cpu").view(2, 3).pin_memory()
    waits = []
    for source, dtype in ((locked, None), (locked[1], None), (locked[:, 1], None), (locked, torch.int64)):
        with device_waits.counted_waits(Path(__file__).parent) as lines:
            source.to(device="cuda", dtype=dtype, non_blocking=True)
        waits.append(bool(lines))
    return waits


def test_copies_through_pageable_memory_are_seen(run_ranks: Callable[..., list[Any]]) -> None:
    """Strides and types are changed on the host, in memory that is not page-locked."""
    assert run_ranks(copies_to_the_gpu, 1) == [[False, False, True, True]]


def differences_of(
    cases: Sequence[Case], run_ranks: Callable[..., list[Any]], tiny_model: Callable[..., Path], directory: Path, sources: Sequence[str]
) -> dict[Case, Differences]:
    """Of each case on TransformerEngine from its training on one rank of torch."""
    models = {name: str(tiny_model(name=name, **MODELS[name])) for name in sorted({case.model for case in cases})}
    bases = list(dict.fromkeys(case.base for case in cases))
    (base,) = run_ranks(run_cases, 1, models, str(directory / "torch"), bases, timeout_s=600)
    found = {}
    in_order = sorted(cases, key=lambda case: case.num_ranks)
    for number, together in enumerate(in_order[start : start + CASES_PER_LAUNCH] for start in range(0, len(in_order), CASES_PER_LAUNCH)):
        num_ranks = max(case.num_ranks for case in together)
        ranks = run_ranks(run_on_te, num_ranks, models, str(directory / str(number)), together, sources, timeout_s=1200)
        for case in together:
            outcomes = [rank[case] for rank in ranks[: case.num_ranks]]
            check_ranks_agree(outcomes)
            found[case] = compare(outcomes, [base[case.base]])
    return found


def check(found: dict[Case, Differences]) -> None:
    wrong = {str(case): differences for case, differences in found.items() if differences.beyond(SAME)}
    assert not wrong, "\n".join(f"{case}: {differences}" for case, differences in wrong.items())


# The newer pair is what tools/setup_env.sh prefers.
@pytest.mark.slow
@pytest.mark.parametrize("pair", [NEWEST, OLDEST], ids=str)
def test_te_trains_as_torch_does(
    run_ranks: Callable[..., list[Any]],
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    te_sources: Callable[[Pair], tuple[str, ...]],
    pair: Pair,
) -> None:
    check(differences_of(GATE, run_ranks, tiny_model, tmp_path, te_sources(pair)))


@pytest.mark.slow
def test_torch_layers_train_and_resume_on_a_gpu_as_on_a_cpu(
    run_ranks: Callable[..., list[Any]], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    case = Case("tp2 sp", "deepseek_v3", "grpo")
    models = {case.model: str(tiny_model(name=case.model, **MODELS[case.model]))}
    (base,) = run_ranks(run_cases, 1, models, str(tmp_path / "cpu"), [case.base])
    ranks = run_ranks(run_on_torch_layers, 2, models, str(tmp_path / "gpu"), case, timeout_s=240)
    check({case: compare([outcome for outcome, _, _ in ranks], [base[case.base]])})
    for _, same, waits in ranks:
        assert same and all(same.values())
        in_turn = {line: count for line, count in waits.items() if count > 2 and not line.startswith(NOT_ON_GPUS)}
        assert not in_turn, f"the GPU is waited for in every micro-batch: {in_turn}"
        assert sum(waits.values()) > 3, "what every optimizer step reads was not seen"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_te_trains_as_torch_does_under_every_layout(
    run_ranks: Callable[..., list[Any]],
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    te_sources: Callable[[Pair], tuple[str, ...]],
) -> None:
    check(differences_of(CASES, run_ranks, tiny_model, tmp_path, te_sources(NEWEST)))
