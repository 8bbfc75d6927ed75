import itertools
import math
import random
import re
from pathlib import Path

import pytest

from megatron_rl.observe import metrics
from megatron_rl.observe.metrics import (
    METRICS,
    Last,
    Max,
    Mean,
    Metric,
    Min,
    Sum,
    check_metrics,
    is_beyond_healthy,
    merge_metrics,
    metric_info,
    metric_values,
)


def test_mean_over_ranks_is_the_mean_of_all_samples_not_of_means() -> None:
    shares = [{"train/entropy": Mean(sum(values), len(values))} for values in ([1.0, 2.0, 9.0], [4.0], [])]
    assert metric_values(merge_metrics(shares)) == {"train/entropy": 4.0}


@pytest.mark.parametrize(("kind", "expected"), [(Sum, 6.0), (Max, 5.0), (Min, -1.0), (Last, 2.0)])
def test_reductions(kind: type[Metric], expected: float) -> None:
    shares = [{"x": kind(number)} for number in (5.0, -1.0, 2.0)]  # type: ignore[call-arg]
    assert merge_metrics(shares)["x"].value == expected


def test_grouping_and_order_of_merges_change_nothing() -> None:
    generator = random.Random(0)
    pairs = [(generator.randint(-9, 9), generator.randint(1, 9)) for _ in range(6)]
    total = sum(pair[0] for pair in pairs) / sum(pair[1] for pair in pairs)
    for order in itertools.islice(itertools.permutations(pairs), 50):
        left = merge_metrics({"m": Mean(*pair)} for pair in order)
        halves = merge_metrics([merge_metrics({"m": Mean(*p)} for p in order[:2]), merge_metrics({"m": Mean(*p)} for p in order[2:])])
        assert left["m"].value == halves["m"].value == total


def test_unmeasured_is_left_out_and_not_zero() -> None:
    assert math.isnan(Mean(0.0, 0.0).value)
    assert metric_values({"a": Mean(0.0, 0.0), "b": Sum(0.0)}) == {"b": 0.0}


@pytest.mark.parametrize("kind", [Max, Min])
@pytest.mark.parametrize("numbers", [(math.nan, 1.0), (1.0, math.nan)])
def test_nan_is_not_hidden_by_max_or_min(kind: type[Max] | type[Min], numbers: tuple[float, float]) -> None:
    assert math.isnan(kind(numbers[0]).merge(kind(numbers[1])).value)


def test_shares_with_different_reductions_are_refused() -> None:
    with pytest.raises(TypeError, match="Mean and Sum"):
        merge_metrics([{"x": Mean(1, 1)}, {"x": Sum(1)}])


def test_unknown_names_and_wrong_reductions_are_refused() -> None:
    check_metrics({"rollout/reward": Mean(1, 1), "time/rollout": Sum(1), "rollout/reward_component/format": Mean(1, 2)})
    with pytest.raises(KeyError, match="closest is 'rollout/reward'"):
        check_metrics({"rollout/rewrd": Mean(1, 1)})
    for name in ("time/", "rollout/reward_komponent/format"):
        with pytest.raises(KeyError, match="not in the table"):
            metric_info(name)
    with pytest.raises(TypeError, match="declares Max"):
        check_metrics({"rollout/response_length_max": Mean(1, 1)})


def test_the_table_is_complete() -> None:
    for name, info in METRICS.items():
        assert name == info.name and re.fullmatch(r"[a-z]+/[a-z0-9_]+(/?\*)?|[a-z]+/\*|eval/\*/[a-z]+[_a-z]*([@^]\*)?", name), name
        assert info.meaning


def test_launch_scripts_name_metrics_that_exist() -> None:
    scripts = sorted((Path(__file__).parents[3] / "examples" / "launch").glob("*.sh"))
    lines = [line for script in scripts for line in re.findall("^# Watch(.*)$", script.read_text(), re.M)]
    watched = [name for line in lines for name in re.findall(r"\w+/\w+", line)]
    assert len(watched) >= 10
    assert all(metric_info(name) for name in watched)


@pytest.mark.parametrize(
    ("name", "value", "beyond"),
    [
        ("rollout/truncated_fraction", 0.1, True),
        ("rollout/truncated_fraction", 0.09, False),
        ("rollout/truncated_fraction", math.nan, True),
        ("train/dual_clip_fraction", 0.02, True),
        ("train/kl_reference", 9.0, False),
        ("rollout/reward", -9.0, False),
        ("own/metric", 9.0, False),
    ],
)
def test_values_are_held_against_an_upper_bound(name: str, value: float, beyond: bool) -> None:
    assert is_beyond_healthy(name, value) == beyond


def test_the_reference_is_the_table() -> None:
    text = Path(metrics.__file__).with_name("METRICS.md").read_text(encoding="utf-8")
    assert text == metrics.reference(), "write METRICS.md anew by the command in it"
    assert re.findall(r"^- `([^`]+)` ", text, re.MULTILINE) == list(METRICS) and max(map(len, text.splitlines())) <= 100


def test_the_readme_shows_lines_of_the_table() -> None:
    readme = Path(metrics.__file__).with_name("README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+/[^`]+)` \| (.*) \| (.*) \|$", readme, re.MULTILINE)
    assert rows == [(name, METRICS[name].meaning, METRICS[name].healthy) for name, *_ in rows]
    assert len(rows) > 5
