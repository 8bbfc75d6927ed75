"""`train` and `evaluate` from settings to the last file, with stand-ins for Ray's actors, the servers and the reward workers alone."""

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from run_parts import Rewards
from whole_run_parts import Client, Engines, Ranks, Sync

from megatron_rl.algorithms.rounding_limits import Expected
from megatron_rl.config.settings import Settings
from megatron_rl.data.buffer import Buffer
from megatron_rl.engines.answers import Generation
from megatron_rl.errors import DamagedCheckpointError, EngineDiedError, EngineError, ResumableError, UserError, WorkerDiedError
from megatron_rl.evaluation.graded_answers import read_answers
from megatron_rl.observe.metrics import Metric
from megatron_rl.observe.sinks import METRICS_FILE, read_metrics
from megatron_rl.observe.spans import read_spans
from megatron_rl.observe.summary import read_summary
from megatron_rl.report.status import RunReport, report_status
from megatron_rl.runtime import run_records, session, start
from megatron_rl.runtime.start import RunStart
from megatron_rl.runtime.watchdog import Watchdog
from megatron_rl.system.stacks import STACKS_VARIABLE
from megatron_rl.types import Group, Ints, Reward, Sample, TrainBatch


def test_a_run_whose_output_nobody_reads_goes_on(
    make_settings: Callable[..., Settings], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as unread, contextlib.redirect_stdout(unread):
        session.train(make_settings(), resume=False)
    summary = read_summary(tmp_path / "run")
    assert summary is not None and (summary.status, summary.steps) == ("finished", 2)
    assert capsys.readouterr().err.count("nobody reads the output any more; the run goes on") == 1


@pytest.mark.parametrize("override", ["data.samples_per_prompt=2", "objective.policy_loss=sft"])
def test_a_run_leaves_its_last_state(make_settings: Callable[..., Settings], tmp_path: Path, override: str) -> None:
    session.train(make_settings(override), resume=False)
    report = report_status(tmp_path / "run")
    assert (report.life, report.step, report.num_steps, report.state is not None) == ("finished", 2, 2, True)
    assert report.state is not None and report.state.waits == () and STACKS_VARIABLE not in os.environ
    assert [engine.url for engine in report.state.engines] == ([] if "sft" in override else ["url"])


def test_a_late_wait_leaves_the_stacks_of_the_run(
    make_settings: Callable[..., Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own, states = Client.generate, list[RunReport]()

    async def generate(self: Client, token_ids: Ints, **keywords: Any) -> tuple[Generation, ...]:
        for _ in range(200 if Client.version == 4 else 0):
            await asyncio.sleep(0.01)
        if Client.version == 4 and not states:
            states.append(await asyncio.to_thread(report_status, tmp_path / "run"))
        return await own(self, token_ids, **keywords)

    monkeypatch.setattr(Client, "generate", generate)
    monkeypatch.setattr(Ranks, "stacks", lambda self, timeout_s: [["train_shard (trainer.py:7)"], None], raising=False)
    monkeypatch.setattr("megatron_rl.runtime.watchdog.LATE_S", 0.3)
    monkeypatch.setattr("megatron_rl.observe.live_state.STATUS_S", 0.1)
    session.train(make_settings("data.samples_per_prompt=2", "run.num_steps=5"), resume=False)
    path = tmp_path / "run" / "logs" / "stacks.txt"
    said, text = " ".join(capsys.readouterr().out.split()), path.read_text()
    assert "note: rollout of step 5 has taken" in said and f"stacks of the run's processes are in {path}" in said
    assert said.count("has taken") == 1 and text.count("=====") == 1
    assert "_wait_openly" in text and "Megatron rank 0\ntrain_shard (trainer.py:7)" in text and "Megatron rank 1\ndoes not answer" in text
    report, *_ = states
    assert report.life == "late" and "rollout of step 5" in report.advice[0] and "rollout of step 5 has taken" in "".join(report.lines())


def test_a_run_with_engines(make_settings: Callable[..., Settings], tmp_path: Path) -> None:
    session.train(make_settings("data.samples_per_prompt=2", f"eval.sets.held_out={tmp_path}/rows.jsonl", "eval.interval=2"), resume=False)
    rows = read_metrics(tmp_path / "run" / METRICS_FILE)
    assert list(rows) == [0, 1, 2]
    assert [rows[step]["weights/version"] for step in rows] == [0, 1, 2]
    assert [rows[step].get("train/num_tokens") for step in rows] == [None, 4, 4]
    assert [rows[step].get("rollout/reward") for step in rows] == [None, 2.5, 2.5]
    assert rows[0]["weights/parity_mean"] == 0 and rows[1]["rollout/staleness_max"] == 0
    summary = read_summary(tmp_path / "run")
    assert summary is not None and summary.status == "finished" and summary.checkpoint is not None
    assert Engines.stopped == 1
    spans = list(read_spans(tmp_path / "run"))
    assert {"rollout_wait", "train", "sync", "start", "start: ranks"} <= {span.name for span in spans if span.who == "driver"}
    made = [span for span in spans if span.who.startswith("engine ") and span.name == "request, training"]
    assert [span.count for span in made] == [2] * 4 and any(span.name == "request, evaluation" for span in spans)
    assert sum(span.who == "groups" for span in spans) == sum(span.who == "rewards" for span in spans) >= 4


def test_sides_of_shared_devices_take_turns_at_the_start(make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that starts beside a rank's memory has a tiny cache, a transport that opens beside both has none left."""
    order: list[str] = []

    def noted(words: str, answer: Any = None) -> Callable[..., Any]:
        return lambda _self, *arguments: order.append(" ".join([words, *(part for parts in arguments for part in sorted(parts))])) or answer

    def noted_later(words: str) -> Callable[..., Any]:
        note = noted(words)

        async def call(self: object, *arguments: Any) -> None:
            note(self, *arguments)

        return call

    for owner, name, function in (
        (Ranks, "start", noted("ranks start")),
        (Ranks, "put_away", noted("ranks put away")),
        (Ranks, "take_back", noted("ranks take back")),
        (Engines, "begin_start", noted("engines start", [])),
        (Client, "release_memory", noted_later("engines release")),
        (Client, "restore_memory", noted_later("engines restore")),
        (Sync, "connect", noted_later("transport opens")),
    ):
        monkeypatch.setattr(owner, name, function, raising=False)
    session.train(make_settings("runtime.colocate=true"), resume=False)
    assert order[: order.index("transport opens") + 1] == [
        "ranks start",
        "ranks put away gradients optimizer parameters",
        "engines start",
        "engines release cuda_graph kv_cache",
        "ranks take back parameters",
        "transport opens",
    ]


def test_what_takes_as_long_as_a_model_has_its_deadline(make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that comes and goes, engines that read and hash all weights, and a probe with the first compiles."""
    waits: dict[str, float] = {}
    wait: Callable[..., Any] = Watchdog.wait

    def noted(self: Watchdog, work: Any, *, name: str, timeout_s: float, **others: Any) -> Any:
        waits[name] = timeout_s
        return wait(self, work, name=name, timeout_s=timeout_s, **others)

    async def nothing(_self: object, *_: object) -> None:
        return None

    monkeypatch.setattr(Watchdog, "wait", noted)
    for owner, name, function in (
        (Ranks, "put_away", lambda *_: None),
        (Ranks, "take_back", lambda *_: None),
        (Client, "release_memory", nothing),
        (Client, "restore_memory", nothing),
    ):
        monkeypatch.setattr(owner, name, function, raising=False)
    settings = make_settings("runtime.colocate=true", "model.deadline_s=1234")
    session.train(settings, resume=False)
    names = [f"{verb} the engines' memory" for verb in ("releasing", "restoring")]
    names += ["checksums of the engines' weights", f"an engine's reading of {settings.model.path}", "parity probe of the engines"]
    assert {name: waits[name] for name in names} == dict.fromkeys(names, 1234.0)


def test_a_supervised_run_starts_no_engine(make_settings: Callable[..., Settings], tmp_path: Path) -> None:
    session.train(make_settings("objective.policy_loss=sft"), resume=False)
    rows = read_metrics(tmp_path / "run" / METRICS_FILE)
    # "1" and the end of the sequence.
    assert {step: row["train/num_tokens"] for step, row in rows.items()} == {1: 4, 2: 4}
    assert not (tmp_path / "run" / "buffer.sqlite").exists() and Engines.stopped == 0


def test_a_directory_has_one_supervised_run_at_a_time(make_settings: Callable[..., Settings], tmp_path: Path) -> None:
    settings = make_settings("objective.policy_loss=sft")
    code = (
        "import sys, pathlib; from megatron_rl.system.files import claim; held = claim(pathlib.Path(sys.argv[1]), what=''); input(print())"
    )
    other = subprocess.Popen([sys.executable, "-c", code, tmp_path / "run" / "run.lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdin is not None and other.stdout is not None and other.stdout.readline()
    with pytest.raises(UserError, match=rf"run\.directory .*run is in use by process {other.pid}; wait for that run or choose another"):
        session.train(settings, resume=True)
    other.stdin.close()
    other.wait(timeout=30)
    session.train(settings, resume=True)


def test_a_supervised_run_continues_without_file_locks(
    make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    session.train(make_settings("objective.policy_loss=sft"), resume=False)
    assert "cannot be locked (No locks available), so nobody looks whether" in " ".join(capsys.readouterr().out.split())


def test_a_supervised_run_names_a_step_of_too_many_rows(make_settings: Callable[..., Settings], capsys: pytest.CaptureFixture[str]) -> None:
    session.train(make_settings("objective.policy_loss=sft", "data.prompts_per_step=9"), resume=False)
    assert "has 8 rows, and a step takes data.prompts_per_step 9" in " ".join(capsys.readouterr().out.split())


def test_an_evaluation_leaves_its_results_and_its_answers(make_settings: Callable[..., Settings], tmp_path: Path) -> None:
    """And asks for no training rows: those of the settings need not be there."""
    sets = f"{{one: {tmp_path}/rows.jsonl, two: {{data: {tmp_path}/rows.jsonl, samples: 2, sampling: {{temperature: 0}}}}}}"
    settings = make_settings(f"eval.sets={sets}", f"data.train={tmp_path}/gone.jsonl")
    one, two = session.evaluate(settings)
    assert (one.estimates["reward"].value, one.estimates["reward"].num, "accuracy" in one.estimates) == (2.0, 8, False)
    result = json.loads((tmp_path / "run" / "two.json").read_text())
    answers = read_answers(tmp_path / "run" / "two.jsonl")
    assert two.path == tmp_path / "run" / "two.json" and result["estimates"]["reward"]["value"] == 2.5
    assert result["facts"]["sampling"]["temperature"] == 0.0 and result["facts"]["samples"] == 2
    assert len(answers) == 16 and {answer.prompt for answer in answers} == set("12345678")
    assert {(answer.label, answer.cause, answer.reward, answer.num_tokens) for answer in answers} == {
        ("1", None, reward, 1) for reward in (2.0, 3.0)
    }
    assert Engines.stopped == 1
    # The same command again asks nothing.
    before = (tmp_path / "run" / "two.jsonl").read_bytes()
    session.evaluate(settings)
    assert (tmp_path / "run" / "two.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (SystemExit(143), ResumableError, "ended by SIGTERM; the same command with --resume continues after step 1"),
        (EngineDiedError("the server died"), ResumableError, "the server died; the same command with --resume continues after step 1"),
        (WorkerDiedError("Megatron rank 1 died"), ResumableError, "Megatron rank 1 died; the same command with --resume continues after"),
        (SystemExit(129), ResumableError, "ended by SIGHUP; the same command with --resume continues after step 1"),
        (EngineError("refused"), EngineError, "refused"),
    ],
    ids=["SIGTERM", "server", "rank", "SIGHUP", "engine"],
)
def test_a_run_ended_from_outside_continues_by_the_same_command(
    make_settings: Callable[..., Settings],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    kind: type[BaseException],
    message: str,
) -> None:
    own = Ranks.train

    def train(self: Ranks, batch: TrainBatch, *, step: int, expected: Expected | None, rows: Any = ()) -> list[dict[str, Metric]]:
        if step == 1:
            raise error
        return own(self, batch, step=step, expected=expected)

    settings = make_settings("data.samples_per_prompt=2", "run.save_interval=1")
    with monkeypatch.context() as patch:
        patch.setattr(Ranks, "train", train)
        with pytest.raises(kind, match=message):
            session.train(settings, resume=True)
    monkeypatch.setattr(Ranks, "load", lambda self, path, *, weights_only: (), raising=False)
    session.train(settings, resume=True)
    assert list(read_metrics(tmp_path / "run" / METRICS_FILE)) == [0, 1, 2]


def test_what_another_run_saves_while_it_ends_is_what_is_resumed(
    make_settings: Callable[..., Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does that is asked to end: it holds the buffer until its last checkpoint is there."""
    session.train(make_settings("data.samples_per_prompt=2", "run.save_interval=1"), resume=False)
    newest, later, checked, opens = tmp_path / "run/checkpoints/step-000002", tmp_path / "later", [], RunStart.open_manager
    newest.rename(later)

    def opened(*given: Any, **named: Any) -> Any:
        later.rename(newest)
        return opens(*given, **named)

    monkeypatch.setattr(RunStart, "open_manager", opened)
    monkeypatch.setattr(Ranks, "check", lambda self, path: checked.append(path))
    monkeypatch.setattr(Ranks, "load", lambda self, path, *, weights_only: (), raising=False)
    session.train(make_settings("data.samples_per_prompt=2", "run.num_steps=3"), resume=True)
    assert checked == [newest / "megatron"]
    assert list(read_metrics(tmp_path / "run" / METRICS_FILE)) == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", ["data.samples_per_prompt=2", "objective.policy_loss=sft"])
def test_a_run_ended_before_training_trains_after_the_resume(
    make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    trained: list[tuple[int, list[int]]] = []
    ends = [SystemExit(143)]

    def train(self: Ranks, batch: TrainBatch, *, step: int, expected: Expected | None, rows: Any = ()) -> list[dict[str, Metric]]:
        trained.append((step, batch.tokens[batch.cu_seqlens[:-1]].tolist()))
        if step == 1 and ends:
            raise ends.pop()
        return []

    settings = make_settings(kind, "run.save_interval=0")
    monkeypatch.setattr(Ranks, "train", train)
    with pytest.raises(ResumableError, match="continues after step 1"):
        session.train(settings, resume=False)
    monkeypatch.setattr(Ranks, "load", lambda self, path, *, weights_only: (), raising=False)
    session.train(settings, resume=True)
    assert [step for step, _ in trained] == [0, 1, 1] and trained[1] == trained[2]


def test_a_changed_checkpoint_ends_the_start_at_once(
    make_settings: Callable[..., Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(self: Ranks, checkpoint: Path) -> None:
        raise DamagedCheckpointError("the content of common.pt is not that of its manifest; copy it again")

    def late(*_: object) -> None:
        raise AssertionError("waited for")

    session.train(make_settings("data.samples_per_prompt=2", "run.save_interval=1"), resume=False)
    left = {name: (tmp_path / "run" / name).read_bytes() for name in (METRICS_FILE, "settings.yaml", "summary.json")}
    monkeypatch.setattr(Ranks, "check", damaged)
    monkeypatch.setattr(Ranks, "start", late)
    monkeypatch.setattr(Engines, "finish_start", late)
    with pytest.raises(UserError, match=r"common\.pt is not that of its manifest; copy it again, or delete .*step-000002 to go on from"):
        session.train(make_settings("data.samples_per_prompt=2", "run.num_steps=4"), resume=True)
    assert left == {name: (tmp_path / "run" / name).read_bytes() for name in left}, "what the run had written is as it was"
    assert Engines.stopped == 2


@pytest.mark.parametrize(
    ("error", "told", "promises"),
    [
        (DamagedCheckpointError("it is damaged; copy it again"), "it is damaged; copy it again, or delete {newest} to go on from ", False),
        (UserError("it is one of another model; give that"), "it is one of another model; give that", False),
        (EngineError("refused"), "refused", True),
    ],
)
def test_a_checkpoint_that_cannot_be_loaded_is_not_resumed(
    make_settings: Callable[..., Settings],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    told: str,
    promises: bool,
) -> None:
    def load(self: Ranks, path: Path, *, weights_only: bool) -> tuple[str, ...]:
        raise error

    words = ("objective.policy_loss=sft", "run.save_interval=1")
    session.train(make_settings(*words), resume=False)
    monkeypatch.setattr(Ranks, "load", load, raising=False)
    capsys.readouterr()
    newest = tmp_path / "run" / "checkpoints" / "step-000002"
    with pytest.raises((UserError, EngineError)) as caught:
        session.train(make_settings(*words, "run.num_steps=3"), resume=True)
    assert str(caught.value).startswith(told.format(newest=newest))
    assert str(caught.value).endswith("(step 1)") == ("damaged" in told)
    assert ("--resume continues after step 2" in " ".join(capsys.readouterr().out.split())) == promises


def test_a_run_keeps_what_waits_for_its_rewards(make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[str] = []
    own_put, own_score = Buffer.put_samples, Rewards.score

    def put_samples(self: Buffer, group: Group) -> None:
        kept.append(group.id)
        own_put(self, group)

    async def late(self: Rewards, sample: Sample) -> Reward:
        await asyncio.sleep(0.01)
        return await own_score(self, sample)

    monkeypatch.setattr("megatron_rl.rollout.groups.SLOW_REWARD_S", 0.0)
    monkeypatch.setattr(Buffer, "put_samples", put_samples)
    monkeypatch.setattr(Rewards, "score", late)
    session.train(make_settings("data.samples_per_prompt=2"), resume=False)
    assert kept and len(kept) == len(set(kept))


@pytest.mark.parametrize("override", ["run.save_interval=1", "objective.policy_loss=sft", "run.save_interval=0"])
def test_a_run_whose_ranks_die_starts_new_ones_by_itself(
    make_settings: Callable[..., Settings],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    override: str,
) -> None:
    """In the second step: all rows are those of a run without the death, and what was finished is not asked for again."""
    own, generate, groups, ended, asked = Ranks.train, Client.generate, set[Ranks](), list[Ranks](), list[int]()
    reports, stopped = set[int](), set[int]()

    def begin(*words: object) -> Any:
        reports.add(number := len(reports))
        return SimpleNamespace(poll=lambda: None, kill=lambda: stopped.add(number), wait=lambda: None)

    async def counted(self: Client, token_ids: Ints, *, num_samples: int = 1, **arguments: Any) -> tuple[Generation, ...]:
        # A probe asks for one sample.
        asked.extend([Client.version] * (num_samples == 2))
        return await generate(self, token_ids, num_samples=num_samples, **arguments)

    def train(self: Ranks, batch: TrainBatch, *, step: int, expected: Expected | None, rows: Any = ()) -> list[dict[str, Metric]]:
        groups.add(self)
        if step == 1 and len(groups) == 1:
            self.has_died = True
            raise WorkerDiedError("Megatron rank 1 died")
        return own(self, batch, step=step, expected=expected)

    monkeypatch.setattr(Ranks, "train", train)
    monkeypatch.setattr(Ranks, "end", lambda self: ended.append(self), raising=False)
    monkeypatch.setattr(Ranks, "load", lambda self, path, *, weights_only: (), raising=False)
    monkeypatch.setattr(Client, "generate", counted)
    monkeypatch.setattr(Sync, "give_up", lambda self, clients: asyncio.sleep(0), raising=False)
    monkeypatch.setattr(run_records, "begin_command", begin)
    words = ("data.samples_per_prompt=2", "run.save_interval=1", "observe.report_interval=1")
    session.train(make_settings(*words, override), resume=False)
    assert reports and reports == stopped, "an earlier page would replace a later one"
    rows = read_metrics(tmp_path / "run" / METRICS_FILE)
    assert [row["train/num_tokens"] for step, row in rows.items() if step] == [4, 4]
    said, saves, supervised = " ".join(capsys.readouterr().out.split()), override != "run.save_interval=0", "sft" in override
    assert "all ranks are started again, 1 of runtime.restarts 4 within an hour, because: Megatron rank 1 died" in said
    assert f"; {0 if saves else 1} trained step{'s' if saves else ''} to be done again" in said
    assert len(groups) == 2 and len(ended) == 1 and Engines.stopped == (not supervised)
    assert supervised or asked == [0, 0, 1, 1, *([] if saves else [1, 1])]


def test_ranks_that_come_back_load_as_the_first_ones(make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch) -> None:
    """From the checkpoint of the command, without the optimizer; where they cannot start, the summary says so."""
    session.train(make_settings("run.num_steps=1", "run.save_interval=1"), resume=False)
    loads, own = list[bool](), start.RunStart._start_ranks

    def train(self: Ranks, batch: TrainBatch, *, step: int, expected: Expected | None, rows: Any = ()) -> list[dict[str, Metric]]:
        self.has_died = True
        raise WorkerDiedError("Megatron rank 1 died")

    def start_ranks(self: RunStart, ranks: Any, **kind: Any) -> None:
        if len(loads) == 2:
            raise UserError("no place for ranks")
        own(self, ranks, **kind)

    monkeypatch.setattr(Ranks, "train", train)
    monkeypatch.setattr(Ranks, "end", lambda self: None, raising=False)
    monkeypatch.setattr(Ranks, "load", lambda self, path, *, weights_only: loads.append(weights_only) or (), raising=False)
    monkeypatch.setattr(Sync, "give_up", lambda self, pool: asyncio.sleep(0), raising=False)
    monkeypatch.setattr(start.RunStart, "_start_ranks", start_ranks)
    settings = make_settings("run.num_steps=2", "run.save_interval=1")
    with pytest.raises(UserError, match="no place for ranks"):
        session.train(settings, resume=True, weights_only=True)
    assert loads == [True, True]
    summary = read_summary(settings.run.directory)
    assert summary is not None and summary.steps == 1 and summary.status.startswith("failed: UserError: no place for ranks")
