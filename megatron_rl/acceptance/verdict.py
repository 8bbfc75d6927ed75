"""Try a node, print a line for each promise, and write them as JSON for the issue tracker."""

import dataclasses
import json
import platform
import tempfile
import time
from collections.abc import Collection
from contextlib import closing
from pathlib import Path

import torch

from megatron_rl.acceptance.lines import LINES, Line
from megatron_rl.acceptance.node import Node
from megatron_rl.errors import UserError
from megatron_rl.files import write_atomic

RESULT_FILE = "acceptance.json"


def accept(directory: Path, *, on_cpu: bool, only: Collection[str] = tuple(LINES)) -> int:
    """Run the lines; 0 when all passed, else 1. Logs and the JSON file are in a new directory below `directory`.

    Raises UserError where there is no GPU, unless `on_cpu`: then two processes stand for GPUs, which tries the acceptance itself.
    """
    num_gpus = torch.cuda.device_count()
    if not on_cpu and not num_gpus:
        raise UserError("doctor --gpu found no GPU here; run it on the node to be accepted, or add --on-cpu to try the acceptance itself")
    directory.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix="acceptance-", dir=directory))
    start, rows = time.monotonic(), []
    with closing(Node("cpu" if on_cpu else "cuda", num_gpus=num_gpus, directory=place)) as node:
        for title in only:
            rows += _try(node, title)
    summary = {
        "machine": {"host": platform.node(), "gpus": [] if on_cpu else [torch.cuda.get_device_name(gpu) for gpu in range(num_gpus)]},
        "passed": all(row["passed"] for row in rows),
        "seconds": round(time.monotonic() - start, 1),
        "lines": rows,
    }
    write_atomic(place / RESULT_FILE, json.dumps(summary, indent=2) + "\n")
    num_failed = sum(not row["passed"] for row in rows)
    print(f"{len(rows) - num_failed} of {len(rows)} lines passed in {summary['seconds']} s; for the issue tracker: {place / RESULT_FILE}")
    return int(num_failed > 0)


def _try(node: Node, title: str) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    start = time.monotonic()

    def say(line: Line) -> None:
        nonlocal start
        seconds = round(time.monotonic() - start, 1)
        start = time.monotonic()
        print(f"{'PASS' if line.passed else 'FAIL'}  {line.name}: {line.number}  [{seconds:.0f} s]", flush=True)
        rows.append({**dataclasses.asdict(line), "seconds": seconds})

    try:
        for line in LINES[title](node):
            say(line)
    except Exception as error:
        say(Line(title, passed=False, number=f"{type(error).__name__}: {error}"))
        # Whatever state the ranks are in, the next line begins with new ones.
        node.close()
    return rows
