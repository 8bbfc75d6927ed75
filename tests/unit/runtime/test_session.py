"""What a start says before, while and after it waits, and what the console of a run shows."""

import asyncio
import io
import json
import re
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from run_parts import Rewards

from megatron_rl.config.load import load_settings
from megatron_rl.data.buffer import Buffer
from megatron_rl.engines.client import EngineClient, EnginePart
from megatron_rl.engines.engine import EngineAddress
from megatron_rl.errors import EngineError
from megatron_rl.observe.console import RunConsole, rl_columns
from megatron_rl.observe.timing import PhaseTimer
from megatron_rl.rollout import manager as manager_module
from megatron_rl.runtime import session
from megatron_rl.runtime.start import RunStart, StartReport

PATHS = ("run.directory=run", "model.path=model", "data.train=train.jsonl")


@pytest.mark.parametrize(
    ("override", "shown"),
    [("run.seed=0", False), ("objective.kl.coef=0.1", True), ("training.reference_interval=2", True)],
)
def test_the_console_has_a_kl_column_with_a_reference(override: str, shown: bool) -> None:
    settings = load_settings(None, [*PATHS, override])
    keeps = settings.training.keeps_reference(settings.objective)
    columns = [column.title for column in rl_columns(("a", "b"), keeps_reference=keeps)]
    assert ("KL ref" in columns) == shown and "reward" in columns


def test_a_start_names_rows_without_a_label_first(tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_module, "RewardRunner", Rewards)
    rows = [{"prompt": "1", "label": "1"}, {"prompt": "2"}, {"prompt": "3", "label": "3"}, {"prompt": "4"}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "held_out.jsonl").write_text(json.dumps(rows[1]) + "\n")
    data = [f"data.train={tmp_path}/train.jsonl", f"eval.sets.held_out={tmp_path}/held_out.jsonl"]
    settings = load_settings(None, [f"run.directory={tmp_path}/run", f"model.path={tiny_model()}", *data])
    stream = io.StringIO()
    with ExitStack() as stack:
        RunStart(settings, stack, StartReport(RunConsole(1, stream=stream), PhaseTimer())).open_manager(tmp_path / "buffer.sqlite")
    before = stream.getvalue().partition("start: ")[0]
    assert f"note: 2 of 4 rows lack the field 'label', the first is {tmp_path}/train.jsonl:2" in before
    assert f"note: no row of {tmp_path}/held_out.jsonl has the field 'label'" in before


def test_an_evaluation_first_removes_remains_of_killed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def start(*_: object, **__: object) -> None:
        order.append("start")
        raise EngineError("enough")

    monkeypatch.setattr(session, "remove_leftovers", lambda: order.append("clean up") or [])
    monkeypatch.setattr(RunStart, "open_manager", start)
    with pytest.raises(EngineError, match="enough"):
        session.evaluate(load_settings(None, [*PATHS]))
    assert order == ["clean up", "start"]


