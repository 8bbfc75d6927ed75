"""The run object between stand-ins of its engines, its ranks and its console: what it asks of them, and what it leaves behind."""

import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_rl.config.load import dump_settings, load_settings
from megatron_rl.errors import EngineError, ParityError, UserError
from megatron_rl.observe.console import RunConsole
from megatron_rl.observe.metrics import Last, Metric, Sum
from megatron_rl.observe.report import report_run
from megatron_rl.observe.sinks import METRICS_FILE, Sinks, read_metrics
from megatron_rl.observe.summary import read_summary
from megatron_rl.observe.timing import PhaseTimer
from megatron_rl.rollout.client import Scores
from megatron_rl.rollout.engine import EngineAddress
from megatron_rl.runtime.colocation import Turn
from megatron_rl.runtime.loop import train_loop
from megatron_rl.runtime.rollout_run import RolloutRun, generation_deadline_s
from megatron_rl.runtime.run_checkpoint import newest_checkpoint
from megatron_rl.runtime.training_run import SETTINGS_FILE, RunRecords, SupervisedRun, TrainingRun
from megatron_rl.runtime.watchdog import Watchdog
from megatron_rl.types import Floats, Group, Ints, Prompt, Reward, RewardOutcome, Sample, StopReason, TrainBatch

Calls = list[tuple[Any, ...]]


class Manager:
    """Engines that generate; they score a probe as `Ranks` do. `fails_at` is the step whose rollout raises `error`."""

    busy_s = 0.0

    def __init__(self, calls: Calls, *, held_out: int, fails_at: int | None, error: BaseException | None) -> None:
        self.calls, self.clients = calls, [self]
        prompt = Prompt(id="p", token_ids=np.array([1, 2, 3]), text="abc")
        self.prompts = SimpleNamespace(held_out=(prompt,) * held_out, tokenizer=range(30), for_parity=lambda count: [prompt])
        self.address = EngineAddress("url", "key", vocab_size=32, context_length=64, max_total_tokens=64, has_tokenizer=False)
        self._fails_at, self._error = fails_at, error

    async def next_batch(self, step: int, *, progress: object) -> tuple[str, dict[str, Metric]]:
        self.calls.append(("rollout", step))
        if step == self._fails_at and self._error is not None:
            raise self._error
        return f"batch {step}", {"rollout/reward": Last(step / 10)}

    async def score(self, token_ids: Ints) -> Scores:
        if ("probe",) not in self.calls:
            self.calls.append(("probe",))
        return Scores(np.zeros(len(token_ids), np.float32))

    async def evaluate(self, *, progress: object) -> dict[str, Metric]:
        trained = sum(call[0] == "train" for call in self.calls)
        self.calls.append(("evaluate",))
        return {"eval/accuracy_greedy": Last(trained / 10), "eval/accuracy_sampled": Last(0.0)}

    async def position(self) -> dict[str, Any]:
        return {"cursor": 7}

    async def rewind(self, *, step: int, position: dict[str, Any] | None) -> None:
        self.calls.append(("rewind", step, position))

    async def forget(self, *, before_step: int) -> None:
        self.calls.append(("forget", before_step))


class Sync:
    """The way of the weights to the engines."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls

    async def run(self, *, version: int) -> dict[str, Metric]:
        self.calls.append(("publish", version))
        return {"weights/version": Last(version)}


class Ranks:
    """Megatron ranks."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls

    def train(self, batch: str, *, step: int) -> list[dict[str, Metric]]:
        self.calls.append(("train", batch, step))
        return [{"train/loss": Last(1.0 - step / 10), "train/num_tokens": Sum(8)}]

    def log_probs(self, batch: TrainBatch, *, temperature: float) -> Floats:
        assert temperature == 1.0
        self.calls.append(("parity",))
        return np.zeros(len(batch.tokens), np.float32)

    def save(self, directory: Path) -> None:
        self.calls.append(("save", directory.parent.name))
        directory.mkdir()

    def save_hf(self, directory: Path) -> None:
        directory.mkdir()

    def load(self, directory: Path) -> None:
        self.calls.append(("load", directory.parent.name))


MakeRun = Callable[..., TrainingRun]


