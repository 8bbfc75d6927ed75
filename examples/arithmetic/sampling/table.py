"""Prints the tables of run.sh: values by seed, of the first step, and of the last steps or the last evaluation.

python examples/arithmetic/sampling/table.py DIRECTORY
"""

import sys
from pathlib import Path

import numpy as np

from megatron_rl.observe.sinks import read_metrics

TREATMENTS = {"plain": "plain", "quadrants": "entropy-aware", "no_argmax": "the same, `argmax` drawn plainly"}
LAST_STEPS = 5
OUTCOMES = {
    "eval/greedy/accuracy": "greedy accuracy",
    "eval/sampled/accuracy": "sampled accuracy",
    "rollout/reward": "reward of the samples",
    "train/entropy": "entropy, nats",
    "rollout/zero_variance_fraction": "groups of one reward",
}
DRAWS = {
    **{f"train/quadrant_{name}": f"`{name}`" for name in ("argmax", "branch", "explore", "resample")},
    "train/draw_log_ratio": "log π - log q",
    "train/off_policy_bounded_fraction": "weights cut at 2",
}


def values(run: Path, metric: str) -> tuple[float, float]:
    """Value of a metric at the start, and its mean over the last steps, or at the last evaluation."""
    found = np.array([row[metric] for row in read_metrics(run / "metrics.jsonl").values() if metric in row])
    return found[0], found[-1 if metric.startswith("eval/") else -LAST_STEPS :].mean()


def table(directory: Path, metrics: dict[str, str], treatments: dict[str, str]) -> None:
    """Print a column for each of `metrics` and a row for each of `treatments`: the start's mean, and the end by seed."""
    print(f"\n| | {' | '.join(metrics.values())} |\n|{'---|' * (len(metrics) + 1)}")
    for name, label in treatments.items():
        runs = [seed / name for seed in sorted(directory.glob("seed*"))]
        cells = []
        for metric in metrics:
            begins, ends = zip(*(values(run, metric) for run in runs), strict=True)
            cells.append(f"{np.mean(begins):.2f} → {' / '.join(f'{end:.3f}' for end in ends)}")
        print(f"| {label} | {' | '.join(cells)} |")


if __name__ == "__main__":
    table(Path(sys.argv[1]), OUTCOMES, TREATMENTS)
    table(Path(sys.argv[1]), DRAWS, {name: label for name, label in TREATMENTS.items() if name != "plain"})
