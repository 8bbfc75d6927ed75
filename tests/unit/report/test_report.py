import base64
import itertools
import json
import math
import os
import re
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from written_run import group, metrics_of, write_run

from megatron_rl.config.load import load_settings
from megatron_rl.config.settings import ObserveSettings
from megatron_rl.errors import UserError
from megatron_rl.evaluation.evaluator import EVALUATION_DIRECTORY
from megatron_rl.observe.groups_of_interest import Answer
from megatron_rl.observe.metrics import metric_info
from megatron_rl.observe.sinks import Sinks
from megatron_rl.observe.spans import Span
from megatron_rl.observe.summary import Summary, write_summary
from megatron_rl.report import page as page_module
from megatron_rl.report.curves import PANELS, _draw_panel, _smooth, draw_curves, drawable
from megatron_rl.report.page import changed_settings, report_run, solved_by_source


class Tags(HTMLParser):
    """Counts what is opened and not closed, and collects where the page would load things from."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "img", "input"):
            self.open.append(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def log_run(directory: Path, *, num_steps: int) -> None:
    with Sinks(directory, ObserveSettings()) as sinks:
        for step in range(num_steps):
            metrics = {"rollout/reward": 0.1 * step, "train/entropy": math.nan if step == 1 else 1.0, "time/train": 12345.6}
            sinks.log(step, metrics | ({"eval/greedy/accuracy": 0.5 + 0.01 * step} if step % 2 == 0 else {}))


def test_without_the_extra_the_page_has_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "_charts", lambda: None)
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
    (source,) = (source for source in tags.sources if not source.startswith("#"))
    assert "pip install &#39;megatron-rl[report]&#39;" in page and "buffer.sqlite does not exist" in page, "what is left out, and why"
    picture = (directory / "curves.png").read_bytes()
    assert base64.b64decode(source.removeprefix("data:image/png;base64,")) == picture
    assert "<td>eval/greedy/accuracy</td><td>0.5</td><td>0.54</td>" in page and "<td>12,346</td>" in page
    assert picture.startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["$\\frac{$", "r\udcff"], ids=["formula", "no text"])
def test_a_directory_of_any_name_has_a_report(tmp_path: Path, name: str) -> None:
    log_run(tmp_path / name, num_steps=1)
    assert report_run(tmp_path / name).is_file()


def test_a_last_value_beyond_its_healthy_range_is_marked(tmp_path: Path) -> None:
    with Sinks(tmp_path, ObserveSettings()) as sinks:
        sinks.log(1, {"rollout/truncated_fraction": 1.0, "rollout/zero_variance_fraction": 0.25, "rollout/reward": 0.5})
    page = report_run(tmp_path).read_text()
    assert "<td>rollout/truncated_fraction</td><td>1</td><td>1 \N{WARNING SIGN}</td>" in page
    assert page.count("\N{WARNING SIGN}") == 1


def test_advice_of_the_steps_shown_stands_in_the_overview(tmp_path: Path) -> None:
    with Sinks(tmp_path, ObserveSettings()) as sinks:
        for step in range(1, 11):
            sinks.log(step, {"rollout/reward": 0.5, "rollout/truncated_fraction": 0.9 if step > 5 else 0.0})
    page = report_run(tmp_path).read_text()
    (advice,) = re.findall(r'<ul id="advice">(.*?)</ul>', page)
    (sentence,) = re.findall("<li>(.*?)</li>", advice)
    assert "90% of responses" in sentence and "rollout.sampling.max_response_tokens" in sentence
    assert page.index('<h1 id="overview">') < page.index(advice) < page.index('<h2 id="curves">')
    assert 'id="advice"' not in report_run(tmp_path, between=(1, 5)).read_text(), "a healthy part of the run"


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


def specs_of(page: Path) -> dict[str, Any]:
    """The charts of a page, by name."""
    _, _, rest = page.read_text().partition('<script type="application/json" id="specs">')
    found = json.loads(rest.partition("</script>")[0])
    return {name: spec for charts in found.values() for name, spec in charts.items()}


def test_names_of_files_are_those_of_their_writers() -> None:
    assert page_module.EVALUATION_DIRECTORY == EVALUATION_DIRECTORY


@pytest.mark.parametrize("package", ["altair", "vl_convert", "itables"])
def test_charts_need_all_of_the_extra_and_no_other_package_is_forgiven(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "megatron_rl.report.charts", raising=False)
    monkeypatch.delattr("megatron_rl.report.charts", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    assert page_module._charts() is None
    monkeypatch.undo()
    monkeypatch.delitem(sys.modules, "megatron_rl.report.charts", raising=False)
    monkeypatch.delattr("megatron_rl.report.charts", raising=False)
    monkeypatch.setitem(sys.modules, "megatron_rl.observe.metrics", None)
    with pytest.raises(ImportError):
        page_module._charts()


def test_a_page_of_200_steps_has_all_parts_within_3_megabytes(tmp_path: Path) -> None:
    pytest.importorskip("altair")
    texts = [f"answer {number} " * 40 for number in range(4)]
    steps = [[group(f"0-{8 * step + one}", texts, [0.0, 1.0, 0.25 * (one % 4), None]) for one in range(3)] for step in range(200)]
    directory = write_run(tmp_path / "run", steps)
    page = report_run(directory)
    assert page.stat().st_size < 3_000_000
    text, specs = page.read_text(), specs_of(page)
    titles = ("Reward, mean of the batch", "seconds", "Use of the engines' memory", "Held-out accuracy", "Rewards", "Staleness, versions")
    for title in titles:
        assert f'data-spec="{title}"'.replace("engines'", "engines&#39;") in text and title in specs, title
    assert "tokens of kept groups: entropy" in {name.lower() for name in specs}
    (rewards,) = (one["data"]["values"] for one in (specs["Reward, mean of the batch"],))
    assert len(rewards) == 201 and rewards[3]["v"] == pytest.approx(metrics_of(3)["rollout/reward"], rel=1e-4)
    band, line = specs["Truncated answers, share"]["layer"]
    assert band["data"]["values"] == [{"low": 0.0, "high": 0.1}] and len(line["data"]["values"]) == 201
    assert "samples of 160 of 200 steps; --steps A-B shows others" in text
    assert "<td>0</td><td>held</td><td>accuracy</td><td>0.5</td><td>0.4</td><td>0.625</td><td>9 prompts</td>" in text
    assert "<th>reward.function</th><td>m:f</td>" in text and "200 of 100" in text


def test_spans_part_the_seconds_of_a_step() -> None:
    """The wait of step 2 is from 10 to 16: requests to 14, one alone to 11 and from 13, rewards to 15.5; ranks work until 19."""
    charts = pytest.importorskip("megatron_rl.report.charts")
    steps = {
        0: {"time/eval": 3.0},
        1: {"time/rollout_wait": 4.0, "time/train": 2.0},
        2: {"time/rollout_wait": 6.0, "time/train": 3.0, "time/sync": 0.5, "time/save": 0.25},
    }
    spans = [
        Span("driver", "rollout_wait", 10.0, 16.0),
        # Begun before the wait, for the step ahead; of an evaluation; beside each other.
        Span("engine a", "request, training", 9.0, 13.0, 8),
        Span("engine b", "request, training", 11.0, 14.0, 8),
        Span("engine b", "request, evaluation", 10.0, 16.0, 1),
        Span("rewards", "group 1", 12.0, 14.5, 8),
        Span("rewards", "group 2", 14.25, 15.5, 8),
        Span("rank 0", "log-probs, advantages", 16.0, 16.25),
        Span("rank 0", "forward, backward", 16.25, 18.0, 16),
        Span("rank 0", "optimizer", 18.0, 18.5),
        Span("rank 1", "forward, backward", 16.0, 19.0, 16),
    ]
    parts = charts.step_seconds(steps, {0: 1.0, 1: 8.0, 2: 20.0}, spans)
    assert {name: seconds for name, seconds in parts[1].items() if seconds} == {"generation": 4.0, "training": 2.0}
    assert {name: seconds for name, seconds in parts[2].items() if seconds} == {
        "generation": pytest.approx(6.0 - 2.0 - 1.5),
        "last request alone": pytest.approx(2.0),
        "rewards": pytest.approx(1.5),
        "forward, backward": pytest.approx(1.75),
        "optimizer": pytest.approx(0.5),
        "training": pytest.approx(0.75),
        "weight sync": 0.5,
        "save": 0.25,
    }
    spec = charts._seconds(parts).to_dict()
    drawn = {row["c"] for row in spec["data"]["values"]}
    assert drawn == set(parts[2]) - {"swap", "evaluation"} and 0 not in parts
    # An area of one step would have no width.
    assert spec["mark"]["type"] == "area" and charts._seconds({2: parts[2]}).to_dict()["mark"]["type"] == "bar"


@pytest.mark.parametrize("numbers", [[360.0] * 4, [0.0] * 3, [0.24999996, 0.25000001], [20000.0, 20010.0, 20060.0], [-1.5, 1.5]])
def test_each_bin_of_a_distribution_has_a_height(numbers: list[float]) -> None:
    charts = pytest.importorskip("megatron_rl.report.charts")
    spec = charts._heat("x", {1: [np.array(numbers)]}).to_dict()
    rows = sorted(spec["data"]["values"], key=lambda row: row["a"])
    assert sum(row["v"] for row in rows) == pytest.approx(1, abs=0.01)
    low, high = min(numbers), max(numbers)
    slack = 0.01 * (high - low)
    assert all(row["a"] < row["b"] for row in rows) and rows[0]["a"] <= low + slack and rows[-1]["b"] >= high - slack
    assert all(one["b"] <= other["a"] for one, other in itertools.pairwise(rows))
    assert len(rows) == (len(set(numbers)) if high - low > 1e-3 * abs(high) else 1)


def test_the_last_row_keeps_its_time_in_a_copy(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", [[group("0-1", ["a"], [1.0])]])
    last = json.loads((directory / "metrics.jsonl").read_text().splitlines()[-1])
    os.utime(directory / "metrics.jsonl", (1e9, 1e9))
    shown = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last["time"]))
    assert f"the last row of metrics is of {shown}" in report_run(directory).read_text()


def test_steps_and_marked_groups_choose_what_is_sent_around(tmp_path: Path) -> None:
    steps = [[group(f"{step}-{one}", ["a", "b"], [0.0, float(one)]) for one in range(6)] for step in range(8)]
    directory = write_run(tmp_path / "run", steps, rejections={"2-5": "no signal <&>"})
    out = tmp_path / "some.html"
    assert report_run(directory, between=(3, 4), out=out, marked=["7-2"]) == out
    assert not (directory / "curves.png").exists() and not (directory / "report.html").exists()
    text = out.read_text()
    rows = [[cell.removesuffix("</td>") for cell in row.split("<td>")[1:]] for row in text.split('<tr data-group="')[1:]]
    assert {row[0] for row in rows} == {"8", "4", "3"} and rows[0][1:3] == ["marked", "7-2"]
    by_name = {row[2]: row for row in rows}
    assert by_name["2-0"][1] == "worst, longest" and by_name["2-5"][1] == "best"
    assert by_name["2-5"][-1].startswith("no signal &lt;&amp;&gt;") and by_name["2-0"][-1].startswith("yes")
    assert by_name["2-5"][5:8] == ["2.5", "0", "5"], "mean, least and most of the rewards"
    with pytest.raises(UserError, match="no group '9-9' was trained on"):
        report_run(directory, out=out, marked=["9-9"])
    with pytest.raises(UserError, match="no metrics to draw between steps 20 and 30"):
        report_run(directory, between=(20, 30))


def test_prompts_are_solved_always_or_never_by_source() -> None:
    given = {"0-1": [1.0, 1.0], "1-1": [1.0], "0-2": [0.0, 1.0], "0-3": [0.0, 0.5], "0-4": [0.5, 0.5], "0-5": [1.0, 0.0]}
    answers = [Answer(1, name, None, index, reward, "stop", 3) for name, rewards in given.items() for index, reward in enumerate(rewards)]
    sources = {"0-4": "b", "0-5": "b"}
    assert solved_by_source(answers, sources) == [("all", 3, 1, 1, "0.6429"), ("b", 2, 0, 1, "0.5")]
    assert solved_by_source(answers[:3], {}) == [], "of one reward alone nobody knows whether it is a good one"


def test_settings_other_than_the_defaults_are_named() -> None:
    words = ("run.directory=r", "model.path=m", "data.train=t", "reward.function=m:f", "run.keep_groups=9", "run.seed=7")
    changed = dict(changed_settings(load_settings(None, words)))
    assert changed["run.keep_groups"] == "9" and changed["run.seed"] == "7" and changed["run.directory"] == "r"
    assert "run.num_steps" not in changed and "rollout.num_engines" not in changed


def test_a_broken_run_is_shown_with_what_is_left(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", [[group("0-1", ["a"], [1.0])]])
    (directory / "settings.yaml").write_text("run: [nonsense")
    (directory / "buffer.sqlite").write_bytes(b"torn")
    (directory / "evaluation" / "step-000000" / "held.json").write_text('{"estimates": {"accuracy"')
    (directory / "metrics.jsonl").open("a").write('{"step": 2, "rollout/re')
    text = report_run(directory).read_text()
    assert "settings: " in text and "buffer.sqlite cannot be read" in text and "the run goes on, or was killed" in text
    assert "Held-out accuracy" not in text
