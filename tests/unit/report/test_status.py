"""What `megatron-rl status` says of directories of runs: of this machine, of others, and of dead ones."""

import json
import math
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.cli import main
from megatron_rl.observe.live_state import STATUS_FILE, EngineState, LiveState, PhaseState, StatusFile, WaitState
from megatron_rl.observe.summary import SUMMARY_FILE, Summary, summary_time, write_summary
from megatron_rl.report import status
from megatron_rl.report.prometheus import exposition, serving
from megatron_rl.report.status import report_status, runs_below
from megatron_rl.system.leftovers import process_identity

WAIT = WaitState(name="training of step 5", owners=("Megatron rank 1",), seconds=60.0, usual_s=4.0, deadline_s=3600.0, late=True)
ENGINE = EngineState(url="http://127.0.0.1:20000", requests=7, limit=64, answers=90, queue=3, kv_use=0.25)
ELSEWHERE = {"pid": 1, "started": 1, "namespace": "pid:[1]", "boot": "another"}


def put_state(directory: Path, **changes: Any) -> LiveState:
    """Write a state of this process, which is waiting for a rank as usual."""
    state = LiveState(
        host="node-3",
        identity=process_identity(os.getpid()),
        time=time.time(),
        num_steps=12,
        phases=(PhaseState(name="train", progress="2/4 parts", seconds=3.0),),
        waits=(replace(WAIT, late=False),),
        engines=(ENGINE,),
        notes=("10:00:00 engine 0 is back",),
    )
    state = replace(state, **changes)
    directory.mkdir(exist_ok=True)
    (directory / STATUS_FILE).write_text(json.dumps(asdict(state)))
    return state


def put_rows(directory: Path, *, steps: int = 4, **values: float) -> None:
    rows = [{"step": step, "time": 1000.0 + 10 * step, **values} for step in range(steps + 1)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def put_summary(directory: Path, outcome: str) -> None:
    no = {"evaluation_before": {}, "evaluation_after": {}, "seconds": {}}
    write_summary(directory, Summary(status=outcome, steps=4, seed=0, peak_memory_bytes=1, checkpoint=None, go_on="again", **no))


def test_a_run_says_what_it_does(tmp_path: Path) -> None:
    put_state(tmp_path)
    put_rows(tmp_path, **{"rollout/reward": 0.5, "rollout/tokens_per_second": 100.0, "memory/peak_bytes": 2.0**31})
    report = report_status(tmp_path)
    assert (report.life, report.step, report.num_steps, report.left_s) == ("running", 4, 12, 80.0)
    first, *rest = report.lines()
    assert first.startswith(f"{tmp_path}: running, 4/12 steps, ends in 80 s (")
    text = "\n".join(rest)
    assert "in train 2/4 parts for 3 s" in text and "waiting for Megatron rank 1" in text and "usually 4.0 s" in text
    assert "engine 0 http://127.0.0.1:20000: 7 of 64 requests, queue 3, KV use 0.25, 90 answers" in text
    assert "100 tokens/s, usually 100" in text and "2.0 GiB" in text and "engine 0 is back" in text


@pytest.mark.parametrize(
    ("outcome", "life", "rc"),
    [("finished", "finished", 0), ("failed: ValueError: no", "failed", 1), ("interrupted: SIGTERM", "interrupted", 75)],
)
def test_a_run_that_ended_has_its_outcome(tmp_path: Path, outcome: str, life: str, rc: int) -> None:
    put_state(tmp_path, identity=ELSEWHERE)
    put_summary(tmp_path, outcome)
    assert report_status(tmp_path).life == life
    assert main(["status", str(tmp_path)]) == rc


def test_a_summary_of_an_earlier_life_does_not_count(tmp_path: Path) -> None:
    put_summary(tmp_path, "interrupted: SIGTERM")
    put_state(tmp_path, earlier=summary_time(tmp_path))
    assert report_status(tmp_path).life == "running"
    os.utime(tmp_path / SUMMARY_FILE, (1, 1))  # the clock was set back before the end of this one
    assert report_status(tmp_path).life == "interrupted"


def test_a_killed_run_is_dead_however_new_its_state(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    put_state(tmp_path, identity=process_identity(process.pid))
    assert report_status(tmp_path).life == "running"
    process.kill()
    process.wait()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "engine-0.log").write_text("\n".join(f"line {number}" for number in range(9)))
    report = report_status(tmp_path)
    assert report.life == "dead" and f"process {process.pid} on node-3 is gone" in report.why
    assert report.log[1:] == tuple(f"line {number}" for number in range(4, 9))


@pytest.mark.parametrize(("ahead_s", "said"), [(-300, "5 min"), (300, "0 s")], ids=["", "the clock was set back"])
@pytest.mark.parametrize(("identity", "life"), [(None, "silent"), (ELSEWHERE, "dead")])
def test_a_silent_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, identity: dict[str, Any] | None, life: str, ahead_s: float, said: str
) -> None:
    monkeypatch.setattr(status, "LOOK_S", 0.1)
    put_state(tmp_path, time=time.time() + ahead_s, identity=identity or process_identity(os.getpid()))
    report = report_status(tmp_path)
    assert report.life == life and f"has written no state for {said}" in report.why


