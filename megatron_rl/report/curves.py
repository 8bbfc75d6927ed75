"""The picture of a run's curves, and the tables and picture of `megatron-rl compare`."""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megatron_rl.errors import UserError
from megatron_rl.system.files import write_atomic

Steps = Mapping[int, Mapping[str, float]]

_COLORS = ("#2563eb", "#ea580c", "#059669", "#9333ea", "#64748b", "#ca8a04")
_GREY = "#475569"
# A curve with more points than this is drawn faintly, with a smoothed line over it.
_SMOOTHED_ABOVE = 30


@dataclass(frozen=True, slots=True)
class Panel:
    """One small diagram: metrics by their names in the legend.

    `sparse` curves have few points, drawn with marks. `zero` starts the axis at 0, `share` also
    ends the axis at 1.
    """

    title: str
    curves: Mapping[str, str]
    sparse: bool = False
    zero: bool = False
    share: bool = False


PANELS = (
    Panel("Reward, mean of the batch", {"reward": "rollout/reward"}),
    Panel("Loss", {"loss": "train/loss"}),
    Panel("Entropy, nats per token", {"entropy": "train/entropy"}, zero=True),
    Panel("KL to the reference, nats per token", {"KL": "train/kl_reference"}, zero=True),
    Panel("Gradient norm before clipping", {"gradient norm": "train/grad_norm"}, zero=True),
    Panel("Engine against trainer, mean |\N{GREEK CAPITAL LETTER DELTA} log-prob|", {"difference": "train/log_prob_diff"}, zero=True),
    Panel("Response length, tokens", {"mean": "rollout/response_length", "longest": "rollout/response_length_max"}),
    Panel("Seconds per step", {name: f"time/{name}" for name in ("rollout", "train", "sync", "eval", "save")}, zero=True),
)


def drawable(steps: Steps) -> list[Panel]:
    """Return the measured panels; of a set the accuracy where every evaluation gave one, else the mean reward."""
    sets = dict.fromkeys(name.split("/")[1] for metrics in steps.values() for name in metrics if name.startswith("eval/"))
    rewarded = {name: [metrics for metrics in steps.values() if f"eval/{name}/reward" in metrics] for name in sets}
    judged = [name for name in sets if all(f"eval/{name}/accuracy" in metrics for metrics in rewarded[name])]
    held_out = (
        Panel("Held-out accuracy", {name: f"eval/{name}/accuracy" for name in judged}, sparse=True, share=True),
        Panel("Held-out reward, mean", {name: f"eval/{name}/reward" for name in sets if name not in judged}, sparse=True),
    )
    panels = (PANELS[0], *held_out, *PANELS[1:])
    return [panel for panel in panels if any(_points(steps, metric)[0] for metric in panel.curves.values())]


def compare_runs(runs: Sequence[Path], *, step: int | None, out: Path) -> None:
    """Print the differences of each run to the first at `step`, or their last common one, and write the picture `out`."""
    if len(set(runs)) < max(len(runs), 2):
        raise UserError(f"got {', '.join(map(str, runs))}, needs at least two runs, each once")
    # Imported here, because it takes seconds, and a page needs none of it.
    from megatron_rl.evaluation.comparison import compare, curves_of, evaluations_in

    found = [evaluations_in(run) for run in runs]
    common = sorted(set.intersection(*map(set, found)))
    if not common or (step is not None and step not in common):
        of_runs = "; ".join(f"{run}: {', '.join(map(str, steps))}" for run, steps in zip(runs, found, strict=True))
        raise UserError(f"the runs were not all evaluated at {'one step' if step is None else f'step {step}'} ({of_runs}); give --step")
    at = common[-1] if step is None else step
    print(f"step {at}; the first run is {runs[0]}")
    for run, steps in zip(runs[1:], found[1:], strict=True):
        for each in compare(found[0][at], steps[at]):
            print(f"{run}: {each}")
    curves = {str(run): curves_of(run) for run in runs}
    for label, of_run in curves.items():
        for name in dict.fromkeys(name for values in of_run.values() for name in values):
            evaluated = [step for step in of_run if name in of_run[step]]
            # The first of equal values. One evaluation alone is no curve.
            best = max(evaluated, key=lambda step: of_run[step][name])
            if len(evaluated) > 1:
                print(f"{label}: {name} is best at step {best}: {of_run[best][name]:.4f}")
    write_atomic(out, draw_comparison(curves, title="Held-out sets"))
    print(out)


