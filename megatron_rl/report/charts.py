"""The charts of a report as Vega-Lite specifications, made by altair, and the scripts that draw them without a network."""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import vl_convert
from altair.utils.schemapi import debug_mode
from numpy.typing import NDArray

from megatron_rl.errors import UserError
from megatron_rl.observe.groups_of_interest import Answer, ends
from megatron_rl.observe.metrics import healthy_bound
from megatron_rl.observe.spans import Span
from megatron_rl.report.curves import Panel, Steps, drawable
from megatron_rl.system.files import write_atomic

_MORE = (
    Panel("Truncated answers, share", {"truncated": "rollout/truncated_fraction"}, zero=True),
    Panel("Groups with one reward, share", {"zero variance": "rollout/zero_variance_fraction"}, zero=True),
    Panel(
        "Failures", {"rewards": "rollout/reward_errors", "rewards too late": "rollout/reward_timeouts", "trajectories": "rollout/failures"}
    ),
    Panel("Staleness, versions", {"mean": "rollout/staleness", "oldest token": "rollout/staleness_max"}),
    Panel("Clipped tokens, share", {"low": "train/clip_fraction_low", "high": "train/clip_fraction_high"}, zero=True),
    Panel(
        "Use of the engines' memory",
        {"fullest": "engine/kv_use_max", "busiest": "engine/kv_use_of_busiest", "idlest": "engine/kv_use_of_idlest"},
        zero=True,
    ),
    Panel("Waiting inside engines", {"most": "engine/queue_max", "mean": "engine/queue"}),
    Panel("Prefix hits of engines", {"most": "engine/prefix_hits_max", "least": "engine/prefix_hits_min"}, zero=True),
    Panel("Restarts and retractions", {"restarts": "engine/restarts", "retractions": "engine/retractions"}),
    Panel("Tokens per second", {"generated": "rollout/tokens_per_second", "trained on": "train/tokens_per_second"}),
)
_PHASES = {"rollout_wait": "generation", "train": "training", "sync": "weight sync", "swap": "swap", "eval": "evaluation", "save": "save"}
"""Phases of a step that follow on each other, as the driver waits for them."""
_PARTS = ("generation", "last request alone", "rewards", "forward, backward", "optimizer", *list(_PHASES.values())[1:])
"""Parts of a step; `training` is then what is left of it."""

_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#f0e442", "#000000", "#999999", "#8c564b")
"""Of Okabe and Ito, and two more: the first eight are told apart with every kind of colour vision."""

ByStep = Mapping[int, Sequence[NDArray[np.float64]]]
"""Numbers of each step, in parts."""

_BINS = 20
_TABLES = files("itables") / "html"


def scripts() -> dict[str, str]:
    """Return JavaScript of `vega` and `datatables`, and the `style` of these.

    Vega's is made once for each release and user: bundling takes seconds.
    """
    kept = Path(f"~/.cache/megatron_rl/vega-{version('vl-convert-python')}.js").expanduser()
    vega = kept.read_text("utf-8") if kept.is_file() else vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    if not kept.is_file():
        # Where nothing can be kept, the next report takes some seconds more.
        with suppress(UserError, OSError):
            write_atomic(kept, vega)
    datatables, style = ((_TABLES / f"dt_bundle.{kind}").read_text("utf-8") for kind in ("js", "css"))
    # Inside a script only these two would be markup; both stand in strings and comments there.
    vega, datatables = (text.replace("<!--", "<\\!--").replace("</script", "<\\/script") for text in (vega, datatables))
    return {"vega": vega, "datatables": datatables, "style": style}


def all_charts(
    steps: Steps,
    evaluations: Sequence[Sequence[Any]],
    answers: Sequence[Answer],
    tokens: Mapping[str, ByStep],
    seconds: Mapping[int, Mapping[str, float]],
) -> dict[str, dict[str, Any]]:
    """Return the charts of a page by section and name; `seconds` are those of `step_seconds`."""
    # Without the check of every part against the schema, which takes most of the time.
    with debug_mode(False):
        curves, distributions = curve_charts(steps, evaluations, seconds), sample_charts(answers, tokens)
        return {"curves": curves, "distributions": distributions, "others": {"positions": position_chart()}}


def curve_charts(steps: Steps, evaluations: Sequence[Sequence[Any]], seconds: Mapping[int, Mapping[str, float]]) -> dict[str, Any]:
    """Return the charts of a run's metrics by name, and of `evaluations`: step, set, estimate, value, low, high and number."""
    found = {"seconds": _seconds(seconds)}
    for panel in (*drawable(steps), *_MORE):
        if (panel.sparse and evaluations) or any(name.startswith("time/") for name in panel.curves.values()):
            continue  # drawn with intervals, or as an area
        found[panel.title] = _curve(panel, steps)
    for kind in sorted({row[2] for row in evaluations if row[2] in ("accuracy", "reward")}):
        found[f"Held-out {kind}"] = _intervals(f"Held-out {kind}", [row for row in evaluations if row[2] == kind])
    return {name: _spec(chart) for name, chart in found.items() if chart is not None}


