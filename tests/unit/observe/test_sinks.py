import json
import math
import resource
import sys
import time
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_rl.config.settings import ObserveSettings
from megatron_rl.errors import UserError
from megatron_rl.observe import sinks as sinks_module
from megatron_rl.observe.sinks import METRICS_FILE, Sinks, TensorBoard, read_metrics
from megatron_rl.types import Prompt, Reward, RewardOutcome, Sample


def test_json_lines_are_readable_while_the_run_goes_on(tmp_path: Path) -> None:
    sinks = Sinks(tmp_path / "run", ObserveSettings())
    sinks.log(0, {"eval/greedy/accuracy": 0.5})
    sinks.log(1, {"train/loss": math.nan, "train/grad_norm": math.inf, "train/lr": 1e-5})
    lines = (tmp_path / "run" / METRICS_FILE).read_text().splitlines()
    assert json.loads(lines[0])["eval/greedy/accuracy"] == 0.5 and json.loads(lines[0])["time"] > 1e9
    assert json.loads(lines[1])["train/loss"] is None and json.loads(lines[1])["train/grad_norm"] is None
    sinks.close()
    steps = read_metrics(tmp_path / "run" / METRICS_FILE)
    assert list(steps) == [0, 1] and math.isnan(steps[1]["train/loss"]) and steps[1]["train/lr"] == 1e-5


def test_a_resume_after_a_clock_set_back_is_read_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for now_ns in (3, 1, 2, 4):
        monkeypatch.setattr(sinks_module, "time", types.SimpleNamespace(time=time.time, time_ns=lambda now_ns=now_ns: now_ns))
        before = {path.name for path in tmp_path.iterdir()}
        TensorBoard(tmp_path, first_step=1).close()
        (new,) = {path.name for path in tmp_path.iterdir()} - before
        assert all(new > name for name in before)


def test_rows_of_one_step_merge_and_a_resume_replaces_later_ones(tmp_path: Path) -> None:
    for first, values in ((0, [1.0, 2.0, 3.0, 4.0]), (2, [30.0])):
        with Sinks(tmp_path, ObserveSettings(), first_step=first) as sinks:
            for step, value in enumerate(values, start=first):
                sinks.log(step, {"train/loss": value})
                sinks.log(step, {"train/lr": 0.1})
    steps = read_metrics(tmp_path / METRICS_FILE)
    assert steps == {
        0: {"train/loss": 1.0, "train/lr": 0.1},
        1: {"train/loss": 2.0, "train/lr": 0.1},
        2: {"train/loss": 30.0, "train/lr": 0.1},
    }


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The lines of the file, without their times."""
    return [{name: value for name, value in json.loads(line).items() if name != "time"} for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("written", "checkpoint_row"),
    [
        pytest.param(5, {"train/loss": 2.0}, id="killed three steps later"),
        pytest.param(1, {"train/loss": 2.0}, id="killed between its checkpoint and its row"),
    ],
)
def test_a_resumed_run_has_every_step_once(tmp_path: Path, written: int, checkpoint_row: dict[str, float]) -> None:
    with Sinks(tmp_path, ObserveSettings()) as sinks:
        for step in range(written + 1):
            sinks.log(step, {"train/loss": float(step)})
    with Sinks(tmp_path, ObserveSettings(), first_step=2, row=checkpoint_row) as sinks:
        assert [row["step"] for row in rows_of(tmp_path / METRICS_FILE)] == [0, 1, 2][: written + 1]
        sinks.log(2, {"weights/version": 2.0})
        sinks.log(3, {"train/loss": 30.0})
    assert rows_of(tmp_path / METRICS_FILE) == [
        {"step": 0, "train/loss": 0.0},
        {"step": 1, "train/loss": 1.0},
        {"step": 2, "train/loss": 2.0, "weights/version": 2.0},
        {"step": 3, "train/loss": 30.0},
    ]


def test_tensorboard_has_every_step_once_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing import event_accumulator as accumulators

    for first, last in ((0, 4), (2, 3), (0, 1)):
        with Sinks(tmp_path, ObserveSettings(), first_step=first) as sinks:
            for step in range(first, last + 1):
                sinks.log(step, {"train/loss": 10.0 * first + step} if step > first or not first else {"weights/version": 2.0})
        events = accumulators.EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
        got = [(event.step, event.value) for event in events.Scalars("train/loss")]
        assert got == sorted({step: row["train/loss"] for step, row in read_metrics(tmp_path / METRICS_FILE).items()}.items())


def test_a_torn_last_line_is_ignored_and_then_dropped(tmp_path: Path) -> None:
    path = tmp_path / METRICS_FILE
    path.write_text('{"step": 0, "train/loss": 1.0}\n{"step": 1, "train/lo')
    assert read_metrics(path) == {0: {"train/loss": 1.0}}
    with Sinks(tmp_path, ObserveSettings()) as sinks:
        sinks.log(1, {"train/loss": 2.0})
    assert read_metrics(path) == {0: {"train/loss": 1.0}, 1: {"train/loss": 2.0}}


@pytest.mark.parametrize("line", ["{", "[1]", '{"time": 1}'])
def test_a_broken_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / METRICS_FILE
    path.write_text('{"step": 0}\n' + line + "\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: not a line of metrics"):
        read_metrics(path)


def test_tensorboard_gets_every_scalar(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing import event_accumulator as accumulators

    with Sinks(tmp_path, ObserveSettings()) as sinks:
        sinks.log(3, {"train/loss": 0.5})
        sinks.log(4, {"train/loss": 0.25})
    events = accumulators.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(3, 0.5), (4, 0.25)]


def sample(text: str, reward: float | None) -> Sample:
    made = Sample.written(Prompt("0-7", np.array([1]), "# two\x1b[31m", label="4"), [1, 2], text=text)
    return replace(made, reward=None if reward is None else Reward(RewardOutcome.SCORED, reward))


SPREAD = {"rollout/reward": np.array([0.0, 1.0, 1.0, np.nan]), "rollout/response_length": np.array([np.nan])}


def test_tensorboard_gets_texts_histograms_and_settings(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing import event_accumulator as accumulators

    with Sinks(tmp_path, ObserveSettings(), config={"run": {"seed": 3}}) as sinks:
        sinks.show(4, [sample("<b>five</b>\n* six", 0.5), sample("seven", None)], SPREAD)
        sinks.show(5, [], {})
    events = accumulators.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["histograms"] == ["rollout/reward_histogram"], "nothing finite, no histogram"
    (histogram,) = events.Histograms("rollout/reward_histogram")
    value = histogram.histogram_value
    assert (histogram.step, value.min, value.max, value.num, value.sum, value.sum_squares) == (4, 0.0, 1.0, 3, 2.0, 2.0)
    assert [(limit, count) for limit, count in zip(value.bucket_limit, value.bucket, strict=True) if count] == [(1 / 30, 1), (1.0, 2)]
    assert events.SummaryMetadata("samples").plugin_data.plugin_name == "text"
    (settings,), (texts,) = events.Tensors("settings"), events.Tensors("samples")
    assert settings.step == 0 and b'"seed": 3' in settings.tensor_proto.string_val[0]
    lines = texts.tensor_proto.string_val[0].decode().splitlines()
    assert texts.step == 4 and all(line.startswith("    ") for line in lines), "code alone: nothing is markup"
    prompt = ["prompt", "#", "two\\x1b[31m"]
    assert [line.split() for line in lines if "<b>" in line or "\\x1b" in line] == [prompt, ["answer", "<b>five</b>"], prompt]


class FakeWandb(types.ModuleType):
    """The calls of wandb that are made, recorded."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.calls: list[Any] = []
        self.id = "abc"

    def init(self, **arguments: Any) -> "FakeWandb":
        self.calls.append(arguments)
        return self

    def log(self, metrics: Any, *, step: int) -> None:
        self.calls.append((step, metrics))

    def finish(self) -> None:
        self.calls.append("finish")

    def Table(self, **arguments: Any) -> Any:
        return arguments

    def Histogram(self, numbers: Any) -> Any:
        return numbers.tolist()


