"""Try a node, print a line for each promise, and write them as JSON for the issue tracker."""

import dataclasses
import json
import platform
import signal
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

import torch

from megatron_rl.acceptance.judging import Line
from megatron_rl.acceptance.lines import LIMITS_S, LINES
from megatron_rl.acceptance.node import Node
from megatron_rl.errors import DeadlineError, UserError, WorkerDiedError, counted
from megatron_rl.files import write_atomic

RESULT_FILE = "acceptance.json"
LONGER_ON_CPU = 3.0
"""A few cores are shared by all that a node does with many and with GPUs."""


def accept(directory: Path, *, stand_ins: int = 0, only: Collection[str] = tuple(LINES)) -> int:
    """Run the lines; 0 when all passed, else 1. Logs and the JSON file are in a new directory below `directory`.

    So many `stand_ins`, processes on the CPU in the place of GPUs, try the acceptance itself; without them it takes all GPUs of the node.
    Raises UserError where there is no GPU, and for stand-ins where there is one.
    """
    on_cpu, found = stand_ins > 0, torch.cuda.device_count()
    if not on_cpu and not found:
        raise UserError("doctor --gpu found no GPU here; run it on the node to be accepted, or add --on-cpu to try the acceptance itself")
    if on_cpu and found:
        # Ranks and engines would take them.
        raise UserError(
            f"--on-cpu was given on a machine with {counted(found, 'GPU')}; leave it out, or hide them with CUDA_VISIBLE_DEVICES=''"
        )
    num_gpus = stand_ins or found
    directory.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix="acceptance-", dir=directory))
    print(f"logs are in {place}", flush=True)
    start, rows = time.monotonic(), list[dict[str, object]]()
    machine = {"host": platform.node(), "gpus": [] if on_cpu else [torch.cuda.get_device_name(gpu) for gpu in range(num_gpus)]}
    with closing(Node("cpu" if on_cpu else "cuda", num_gpus=num_gpus, directory=place)) as node:
        for number, title in enumerate(only, start=1):
            rows += _try(node, title)
            # After each, so that what ends the command halfway leaves what was found.
            complete, seconds = number == len(only), round(time.monotonic() - start, 1)
            _write(place, {"machine": machine, "complete": complete, "seconds": seconds}, rows)
    num_failed = sum(not row["passed"] for row in rows)
    print(f"{len(rows) - num_failed} of {len(rows)} lines passed in {seconds} s; for the issue tracker: {place / RESULT_FILE}")
    return int(num_failed > 0)


def _write(place: Path, summary: Mapping[str, object], rows: list[dict[str, object]]) -> None:
    passed = bool(summary["complete"]) and all(row["passed"] for row in rows)
    write_atomic(place / RESULT_FILE, json.dumps({**summary, "passed": passed, "lines": rows}, indent=2) + "\n")


@contextmanager
def _within(seconds: float, *, what: str) -> Iterator[None]:
    """Raise DeadlineError inside, wherever the main thread waits, after `seconds`."""

    def stop(*_: object) -> None:
        raise DeadlineError(f"{what} took longer than the {seconds:g} s that it has of 15 minutes")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


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
        with _within(LIMITS_S[title] * (LONGER_ON_CPU if node.kind == "cpu" else 1.0), what=title):
            for line in LINES[title](node):
                say(line)
    except Exception as error:
        # Where a rank died, others see a connection that broke, and may say so first.
        deaths = [] if isinstance(error, WorkerDiedError) else node.deaths()
        say(Line(title, passed=False, number="\n".join([f"{type(error).__name__}: {error}", *deaths])))
        # Whatever state the ranks are in, the next line begins with new ones.
        node.close()
    return rows
