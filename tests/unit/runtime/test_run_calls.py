"""The run object between stand-ins of its engines, its ranks and its console: what it asks of them, and what it leaves behind."""

import asyncio
import json
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from run_parts import Calls, Devices, MakeRun, Manager, Ranks
from tensorboard.backend.event_processing import event_accumulator as accumulators

from megatron_rl.algorithms.entropy_aware import Draw, EntropyAware
from megatron_rl.algorithms.rounding_limits import Expected
from megatron_rl.config.load import load_settings
from megatron_rl.config.settings import ModelSettings, RewardSettings, RolloutSettings, Settings
from megatron_rl.data.batch import batch_from_sequences
from megatron_rl.engines.engine_pool import EnginePool
from megatron_rl.engines.sampling import Sampling
from megatron_rl.errors import EngineError, ParityError, UserError
from megatron_rl.observe.metrics import Metric, Sum
from megatron_rl.observe.sinks import METRICS_FILE, read_metrics
from megatron_rl.observe.summary import read_summary
from megatron_rl.report.page import report_run
from megatron_rl.runtime import agreement, run_records, watchdog
from megatron_rl.runtime.loop import train_loop
from megatron_rl.runtime.run_evaluations import generation_deadline_s
from megatron_rl.types import Floats, Group, Prompt, Reward, RewardOutcome, Sample, StopReason, TrainBatch
from megatron_rl.weights.sync import Prove


def steps_of(directory: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (directory / METRICS_FILE).read_text().splitlines()]