def test_wandb_run_is_continued_on_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for _ in range(2):
        with Sinks(tmp_path, ObserveSettings(wandb_project="p"), config={"a": 1}) as sinks:
            sinks.log(1, {"train/loss": 0.5})
    first, logged, finished, second, *_ = fake.calls
    assert first["project"] == "p" and first["id"] is None and first["config"] == {"a": 1} and first["name"] == tmp_path.name
    assert logged == (1, {"train/loss": 0.5}) and finished == "finish"
    assert second["id"] == "abc" and second["resume"] == "allow"


def test_wandb_gets_tables_histograms_and_a_given_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", fake := FakeWandb())
    monkeypatch.setenv("WANDB_NAME", "mine")
    with Sinks(tmp_path, ObserveSettings(wandb_project="p")) as sinks:
        sinks.show(4, [sample("five", 0.5)], SPREAD)
    begun, (step, sent), _ = fake.calls
    assert begun["name"] == "mine" and step == 4 and sent["rollout/reward_histogram"] == [0.0, 1.0, 1.0]
    assert sent["samples"]["data"] == [[4, "0-7", "# two\\x1b[31m", "4", "five", 0.5, 2, "stop"]]
    assert len(sent["samples"]["columns"]) == 8 and len(sent) == 2


def test_a_sink_whose_package_is_missing_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"observe.wandb_project is set but wandb is not installed; pip install wandb"):
        Sinks(tmp_path, ObserveSettings(wandb_project="p"))


def test_a_full_disk_is_a_user_error(tmp_path: Path) -> None:
    sinks = Sinks(tmp_path, ObserveSettings())
    sinks._sinks[0]._file.close()  # type: ignore[attr-defined]
    with Path("/dev/full").open("wb", buffering=0) as full:
        sinks._sinks[0]._file = full  # type: ignore[attr-defined]
        with pytest.raises(UserError, match="No space left on device"):
            sinks.log(0, {"train/loss": 1.0})


def test_a_row_that_did_not_fit_leaves_no_half_of_itself(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Sinks(tmp_path, ObserveSettings()) as sinks:
        sinks.log(0, {"train/loss": 1.0})
        before = (tmp_path / "metrics.jsonl").read_bytes()
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, hard))
        try:
            with pytest.raises(UserError, match="File too large"):
                sinks.log(1, {"train/loss": 2.0})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert (tmp_path / "metrics.jsonl").read_bytes() == before
        sinks.log(2, {"train/loss": 3.0})
    assert list(read_metrics(tmp_path / "metrics.jsonl")) == [0, 2]
