import io
import os
import re
import threading
import time

import pytest

from megatron_rl.observe.console import SUPERVISED_COLUMNS, RunConsole, rl_columns, short_time
from megatron_rl.observe.metrics import metric_info

COLUMNS = rl_columns(("greedy", "sampled", "third"), keeps_reference=True)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


ROW = {
    "rollout/reward": 0.4567,
    "eval/greedy/accuracy": 0.9,
    "train/entropy": 1.25,
    "train/grad_norm": float("nan"),
    "train/log_prob_diff": 3.2e-6,
    "rollout/truncated_fraction": 0.25,
    "time/rollout_wait": 1.5,
}


def test_columns_show_metrics_that_exist() -> None:
    for column in (*COLUMNS, *SUPERVISED_COLUMNS):
        assert all(metric_info(name) for name in column.metrics)
        assert len(column.title) <= column.width


def test_rows_line_up_under_a_header_that_comes_back() -> None:
    stream = io.StringIO()
    with RunConsole(150, columns=COLUMNS, stream=stream) as console:
        for step in range(21):
            console.row(step, ROW if step else {})
    lines = [line for line in stream.getvalue().splitlines() if not line.startswith("note")]
    headers = [index for index, line in enumerate(lines) if "reward" in line]
    assert headers == [0, 21] and len(lines) == 23
    assert len({len(line) for line in lines}) == 1
    assert lines[2].split() == ["1/150", "0.457", "0.900", "1.250", "3.2e-06", "!25%", "1.50", "0s"]
    assert lines[2].index("0.457") + 5 == lines[0].index("reward") + 6
    assert len(lines[0]) <= 80 and "sampled" not in lines[0]


def test_times_take_six_characters() -> None:
    cases = {0: "0s", 59.4: "59s", 59.6: "1m00s", 725: "12m05s", 12300: "3h25m", 187200: "2d04h", 86399: "23h59m"}
    assert {seconds: short_time(seconds) for seconds in cases} == cases


def test_the_time_left_is_that_at_the_pace_of_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, now = io.StringIO(), [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    console = RunConsole(50, columns=COLUMNS, stream=stream)
    for step, seconds in ((10, 0.0), (11, 30.0), (14, 10.0)):
        now[0] += seconds
        console.row(step, {})
    assert [line.split()[1:] for line in stream.getvalue().splitlines()[1:]] == [[], ["19m30s"], ["6m00s"]]


def test_a_run_of_any_columns_is_ascii_in_80_columns() -> None:
    for columns in (COLUMNS, SUPERVISED_COLUMNS, rl_columns(("a long name",), keeps_reference=True)):
        stream = io.StringIO()
        console = RunConsole(10000, columns=columns, stream=stream)
        names = [name for column in columns for name in column.metrics]
        console.row(1, dict.fromkeys(names, 0.05))
        console.row(2, dict.fromkeys(names, 0.05))
        rows = [line for line in stream.getvalue().splitlines() if not line.startswith("note")]
        assert len(rows) == 3 and stream.getvalue().isascii() and max(map(len, rows)) <= 80


def test_a_wide_terminal_gets_all_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    stream = io.StringIO()
    RunConsole(150, columns=COLUMNS, stream=stream).row(1, {"eval/sampled/reward": -1.5})
    header, row = stream.getvalue().splitlines()
    assert [column.title for column in COLUMNS if column.title not in header] == []
    assert row.split() == ["1/150", "-1.500"], "the mean reward stands where there is no accuracy"


def test_a_metric_beyond_its_healthy_range_is_named_once() -> None:
    stream = io.StringIO()
    console = RunConsole(2, stream=stream)
    for fraction in (0.05, 1.0, 1.0):
        console.row(1, {"rollout/truncated_fraction": fraction, "train/kl_reference": 9.0})
    notes = [line for line in stream.getvalue().splitlines() if line.startswith("note")]
    assert notes.pop(0) == "note: ! is before numbers beyond their healthy range" and len(notes) == 1
    assert all(part in notes[0] for part in ("rollout/truncated_fraction is 1,", "< 0.1", "raise max_response_tokens"))


def test_a_log_file_gets_the_first_and_long_runs_of_a_phase() -> None:
    stream = io.StringIO()
    with RunConsole(2, stream=stream) as console:
        for _ in range(3):
            with console.phase("rollout", total=8, unit="groups") as progress:
                progress.advance(8)
    first, second = stream.getvalue().splitlines()
    assert re.fullmatch(r"\[ +\d+\.\d s\] rollout \.\.\.", first)
    assert re.fullmatch(r"\[ +\d+\.\d s\] rollout: 8/8 groups, \d+\.\d s", second)


def test_a_long_phase_is_never_silent_in_a_log_file() -> None:
    stream = io.StringIO()
    with RunConsole(1, stream=stream, heartbeat_s=0.02) as console, console.phase("start engines") as outer:
        outer.say("loading weights")
        with console.phase("rollout", total=64, unit="groups") as progress:
            progress.advance(12)
            # Whether there was a beat before is a matter of the machine.
            before, deadline = len(stream.getvalue()), time.monotonic() + 10
            while stream.getvalue()[before:].count("still") < 3 and time.monotonic() < deadline:
                time.sleep(0.005)
    beats = [line for line in stream.getvalue()[before:].splitlines() if "still" in line]
    assert len(beats) >= 3
    assert all(re.search(r"still start engines loading weights, \d+\.\d s; rollout 12/64 groups, \d+\.\d s$", beat) for beat in beats[1:])


def test_there_is_no_heartbeat_between_phases() -> None:
    stream = io.StringIO()
    with RunConsole(1, stream=stream, heartbeat_s=0.01) as console:
        with pytest.raises(RuntimeError), console.phase("rollout"):
            raise RuntimeError
        printed = stream.getvalue()
        time.sleep(0.05)
    assert stream.getvalue() == printed and "rollout ..." in printed and "rollout:" not in printed


def test_a_terminal_gets_a_live_line_that_goes_away() -> None:
    stream = Terminal()
    with RunConsole(1, stream=stream) as console:
        with console.phase("rollout", total=4, unit="groups") as progress:
            progress.advance(3)
            deadline = time.monotonic() + 10
            while "rollout 3/4 groups" not in stream.getvalue() and time.monotonic() < deadline:
                time.sleep(0.02)
        console.say("a line that stays")
    written = stream.getvalue()
    assert "rollout 3/4 groups" in written and "a line that stays" in written
    assert "\x1b[2K" in written, "the live line is erased"
    assert not [thread for thread in threading.enumerate() if thread.name == "console"]


def test_a_run_goes_on_when_nobody_reads_what_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as stream, RunConsole(2, stream=stream) as console:
        for step in (1, 2):
            console.row(step, ROW)
    assert capsys.readouterr().err == "megatron-rl: nobody reads the output any more; the run goes on, SIGINT or SIGTERM ends it\n"
