"""The arithmetic example's GRPO at a small size, and what its run directory says."""

import json
from pathlib import Path

SIZES = ("data.prompts_per_step=16", "data.samples_per_prompt=4", "run.eval_interval=2", "training.schedule.warmup_steps=1")


def rl_arguments(task: Path, directory: Path, *overrides: str) -> list[str]:
    """The command line's arguments for a run in `directory` on the model and the data of `task`."""
    paths = (f"model.path={task}/model", f"data.train={task}/train.jsonl", f"data.eval={task}/held_out.jsonl")
    return ["train", "examples/arithmetic/grpo.yaml", f"run.directory={directory}", *paths, *SIZES, *overrides]


def metrics(directory: Path) -> dict[int, dict[str, float]]:
    """All metrics of every step."""
    steps: dict[int, dict[str, float]] = {}
    for line in (directory / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        steps.setdefault(row["step"], {}).update(row)
    return steps
