"""What a start says while it waits, and what it says at its end."""

import io
import re
from concurrent.futures import Future

import pytest

from megatron_rl.observe.console import RunConsole
from megatron_rl.observe.timing import PhaseTimer
from megatron_rl.runtime.start_report import StartReport


def test_every_part_is_named_while_it_is_waited_for_and_measured() -> None:
    stream, timer = io.StringIO(), PhaseTimer()
    report = StartReport(RunConsole(1, stream=stream), timer)
    engines: list[Future[None]] = [Future(), Future()]
    report.follow("engines", engines)
    with report.part("weight transport"):
        assert re.findall(r"start: ([a-z ]+) \.\.\.", stream.getvalue()) == ["engines", "weight transport"]
        engines[1].set_result(None)
        assert timer.totals().keys() == set()
        engines[0].set_result(None)
        assert timer.totals().keys() == {"start_engines"}
    assert timer.totals().keys() == {"start_engines", "start_weight_transport"}
    assert re.fullmatch(r"started: engines \d+\.\d s, weight transport \d+\.\d s", str(report))


def test_a_part_that_fails_is_not_said_to_have_started() -> None:
    stream = io.StringIO()
    report = StartReport(RunConsole(1, stream=stream), PhaseTimer())
    with pytest.raises(ValueError, match="boom"), report.part("Ray"):
        raise ValueError("boom")
    assert "start: Ray ..." in stream.getvalue() and str(report) == "started: "
