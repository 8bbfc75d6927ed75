"""Spans that a run writes, and `megatron-rl trace` of them."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.cli import main
from megatron_rl.observe import spans as module
from megatron_rl.observe.spans import EARLIER_FILE, SPANS_FILE, Span, Spans, read_spans, write_spans

ENGINE = "engine http://127.0.0.1:20000"
SPANS = [
    Span("driver", "rollout_wait", 100.5, 103.0),
    Span("driver", "train", 103.0, 104.5),
    Span(ENGINE, "request, training", 100.5, 102.0, 8),
    Span(ENGINE, "request, training", 101.0, 103.0, 4),
    Span(ENGINE, "request, training", 102.0, 102.5, 2),
    Span("rank 10", "optimizer", 104.0, 104.25),
    Span("rank 2", "optimizer", 104.0, 104.5),
    Span("driver", "train", 109.0, 111.0),
    Span("driver", "train", 90.0, 100.0),
]


def put_rows(directory: Path) -> None:
    rows = [{"step": step, "time": 90.0 + 10 * step} for step in (1, 2, 3)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def traced(directory: Path, *words: str) -> list[dict[str, Any]]:
    out = directory / "made.json"
    assert main(["trace", str(directory), "--out", str(out), *words]) == 0
    events: list[dict[str, Any]] = json.loads(out.read_text())["traceEvents"]
    return events


def test_a_step_is_the_time_between_two_rows(tmp_path: Path) -> None:
    put_rows(tmp_path)
    write_spans(tmp_path, SPANS)
    events = traced(tmp_path, "--step", "2")
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert list(names.values()) == ["driver", "rank 2", "rank 10", ENGINE]
    own = [(names[each["pid"]], each["name"], each["ts"], each["dur"], each["tid"]) for each in events if each["ph"] == "X"]
    assert own == [
        ("driver", "step 2", 0.0, 10e6, 0),
        ("driver", "rollout_wait", 0.5e6, 2.5e6, 1),
        ("driver", "train", 3e6, 1.5e6, 1),
        ("driver", "train", 9e6, 2e6, 1),
        ("rank 2", "optimizer", 4e6, 0.5e6, 0),
        ("rank 10", "optimizer", 4e6, 0.25e6, 0),
        (ENGINE, "request, training", 0.5e6, 1.5e6, 0),
        (ENGINE, "request, training", 1e6, 2e6, 1),
        (ENGINE, "request, training", 2e6, 0.5e6, 0),
    ]
    counts = [(each["ts"], each["args"]["samples"]) for each in events if each["ph"] == "C"]
    assert counts == [(0.5e6, 8), (1e6, 12), (2e6, 4), (2e6, 6), (2.5e6, 4), (3e6, 0)]


def test_the_newest_step_and_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(tmp_path)]) == 2 and "has no row of a step" in capsys.readouterr().err
    put_rows(tmp_path)
    write_spans(tmp_path, SPANS)
    assert [each["name"] for each in traced(tmp_path) if each["ph"] == "X"] == ["train", "step 3"]
    assert [each["name"] for each in traced(tmp_path, "--step", "1") if each["ph"] == "X"] == ["step 1", "train"]
    assert main(["trace", str(tmp_path), "--step", "2"]) == 0 and (tmp_path / "trace-000002.json").is_file()
    assert main(["trace", str(tmp_path), "--step", "9"]) == 2
    assert "--step is 9" in (said := capsys.readouterr().err) and "steps 1 to 3" in said
    (tmp_path / SPANS_FILE).unlink()
    assert main(["trace", str(tmp_path), "--step", "2"]) == 2 and "no span of step 2" in capsys.readouterr().err


def test_spans_are_measured_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_SPANS", 3)
    spans, before = Spans(), time.time()
    with pytest.raises(RuntimeError), spans.measure("work", count=4):
        raise RuntimeError
    (span,) = spans.take()
    assert (span.who, span.name, span.count) == ("", "work", 4) and before - 1 < span.begin <= span.end <= time.time()
    assert spans.take() == []
    spans.extend(SPANS[:4], who="rank 1")
    assert [(each.who, each.begin) for each in spans.take()] == [("rank 1", each.begin) for each in SPANS[1:4]]


def test_the_file_is_bounded_and_half_a_line_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_spans(tmp_path, SPANS[:1])
    with (tmp_path / SPANS_FILE).open("ab") as file:
        file.write(b'{"who": "driver", "na')
    write_spans(tmp_path, SPANS[1:3])
    assert list(read_spans(tmp_path)) == SPANS[:3]
    monkeypatch.setattr(module, "MOST_BYTES", 150)
    write_spans(tmp_path, [SPANS[3]])
    assert os.listdir(tmp_path) == [EARLIER_FILE]
    write_spans(tmp_path, [SPANS[4]])
    assert list(read_spans(tmp_path)) == SPANS[:5]
    write_spans(tmp_path, [SPANS[5]] * 2)
    assert list(read_spans(tmp_path)) == [SPANS[4], SPANS[5], SPANS[5]]
