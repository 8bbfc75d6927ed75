"""Draws the curves of run.sh and prints its table.

    python examples/arithmetic/entropy/plot.py DIRECTORY

Writes DIRECTORY/entropy.png: entropy, held-out accuracy and entropy coefficient over the steps, one line per treatment (the mean of
the seeds) in a band from the lowest to the highest seed.
"""

import sys
from pathlib import Path

import matplotlib
import numpy as np

from megatron_rl.observe.sinks import read_metrics

matplotlib.use("Agg")
from matplotlib import pyplot as plt

TREATMENTS = {"none": "no control", "clip_higher": "clip-higher 1.0", "static": "static bonus 0.5", "adaptive": "adaptive, target 0.15"}
PANELS = {
    "train/entropy": "entropy (nats per token)",
    "rollout/reward": "reward of the rollouts",
    "train/entropy_coef": "entropy coefficient",
}
LAST_STEPS = 10


def read(directory: Path, treatment: str, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps [N] and values [seeds, N] of a metric of all seeds."""
    runs = [read_metrics(path / treatment / "metrics.jsonl") for path in sorted(directory.glob("seed*"))]
    series = [{step: values[metric] for step, values in run.items() if metric in values} for run in runs]
    steps = sorted(series[0])
    return np.array(steps), np.array([[values[step] for step in steps] for values in series])


def draw(directory: Path) -> None:
    """One panel per metric."""
    figure, axes = plt.subplots(1, len(PANELS), figsize=(13, 3.8), constrained_layout=True)
    for axis, (metric, title) in zip(axes, PANELS.items(), strict=True):
        for number, (treatment, label) in enumerate(TREATMENTS.items()):
            steps, values = read(directory, treatment, metric)
            if len(steps):
                axis.plot(steps, values.mean(0), label=label, color=f"C{number}")
                axis.fill_between(steps, values.min(0), values.max(0), color=f"C{number}", alpha=0.15, linewidth=0)
        axis.set_title(title)
        axis.set_xlabel("step (4 optimizer steps each)")
        axis.grid(alpha=0.3)
    axes[0].axhline(0.15, color="black", linewidth=0.8, linestyle=":")
    axes[0].legend(fontsize=8)
    figure.savefig(directory / "entropy.png", dpi=110)


def print_table(directory: Path) -> None:
    """Entropy over the last steps and accuracy at the end, by seed."""
    print(f"| treatment | entropy, mean of the last {LAST_STEPS} steps, by seed | greedy accuracy at the end | sampled |")
    print("|---|---|---|---|")
    for treatment, label in TREATMENTS.items():
        entropy = read(directory, treatment, "train/entropy")[1][:, -LAST_STEPS:].mean(1)
        accuracies = [read(directory, treatment, f"eval/{kind}/accuracy")[1][:, -1] for kind in ("greedy", "sampled")]
        cells = [" / ".join(f"{value:.3f}" for value in values) for values in (entropy, *accuracies)]
        print(f"| {label} | {cells[0]} | {cells[1]} | {cells[2]} |")


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
    print_table(Path(sys.argv[1]))