class Engines:
    """A group of two servers that have started; `goes_on` is what was to be asked when one dies, `restarts` what comes of other starts."""

    def __init__(self, *restarts: EngineAddress | Exception, count: int = 2) -> None:
        self.restarts, self.ended = list(restarts), list[tuple[int, str]]()
        self.addresses = [EngineAddress(f"url-{number}", "key", 32, 64, 64, has_tokenizer=False) for number in range(count)]
        self.goes_on: dict[int, Callable[[Exception], bool]] = {}
        self.given_up, self.lost = list[tuple[int, str]](), set[int]()

    def finish_start(self, starting: list[Any]) -> list[EngineAddress]:
        return self.addresses

    def watch(self, number: int, *, goes_on: Callable[[Exception], bool]) -> None:
        self.goes_on[number] = goes_on

    def may_restart(self, number: int) -> bool:
        return number == 0 and bool(self.restarts)

    def end(self, number: int, fault: str) -> None:
        self.ended.append((number, fault))

    def give_up(self, number: int, error: Exception) -> None:
        self.given_up.append((number, str(error)))

    async def restart(self, number: int) -> EngineAddress:
        await asyncio.sleep(0.01)
        outcome = self.restarts.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def test_a_run_survives_a_dead_engine_but_not_the_last(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager_module, "RewardRunner", Rewards)
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "1", "label": "1"}) + "\n")
    settings = load_settings(None, [f"run.directory={tmp_path}/run", f"model.path={tiny_model()}", f"data.train={tmp_path}/train.jsonl"])
    stream, engines = io.StringIO(), Engines()

    async def only_the_second(self: EngineClient, parts: Collection[EnginePart]) -> None:
        if self.address is engines.addresses[0]:
            raise EngineError("cannot be reached")

    monkeypatch.setattr(EngineClient, "release_memory", only_the_second)
    monkeypatch.setattr(EngineClient, "restore_memory", only_the_second)
    with ExitStack() as stack:
        start = RunStart(settings, stack, StartReport(RunConsole(1, stream=stream), PhaseTimer()))
        manager = start.open_manager(tmp_path / "buffer.sqlite")
        start.join(manager, engines, [])  # type: ignore[arg-type]
        assert [client.address for client in manager.clients] == engines.addresses
        # Its memory is asked for while that becomes known.
        moving = [
            asyncio.run_coroutine_threadsafe(call(["weights"]), start.watchdog._loop)
            for call in (manager.release_memory, manager.restore_memory)
        ]
        log = "at url, died; the end of its log engine-0.log:\nTraceback\n  a = b\nRuntimeError: no memory\n\n[10:31] SIGQUIT received"
        assert engines.goes_on[0](EngineError(log))
        assert [move.result(timeout=10) for move in moving] == [None, None]
        assert [client.address for client in manager.clients] == engines.addresses[1:]
        said = "note: the run goes on with 1 of 2 engines, because one ended: at url, died; the end of its log engine-0.log: RuntimeError"
        assert f"{said}: no memory" in " ".join(stream.getvalue().split()) and "Traceback" not in stream.getvalue()
        printed = stream.getvalue()
        assert not engines.goes_on[1](EngineError("killed, too"))
        assert [client.address for client in manager.clients] == engines.addresses[1:]
        assert stream.getvalue() == printed


@pytest.mark.parametrize(("count", "most_lost"), [(1, 0), (2, 1), (3, 1), (5, 2), (8, 4)])
def test_a_run_ends_when_more_than_half_of_its_engines_are_lost(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, most_lost: int
) -> None:
    """Those that are lost are as many whether a death or a start that fails ends their returns."""
    monkeypatch.setattr(manager_module, "RewardRunner", Rewards)
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "1", "label": "1"}) + "\n")
    settings = load_settings(None, [f"run.directory={tmp_path}/run", f"model.path={tiny_model()}", f"data.train={tmp_path}/train.jsonl"])
    stream, engines = io.StringIO(), Engines(EngineError("no memory"), count=count)
    with ExitStack() as stack:
        start = RunStart(settings, stack, StartReport(RunConsole(1, stream=stream), PhaseTimer()))
        manager = start.open_manager(tmp_path / "buffer.sqlite")
        start.join(manager, engines, [])  # type: ignore[arg-type]
        for number in range(most_lost):
            assert engines.goes_on[number](EngineError("killed"))
            for _ in range(500 if number == 0 else 0):
                if "could not be started again" in stream.getvalue():
                    break
                time.sleep(0.01)
        # Of one engine alone the start that may come is none that has failed.
        engines.restarts.clear()
        assert not engines.goes_on[count - 1](EngineError("killed"))
    said = f"the run ends, because {most_lost + 1} of {count} engines are lost, more than half"
    assert (said in stream.getvalue()) == (count - most_lost > 1)


@pytest.mark.parametrize(("count", "num_dead"), [(1, 0), (3, 0), (3, 1), (2, 1), (4, 2)])
def test_a_start_that_fails_may_leave_too_few_engines(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, num_dead: int
) -> None:
    """No death follows, and one of an engine that may return is none that is lost."""
    monkeypatch.setattr(manager_module, "RewardRunner", Rewards)
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "1", "label": "1"}) + "\n")
    settings = load_settings(None, [f"run.directory={tmp_path}/run", f"model.path={tiny_model()}", f"data.train={tmp_path}/train.jsonl"])
    stream, engines = io.StringIO(), Engines(EngineError("no memory"), count=count)
    with ExitStack() as stack:
        start = RunStart(settings, stack, StartReport(RunConsole(1, stream=stream), PhaseTimer()))
        manager = start.open_manager(tmp_path / "buffer.sqlite")
        start.join(manager, engines, [])  # type: ignore[arg-type]
        for number in range(num_dead):
            assert engines.goes_on[count - 1 - number](EngineError("killed"))
        assert engines.goes_on[0](EngineError("killed, 0"))
        for _ in range(500):
            if not manager._returning:
                break
            time.sleep(0.01)
    ends = 2 * (num_dead + 1) > count
    assert engines.given_up == [(0, "killed, 0")] * ends
    said = f"the run ends, because {num_dead + 1} of {count} engines are lost, more than half"
    assert (said in stream.getvalue()) == (ends and count - num_dead > 1)


