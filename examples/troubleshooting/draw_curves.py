"""The picture of this page: what the runs below a directory have in common, and where each goes wrong.

python examples/troubleshooting/draw_curves.py runs/broken curves.png
"""

import sys
from pathlib import Path

from megatron_rl.observe.sinks import METRICS_FILE, read_metrics
from megatron_rl.report.curves import Panel, draw_curves

CURVES = {
    "reward": "rollout/reward",
    "groups with one reward": "rollout/zero_variance_fraction",
    "cut answers": "rollout/truncated_fraction",
    "entropy, nats": "train/entropy",
}


def main(runs: Path, picture: Path) -> None:
    """Draw a panel for each run."""
    steps: dict[int, dict[str, float]] = {}
    panels = []
    for path in sorted(runs.glob(f"*/{METRICS_FILE}")):
        name = path.parent.name
        panels.append(Panel(name, {label: f"{name}/{metric}" for label, metric in CURVES.items()}, zero=True))
        for step, row in read_metrics(path).items():
            steps.setdefault(step, {}).update({f"{name}/{metric}": value for metric, value in row.items()})
    picture.write_bytes(draw_curves(dict(sorted(steps.items())), title="Runs with one fault each", panels=panels))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