def test_the_order_of_a_run(
    make_run: MakeRun, calls: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/an environment/python")
    run = make_run("run.num_steps=3", "run.save_interval=2", "eval.interval=2", "eval.sets.held_out=held_out.jsonl")
    train_loop(run, first_step=0)
    assert calls == [
        ("publish", 0), ("read", "model"), ("probe",), ("score", 4), ("score", 1), ("parity",), ("expect",),
        ("evaluate", "step-000000", True), ("rollout", 0), ("train", "batch 0", 0), ("expect",), ("publish", 1), ("score", 1),
        ("rollout", 1), ("train", "batch 1", 1), ("save", ".step-000002.partial"), ("expect",), ("publish", 2), ("score", 1),
        ("evaluate", "step-000002", False), ("saved",), ("forget", 2),
        ("rollout", 2), ("train", "batch 2", 2), ("save", ".step-000003.partial"), ("expect",), ("publish", 3), ("score", 1),
        ("evaluate", "step-000003", False), ("saved",), ("forget", 2),
    ]  # fmt: skip
    rows = read_metrics(tmp_path / "run" / METRICS_FILE)
    # Everything of a step stands in the row of the number of steps done.
    assert list(rows) == [0, 1, 2, 3]
    assert [rows[step].get("train/loss") for step in rows] == [None, 1.0, 0.9, 0.8]
    assert [rows[step]["weights/version"] for step in rows] == [0, 1, 2, 3]
    assert [rows[step].get("eval/held_out/accuracy") for step in rows] == [0.0, None, 0.2, 0.3]
    run.finish()
    summary = read_summary(tmp_path / "run")
    assert summary is not None and (summary.status, summary.steps) == ("finished", 3)
    assert summary.evaluation_before == {"held_out/accuracy": 0.0} and summary.evaluation_after == {"held_out/accuracy": 0.3}
    assert summary.checkpoint is not None and summary.checkpoint.endswith("step-000003/hf")
    assert summary.go_on.endswith("settings.yaml --resume run.num_steps=4")
    assert (tmp_path / "run" / "curves.png").exists()
    *_, last, policy, report, metrics, go_on = capsys.readouterr().out.splitlines()
    assert last == "finished after 3 steps" and go_on == f"go on    {summary.go_on}"
    assert shlex.split(summary.go_on)[:4] == ["/an environment/python", "-m", "megatron_rl", "train"]
    assert [line.split() for line in (policy, report, metrics)] == [
        [name, str(tmp_path / "run" / file)]
        for name, file in (("policy", "huggingface"), ("report", "report.html"), ("metrics", "metrics.jsonl"))
    ]


@pytest.mark.parametrize(
    ("error", "status", "saved"),
    [
        (EngineError("gone\nlog"), "failed: EngineError: gone", True),
        (SystemExit(130), "interrupted: SIGINT", True),
        (SystemExit(129), "interrupted: SIGHUP", True),
    ],
    ids=["error", "SIGINT", "SIGHUP"],
)
def test_a_run_that_ends_early_keeps_what_it_has(make_run: MakeRun, tmp_path: Path, error: BaseException, status: str, saved: bool) -> None:
    run = make_run("run.num_steps=9", fails_at=2, error=error)
    with pytest.raises(type(error)):
        train_loop(run, first_step=0)
    run.break_off(error)
    summary = read_summary(tmp_path / "run")
    assert summary is not None and (summary.status, summary.steps, summary.checkpoint is not None) == (status, 2, saved)
    assert summary.go_on.endswith("settings.yaml --resume")
    assert steps_of(tmp_path / "run") == [0, 1, 2]
    assert status in (tmp_path / "run" / "report.html").read_text()


def test_a_trained_step_is_logged_although_its_save_fails(make_run: MakeRun, calls: Calls, tmp_path: Path) -> None:
    run = make_run("run.num_steps=1")
    run.begin(step=0)
    run.train(run.next_batch(0), step=0)
    run.break_off(UserError("the disk is full"))
    assert read_metrics(tmp_path / "run" / METRICS_FILE)[1]["train/loss"] == 1.0
    # No row of a step of which there is only a rollout.
    run.next_batch(1)
    run.break_off(UserError("the disk is full"))
    assert steps_of(tmp_path / "run") == [0, 1]


def test_a_resumed_run_goes_on_after_its_checkpoint(
    make_run: MakeRun, calls: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = make_run("run.num_steps=9", "run.save_interval=2", fails_at=5, error=EngineError("gone"))
    with pytest.raises(EngineError):
        train_loop(first, first_step=0)
    assert steps_of(tmp_path / "run") == [0, 1, 2, 3, 4, 5]
    calls.clear()
    (tmp_path / "run" / "checkpoints" / ".step-000006.partial").mkdir()
    link = tmp_path / "run" / "huggingface"
    link.unlink()
    link.symlink_to("checkpoints/step-000002/hf")
    again = make_run("run.num_steps=6", resume=True)
    step = again.resume()
    assert link.readlink() == Path("checkpoints/step-000004/hf"), "the kill may have come before it"
    printed = " ".join(capsys.readouterr().out.split())
    assert "training.optimizer.lr is 2 from now on, was 1 in the checkpoint" in printed
    assert "5 groups to be made anew, because of a setting" in printed
    assert ".step-000006.partial is not complete and is passed over; it can be deleted" in printed
    assert (step, calls) == (4, [("load", "step-000004", False), ("rewind", 4, {"cursor": 7})])
    again.break_off(SystemExit(130))
    summary = read_summary(tmp_path / "run")
    assert summary is not None and summary.steps == 4
    train_loop(again, first_step=step)
    assert steps_of(tmp_path / "run") == [0, 1, 2, 3, 4, 5, 6]
    assert [call[1] for call in calls if call[0] == "publish"] == [4, 5, 6]


def test_a_run_killed_after_its_checkpoint_has_that_step_s_row(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("run.num_steps=9", "run.save_interval=2")
    run.begin(step=0)
    for step in range(2):
        run.train(run.next_batch(step), step=step)
        if step == 0:
            run.log(step=1)
    run.save(step=2)
    run.train(run.next_batch(2), step=2)
    again = make_run("run.num_steps=9", resume=True)
    again.begin(step=again.resume())
    row = read_metrics(tmp_path / "run" / METRICS_FILE)[2]
    assert (row["train/loss"], row["rollout/reward"], row["weights/version"]) == (0.9, 0.1, 2)
    assert steps_of(tmp_path / "run") == [0, 1, 2]


def test_a_run_without_checkpoint_starts_at_the_first_prompt(make_run: MakeRun, calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert make_run(resume=True).resume() == 0
    assert calls == [("rewind", 0, None)]
    assert "5 groups to be made anew, because of a setting" in " ".join(capsys.readouterr().out.split())


def test_groups_too_old_after_a_resume_are_announced(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Manager, "renewed_at", 1)
    train_loop(make_run("run.num_steps=3", "rollout.max_staleness=1", "objective.proximal=rollout"), first_step=0)
    found = re.findall(r"step \d: \d+ groups made anew[^\n]*", capsys.readouterr().out)
    assert found == ["step 2: 3 groups made anew, because rollout.max_staleness is 1 now"]


@pytest.mark.parametrize("call", ["next_batch", "save", "finish"])
@pytest.mark.parametrize("happened", ["deleted or moved", "replaced by another directory"])
def test_a_run_directory_that_goes_is_noticed_at_once(make_run: MakeRun, calls: Calls, tmp_path: Path, call: str, happened: str) -> None:
    run = make_run("run.num_steps=3")
    run.begin(step=0)
    if call == "finish":
        run.save(step=1)
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    if happened != "deleted or moved":
        make_run("run.num_steps=3")
    before = sorted((tmp_path / "run").rglob("*"))
    calls.clear()
    calling: dict[str, Callable[[], object]] = {
        "next_batch": lambda: run.next_batch(0), "save": lambda: run.save(step=1), "finish": run.finish
    }  # fmt: skip
    with pytest.raises(UserError, match=rf"run\.directory \S+/run was {happened} .* start it again in a directory that stays") as caught:
        calling[call]()
    assert calls == []
    run.break_off(caught.value)
    assert sorted((tmp_path / "run").rglob("*")) == before


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


def test_a_run_writes_reports_meanwhile_and_prints_samples(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun, killed = list[tuple[Any, ...]](), list[int]()

    def begin(*words: Any) -> Any:
        begun.append(words)
        number = len(begun)
        # The first goes on for one more question.
        polls = iter([None, 0] if number == 1 else [0, 0, 0, 0])
        return SimpleNamespace(poll=lambda: next(polls), kill=lambda: killed.append(number), wait=lambda: None)

    monkeypatch.setattr(run_records, "begin_command", begin)
    prompt = Prompt("0-7", np.array([1]), "two and two\x1b[31m", label="4")
    monkeypatch.setattr(Manager, "looked_at", {4: Sample.written(prompt, [1, 2], text="five")})
    run = make_run("run.num_steps=9", "run.save_interval=0", "observe.report_interval=2", "observe.print_samples=3")
    train_loop(run, first_step=0)
    run.finish()
    directory = run._directory  # type: ignore[attr-defined]
    assert begun == [("report", directory)] * 3 and killed == [3], "after steps 2, 6 and 8; at step 4 the first was being written"
    lines = capsys.readouterr().out.splitlines()
    (titles,) = [[line for line in lines if re.match(r"step \d+: no reward", line)]]
    assert titles == [f"step {step}: no reward, 2 tokens, ended by stop, group '0-7'" for step in (3, 6, 9)]
    assert lines.count("    prompt  two and two\\x1b[31m") == lines.count("    answer  five") == 3
    events = accumulators.EventAccumulator(str(directory / "tensorboard"), size_guidance={"histograms": 0})
    events.Reload()
    assert [event.step for event in events.Histograms("rollout/reward_histogram")] == [3, 6, 9]


def test_the_parity_that_is_needed_is_the_one_that_was_set(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def log_probs(self: Ranks, batch: TrainBatch, *, temperature: float) -> Floats:
        return np.full(len(batch.tokens), 1e-3, np.float32)

    monkeypatch.setattr(Ranks, "log_probs", log_probs)
    with pytest.raises(ParityError, match=r"needs a median of at most 1e-04 .* a mean of at most 1e-04"):
        make_run("rollout.sampling.temperature=1.0").begin(step=0)
    make_run("weights.parity_threshold=2e-3").begin(step=0)


def test_samples_that_disagree_end_the_run_with_the_likeliest_cause(
    make_run: MakeRun, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    off_by, right_at = 0.0, None
    samples = batch_from_sequences(prompts=[[1, 2, 3]] * 4, responses=[[2, 3]] * 4, rollout_log_probs=[[-1.0, -0.5]] * 4)
    samples = replace(samples, weight_versions=np.where(samples.loss_mask, 4, -1))

    def log_probs(self: Ranks, batch: TrainBatch, *, temperature: float) -> Floats:
        calls.append(("parity",))
        # Above and below those of the engine in turn.
        wrong_T = off_by * (-1) ** np.repeat(np.arange(batch.num_sequences), batch.lengths)
        return (wrong_T * (1.0 if right_at is None else temperature - right_at)).astype(np.float32)

    def train(self: Ranks, batch: TrainBatch, *, step: int, expected: Expected | None, rows: Any = ()) -> list[dict[str, Metric]]:
        assert expected is not None and expected.version == step and expected.limits.outlier == pytest.approx(1e-3 / 0.8)
        raise ParityError("step 5: engine and trainer disagree about the samples")

    monkeypatch.setattr(Ranks, "log_probs", log_probs)
    monkeypatch.setattr(Ranks, "train", train)

    def cause(*peers: Any, weights: str = "synced", shared: bool = False) -> str:
        calls.clear()
        run = make_run(devices=Devices(calls) if shared else None)
        manager = run._manager  # type: ignore[attr-defined]
        manager._head = weights
        manager.pool = EnginePool([manager, *peers], max_requests=1)
        with pytest.raises(ParityError, match=r"^step 5: engine and trainer disagree about the samples; ") as raised:
            run.train(samples, step=4)
        return str(raised.value).partition("; ")[2]

    found = cause()
    assert "not as engines returned them, since a fresh probe of every engine agrees; look at rollout.function" in found
    assert "it looks like other tokens than those that were scored" in found
    assert ("publish", 4) not in calls and ("distrust", 4) in calls and calls.count(("probe",)) == 1
    right_at, off_by = 1.0, 0.5
    assert "log-probs of the engines are those of temperature 1 (mean" in cause() and ("publish", 4) in calls
    right_at, off_by = None, 0.03
    assert "another dtype on one side" in cause()
    off_by = 0.5
    assert "likeliest cause on url: stale weights, since another sync of the same version changed 1 of 1 weight: head" in cause(
        weights="made up"
    )
    cause(shared=True)
    assert calls.index(("publish", 4)) < calls.index(("probe",)), "engines lose their weights on shared devices"
    peer = Manager(calls, fails_at=None, error=None)
    peer.address, peer.log_prob, peer._head = replace(peer.address, url="peer"), 0.5, "synced"
    monkeypatch.setattr(Ranks, "log_probs", lambda self, batch, *, temperature: np.full(len(batch.tokens), 0.5, np.float32))
    assert "likeliest cause on url alone (1 other engine agreed): " in cause(peer)


def test_draws_by_entropy_are_expected_of_samples_alone(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes and fixed tokens are the policy's; a diagnosis looks at samples as they were drawn."""
    entropy, asked = EntropyAware(thresholds=(0.5, 0.5), quadrants={"explore": Draw(temperature=0.5)}), list[EntropyAware | None]()
    samples = batch_from_sequences(prompts=[[1, 2, 3]] * 4, responses=[[2, 3]] * 4, rollout_log_probs=[[-1.0, -0.5]] * 4)
    samples, generate = replace(samples, weight_versions=np.where(samples.loss_mask, 4, -1)), Manager.generate

    def log_probs(self: Ranks, batch: TrainBatch, **distribution: Any) -> Floats:
        asked.append(distribution.get("entropy"))
        return np.zeros(len(batch.tokens), np.float32)

    def train(self: Ranks, batch: TrainBatch, *, step: int, expected: Expected | None, rows: Any) -> list[dict[str, Metric]]:
        assert expected is not None and (expected.version, expected.entropy) == (4, entropy)
        # Rounding grows with the coolest draw.
        assert expected.limits.outlier == pytest.approx(1e-3 / 0.8 / 0.5)
        raise ParityError("the samples disagree")

    async def generated(self: Manager, token_ids: Any, *, sampling: Sampling, num_samples: int) -> Any:
        assert sampling.entropy is None
        return await generate(self, token_ids, sampling=sampling, num_samples=num_samples)

    for owner, name, function in ((Ranks, "log_probs", log_probs), (Ranks, "train", train), (Manager, "generate", generated)):
        monkeypatch.setattr(owner, name, function)
    words = ("rollout.sampling.entropy={thresholds: [0.5, 0.5], quadrants: {explore: {temperature: 0.5}}}", "objective.proximal=rollout")
    run = make_run(*words)
    run.begin(step=0)
    assert asked and set(asked) == {None}
    with pytest.raises(ParityError, match="the samples disagree; likeliest cause: tokens, log-probs or versions"):
        run.train(samples, step=4)
    assert asked[-1] == entropy


def test_fixed_tokens_are_compared_at_every_sync(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("run.num_steps=3")
    train_loop(run, first_step=0)
    run._manager.log_prob = 5e-5  # type: ignore[attr-defined]
    run.publish(version=4)
    run.log(step=4)
    rows = read_metrics(tmp_path / "run" / METRICS_FILE)
    assert [rows[step].get("weights/scored_mean") for step in (0, 1, 3)] == [0.0, 0.0, 0.0]
    assert rows[4]["weights/scored_mean"] == pytest.approx(5e-5)
    run._manager.log_prob = 0.5  # type: ignore[attr-defined]
    with pytest.raises(ParityError, match=r"fixed tokens after a sync: url \(median .*5\.00e-01.*; likeliest cause on url: a top_p"):
        run.publish(version=5)


def test_weights_are_compared_bit_by_bit_at_the_first_sync(
    make_run: MakeRun, calls: Calls, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def begun(step: int = 0) -> list[str]:
        calls.clear()
        make_run().begin(step=step)
        return [call[0] for call in calls if call[0] in ("publish", "read")]

    def said() -> str:
        return " ".join(capsys.readouterr().out.split())

    assert begun() == ["publish", "read"] and "1 weights of each engine came by the first sync, bit for bit as an engine reads" in said()
    assert begun(step=3) == ["publish"] and "not compared with a file, because the run is resumed" in said()
    monkeypatch.setattr(Manager, "read", None)
    assert begun() == ["publish", "read", "publish"] and "an engine cannot read" in said()
    monkeypatch.setattr(Manager, "read", "of another file")
    with pytest.raises(ParityError, match=r"got other bits by the first sync than it reads from .*model: 1 of 1 weight, needs 0: head"):
        begun()
    monkeypatch.setattr(agreement, "engines_read", lambda path: False)
    assert begun() == ["publish"] and "because engines cannot read" in said()


def test_checkpoints_kept_for_good_keep_no_samples(make_run: MakeRun, calls: Calls) -> None:
    run = make_run("run.num_steps=5", "run.save_interval=1", "run.keep_checkpoints=1", "run.keep_interval=2")
    train_loop(run, first_step=0)
    assert [before for name, *before in calls if name == "forget"] == [[1], [2], [3], [4], [5]]


def test_shared_devices_are_taken_before_who_needs_them(make_run: MakeRun, calls: Calls) -> None:
    run = make_run("run.num_steps=1", "eval.sets.held_out=held_out.jsonl", devices=Devices(calls))
    train_loop(run, first_step=0)
    assert calls == [
        ("publish", 0), ("read", "model"), ("phase", "GENERATION"), ("probe",), ("score", 4), ("score", 1),
        ("phase", "SYNC"), ("parity",), ("expect",), ("phase", "GENERATION"), ("evaluate", "step-000000", True),
        ("rollout", 0), ("phase", "TRAINING"), ("train", "batch 0", 0), ("save", ".step-000001.partial"),
        # The devices stay with whom they are while files are waited for.
        ("phase", "SYNC"), ("expect",), ("publish", 1), ("phase", "GENERATION"), ("score", 1), ("evaluate", "step-000001", False),
        ("saved",), ("forget", 1),
    ]  # fmt: skip


class Rows:
    """The rows of a file; a position is where the next one is."""

    def __init__(self) -> None:
        self.at, self.rows = 0, self

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
    first = make_run(*words, "run.num_steps=3", source=rows)
    train_loop(first, first_step=0)
    first.finish()
    assert [(call[0], call[-1]) for call in calls if call[0] == "train"] == [("train", step) for step in range(3)]
    assert [call[1].tokens[::2].tolist() for call in calls if call[0] == "train"] == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert {call[0] for call in calls} == {"train", "save", "saved"}
    assert steps_of(tmp_path / "run") == [1, 2, 3]
    again = Rows()
    run = make_run(*words, "run.num_steps=5", source=again, resume=True)
    assert (run.resume(), again.at) == (3, 9)


def test_a_supervised_run_without_checkpoint_starts_at_row_one(make_run: MakeRun) -> None:
    rows = Rows()
    assert make_run("objective.policy_loss=sft", source=rows, resume=True).resume() == 0
    assert rows.at == 0


def test_a_batch_of_many_waves_gets_the_time_of_all_its_waves() -> None:
    paths = ("run.directory=run", "model.path=model", "data.train=train.jsonl")
    limits = (
        "rollout.max_concurrent_requests=256",
        "model.deadline_s=600.0",
        "reward.timeout_s=2.0",
        "rollout.timeout_s=60",
    )

    def sections(settings: Settings) -> tuple[ModelSettings, RolloutSettings, RewardSettings]:
        return settings.model, settings.rollout, settings.reward

    one = load_settings(None, [*paths, *limits])
    assert generation_deadline_s(*sections(one), num_samples=256, num_workers=4) == 2 * 600 + 64 * 2
    assert generation_deadline_s(*sections(one), num_samples=2048, num_workers=4) == 9 * 600 + 512 * 2
    following = load_settings(None, [*paths, *limits, "rollout.max_concurrent_requests=null"])
    assert generation_deadline_s(*sections(following), num_samples=256, num_workers=4) == 33 * 600 + 64 * 2, "at least 8 at once"
    two = load_settings(None, [*paths, *limits, "rollout.num_engines=2"])
    assert generation_deadline_s(*sections(two), num_samples=2048, num_workers=4) == 5 * 600 + 512 * 2
    slow = load_settings(None, [*paths, *limits, "rollout.timeout_s=700"])
    assert generation_deadline_s(*sections(slow), num_samples=256, num_workers=4) == 2 * 3 * (700 + 5) + 64 * 2, (
        "three attempts, each with the time until it is left to itself"
    )
    many = load_settings(None, [*paths, *limits, "rollout.num_engines=8"])
    assert generation_deadline_s(*sections(many), num_samples=8192, num_workers=4) == 5 * 600 + 2048 * 2
    played = load_settings(None, [*paths, *limits, "rollout.num_engines=8", "rollout.environment=a:B"])
    assert generation_deadline_s(*sections(played), num_samples=8192, num_workers=4) == 33 * 600 + 2048 * 2, "256 places"
    few = load_settings(None, [*paths, *limits, "rollout.max_concurrent_requests=64", "rollout.environment=a:B"])
    assert generation_deadline_s(*sections(few), num_samples=300, num_workers=4) == 6 * 600 + 75 * 2, "64 slots"
    agents = load_settings(None, [*paths, *limits, "rollout.agent={command: [a], max_processes: 10}"])
    assert generation_deadline_s(*sections(agents), num_samples=300, num_workers=4) == 31 * 600 + 75 * 2, "10 processes"


def test_an_engine_that_returns_gets_the_weights_of_the_others(make_run: MakeRun, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once during a rollout, and not between a training step and its publication, when ranks have other weights."""
    monkeypatch.setattr(watchdog, "MEANWHILE_S", 0.01)
    run = make_run("run.num_steps=9")
    run.begin(step=0)
    manager = run._manager
    newcomer = Manager(calls, fails_at=None, error=None)

    async def next_batch(step: int, *, progress: object) -> tuple[str, dict[str, Metric]]:
        manager.pool.join(newcomer)
        while manager.pool.has_newcomers:
            await asyncio.sleep(0.01)
        return "batch", {"rollout/renewed_groups": Sum(0)}

    async def position(*, step: int) -> dict[str, Any]:
        await asyncio.sleep(0.1)
        return {}

    async def publish(*, version: int, prove: Prove) -> dict[str, Metric]:
        calls.append(("publish", version))
        manager.pool.admit(manager.pool.membership.members)
        return {}

    monkeypatch.setattr(manager, "next_batch", next_batch)
    monkeypatch.setattr(manager, "position", position)
    monkeypatch.setattr(run._sync, "run", publish)
    calls.clear()
    run.train(run.next_batch(0), step=0)
    manager.pool.join(Manager(calls, fails_at=None, error=None))
    run._position(step=1)
    assert calls == [("publish", 0), ("train", "batch", 0)] and manager.pool.has_newcomers
    run.publish(version=1)
    assert calls[-1] == ("publish", 1) and not manager.pool.has_newcomers