def sample_charts(answers: Sequence[Answer], tokens: Mapping[str, ByStep]) -> dict[str, Any]:
    """Return charts of the distribution of rewards and lengths, and of the `tokens`' numbers by quantity and step."""
    rewards: dict[int, list[float]] = {}
    lengths: dict[int, list[float]] = {}
    for answer in answers:
        lengths.setdefault(answer.step, []).append(answer.num_tokens)
    for end in ends(answers):
        if end.reward is not None:
            rewards.setdefault(end.step, []).append(end.reward)
    found = {"Rewards": rewards, "Response lengths, tokens": lengths}
    values = {
        **{name: {step: [np.array(numbers)] for step, numbers in of.items()} for name, of in found.items()},
        **{f"Tokens of kept groups: {name}": of for name, of in tokens.items()},
    }
    return {name: _spec(_heat(name, of)) for name, of in values.items() if of}


def position_chart() -> Any:
    """Return the chart of one quantity by the tokens' places, of the data `positions` that the page fills in."""
    base = alt.Chart(alt.NamedData("positions")).encode(
        x=alt.X("place:Q", title="token", axis=alt.Axis(tickMinStep=1, format="d")),
        y=alt.Y("value:Q", title=None, axis=alt.Axis(format=".4~g")),
    )
    points = base.mark_circle(size=18, color=_COLORS[0]).encode(tooltip=["place:Q", "text:N", alt.Tooltip("value:Q", format=".4g")])
    return _spec((base.mark_line(color=_COLORS[0], opacity=0.4) + points).properties(width=1000, height=140).interactive(bind_y=False))


def _spec(chart: Any) -> Any:
    return chart.to_dict(validate=False)


def _rows(steps: Steps, curves: Mapping[str, str]) -> list[dict[str, Any]]:
    return [
        {"s": step, "c": label, "v": float(f"{metrics[name]:.5g}")}
        for label, name in curves.items()
        for step, metrics in steps.items()
        if math.isfinite(metrics.get(name, math.nan))
    ]


def _curve(panel: Panel, steps: Steps) -> Any:
    rows = _rows(steps, panel.curves)
    if not rows:
        return None
    labels = [label for label in panel.curves if any(row["c"] == label for row in rows)]
    line = (
        alt.Chart(alt.Data(values=rows), title=panel.title, width=330, height=170)
        .mark_line(point=len(rows) < 100, strokeWidth=1.6)
        .encode(
            x=alt.X("s:Q", title="step", axis=alt.Axis(tickMinStep=1)),
            y=alt.Y("v:Q", title=None, scale=alt.Scale(zero=panel.zero), axis=alt.Axis(format=".4~g")),
            color=alt.Color("c:N", title=None, scale=alt.Scale(domain=labels, range=_COLORS), legend=_legend(labels)),
            tooltip=[alt.Tooltip("s:Q", title="step"), alt.Tooltip("c:N", title="curve"), alt.Tooltip("v:Q", title="value", format=".5g")],
        )
        .interactive(bind_y=False)
    )
    bounds = {bound for name in panel.curves.values() if (bound := healthy_bound(name)) is not None}
    if len(bounds) != 1:
        return line
    band = alt.Chart(alt.Data(values=[{"low": 0.0, "high": bounds.pop()}])).mark_rect(color=_COLORS[2], opacity=0.12)
    return band.encode(y="low:Q", y2="high:Q") + line


def _legend(labels: Sequence[str]) -> Any:
    return alt.Legend(orient="bottom") if len(labels) > 1 else None


def step_seconds(steps: Steps, times: Mapping[int, float], spans: Iterable[Span]) -> dict[int, dict[str, float]]:
    """Return the seconds of each step by its part, as the driver waits for them.

    `times` are those of the steps' rows. Spans part the wait for samples into generation, the time
    with one request in progress, and rewards with none, and the training of rank 0 into its passes
    and the optimizer. Without them, as in the first steps of a long run, both stay whole.
    """
    by_step: dict[int, list[Span]] = defaultdict(list)
    ends = sorted((at, step) for step, at in times.items())
    for span in spans:
        first, last = bisect_left(ends, (span.begin, -1)), bisect_left(ends, (span.end, -1))
        for _, step in ends[first : last + 1]:
            by_step[step].append(span)
    found = {}
    for step, metrics in steps.items():
        row = {title: metrics.get(f"time/{name}", 0.0) for name, title in _PHASES.items()}
        requests, rewards = list[Span](), list[Span]()
        for span in by_step[step]:
            if span.who == "rank 0" and span.name in _PARTS:
                row[span.name] = row.get(span.name, 0.0) + span.end - span.begin
                row["training"] = max(0.0, row["training"] - (span.end - span.begin))
            elif span.who == "rewards" or span.name == "request, training":
                (rewards if span.who == "rewards" else requests).append(span)
        for wait in (span for span in by_step[step] if (span.who, span.name) == ("driver", "rollout_wait")):
            asked, busy = (_seconds_by_number(some, wait) for some in (requests, requests + rewards))
            for part, seconds in (("last request alone", asked[1]), ("rewards", asked[0] - busy[0])):
                row[part] = row.get(part, 0.0) + seconds
                row["generation"] = max(0.0, row["generation"] - seconds)
        if step > 0:
            found[step] = row
    return found


