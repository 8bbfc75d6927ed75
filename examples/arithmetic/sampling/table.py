"""Prints the tables of run.sh.

python examples/arithmetic/sampling/table.py DIRECTORY
"""

import sys
from pathlib import Path

import numpy as np

from megatron_rl.observe.sinks import read_metrics

TREATMENTS = {"plain": "plain", "quadrants": "entropy-aware", "no_argmax": "entropy-aware, argmax drawn plainly"}
LAST_STEPS = 6


def read(run: Path, metric: str) -> np.ndarray:
    """Values of a metric over the steps that have it."""
    return np.array([values[metric] for values in read_metrics(run / "metrics.jsonl").values() if metric in values])


def cell(runs: list[Path], metric: str, *, first: bool = False) -> str:
    """Value at the end, the mean of the last steps where it is one of training, or the first, by seed."""
    count = LAST_STEPS if metric.startswith(("train", "rollout")) else 1
    return " / ".join(f"{values[0] if first else values[-count:].mean():.3f}" for values in (read(run, metric) for run in runs))


def table(directory: Path, columns: dict[str, tuple[str, bool]], treatments: dict[str, str]) -> None:
    """One row for each treatment, one column for each (metric, whether of the first step)."""
    print(f"\n| | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for name, label in treatments.items():
        runs = [seed / name for seed in sorted(directory.glob("seed*"))]
        print(f"| {label} | {' | '.join(cell(runs, metric, first=first) for metric, first in columns.values())} |")


if __name__ == "__main__":
    ends = {
        "greedy accuracy": ("eval/greedy/accuracy", False),
        "sampled accuracy": ("eval/sampled/accuracy", False),
        "entropy, first step": ("train/entropy", True),
        "entropy, end": ("train/entropy", False),
        "reward of samples, end": ("rollout/reward", False),
        "groups of equal rewards, end": ("rollout/zero_variance_fraction", False),
    }
    draws = {f"{name}, first and end": f"train/quadrant_{name}" for name in ("argmax", "branch", "explore", "resample")}
    drawn = {
        label: (metric, first) for name, metric in draws.items() for label, first in ((name, True), (f"{name.split(',')[0]}, end", False))
    }
    drawn |= {"log π - log q, end": ("train/draw_log_ratio", False), "weight cut, end": ("train/off_policy_bounded_fraction", False)}
    table(Path(sys.argv[1]), ends, TREATMENTS)
    table(Path(sys.argv[1]), drawn, {name: label for name, label in TREATMENTS.items() if name != "plain"})
