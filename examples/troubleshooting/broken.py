"""Faults for the arithmetic task: rows as a wrong pipeline writes them, and a reward that finds no answer.

    python examples/troubleshooting/broken.py runs/arithmetic/task

writes `no_equals.jsonl`, whose prompts lack their end, and `no_label.jsonl`, whose labels are in another field, beside `train.jsonl`.
"""

import json
import sys
from pathlib import Path

from megatron_rl.types import Sample


def boxed(*, sample: Sample) -> float:
    """1 where the label stands in a box, which nobody taught the model to write."""
    return float(f"\\boxed{{{sample.prompt.label}}}" in sample.response_text)


def write_rows(task: Path) -> None:
    """Write the rows of train.jsonl in both wrong forms."""
    rows = [json.loads(line) for line in (task / "train.jsonl").read_text().splitlines()]
    broken = {
        "no_equals": [{**row, "prompt": row["prompt"].removesuffix("=")} for row in rows],
        "no_label": [{"prompt": row["prompt"], "answer": row["label"]} for row in rows],
    }
    for name, wrong in broken.items():
        (task / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in wrong))


if __name__ == "__main__":
    write_rows(Path(sys.argv[1]))
