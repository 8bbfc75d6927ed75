import contextlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import whole_run_parts
from run_parts import Calls, Evaluations, MakeRun, Manager, Ranks, Rewards, Sync

from megatron_rl.checkpoints.run_checkpoints import newest_checkpoint
from megatron_rl.config.load import dump_settings, load_settings
from megatron_rl.config.settings import Settings
from megatron_rl.observe.console import RunConsole
from megatron_rl.observe.sinks import Sinks
from megatron_rl.observe.summary import SETTINGS_FILE
from megatron_rl.observe.timing import PhaseTimer
from megatron_rl.report.page import report_run
from megatron_rl.rollout import manager as manager_module
from megatron_rl.runtime import session, start
from megatron_rl.runtime.run import RolloutRun, Run
from megatron_rl.runtime.run_records import RunRecords
from megatron_rl.runtime.runs_without_engines import SupervisedRun
from megatron_rl.runtime.watchdog import Watchdog


@pytest.fixture(autouse=True)
def pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make reports in this process, without the seconds that a process and its picture take."""
    monkeypatch.setattr("megatron_rl.report.page.draw_curves", lambda steps, *, title: b"picture")
    monkeypatch.setattr("megatron_rl.runtime.run_records.run_command", lambda command, directory: report_run(directory))


@pytest.fixture
def calls() -> Calls:
    """What was asked of engines and ranks, in order."""
    return []


@pytest.fixture
def watchdog() -> Iterator[Watchdog]:
    """One that watches nobody."""
    with Watchdog() as made:
        yield made


@pytest.fixture
def make_run(tmp_path: Path, calls: Calls, watchdog: Watchdog, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> MakeRun:
    """`make_run("run.num_steps=3", resume=True)`, in the directory tmp_path/run; with `source` a supervised one of its rows."""

    def make(
        *overrides: str,
        resume: bool = False,
        fails_at: int | None = None,
        error: BaseException | None = None,
        devices: Any = None,
        source: Any = None,
        written: bool = True,
        save_error: Exception | None = None,
    ) -> Run:
        directory = tmp_path / "run"
        directory.mkdir(exist_ok=True)
        model = tmp_path / "model"
        words = (f"run.directory={directory}", f"model.path={model if model.exists() else tiny_model()}", "data.train=train.jsonl")
        settings = load_settings(None, [*words, "rollout.sampling.temperature=0.8", *overrides])
        (directory / SETTINGS_FILE).write_text(dump_settings(settings))
        found = newest_checkpoint(directory) if resume else None
        step, row = (found[1].step, found[1].metrics) if found else (0, {})
        records = RunRecords(
            settings.run,
            console=RunConsole(settings.run.num_steps),
            sinks=Sinks(directory, settings.observe, first_step=step, row=row),
            memory=SimpleNamespace(peak_bytes=5),  # type: ignore[arg-type]
            timer=PhaseTimer(),
            report_interval=settings.observe.report_interval,
        )
        ranks: Any = Ranks(calls, written=written, save_error=save_error)
        if source is not None:
            groups = settings.data.prompts_per_step
            return SupervisedRun(settings.run, groups_per_step=groups, source=source, ranks=ranks, records=records)
        monkeypatch.setattr("megatron_rl.runtime.run_evaluations.make_evaluator", lambda *_, **__: Evaluations(calls))
        manager = Manager(calls, fails_at=fails_at, error=error)
        parts: dict[str, Any] = {"manager": manager, "sync": Sync(calls, manager)}
        parts |= {"watchdog": watchdog, "devices": devices, "ranks": ranks, "records": records}
        return RolloutRun(settings, dtype="float32", **parts)

    return make


@pytest.fixture
def make_settings(tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Settings]:
    """Settings of a run of two steps of two prompts, and everything outside of this process replaced."""
    monkeypatch.setattr(start, "TrainerGroup", whole_run_parts.Ranks)
    monkeypatch.setattr(start, "EngineGroup", whole_run_parts.Engines)
    monkeypatch.setattr(start, "WeightSync", whole_run_parts.Sync)
    for module in (session, start):
        monkeypatch.setattr(module, "cluster_device_kind", lambda: "cpu")
    monkeypatch.setattr(start, "ray_cluster", lambda **_: contextlib.nullcontext(Future()))
    reservation = SimpleNamespace(device_kind="cpu", placement=SimpleNamespace(needs=SimpleNamespace(colocated=False)))
    monkeypatch.setattr(start, "reserve", lambda needs, **_: reservation)
    monkeypatch.setattr(session, "remove_leftovers", lambda: [])
    monkeypatch.setattr(manager_module, "EngineClient", whole_run_parts.Client)
    monkeypatch.setattr(manager_module, "RewardRunner", Rewards)
    monkeypatch.setattr("megatron_rl.report.page.draw_curves", lambda steps, *, title: b"picture")
    monkeypatch.setattr(whole_run_parts.Engines, "stopped", 0)
    rows = [json.dumps({"prompt": str(number), "label": "1", "response": "1"}) for number in range(1, 9)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    paths = (f"run.directory={tmp_path}/run", f"model.path={tiny_model()}", f"data.train={tmp_path}/rows.jsonl", "run.num_steps=2")

    def make(*overrides: str) -> Settings:
        # Short ones come in one answer.
        return load_settings(None, [*paths, "data.prompts_per_step=2", "rollout.sampling.max_response_tokens=8", *overrides])

    return make