def _seconds_by_number(spans: Iterable[Span], within: Span) -> dict[int, float]:
    """Return the seconds of a span by the number of `spans` in progress."""
    changes = [(within.begin, 0), (within.end, 0)]
    for span in spans:
        changes += [(min(max(at, within.begin), within.end), change) for at, change in ((span.begin, 1), (span.end, -1))]
    number, seconds = 0, defaultdict[int, float](float)
    for (at, change), (until, _) in pairwise(sorted(changes)):
        number += change
        seconds[number] += until - at
    return seconds


def _seconds(seconds: Mapping[int, Mapping[str, float]]) -> Any:
    known = {part: part for part in _PARTS if any(row.get(part) for row in seconds.values())}
    # A part without seconds in a step had none: areas are drawn from step to step.
    rows = _rows({step: {part: row.get(part, 0.0) for part in known} for step, row in seconds.items()}, known)
    if not rows:
        return None
    chart = alt.Chart(alt.Data(values=rows), title="Seconds of a step, as the run waits for them", width=700, height=200)
    # An area of a single step has no width.
    drawn = chart.mark_area(line=True, opacity=0.75) if len(seconds) > 1 else chart.mark_bar(size=40, opacity=0.75)
    return drawn.encode(
        x=alt.X("s:Q", title="step", axis=alt.Axis(tickMinStep=1)),
        y=alt.Y("v:Q", title="s", stack=True),
        color=alt.Color("c:N", title=None, scale=alt.Scale(domain=list(known), range=_COLORS), legend=alt.Legend(orient="bottom")),
        tooltip=["s:Q", "c:N", alt.Tooltip("v:Q", format=".3g")],
    )


def _intervals(title: str, evaluations: Sequence[Sequence[Any]]) -> Any:
    rows = [{"s": step, "c": name, "v": value, "low": low, "high": high} for step, name, _, value, low, high, _ in evaluations]
    labels = sorted({row["c"] for row in rows})
    base = alt.Chart(alt.Data(values=rows), title=title, width=330, height=170).encode(
        x=alt.X("s:Q", title="step", axis=alt.Axis(tickMinStep=1)),
        color=alt.Color("c:N", title=None, scale=alt.Scale(domain=labels, range=_COLORS), legend=_legend(labels)),
    )
    line = base.mark_line(point=True).encode(y=alt.Y("v:Q", title=None), tooltip=["s:Q", "c:N", "v:Q", "low:Q", "high:Q"])
    return base.mark_rule().encode(y="low:Q", y2="high:Q") + line


def _heat(title: str, of: ByStep) -> Any:
    """Return the share of the values of each step in each bin, outer hundredths in the outer bins."""
    values = {step: np.concatenate(of[step]) for step in sorted(of)}
    low, high = np.quantile(np.concatenate(list(values.values())), [0.005, 0.995])
    size, bins = max(abs(low), abs(high)), _BINS
    if high - low <= 1e-3 * size or not size:
        # Equal numbers, but for rounding, would have bins without a height.
        low, high, bins = low - (size / 20 or 0.5), high + (size / 20 or 0.5), 1
    edges = np.linspace(low, high, bins + 1)
    rows = []
    for step, numbers in values.items():
        counts, _ = np.histogram(np.clip(numbers, edges[0], edges[-1]), edges)
        for index in np.flatnonzero(counts):
            share = float(f"{counts[index] / counts.sum():.3g}")
            rows.append({"s": str(step), "a": float(f"{edges[index]:.6g}"), "b": float(f"{edges[index + 1]:.6g}"), "v": share})
    order = [str(step) for step in values]
    return (
        alt.Chart(alt.Data(values=rows), title=title, width=430, height=180)
        .mark_rect()
        .encode(
            x=alt.X("s:O", title="step", sort=order, axis=alt.Axis(labelOverlap=True)),
            y=alt.Y("a:Q", title=None, scale=alt.Scale(zero=False), axis=alt.Axis(format=".6~g")),
            y2="b:Q",
            color=alt.Color("v:Q", title="share", scale=alt.Scale(scheme="viridis", domain=[0, 1])),
            tooltip=["s:O", alt.Tooltip("a:Q", title="from"), alt.Tooltip("b:Q", title="to"), alt.Tooltip("v:Q", title="share")],
        )
    )
