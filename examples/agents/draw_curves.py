"""Draws the rewards of the examples' runs side by side: `python -m examples.agents.draw_curves NAME=RUN ... --out PICTURE`.

RUN is a directory that `megatron-rl train` wrote. Lines are the training rewards of each step, points those of held-out rows.
"""

import argparse
import json
from pathlib import Path

from matplotlib.figure import Figure

HELD_OUT = {"eval/sampled/reward": "held out, sampled", "eval/greedy/reward": "held out, greedy"}


def read_curve(run: Path, metric: str) -> tuple[list[int], list[float]]:
    """Return steps and values of a metric, of the steps that have it."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    found = {row["step"]: row[metric] for row in rows if metric in row}
    return list(found), list(found.values())


def draw(runs: dict[str, Path], picture: Path) -> None:
    """Draw a panel for each run."""
    figure = Figure(figsize=(2.4 * len(runs), 2.4), layout="constrained")
    panels = figure.subplots(1, len(runs), sharey=True, squeeze=False)[0]
    for panel, (name, run) in zip(panels, runs.items(), strict=True):
        panel.plot(*read_curve(run, "rollout/reward"), color="tab:blue", label="training")
        for (metric, label), marker in zip(HELD_OUT.items(), "ox", strict=True):
            panel.plot(*read_curve(run, metric), marker, color="tab:orange", label=label)
        panel.set(title=name, xlabel="step", ylim=(-0.03, 1.03))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("reward")
    panels[0].legend(fontsize="x-small", loc="lower right")
    figure.savefig(picture, dpi=100)


def main() -> None:
    """Read the command line and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="NAME=RUN")
    parser.add_argument("--out", type=Path, default=Path("examples/agents/curves.png"))
    arguments = parser.parse_args()
    draw({name: Path(run) for name, _, run in (pair.partition("=") for pair in arguments.runs)}, arguments.out)


if __name__ == "__main__":
    main()
