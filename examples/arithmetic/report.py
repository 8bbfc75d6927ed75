"""Closes the quickstart: checks the checkpoint with plain transformers and puts the figures of both runs into one summary.

    python examples/arithmetic/report.py DIRECTORY --seconds setup=1.2 --seconds task=4.0 ...

DIRECTORY holds what quickstart.sh made: task/, sft/ and grpo/, each run with its summary.json. Writes DIRECTORY/summary.json
and exits with 1 when transformers and the engine disagree about the accuracy of the same checkpoint.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from score import greedy_accuracy

# One problem of 500: two logits that differ by rounding may swap the most likely digit.
ACCURACY_TOLERANCE = 0.0021


def read_summary(run: Path) -> dict[str, Any]:
    """The summary.json of a finished run."""
    return json.loads((run / "summary.json").read_text(encoding="utf-8"))


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write so that a reader finds either nothing or all of it."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)


def read_seconds(pairs: list[str]) -> dict[str, float]:
    """`["task=4.0"]` as a mapping; ValueError when a pair is not NAME=NUMBER."""
    return {name: float(value) for name, _, value in (pair.partition("=") for pair in pairs)}


def print_table(summary: dict[str, Any]) -> None:
    """Accuracy before and after, and where the time went."""
    before, after = summary["evaluation_before"], summary["evaluation_after"]
    table = Table("held-out accuracy", "before RL", "after RL", "after RL, by transformers")
    for name, transformers in (("greedy", f"{summary['accuracy_transformers']:.3f}"), ("sampled", "")):
        table.add_row(name, f"{before[f'{name}/accuracy']:.3f}", f"{after[f'{name}/accuracy']:.3f}", transformers)
    console = Console()
    console.print(table)
    seconds = [f"{name} {value:.0f}" for name, value in summary["seconds"].items() if value >= 0.5]
    console.print("seconds: " + ", ".join(seconds), soft_wrap=True)
    console.print(f"peak memory: {summary['peak_memory_bytes'] / 2**30:.1f} GiB")


def main() -> None:
    """Read the command line, score, write the summary and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seconds", action="append", default=[], metavar="NAME=SECONDS", help="wall time of a phase, may be repeated")
    arguments = parser.parse_args()
    directory: Path = arguments.directory

    sft, grpo = read_summary(directory / "sft"), read_summary(directory / "grpo")
    begin = time.monotonic()
    accuracy = greedy_accuracy(Path(grpo["checkpoint"]), directory / "task" / "held_out.jsonl")
    seconds = read_seconds(arguments.seconds) | {"score": time.monotonic() - begin}
    summary = grpo | {
        "accuracy_transformers": accuracy,
        "peak_memory_bytes": max(sft["peak_memory_bytes"], grpo["peak_memory_bytes"]),
        "seconds": seconds | {f"grpo/{name}": value for name, value in grpo["seconds"].items()},
    }
    print_table(summary)
    by_engine = summary["evaluation_after"]["greedy/accuracy"]
    if abs(accuracy - by_engine) > ACCURACY_TOLERANCE:
        sys.exit(
            f"transformers scores {accuracy:.3f} where the engine scored {by_engine:.3f}, needs the same to within "
            f"one problem: the exported checkpoint {grpo['checkpoint']} is not what was trained; please report this"
        )
    write_json(directory / "summary.json", summary)


if __name__ == "__main__":
    main()
