"""`megatron-rl buffer`: the samples of a run's buffer, in the terminal or as files."""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from megatron_rl.errors import UserError, counted

if TYPE_CHECKING:
    from megatron_rl.data.recorded import Recorded

_ROWS_AT_ONCE = 256
_RUN = click.argument("run", type=click.Path(path_type=Path))
_STEP = click.option("--step", type=click.IntRange(1), help="Only what this step took, counted from 1.")
_GROUP = click.option("--group", help="Only the group of this prompt's id.")


@click.group(name="buffer", short_help="Look at the samples of a run, also of a running one.")
def buffer() -> None:
    """Read the samples of RUN, a run.directory or a file that `export` wrote, beside the run or after it. Nothing is changed."""


def opened(run: Path) -> "Recorded":
    """Return the record of `run`. Raises UserError."""
    from megatron_rl.data.recorded import Recorded

    return Recorded(run)


@buffer.command(name="ls", short_help="List the steps.")
@_RUN
def list_steps(run: Path) -> None:
    """Print a line for each step: groups taken and trained on, samples, scores, lengths, weight versions, groups without tokens."""
    with opened(run) as recorded:
        steps, states = recorded.steps(), recorded.statistics().get("groups by state", {})
    for line in _table(steps):
        print(line)
    print(", ".join(f"{count} {state}" for state, count in states.items()) or "no group")


@buffer.command(short_help="Print samples.")
@_RUN
@_STEP
@_GROUP
@click.option("--limit", type=click.IntRange(1), default=8, show_default=True, help="Samples at most.")
def show(run: Path, step: int | None, group: str | None, limit: int) -> None:
    """Print prompts and responses with their rewards and versions; control characters are escaped."""
    before = None
    with opened(run) as recorded:
        for sample in islice(recorded.samples(step=step, group=group), limit):
            if (sample["group"], sample["prompt"]) != before:
                before = sample["group"], sample["prompt"]
                taken = "waits" if sample["step"] is None else f"step {sample['step']}"
                left_out = f", left out: {sample['rejection']}" if sample["rejection"] else ""
                print(_safe(f"── group {sample['group']}, {taken}{left_out}, label {sample['label']!r}\n{sample['prompt']}"))
            print(_safe(f"── sample {_facts(sample)}\n{sample['text']}"))


def _facts(sample: Mapping[str, Any]) -> str:
    reward = f"reward {sample['reward']:g}" if sample["outcome"] == "scored" else f"no reward ({sample['outcome'] or 'not asked for'})"
    parts = "".join(f", {name} {value:g}" for name, value in sample["components"].items())
    role = f", role {sample['role']}" if sample["role"] else ""
    versions = "" if sample["min_version"] is None else f", versions {sample['min_version']} to {sample['max_version']}"
    first_line = sample["message"].strip().partition("\n")[0]
    message = f": {first_line}" if first_line else ""
    length = counted(sample["num_tokens"], "token")
    return f"{sample['index']}{role}, {reward}{message}{parts}, {length}, ended by {sample['stop']}{versions}"


@buffer.command(short_help="Print counts and percentiles.")
@_RUN
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def stats(run: Path, as_json: bool) -> None:
    """Print groups by state and reason, samples by outcome, end and age, and percentiles of rewards and lengths."""
    with opened(run) as recorded:
        print_statistics(recorded, as_json=as_json)


def print_statistics(recorded: "Recorded", *, as_json: bool = False) -> None:
    """Print the counts and percentiles of a record."""
    found = recorded.statistics()
    if as_json:
        print(json.dumps(found))
        return
    for name, values in found.items():
        print(_safe(f"{name}: " + ", ".join(f"{kind} {value:g}" for kind, value in values.items())))


@buffer.command(short_help="Write samples to a file.")
@_RUN
@_STEP
@_GROUP
@click.option(
    "--out", type=click.Path(path_type=Path), help="FILE.jsonl, FILE.parquet, or FILE.sqlite; JSON lines on stdout when not given."
)
@click.option("--tokens", is_flag=True, help="With ids, mask, log-probs and weight versions of every token.")
def export(run: Path, step: int | None, group: str | None, out: Path | None, tokens: bool) -> None:
    """Write a row for each sample, or with FILE.sqlite groups from which `megatron-rl train --replay FILE` trains."""
    with opened(run) as recorded:
        write_samples(recorded, out, step=step, group=group, tokens=tokens)


def check_new(out: Path) -> None:
    """Raise UserError for a file that exists, and for an ending without a form."""
    if out.exists():
        raise UserError(f"{out} exists, needs a new file; remove it or give another name")
    if out.suffix not in (".jsonl", ".parquet", ".sqlite"):
        raise UserError(f"--out is {out}, needs a name that ends in .jsonl, .parquet or .sqlite; rename it")


def write_samples(recorded: "Recorded", out: Path | None, **chosen: Any) -> None:
    """Write the `chosen` samples to a new file `out` by its ending, or to stdout. Raises UserError."""
    if out is not None:
        check_new(out)
    if out is not None and out.suffix == ".sqlite":
        if chosen["group"] is not None:
            raise UserError("--group was given with a file ending in .sqlite, which takes whole steps; leave it out")
        print(f"{out}: {counted(recorded.copy(out, step=chosen['step']), 'group')}")
        return
    if out is None:
        for row in recorded.samples(**chosen):
            # Escaped down to ASCII: stdout may be a terminal.
            sys.stdout.write(json.dumps(row) + "\n")
        return
    from megatron_rl.system.files import disk_errors

    with disk_errors(out):
        write, rows = _write_lines if out.suffix == ".jsonl" else _write_table, recorded.samples(**chosen)
        unfinished = out.with_name(f".{out.name}.partial")
        try:
            number = write(unfinished, rows)
            unfinished.rename(out)
        finally:
            unfinished.unlink(missing_ok=True)
    print(f"{out}: {counted(number, 'sample')}")


def _write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    number = 0
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            number += 1
    return number


def _write_table(path: Path, rows: Iterator[Mapping[str, Any]]) -> int:
    """Write parquet in parts of some rows; objects, whose fields differ, are JSON texts."""
    import pyarrow
    import pyarrow.parquet

    kinds: dict[str, Any] = dict.fromkeys(("step", "index", "trajectory", "num_tokens", "num_trainable_tokens"), pyarrow.int64())
    kinds |= {"min_version": pyarrow.int64(), "max_version": pyarrow.int64(), "reward": pyarrow.float64(), "trained": pyarrow.bool_()}
    kinds |= dict.fromkeys(("prompt_ids", "response_ids", "loss_mask", "weight_versions"), pyarrow.list_(pyarrow.int32()))
    kinds["rollout_log_probs"] = pyarrow.list_(pyarrow.float32())
    number, writer = 0, None
    try:
        while part := list(islice(rows, _ROWS_AT_ONCE)):
            number += len(part)
            columns = {
                name: pyarrow.array(
                    [json.dumps(row[name]) if isinstance(row[name], dict) else row[name] for row in part], kinds.get(name, pyarrow.string())
                )
                for name in part[0]
            }
            table = pyarrow.table(columns)
            writer = writer or pyarrow.parquet.ParquetWriter(path, table.schema)
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()
    return number


def _table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the rows as aligned columns with their names."""
    if not rows:
        return
    cells = [[name.replace("_", " ") for name in rows[0]], *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _safe(text: str) -> str:
    """Return `text` without characters that a terminal would interpret; lines stay lines."""
    return "".join(each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode("ascii") for each in text)
