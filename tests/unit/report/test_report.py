import base64
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from megatron_rl.config.settings import ObserveSettings
from megatron_rl.observe.metrics import metric_info
from megatron_rl.observe.sinks import Sinks
from megatron_rl.observe.summary import Summary, write_summary
from megatron_rl.report.curves import PANELS, _draw_panel, _smooth, draw_curves, drawable
from megatron_rl.report.page import report_run


class Tags(HTMLParser):
    """Counts what is opened and not closed, and collects where the page would load things from."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "img"):
            self.open.append(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def log_run(directory: Path, *, num_steps: int) -> None:
    with Sinks(directory, ObserveSettings()) as sinks:
        for step in range(num_steps):
            metrics = {"rollout/reward": 0.1 * step, "train/entropy": math.nan if step == 1 else 1.0, "time/train": 12345.6}
            sinks.log(step, metrics | ({"eval/greedy/accuracy": 0.5 + 0.01 * step} if step % 2 == 0 else {}))


def test_report_is_one_self_contained_page_with_the_picture(tmp_path: Path) -> None:
    directory = tmp_path / "A <b> & c"
    log_run(directory, num_steps=5)
    seconds = {"<1>": 2.0}
    accuracies = {"evaluation_before": {"greedy/accuracy": 0.5}, "evaluation_after": {"greedy/accuracy": 0.54, "greedy/reward": 1.0}}
    rest: dict[str, Any] = {"seconds": seconds, "peak_memory_bytes": 0, "checkpoint": None, **accuracies}
    write_summary(directory, Summary(status="finished", steps=5, seed=1, go_on="a && b", **rest))
    page = report_run(directory).read_text()
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert "A &lt;b&gt; &amp; c" in page and "&lt;1&gt;" in page and "a &amp;&amp; b" in page and "<b>" not in page
    (source,) = tags.sources
    picture = (directory / "curves.png").read_bytes()
    assert base64.b64decode(source.removeprefix("data:image/png;base64,")) == picture
    assert re.search(r"eval/greedy/accuracy</td>\s*<td class=\"number\">0.5</td>\s*<td class=\"number\">0.54</td>", page)
    assert '<td class="number">12,346</td>' in page
    assert picture.startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["$\\frac{$", "r\udcff"], ids=["formula", "no text"])
def test_a_directory_of_any_name_has_a_report(tmp_path: Path, name: str) -> None:
    log_run(tmp_path / name, num_steps=1)
    assert report_run(tmp_path / name).is_file()


def test_a_last_value_beyond_its_healthy_range_is_marked(tmp_path: Path) -> None:
    with Sinks(tmp_path, ObserveSettings()) as sinks:
        sinks.log(1, {"rollout/truncated_fraction": 1.0, "rollout/zero_variance_fraction": 0.25, "rollout/reward": 0.5})
    page = report_run(tmp_path).read_text()
    assert re.search(r"rollout/truncated_fraction</td>\s*<td class=\"number\">1</td>\s*<td class=\"number\">1 \N{WARNING SIGN}</td>", page)
    assert page.count("\N{WARNING SIGN}") == 1


def test_rewards_beyond_accuracies_get_an_axis_that_holds_them() -> None:
    steps = {step: {"eval/greedy/reward": value, "eval/sampled/reward": -value} for step, value in ((0, -3.0), (5, 1.482))}
    (panel,) = drawable(steps)
    assert panel.title == "Held-out reward, mean"
    axis = Figure().subplots()
    _draw_panel(axis, panel, steps)
    low, high = axis.get_ylim()
    assert low < -3 and high > 3
    with_accuracy = {step: {**values, "eval/greedy/accuracy": 1.0} for step, values in steps.items()}
    assert [list(panel.curves) for panel in drawable(with_accuracy)] == [["greedy"], ["sampled"]]
    assert [list(panel.curves) for panel in drawable({**with_accuracy, 9: steps[5]})] == [["greedy", "sampled"]]


def test_only_measured_panels_are_drawn(tmp_path: Path) -> None:
    for panel in PANELS:
        for metric in panel.curves.values():
            metric_info(metric)
    one = {0: {"rollout/reward": 1.0}, 1: {"rollout/reward": math.nan}}
    many = {step: {"rollout/reward": 1.0, "train/entropy": 2.0, "train/loss": float(step)} for step in range(50)}
    sizes = []
    for name, steps in (("one", one), ("many", many)):
        (tmp_path / name).write_bytes(draw_curves(steps, title=name))
        image = imread(tmp_path / name, format="png")
        sizes.append(image.shape[1])
        assert image.std() > 0.01
    assert sizes[1] == pytest.approx(3 * sizes[0], rel=0.01)
    with pytest.raises(ValueError, match="no curves to draw"):
        draw_curves({0: {"weights/version": 1.0}}, title="none")


def test_smoothing_keeps_a_straight_line_and_halves_noise() -> None:
    line = [0.5 * index - 3 for index in range(40)]
    np.testing.assert_allclose(_smooth(line, width=3), line, atol=1e-12)
    noise = np.random.default_rng(0).normal(size=400)
    assert np.std(_smooth(list(noise), width=10)) < 0.5


# Near an end the window reaches to one side only, where a line fitted to a jump leaves the range.
@pytest.mark.parametrize("values", [[0.0] * 37 + [1.0] * 3, [1.0] * 3 + [0.0] * 37, [5.0] * 36 + [0.0] * 4], ids=["jump", "peak", "drop"])
def test_smoothing_stays_in_the_range_of_the_data(values: list[float]) -> None:
    smoothed = _smooth(values, width=4)
    assert min(values) <= min(smoothed) and max(smoothed) <= max(values)