def draw_comparison(runs: Mapping[str, Steps], *, title: str) -> bytes:
    """Return a PNG with a panel for each held-out set, and a curve in it for each run."""
    steps: dict[int, dict[str, float]] = {}
    for run, of_run in runs.items():
        for step, values in of_run.items():
            steps.setdefault(step, {}).update({f"{run}/{name}": value for name, value in values.items()})
    sets = dict.fromkeys(name for of_run in runs.values() for values in of_run.values() for name in values)
    panels = [Panel(name, {run: f"{run}/{name}" for run in runs}, sparse=True) for name in sets]
    return draw_curves(dict(sorted(steps.items())), title=title, panels=panels)


def draw_curves(steps: Steps, *, title: str, panels: Sequence[Panel] | None = None) -> bytes:
    """Return a PNG with these panels, three in a row, or every measured one. Raises ValueError without any."""
    shown = drawable(steps) if panels is None else panels
    if not shown:
        raise ValueError("nothing was measured in this run, so there are no curves to draw")
    columns = min(3, len(shown))
    num_rows = math.ceil(len(shown) / columns)
    figure = Figure(figsize=(4.6 * columns, 2.9 * num_rows + 0.5), dpi=110, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left", parse_math=False)
    axes = figure.subplots(num_rows, columns, squeeze=False).flatten()
    for axis, panel in zip(axes, shown, strict=False):
        _draw_panel(axis, panel, steps)
    for axis in axes[len(shown) :]:
        axis.set_visible(False)
    for axis in axes[max(0, len(shown) - columns) : len(shown)]:
        axis.set_xlabel("step", fontsize=9, color=_GREY)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _draw_panel(axis: Axes, panel: Panel, steps: Steps) -> None:
    for color, (label, metric) in zip(_COLORS, panel.curves.items(), strict=False):
        numbers, values = _points(steps, metric)
        if not numbers:
            continue
        if panel.sparse or len(numbers) <= _SMOOTHED_ABOVE:
            axis.plot(numbers, values, color=color, linewidth=1.6, marker="o", markersize=4 if panel.sparse else 2.5, label=label)
        else:
            axis.plot(numbers, values, color=color, linewidth=0.7, alpha=0.3)
            axis.plot(numbers, _smooth(values, width=max(3, len(values) // 20)), color=color, linewidth=1.7, label=label)
    _dress(axis, panel)


def _dress(axis: Axes, panel: Panel) -> None:
    axis.set_title(panel.title, fontsize=10, loc="left", color="#0f172a")
    axis.grid(True, color="#e2e8f0", linewidth=0.7)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=8, colors=_GREY, length=0)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axis.margins(x=0.14 if panel.sparse else 0.02)
    for side, spine in axis.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color("#cbd5e1")
    axis.ticklabel_format(axis="y", style="sci", scilimits=(-3, 5))
    axis.yaxis.get_offset_text().set_fontsize(8)
    if panel.share:
        axis.set_ylim(0, 1.05)
    elif panel.zero:
        axis.set_ylim(bottom=min(0.0, axis.get_ylim()[0]) if axis.dataLim.ymin < 0 else 0.0)
    if len(axis.get_legend_handles_labels()[1]) > 1:
        axis.legend(fontsize=8, frameon=False, loc="best")


def _points(steps: Steps, metric: str) -> tuple[list[int], list[float]]:
    """Return the steps with finite values of a metric, and the values."""
    found = [(step, metrics[metric]) for step, metrics in steps.items() if math.isfinite(metrics.get(metric, math.nan))]
    return [step for step, _ in found], [value for _, value in found]


def _smooth(values: Sequence[float], *, width: int) -> list[float]:
    """Return the mean with up to `width` values on each side, as many on both: a straight line stays one.

    It stays within the range of these values: no accuracy above 1, no length below 0.
    """
    reaches = [min(index, len(values) - 1 - index, width) for index in range(len(values))]
    return [float(np.mean(values[index - reach : index + reach + 1])) for index, reach in enumerate(reaches)]