@pytest.fixture(autouse=True)
def pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the second that each picture takes."""
    monkeypatch.setattr("megatron_rl.observe.report.draw_curves", lambda steps, *, title: b"picture")


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
def make_run(tmp_path: Path, calls: Calls, watchdog: Watchdog) -> MakeRun:
    """`make_run("run.num_steps=3", resume=True)`, in the directory tmp_path/run; with `source` a supervised one of its rows."""

    def make(
        *overrides: str,
        resume: bool = False,
        held_out: int = 0,
        fails_at: int | None = None,
        error: BaseException | None = None,
        devices: Any = None,
        source: Any = None,
    ) -> TrainingRun:
        directory = tmp_path / "run"
        directory.mkdir(exist_ok=True)
        settings = load_settings(None, [f"run.directory={directory}", "model.path=model", "data.train=train.jsonl", *overrides])
        (directory / SETTINGS_FILE).write_text(dump_settings(settings))
        found = newest_checkpoint(directory) if resume else None
        step, row = (found[1].step, found[1].metrics) if found else (0, {})
        records = RunRecords(
            console=RunConsole(settings.run.num_steps),
            sinks=Sinks(directory, settings.observe, first_step=step, row=row),
            memory=SimpleNamespace(peak_bytes=5),  # type: ignore[arg-type]
            timer=PhaseTimer(),
        )
        ranks: Any = Ranks(calls)
        if source is not None:
            return SupervisedRun(settings, source=source, trainers=ranks, records=records)
        manager: Any = Manager(calls, held_out=held_out, fails_at=fails_at, error=error)
        sync: Any = Sync(calls)
        return RolloutRun(
            settings, manager=manager, sync=sync, dtype="float32", watchdog=watchdog, devices=devices, trainers=ranks, records=records
        )

    return make


def steps_of(directory: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (directory / METRICS_FILE).read_text().splitlines()]


def test_the_order_of_a_run(make_run: MakeRun, calls: Calls, tmp_path: Path) -> None:
    run = make_run("run.num_steps=3", "run.save_interval=2", "run.eval_interval=2", "data.eval=held_out.jsonl", held_out=4)
    train_loop(run, first_step=0)
    assert calls == [
        ("publish", 0), ("probe",), ("parity",), ("evaluate",),
        ("rollout", 0), ("train", "batch 0", 0), ("publish", 1),
        ("rollout", 1), ("train", "batch 1", 1), ("save", ".step-000002.partial"), ("forget", 2), ("publish", 2), ("evaluate",),
        ("rollout", 2), ("train", "batch 2", 2), ("save", ".step-000003.partial"), ("forget", 2), ("publish", 3), ("evaluate",),
    ]  # fmt: skip
    rows = read_metrics(tmp_path / "run" / METRICS_FILE)
    # Everything of a step stands in the row of the number of steps done.
    assert list(rows) == [0, 1, 2, 3]
    assert [rows[step].get("train/loss") for step in rows] == [None, 1.0, 0.9, 0.8]
    assert [rows[step]["weights/version"] for step in rows] == [0, 1, 2, 3]
    assert [rows[step].get("eval/accuracy_greedy") for step in rows] == [0.0, None, 0.2, 0.3]
    run.finish()
    summary = read_summary(tmp_path / "run")
    assert summary is not None and (summary.status, summary.steps) == ("finished", 3)
    assert (summary.accuracy_before, summary.accuracy_after) == (0.0, 0.3)
    assert summary.checkpoint is not None and summary.checkpoint.endswith("step-000003/hf")
    assert summary.go_on.endswith("settings.yaml --resume run.num_steps=4")
    assert (tmp_path / "run" / "curves.png").exists()


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (EngineError("gone\nlog"), "failed: EngineError: gone"),
        (KeyboardInterrupt(), "interrupted: SIGINT"),
        (SystemExit(129), "interrupted: SIGHUP"),
    ],
    ids=["error", "SIGINT", "SIGHUP"],
)
def test_a_run_that_ends_early_keeps_what_it_has(make_run: MakeRun, tmp_path: Path, error: BaseException, status: str) -> None:
    run = make_run("run.num_steps=9", fails_at=2, error=error)
    with pytest.raises(type(error)):
        train_loop(run, first_step=0)
    run.break_off(error)
    summary = read_summary(tmp_path / "run")
    assert summary is not None and (summary.status, summary.steps, summary.checkpoint) == (status, 2, None)
    assert summary.go_on.endswith("settings.yaml --resume")
    assert steps_of(tmp_path / "run") == [0, 1, 2]
    assert status in (tmp_path / "run" / "report.html").read_text()


def test_a_run_that_is_asked_to_end_leaves_a_checkpoint_of_its_last_step(make_run: MakeRun, calls: Calls, tmp_path: Path) -> None:
    run = make_run("run.num_steps=9", "run.save_interval=0", fails_at=2, error=SystemExit(143))
    with pytest.raises(SystemExit):
        train_loop(run, first_step=0)
    run.break_off(SystemExit(143))
    summary = read_summary(tmp_path / "run")
    assert summary is not None and (summary.status, summary.steps) == ("interrupted: SIGTERM", 2)
    assert [call for call in calls if call[0] == "save"] == [("save", ".step-000002.partial")]
    # What a checkpoint has already is not written again.
    run.break_off(SystemExit(143))
    again = make_run("run.num_steps=9", "run.save_interval=0", resume=True)
    assert again.resume() == 2
    again.break_off(SystemExit(143))
    assert sum(call[0] == "save" for call in calls) == 1


def test_a_checkpoint_that_cannot_be_written_at_the_end_does_not_cost_the_summary(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: Ranks, directory: Path) -> None:
        raise UserError("the disk is full")

    monkeypatch.setattr(Ranks, "save", fail)
    run = make_run("run.num_steps=9", "run.save_interval=0", fails_at=2, error=SystemExit(143))
    with pytest.raises(SystemExit):
        train_loop(run, first_step=0)
    run.break_off(SystemExit(143))
    summary = read_summary(tmp_path / "run")
    assert summary is not None and (summary.steps, summary.checkpoint) == (2, None)
    assert "no checkpoint of step 2 could be written: the disk is full" in capsys.readouterr().out


@pytest.mark.parametrize("phase", ["train", "save"])
def test_sigterm_waits_for_an_optimizer_step_and_for_a_checkpoint(
    make_run: MakeRun, calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    own = getattr(Ranks, phase)

    def interrupted(self: Ranks, *arguments: Any, **keywords: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return own(self, *arguments, **keywords)

    monkeypatch.setattr(Ranks, phase, interrupted)
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        run = make_run("run.num_steps=9", "run.save_interval=1")
        with pytest.raises(SystemExit) as left:
            train_loop(run, first_step=0)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        saved = [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")]
        assert saved == (["step-000001"] if phase == "save" else []), "it is not begun again"
        run.break_off(left.value)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [call[0] for call in calls if call[0] in ("train", "save")] == ["train", "save"]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000001"]


def test_a_resumed_run_evaluates_where_the_run_that_was_not_interrupted_does(make_run: MakeRun, calls: Calls) -> None:
    overrides = ("run.num_steps=9", "run.save_interval=1", "run.eval_interval=2", "data.eval=held_out.jsonl")
    for last, evaluates in ((3, False), (4, True)):
        first = make_run(*overrides, resume=True, held_out=4, fails_at=last, error=EngineError("gone"))
        with pytest.raises(EngineError):
            train_loop(first, first_step=first.resume())
        again = make_run(*overrides, resume=True, held_out=4)
        step = again.resume()
        calls.clear()
        again.begin(step=step)
        assert step == last and calls[:3] == [("publish", step), ("probe",), ("parity",)]
        assert (("evaluate",) in calls) == evaluates


def test_a_step_that_was_trained_on_is_logged_although_its_save_fails(make_run: MakeRun, calls: Calls, tmp_path: Path) -> None:
    run = make_run("run.num_steps=1")
    run.begin(step=0)
    run.train(run.next_batch(0), step=0)
    run.break_off(UserError("the disk is full"))
    assert read_metrics(tmp_path / "run" / METRICS_FILE)[1]["train/loss"] == 1.0
    # No row of a step of which there is only a rollout.
    run.next_batch(1)
    run.break_off(UserError("the disk is full"))
    assert steps_of(tmp_path / "run") == [0, 1]


def test_a_resumed_run_goes_on_after_its_checkpoint(make_run: MakeRun, calls: Calls, tmp_path: Path) -> None:
    first = make_run("run.num_steps=9", "run.save_interval=2", fails_at=5, error=EngineError("gone"))
    with pytest.raises(EngineError):
        train_loop(first, first_step=0)
    assert steps_of(tmp_path / "run") == [0, 1, 2, 3, 4, 5]
    calls.clear()
    again = make_run("run.num_steps=6", resume=True)
    step = again.resume()
    assert (step, calls) == (4, [("load", "step-000004"), ("rewind", 4, {"cursor": 7})])
    again.break_off(KeyboardInterrupt())
    summary = read_summary(tmp_path / "run")
    assert summary is not None and summary.steps == 4
    train_loop(again, first_step=step)
    assert steps_of(tmp_path / "run") == [0, 1, 2, 3, 4, 5, 6]
    assert [call[1] for call in calls if call[0] == "publish"] == [4, 5, 6]


def test_a_run_that_is_killed_behind_its_checkpoint_has_the_row_of_its_step(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("run.num_steps=9", "run.save_interval=2")
    run.begin(step=0)
    for step in range(2):
        run.train(run.next_batch(step), step=step)
        if step == 0:
            run.log(step=1)
    run.save(step=2)
    again = make_run("run.num_steps=9", resume=True)
    again.begin(step=again.resume())
    row = read_metrics(tmp_path / "run" / METRICS_FILE)[2]
    assert (row["train/loss"], row["rollout/reward"], row["weights/version"]) == (0.9, 0.1, 2)
    assert steps_of(tmp_path / "run") == [0, 1, 2]


def test_a_run_without_checkpoint_starts_at_the_first_prompt(make_run: MakeRun, calls: Calls) -> None:
    assert make_run(resume=True).resume() == 0
    assert calls == [("rewind", 0, None)]


@pytest.mark.parametrize("call", ["next_batch", "save"])
def test_a_deleted_run_directory_is_noticed_at_once(make_run: MakeRun, calls: Calls, tmp_path: Path, call: str) -> None:
    run = make_run("run.num_steps=3")
    run.begin(step=0)
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    calls.clear()
    with pytest.raises(UserError, match=r"run\.directory \S+/run was deleted or moved while the run was going") as caught:
        run.next_batch(0) if call == "next_batch" else run.save(step=1)
    assert calls == []
    run.break_off(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_report_can_be_made_at_any_time(make_run: MakeRun, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no directory"):
        report_run(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"metrics\.jsonl does not exist"):
        report_run(tmp_path)
    run = make_run("run.num_steps=2")
    with pytest.raises(UserError, match="holds no metrics"):
        report_run(tmp_path / "run")
    train_loop(run, first_step=0)
    assert "the run goes on, or was killed" in report_run(tmp_path / "run").read_text()
    run.finish()
    page = report_run(tmp_path / "run").read_text()
    assert "finished" in page and "--resume run.num_steps=3" in page
    (tmp_path / "run" / "summary.json").write_text('{"accuracy": 1}')
    with pytest.raises(UserError, match=r"summary\.json is not the summary of a run"):
        report_run(tmp_path / "run")


class Devices:
    """Shared devices: a turn is taken when it is another than the last."""

    def __init__(self, calls: Calls) -> None:
        self.calls, self.turn = calls, Turn.SYNC

    def changes(self, turn: Turn) -> bool:
        return turn is not self.turn

    def take(self, turn: Turn) -> None:
        self.calls.append(("turn", turn.name))
        self.turn = turn


def test_a_run_measures_how_long_engines_were_busy_and_how_much_of_that_the_training_hid(
    make_run: MakeRun, calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(self: Ranks, batch: str, *, step: int) -> list[dict[str, Metric]]:
        Manager.busy_s += 3600.0 if step == 0 else 0.0
        return []

    monkeypatch.setattr(Manager, "busy_s", 5.0)
    monkeypatch.setattr(Ranks, "train", train)
    train_loop(make_run("run.num_steps=2", "run.save_interval=0"), first_step=0)
    rows = read_metrics(tmp_path / "run" / METRICS_FILE)
    assert [rows[step]["time/rollout"] for step in (0, 1, 2)] == [5.0, 3600.0, 0.0]
    assert [rows[step]["rollout/overlap_fraction"] for step in (1, 2)] == [1.0, 0.0]


def test_the_parity_that_is_needed_is_the_one_that_was_set(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def log_probs(self: Ranks, batch: TrainBatch, *, temperature: float) -> Floats:
        return np.full(len(batch.tokens), 1e-3, np.float32)

    monkeypatch.setattr(Ranks, "log_probs", log_probs)
    with pytest.raises(ParityError, match="needs a mean of at most 1e-04"):
        make_run().begin(step=0)
    make_run("weights.parity_threshold=2e-3").begin(step=0)


def test_shared_devices_are_taken_before_who_needs_them(make_run: MakeRun, calls: Calls) -> None:
    run = make_run("run.num_steps=1", "data.eval=held_out.jsonl", held_out=1, devices=Devices(calls))
    train_loop(run, first_step=0)
    assert calls == [
        ("publish", 0), ("turn", "GENERATION"), ("probe",), ("turn", "SYNC"), ("parity",), ("turn", "GENERATION"), ("evaluate",),
        ("rollout", 0), ("turn", "TRAINING"), ("train", "batch 0", 0), ("save", ".step-000001.partial"), ("forget", 1),
        ("turn", "SYNC"), ("publish", 1), ("turn", "GENERATION"), ("evaluate",),
    ]  # fmt: skip


class Rows:
    """The rows of a file; a position is where the next one is."""

    def __init__(self) -> None:
        self.at = 0

    def next_supervised(self, count: int) -> list[Group]:
        self.at += count
        return [row(str(number)) for number in range(self.at - count, self.at)]

    def state(self) -> dict[str, Any]:
        return {"at": self.at}

    def restore(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def row(name: str) -> Group:
    prompt = Prompt(id=name, token_ids=np.array([int(name) + 1]), text=name)
    arrays = {"response_ids": [1], "loss_mask": [True], "rollout_log_probs": [0.0], "weight_versions": [-1]}
    reward = Reward(RewardOutcome.SCORED, 0.0)
    sample = Sample(
        group_id=name, index=0, prompt=prompt, stop_reason=StopReason.STOP, reward=reward,
        **{field: np.array(values) for field, values in arrays.items()},
    )  # fmt: skip
    return Group(name, prompt, (sample,))


def test_a_supervised_run_trains_on_its_rows_and_asks_no_engine(make_run: MakeRun, calls: Calls, tmp_path: Path) -> None:
    words = ("objective.policy_loss=sft", "run.save_interval=2", "data.prompts_per_step=3")
    rows = Rows()
    train_loop(make_run(*words, "run.num_steps=3", source=rows), first_step=0)
    assert [(call[0], call[-1]) for call in calls if call[0] == "train"] == [("train", step) for step in range(3)]
    assert [call[1].tokens[::2].tolist() for call in calls if call[0] == "train"] == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert {call[0] for call in calls} == {"train", "save"}
    assert steps_of(tmp_path / "run") == [1, 2, 3]
    again = Rows()
    run = make_run(*words, "run.num_steps=5", source=again, resume=True)
    assert (run.resume(), again.at) == (3, 9)


def test_a_supervised_run_without_checkpoint_starts_at_its_first_row(make_run: MakeRun) -> None:
    rows = Rows()
    assert make_run("objective.policy_loss=sft", source=rows, resume=True).resume() == 0
    assert rows.at == 0


def test_a_batch_of_many_waves_gets_the_time_of_all_its_waves() -> None:
    paths = ("run.directory=run", "model.path=model", "data.train=train.jsonl")
    limits = ("rollout.max_concurrent_requests=256", "rollout.request_timeout_s=600.0", "reward.timeout_s=2.0", "reward.num_workers=4")
    one = load_settings(None, [*paths, *limits])
    assert generation_deadline_s(one, 256) == 2 * 600 + 64 * 2
    assert generation_deadline_s(one, 2048) == 9 * 600 + 512 * 2
    two = load_settings(None, [*paths, *limits, "rollout.num_engines=2"])
    assert generation_deadline_s(two, 2048) == 5 * 600 + 512 * 2
