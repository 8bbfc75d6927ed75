"""The report of a run: curves.png and a self-contained report.html, from metrics.jsonl alone."""

import base64
import html
import math
import os
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.errors import UserError
from megatron_rl.observe.metrics import find_info, is_beyond_healthy
from megatron_rl.observe.sinks import METRICS_FILE, read_metrics
from megatron_rl.observe.summary import REPORT_FILE, SUMMARY_FILE, Summary, read_summary
from megatron_rl.report.curves import Steps, draw_curves, drawable
from megatron_rl.system.files import write_atomic

CURVES_FILE = "curves.png"

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


def report_run(directory: Path) -> Path:
    """Write the picture and the page into the `directory` of a run and return the page's path.

    The run may have ended, go on or have been killed. Raises UserError for a run without metrics
    and for a full disk.
    """
    if not directory.is_dir():
        raise UserError(f"{directory} is no directory; give the run.directory of a run")
    path = directory / METRICS_FILE
    if not path.exists():
        raise UserError(f"{path} does not exist, so there is nothing to report; give the run.directory of a run")
    # A name may hold bytes that are no text.
    name = os.fsencode(directory.name).decode(errors="replace")
    summary, steps, title = read_summary(directory), read_metrics(path), f"Run {name}"
    if not drawable(steps):
        raise UserError(f"{path} holds no metrics to draw, so there is nothing to report; run at least one step")
    picture = draw_curves(steps, title=title)
    write_atomic(directory / CURVES_FILE, picture)
    write_atomic(directory / REPORT_FILE, _page(steps, picture, title=title, summary=summary))
    return directory / REPORT_FILE


def _page(steps: Steps, picture: bytes, *, title: str, summary: Summary | None) -> str:
    name = html.escape(title)
    image = base64.b64encode(picture).decode()
    facts = _facts_of(summary) if summary is not None else {"status": f"no {SUMMARY_FILE}: the run goes on, or was killed"}
    go_on = html.escape(summary.go_on) if summary is not None else ""
    return f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{name}</title><style>{_STYLE}</style></head>
<body><main>
<h1>{name}</h1>
{_table((), list(facts.items()), numbers=())}
<h2>Curves</h2>
<img alt="Curves of the run" src="data:image/png;base64,{image}">
<h2>Go on from here</h2>
<pre>{go_on}</pre>
<h2>Numbers</h2>
{_table(("metric", "first", "last", "unit", "meaning", "healthy"), _final_rows(steps), numbers=(1, 2))}
</main></body></html>
"""


def _facts_of(summary: Summary) -> dict[str, str]:
    """Return the summary as rows of a table, without absent measurements."""
    facts = {
        "status": summary.status,
        "steps": str(summary.steps),
        "seed": str(summary.seed),
        "peak memory": f"{summary.peak_memory_bytes / 2**30:.2f} GiB",
        "seconds": ", ".join(f"{name} {seconds:.0f}" for name, seconds in summary.seconds.items()),
    }
    if summary.checkpoint is not None:
        facts["checkpoint"] = summary.checkpoint
    for name, before in summary.evaluation_before.items():
        if name.endswith("/accuracy") or (
            name.endswith("/reward") and f"{name.rpartition('/')[0]}/accuracy" not in summary.evaluation_before
        ):
            facts[f"held-out {name}"] = f"{before:.3f} → {summary.evaluation_after.get(name, before):.3f}"
    return facts


def _final_rows(steps: Steps) -> list[tuple[str, ...]]:
    """Return one row per metric with the first and the last value."""
    rows: list[tuple[str, ...]] = []
    for name in sorted({name for metrics in steps.values() for name in metrics}):
        values = [metrics[name] for metrics in steps.values() if name in metrics]
        info = find_info(name)
        described = (info.unit, info.meaning, info.healthy) if info is not None else ("", "not in the table of metrics", "")
        mark = " \N{WARNING SIGN}" if is_beyond_healthy(name, values[-1]) else ""
        rows.append((name, _shown(values[0]), f"{_shown(values[-1])}{mark}", *described))
    return rows


def _shown(value: float) -> str:
    if not math.isfinite(value):
        return "not finite"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[int]) -> str:
    """Return an HTML table with the columns `numbers` aligned to the right."""
    lines = ["".join(f"<th>{html.escape(title)}</th>" for title in titles)] if titles else []
    for row in rows:
        kinds = (' class="number"' if index in numbers else "" for index in range(len(row)))
        lines.append("".join(f"<td{kind}>{html.escape(cell)}</td>" for kind, cell in zip(kinds, row, strict=True)))
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="table"><table>{body}</table></div>'
