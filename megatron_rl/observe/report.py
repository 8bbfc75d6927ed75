"""The report of a run: curves.png and a self-contained report.html, from metrics.jsonl alone."""

import base64
import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_rl.errors import UserError
from megatron_rl.files import write_atomic
from megatron_rl.observe.curves import Steps, draw_curves, drawable
from megatron_rl.observe.metrics import find_info, is_beyond_healthy
from megatron_rl.observe.sinks import METRICS_FILE, read_metrics
from megatron_rl.observe.summary import REPORT_FILE, SUMMARY_FILE, facts_of, read_summary

CURVES_FILE = "curves.png"

_BEYOND = "\N{WARNING SIGN}"
"""Mark beside a last value beyond the healthy range."""
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #0f172a; background: #f8fafc; margin: 0; }
main { max-width: 1100px; margin: 0 auto; padding: 24px 16px 64px; }
h1 { font-size: 24px; margin: 0 0 16px; } h2 { font-size: 17px; margin: 32px 0 8px; }
img { width: 100%; height: auto; background: white; border: 1px solid #e2e8f0; border-radius: 8px; }
pre { background: #0f172a; color: #e2e8f0; padding: 12px 16px; border-radius: 8px; overflow-x: auto; }
.table { overflow-x: auto; background: white; border: 1px solid #e2e8f0; border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 6px 12px; border-bottom: 1px solid #f1f5f9; vertical-align: top; }
th { color: #475569; font-weight: 600; } tr:last-child td { border-bottom: 0; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
"""


def has_curves(directory: Path) -> bool:
    """Return True when the run in `directory` has a measurement to draw.

    Raises UserError for a broken metrics.jsonl.
    """
    path = directory / METRICS_FILE
    return path.exists() and bool(drawable(read_metrics(path)))


def write_report(directory: Path, *, facts: Mapping[str, str], commands: Sequence[str]) -> Path:
    """Write the picture and the page into the run's `directory` and return the page's path.

    The directory's name is the title. `facts` are shown as a table of names and values, `commands`
    as lines for going on. Raises UserError when the run has no metrics or the disk is full.
    """
    path, title = directory / METRICS_FILE, f"Run {directory.name}"
    if not path.exists():
        raise UserError(f"{path} does not exist, so there is nothing to report; give the run.directory of a run")
    if not has_curves(directory):
        raise UserError(f"{path} holds no metrics to draw, so there is nothing to report; run at least one step")
    steps = read_metrics(path)
    picture = draw_curves(steps, title=title)
    write_atomic(directory / CURVES_FILE, picture)
    write_atomic(directory / REPORT_FILE, _page(steps, picture, title=title, facts=facts, commands=commands))
    return directory / REPORT_FILE


def report_run(directory: Path) -> Path:
    """Call `write_report` on the `directory` of a run: ended, going on or killed.

    Raises UserError.
    """
    if not directory.is_dir():
        raise UserError(f"{directory} is no directory; give the run.directory of a run")
    summary = read_summary(directory)
    if summary is not None:
        return write_report(directory, facts=facts_of(summary), commands=[summary.go_on])
    return write_report(directory, facts={"status": f"no {SUMMARY_FILE}: the run goes on, or was killed"}, commands=[])


def _page(steps: Steps, picture: bytes, *, title: str, facts: Mapping[str, str], commands: Sequence[str]) -> str:
    name = html.escape(title)
    image = base64.b64encode(picture).decode()
    listing = html.escape("\n".join(commands))
    return f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{name}</title><style>{_STYLE}</style></head>
<body><main>
<h1>{name}</h1>
{_table(("", ""), [(key, value) for key, value in facts.items()], numbers=())}
<h2>Curves</h2>
<img alt="Curves of the run" src="data:image/png;base64,{image}">
<h2>Go on from here</h2>
<pre>{listing}</pre>
<h2>Numbers</h2>
{_table(("metric", "first", "last", "unit", "meaning", "healthy"), _final_rows(steps), numbers=(1, 2))}
</main></body></html>
"""


def _final_rows(steps: Steps) -> list[tuple[str, ...]]:
    """Return one row per metric with the first and the last value."""
    rows: list[tuple[str, ...]] = []
    for name in sorted({name for metrics in steps.values() for name in metrics}):
        values = [metrics[name] for metrics in steps.values() if name in metrics]
        info = find_info(name)
        described = (info.unit, info.meaning, info.healthy) if info is not None else ("", "not in the table of metrics", "")
        mark = f" {_BEYOND}" if is_beyond_healthy(name, values[-1]) else ""
        rows.append((name, _shown(values[0]), f"{_shown(values[-1])}{mark}", *described))
    return rows


def _shown(value: float) -> str:
    if not math.isfinite(value):
        return "not finite"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[int]) -> str:
    """Return an HTML table with the columns `numbers` aligned to the right.

    A row of empty titles is left out.
    """
    head = "".join(f"<th>{html.escape(title)}</th>" for title in titles)
    body = "\n".join(
        "<tr>"
        + "".join(
            f'<td class="number">{html.escape(cell)}</td>' if index in numbers else f"<td>{html.escape(cell)}</td>"
            for index, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return f'<div class="table"><table>{f"<tr>{head}</tr>" if any(titles) else ""}{body}</table></div>'