def test_ranks_come_back_without_an_engine_that_is_lost(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager_module, "RewardRunner", Rewards)
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "1", "label": "1"}) + "\n")
    settings = load_settings(None, [f"run.directory={tmp_path}/run", f"model.path={tiny_model()}", f"data.train={tmp_path}/train.jsonl"])
    engines = Engines()
    well = engines.addresses[1]
    engines.lost, engines.addresses = {0}, [None, well]  # type: ignore[list-item]
    with ExitStack() as stack:
        start = RunStart(settings, stack, StartReport(RunConsole(1, stream=io.StringIO()), PhaseTimer()))
        manager = start.open_manager(tmp_path / "buffer.sqlite")
        assert start.join(manager, engines, []) == [well]  # type: ignore[arg-type]
        assert [client.address for client in manager.clients] == [well] and set(engines.goes_on) == {1} and engines.given_up == []


def test_the_last_engine_is_started_again(tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_module, "RewardRunner", Rewards)
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "1", "label": "1"}) + "\n")
    settings = load_settings(None, [f"run.directory={tmp_path}/run", f"model.path={tiny_model()}", f"data.train={tmp_path}/train.jsonl"])
    stream, back = io.StringIO(), EngineAddress("url-back", "key", 32, 64, 64, has_tokenizer=False)
    engines = Engines(EngineError("no memory yet"), back)
    with ExitStack() as stack:
        start = RunStart(settings, stack, StartReport(RunConsole(1, stream=stream), PhaseTimer()))
        manager = start.open_manager(tmp_path / "buffer.sqlite")
        start.join(manager, engines, [])  # type: ignore[arg-type]
        # Also what may not be started again, as the other one goes on.
        assert manager.pool.end_failed(manager.clients[1], EngineError("noise")) and engines.ended == [(1, "noise")]
        assert manager.pool.end_failed(manager.clients[0], EngineError("nonsense")) and engines.ended[1:] == [(0, "nonsense")]
        left = manager.clients[0]
        for number in (1, 0):
            assert engines.goes_on[number](EngineError(f"killed, {number}; the end of its log:\nGET 200 OK"))
        # A failure that is known later than the death is not that of the engine in its place.
        assert not manager.pool.end_failed(left, EngineError("cannot be reached")) and len(engines.ended) == 2
        for _ in range(500):
            if manager._num_returned:
                break
            time.sleep(0.01)
        assert [client.address for client in manager.clients] == [back]
        printed = stream.getvalue()
        assert "note: the run goes on with 1 of 2 engines, because one ended: killed, 1; the end of its log\n" in printed
        assert "note: engine 0 is started again, and the run goes on with 0 of 2 engines, because one ended: killed, 0" in printed
        assert "note: engine 0 could not be started again: no memory yet" in printed
        assert re.search(r"note: engine 0 is back after \d+ s, and gets the current weights", printed)
        assert manager.pool.has_newcomers and manager._num_returned == 1
        assert engines.goes_on[0].args[1] == back  # type: ignore[attr-defined]


def test_a_checkpoint_has_a_position_of_the_buffer_on_disk(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[Buffer] = []
    monkeypatch.setattr(manager_module, "RewardRunner", Rewards)
    monkeypatch.setattr(Buffer, "flush", lambda buffer: flushed.append(buffer))
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "1", "label": "1"}) + "\n")
    settings = load_settings(None, [f"run.directory={tmp_path}/run", f"model.path={tiny_model()}", f"data.train={tmp_path}/train.jsonl"])
    with ExitStack() as stack:
        start = RunStart(settings, stack, StartReport(RunConsole(1, stream=io.StringIO()), PhaseTimer()))
        manager = start.open_manager(tmp_path / "buffer.sqlite")
        assert not flushed
        position = start.watchdog.wait(manager.position(step=0), name="position", owner="the buffer", timeout_s=10)
        assert len(flushed) == 1 and position == {**manager.prompts.source.rows.state(), "num_groups": 0, "num_consumed": 0}


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
