"""The layout changes nothing: every case of the matrix gives the numbers of one rank. `layout_table.py` says what is in it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layout_runs import Differences, Outcome, check_ranks_agree, compare, merged_metrics, run_cases, wanted_arrangement
from layout_table import CASES, GATE, LAYOUTS, MODELS, OBJECTIVES, WITHOUT_CLIP, Case

FLOAT32 = Differences(loss=1e-5, metrics=1e-5, grad_norm=1e-5, log_probs=1e-5, weights=1e-5)
# The same products are rounded to bfloat16 in any case; only sums of gradients, in float32, differ in order. A main weight that they
# move across a rounding border is off by 1/256 in bfloat16, and so are log-probs of size 4.
BFLOAT16_SAME_SUMS = Differences(loss=1e-4, metrics=1e-3, grad_norm=1e-4, log_probs=0.03, weights=3e-4)
# Parts of a sum are rounded to bfloat16, 1/256 each, before they are added over ranks; metrics such as KLs are small differences.
BFLOAT16_SPLIT_SUMS = Differences(loss=3e-3, metrics=0.1, grad_norm=1e-2, log_probs=0.15, weights=5e-3)
# The ratios of a second step carry that rounding into the losses, which are near zero.
BFLOAT16_SPLIT_SUMS_AND_RATIOS = Differences(loss=0.2, metrics=0.3, grad_norm=0.1, log_probs=0.15, weights=5e-3)
BFLOAT16_ROUTER_TIE_LOG_PROB, BFLOAT16_ROUTER_TIE_WEIGHT = 1.0, 0.02
"""Of a token whose router logits are a near tie and which goes to another expert, and of the few-token expert that it then trains."""
SECONDS_PER_CASE = 15
CASES_PER_LAUNCH = 16
"""Starting a rank costs seconds; but gloo's threads outlive their process groups, and hundreds of them slow a rank down many times."""
Outcomes = Callable[[Case], list[Outcome]]

slow = pytest.mark.slow


@pytest.fixture(scope="module")
def known() -> dict[Case, list[Outcome] | str]:
    """Outcomes of the cases that ran already, or why they could not."""
    return {}


@pytest.fixture
def outcomes(
    request: pytest.FixtureRequest,
    known: dict[Case, list[Outcome] | str],
    run_ranks: Callable[..., list[Any]],
    tiny_model: Callable[..., Path],
    tmp_path: Path,
) -> Outcomes:
    """`outcomes(case)` gives those of the case's ranks. Selected cases of as many ranks are run together, each once."""
    selected = [
        item.callspec.params["case"] for item in request.session.items if item.path == request.path and "case" in item.callspec.params
    ]

    def run(wanted: list[Case]) -> None:
        num_ranks = wanted[0].num_ranks
        launch = f"launch-{len(known)}"
        models = {name: str(tiny_model(name=f"{name}-{launch}", **MODELS[name])) for name in {case.model for case in wanted}}
        try:
            timeout_s = 60 + SECONDS_PER_CASE * len(wanted) * max(1, num_ranks // 2)
            ranks = run_ranks(run_cases, num_ranks, models, str(tmp_path / launch), wanted, timeout_s=timeout_s)
        except AssertionError as error:
            known.update(dict.fromkeys(wanted, f"the ranks that run this case died in another one of {num_ranks} ranks, told above"))
            pytest.fail(str(error), pytrace=False)
        known.update({case: [rank[case] for rank in ranks] for case in wanted})

    def get(case: Case) -> list[Outcome]:
        if case not in known:
            together = [case, *selected, *(other.base for other in selected)]
            left = [other for other in dict.fromkeys(together) if other.num_ranks == case.num_ranks and other not in known]
            run(left[:CASES_PER_LAUNCH])
        found = known[case]
        if isinstance(found, str):
            pytest.fail(found, pytrace=False)
        return found

    return get


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", [pytest.param(case, id=str(case), marks=() if case in GATE else slow) for case in CASES])
def test_the_layout_changes_nothing(case: Case, outcomes: Outcomes, matrix: list[tuple[Case, Differences]]) -> None:
    base, found = outcomes(case.base), outcomes(case)
    differences = compare(found, base)
    matrix.append((case, differences))
    check_ranks_agree(found)
    for outcome in found:
        wanted = wanted_arrangement(LAYOUTS[case.layout])
        assert {name: outcome["arrangement"][name] for name in wanted} == wanted
    assert not differences.beyond(tolerance_of(case)), differences
    assert_first_ratios_are_one(case, found)
    assert_trained(base)


def tolerance_of(case: Case) -> Differences:
    if case.dtype == "float32":
        return FLOAT32
    sizes = LAYOUTS[case.layout].topology
    # One rank adds the two gradients of a tied embedding in bfloat16, two stages add theirs in float32.
    if not sizes.keys() & {"tp", "cp", "ep"} and not ("pp" in sizes and MODELS[case.model].get("tied", True)):
        return BFLOAT16_SAME_SUMS
    tolerance = BFLOAT16_SPLIT_SUMS_AND_RATIOS if case.objective in WITHOUT_CLIP else BFLOAT16_SPLIT_SUMS
    if "ep" in sizes:
        tolerance = replace(tolerance, log_probs=BFLOAT16_ROUTER_TIE_LOG_PROB)
        if case.objective in WITHOUT_CLIP:
            tolerance = replace(tolerance, weights=BFLOAT16_ROUTER_TIE_WEIGHT)
    return tolerance


def assert_first_ratios_are_one(case: Case, found: list[Outcome]) -> None:
    """Old and new log-probs of a batch's first step come from the same weights: exactly one number in any dtype, or one pass is wrong."""
    steps_per_batch = OBJECTIVES[case.objective].training.get("optimizer_steps_per_batch", 1)
    for step in merged_metrics(found)[::steps_per_batch]:
        assert (step.get("train/ratio", 1.0), step.get("train/ppo_kl", 0.0)) == (1.0, 0.0)


def assert_trained(base: list[Outcome]) -> None:
    """There was something to compare: gradients that are not tiny, steps that were taken, weights and log-probs that moved."""
    for step in merged_metrics(base):
        assert step["train/skipped_steps"] == 0 and step["train/grad_norm"] > 0.01
        assert step.get("train/critic_grad_norm", 1.0) > 0.01 and step.get("train/critic_skipped_steps", 0) == 0
    before, after = base[0]["log_probs"]
    assert np.abs(after - before).max() > 0.01