def test_a_run_elsewhere_whose_clock_is_behind_runs(tmp_path: Path) -> None:
    put_state(tmp_path, time=time.time() - 300, identity=ELSEWHERE)
    before = put_state(tmp_path, time=time.time() - 300, identity=ELSEWHERE)
    code = (
        "import sys, time, pathlib; time.sleep(1); p = pathlib.Path(sys.argv[1]); p.write_text(p.read_text().replace(sys.argv[2], '5.5'))"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / STATUS_FILE), str(before.time)]):
        assert report_status(tmp_path).life == "running"


def test_a_late_wait_has_a_status_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put_state(tmp_path, waits=(WAIT,))
    assert main(["status", str(tmp_path), "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert (found["life"], found["exit_status"], found["state"]["waits"][0]["owners"]) == ("late", 3, ["Megatron rank 1"])
    assert "logs/stacks.txt" in found["advice"][0]


def test_runs_below_a_directory_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        put_state(tmp_path / name)
    put_summary(tmp_path / "b", "failed: OSError: no")
    assert {path.name for path in runs_below(tmp_path)} == {"a", "b"}
    assert main(["status", str(tmp_path)]) == 1
    assert capsys.readouterr().out.count("steps") == 2


def test_a_directory_without_a_run_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(tmp_path)]) == 2
    assert "so no run was started there; give the run.directory of a run" in capsys.readouterr().err


def test_watching_ends_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    put_state(tmp_path)
    monkeypatch.setattr(status, "STATUS_S", 0.0)
    monkeypatch.setattr(status.time, "sleep", lambda seconds: put_summary(tmp_path, "finished"))
    assert main(["status", str(tmp_path), "--watch"]) == 0
    assert "running" in (out := capsys.readouterr().out) and "finished" in out


def test_disk_to_come_counts_checkpoints_and_the_buffer(tmp_path: Path) -> None:
    put_state(tmp_path)
    put_rows(tmp_path)
    run = "{directory: runs/elsewhere, num_steps: 12, save_interval: 2, keep_checkpoints: 3, export_interval: 3}"
    given = f"run: {run}\nmodel: {{path: m}}\ndata: {{train: t}}\n"
    (tmp_path / "settings.yaml").write_text(given)
    saved = tmp_path / "checkpoints" / "step-000002"
    (saved / "megatron").mkdir(parents=True)
    (saved / "megatron" / "manifest.json").write_bytes(b"1" * 100)
    (saved / "run.json").write_bytes(b"")
    (saved / "hf").mkdir()
    (saved / "hf" / "model.safetensors").write_bytes(b"1" * 30)
    (tmp_path / "buffer.sqlite").write_bytes(b"1" * 40)
    # One of four is there: three of 130 bytes, 10 bytes for each of 8 steps, and 30 bytes for each export of steps 6, 9 and 12.
    assert report_status(tmp_path).disk_to_come == 390 + 80 + 90


