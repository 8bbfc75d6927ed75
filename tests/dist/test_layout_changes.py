"""A checkpoint goes on under any other layout, with its optimizer: what follows is what one rank does that never stopped.

Every layout of a table is tried from every other, with and without expert parallelism and the distributed optimizer. The end of a
session prints the largest difference of each pair, and writes it to what LAYOUT_CHANGES_FILE names (`tests/dist/LAYOUT_CHANGES.md`).
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from layout_runs import Differences, Outcome, compare, make_batch, make_settings, make_trainer, outcome_of, train_batches
from layout_table import BASE, DISTRIBUTED, MODELS, OBJECTIVES, SEQUENCE_PARALLEL, Layout
from layout_table import LAYOUTS as MATRIX

TOLERANCE = 1e-5
LAYOUTS = MATRIX | {"ep2 tp2 dp2 sp distopt": Layout(4, {**SEQUENCE_PARALLEL, "ep": 2, "etp": 1}, optimizer=DISTRIBUTED)}
BEFORE, AFTER = (1, 2), (3, 4)
DENSE = (BASE, "dp2", "dp2 distopt overlap", "tp2 sp", "pp2", "pp2 vpp2", "cp2", "tp2 dp2 sp distopt", "tp2 pp2 vpp2 sp")
EXPERTS = (BASE, "dp2 distopt", "ep2", "ep2 distopt", "ep2 cp2", "ep2 pp2", "ep2 pp2 vpp2", "ep2 tp2 sp etp2", "ep2 tp2 dp2 sp distopt")
Change = tuple[str, str, Sequence[str]]
"""A model, the layout that saves, those that go on."""
GATE: tuple[Change, ...] = (
    ("tied", "dp2 distopt overlap", ("tp2 sp", BASE)),
    ("tied", "tp2 sp", ("dp2 distopt overlap", "pp2 vpp2")),
    ("qwen3_moe", "ep2 distopt", ("dp2",)),
    ("qwen3_moe", "dp2", ("ep2 distopt", "ep2")),
)
WIDE: tuple[Change, ...] = (
    *(("tied", layout, DENSE) for layout in DENSE),
    *(("qwen3_moe", layout, EXPERTS) for layout in EXPERTS),
)


def change(
    rank: int, world_size: int, init_method: str, models: dict[str, str], directory: str, changes: Sequence[Change]
) -> dict[tuple[str, str, str], Outcome]:
    """For each model the last batches of one rank that trains them all, and of every layout from the checkpoint of another."""
    from megatron_rl.training.topology import shutdown

    objective = OBJECTIVES["grpo"]
    outcomes: dict[tuple[str, str, str], Outcome] = {}

    def train(model: str, layout: str, *, name: str, start: Path | None, seeds: Sequence[int], end: Path | None) -> Outcome | None:
        if rank >= LAYOUTS[layout].num_ranks:
            return None
        print(f"{model}: {name}", flush=True)
        settings = make_settings(
            models[model], Path(directory) / "run", LAYOUTS[layout], objective=objective.objective, training=objective.training
        )
        trainer = make_trainer(settings, rank, f"{init_method}-{model}-{name}")
        if start is not None:
            trainer.load(start)
        metrics = train_batches(trainer, settings, seeds)
        if end is not None:
            trainer.save(end)
        outcome = outcome_of(trainer, metrics[-2 * len(AFTER) :], log_probs=[trainer.log_probs(make_batch(7))], whole=rank == 0)
        shutdown()
        return outcome

    for model in dict.fromkeys(model for model, _, _ in changes):
        base = train(model, BASE, name="base", start=None, seeds=BEFORE + AFTER, end=None)
        if base is not None:
            outcomes[model, "", BASE] = base
    for model, saved_as, loaded_as in changes:
        saved = Path(directory) / f"{model} {saved_as}"
        train(model, saved_as, name=f"{saved_as} saves", start=None, seeds=BEFORE, end=saved)
        for layout in loaded_as:
            resumed = train(model, layout, name=f"{saved_as} to {layout}", start=saved, seeds=AFTER, end=None)
            if resumed is not None:
                outcomes[model, saved_as, layout] = resumed
    return outcomes


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "changes",
    [pytest.param(GATE, id="gate"), *(pytest.param((row,), id=f"{row[0]}-{row[1]}", marks=pytest.mark.slow) for row in WIDE)],
)
def test_a_checkpoint_continues_under_another_layout(
    changes: Sequence[Change],
    run_ranks: Callable[..., list[Any]],
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    layout_changes: dict[tuple[str, str, str], float],
) -> None:
    models = {name: str(tiny_model(name=name, **MODELS[name])) for name in {model for model, _, _ in changes}}
    num_ranks = max(LAYOUTS[layout].num_ranks for _, saved_as, loaded_as in changes for layout in (saved_as, *loaded_as))
    found = run_ranks(change, num_ranks, models, str(tmp_path), changes, timeout_s=800)
    too_far: dict[tuple[str, str, str], Differences] = {}
    for model, saved_as, loaded_as in changes:
        base = [found[0][model, "", BASE]]
        for layout in loaded_as:
            case = model, saved_as, layout
            differences = compare([rank[case] for rank in found if case in rank], base)
            layout_changes[case] = differences.largest
            if not differences.largest <= TOLERANCE:
                too_far[case] = differences
    assert not too_far, too_far