def test_the_state_is_written_and_does_not_make_directories(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    sources: dict[str, Any] = {"phases": tuple, "waits": lambda: (WAIT,), "engines": lambda: (ENGINE,), "notes": lambda: ["a"]}
    writer = StatusFile(directory, num_steps=3, **sources)
    writer.write()
    assert not directory.exists()
    directory.mkdir()
    with writer:
        pass
    found = report_status(directory).state
    assert found is not None and (found.waits, found.engines, found.notes, found.num_steps) == ((WAIT,), (ENGINE,), ("a",), 3)
    assert [path.name for path in directory.iterdir()] == [STATUS_FILE]


def test_prometheus_reads_what_is_known(tmp_path: Path) -> None:
    run, other = tmp_path / 'a "b"\\', tmp_path / "other"
    put_state(run, waits=(WAIT, replace(WAIT, seconds=90.0, late=False)))
    put_rows(run, **{"rollout/reward": 0.25})
    put_state(other, identity=ELSEWHERE, engines=())
    put_summary(other, "finished")
    ended = replace(report_status(other), metrics={"a/b": math.inf, "c": math.nan})
    text = exposition([replace(report_status(run), disk_free=7), ended])
    name, values = str(run).replace("\\", "\\\\").replace('"', '\\"'), text.splitlines()
    for line in (
        f'up{{run="{name}",life="late"}} 1.0',
        f'up{{run="{other}",life="finished"}} 0.0',
        f'step{{run="{name}"}} 4',
        f'wait_seconds{{run="{name}"}} 90.0',
        f'late_waits{{run="{name}"}} 1',
        f'disk_free_bytes{{run="{name}"}} 7',
        f'engine_queue{{run="{name}",engine="{ENGINE.url}"}} 3',
        f'metric{{run="{name}",name="rollout/reward"}} 0.25',
        f'metric{{run="{other}",name="a/b"}} +Inf',
        f'metric{{run="{other}",name="c"}} NaN',
    ):
        assert f"megatron_rl_{line}" in values
    families = [line.split()[2] for line in values if line.startswith("# TYPE")]
    assert len(set(families)) == len(families) and "megatron_rl_disk_to_come_bytes" not in families
    assert not any("time_left" in line and str(other) in line for line in values), "a finished run has no time to come"


def test_prometheus_is_served_on_loopback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put_state(tmp_path)
    with serving(0) as publish:
        address = capsys.readouterr().out.strip()
        assert address.startswith("http://127.0.0.1:")
        publish([report_status(tmp_path)])
        with urllib.request.urlopen(address, timeout=20) as answer:
            assert "version=0.0.4" in answer.headers["Content-Type"] and b"megatron_rl_steps{" in answer.read()
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(address.replace("metrics", "etc"), timeout=20)
        port = address.rpartition(":")[2].removesuffix("/metrics")
        assert main(["status", str(tmp_path), "--serve", port]) == 2
    assert f"--serve is {port}" in capsys.readouterr().err


def test_status_and_samples_start_nothing_heavy(tmp_path: Path) -> None:
    """The state of a run is asked for often, and torch and megatron-core take seconds."""
    put_state(tmp_path)
    put_rows(tmp_path)
    heavy = "[name for name in ('torch', 'megatron', 'transformers', 'matplotlib') if name in sys.modules]"
    code = f"import sys; from megatron_rl.cli import main; [main([name, '.']) for name in ('status', 'samples')]; print('heavy:', {heavy})"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert "4/12 steps" in done.stdout and done.stdout.endswith("heavy: []\n")
