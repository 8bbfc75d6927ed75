"""The main job with all its real parts: Megatron ranks over gloo, an SGLang server, Ray, the buffer. Small, but nothing is replaced."""

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from small_run import beyond_loopback, exposures, listeners, metrics, rl_arguments
from transformers import AutoModelForCausalLM

NO_RESTARTS = ("rollout.engine_restarts=0", "runtime.restarts=0")
ONE_RANK = "training.topology.num_ranks=1"


def test_supervised_start_then_rl_until_a_signal(task: Path, tmp_path: Path, start: Callable[..., Any]) -> None:
    sft, rl = tmp_path / "sft", tmp_path / "rl"
    warm = start(
        "train", "examples/arithmetic/sft.yaml", f"run.directory={sft}", f"model.path={task}/model", f"data.train={task}/supervised.jsonl",
        "run.num_steps=12", "training.schedule.warmup_steps=2", "run.export_interval=6",
    )  # fmt: skip
    assert warm.wait() == 0, warm.output
    assert "statistics of logits: torch, for float32 on cpu" in warm.output
    losses = [row["train/loss"] for step, row in sorted(metrics(sft).items()) if step]
    assert losses[-1] < losses[0] - 0.3

    exported = [AutoModelForCausalLM.from_pretrained(sft / "exports" / f"step-0000{step}") for step in ("06", "12")]
    saved = AutoModelForCausalLM.from_pretrained(sft / "huggingface")
    differ = [
        any(not ours.equal(theirs) for ours, theirs in zip(model.parameters(), saved.parameters(), strict=True)) for model in exported
    ]
    assert differ == [True, False]

    # The run would go on, and is ended.
    run = start(*rl_arguments(task, rl, "run.num_steps=1000", f"model.path={sft}/huggingface", "run.save_interval=2"))
    summary = assert_ends_in_order(run, rl, number=signal.SIGTERM, status=75)
    assert 0 <= summary["evaluation_before"]["greedy/accuracy"] <= 1
    assert summary["peak_memory_bytes"] > 2**29
    steps = metrics(rl)
    assert steps[0]["weights/parity_mean"] <= 1e-4
    assert [steps[step]["weights/version"] for step in (0, 1, 2)] == [0, 1, 2]
    assert all(steps[step]["train/log_prob_diff"] <= 1e-4 for step in (1, 2))
    assert all(steps[step]["rollout/num_samples"] == 64 for step in (1, 2))
    assert all(steps[step]["rollout/staleness_max"] == 0 for step in (1, 2))


def steps_of(directory: Path) -> list[int]:
    """The steps of metrics.jsonl, line by line."""
    return [json.loads(line)["step"] for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("change", ["noise", "zero", "reversed", "random"])
def test_no_step_is_made_on_samples_that_were_changed(task: Path, tmp_path: Path, start: Callable[..., Any], change: str) -> None:
    directory = tmp_path / "run"
    changed = ("rollout.function=tests.e2e.changed_samples:rollout", f"rollout.args.change={change}")
    run = start(*rl_arguments(task, directory, "run.num_steps=3", "eval={}", "run.save_interval=1", ONE_RANK, *changed))
    assert run.wait() == 1, run.output
    said = " ".join(run.output.split())
    assert re.search(
        r"step 2: engine and trainer disagree about the samples: over \d+ tokens of weight version 1, the trainer's own", said
    ), said
    assert "likeliest cause: tokens, log-probs or versions of the samples are not as engines returned them" in said
    looks = {"noise": "log-probs that were changed a little", "zero": "log-probs that are missing", "reversed": "tokens in reversed order"}
    assert f"changed_samples:rollout; it looks like {looks.get(change, 'other tokens than those that were scored')}" in said
    assert "train/loss" in metrics(directory)[1] and 2 not in metrics(directory)
    assert sorted(path.name for path in (directory / "checkpoints").iterdir()) == ["step-000001"]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_leaves_a_checkpoint_and_no_process(
    task: Path, tmp_path: Path, start: Callable[..., Any], number: signal.Signals, status: int
) -> None:
    """Without held-out data, which is the default."""
    run = start(*rl_arguments(task, tmp_path / "run", "run.num_steps=1000", "run.save_interval=2", "eval={}"))
    assert_ends_in_order(run, tmp_path / "run", number=number, status=status)


def assert_ends_in_order(run: Any, directory: Path, *, number: signal.Signals, status: int) -> dict[str, Any]:
    """Send the signal after step 2: SIGINT to the process group, as a terminal does; SIGTERM to every process, as Slurm does.

    Returns summary.json.
    """
    run.wait_for("  2/1000")
    deadline = time.monotonic() + 30
    # A process that changes its threads or files meanwhile can be missed.
    while not {"sglang::scheduler", "raylet", "gcs_server"} <= (by_process := listeners(run)).keys():
        assert time.monotonic() < deadline, by_process
    assert beyond_loopback(by_process) == {}
    key = run.members("/raylet ")[0].environ()["RAY_AUTH_TOKEN"]
    assert len(key) >= 32 and exposures(key, directory.parent) == []
    assert [each.name() for each in run.members("multiprocessing.spawn") if "RAY_AUTH_TOKEN" in each.environ()] == []
    assert all(f"start: {part} ..." in run.output for part in ("reward workers", "Ray", "ranks", "engines"))
    if number == signal.SIGINT:
        os.killpg(run.process.pid, number)
    else:
        for process in (psutil.Process(run.process.pid), *run.descendants()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
    assert run.wait() == status, run.output
    sentence = rf"megatron-rl: ended by {number.name}; the same command with --resume continues after step (\d+)"
    ended = re.fullmatch(sentence, run.output.splitlines()[-1])
    assert ended is not None, run.output
    assert "***" not in run.output and "logging.cc" not in run.output and "Traceback" not in run.output
    assert run.survivors() == []
    summary: dict[str, Any] = json.loads((directory / "summary.json").read_text())
    assert summary["status"] == f"interrupted: {number.name}" and summary["steps"] == int(ended[1]) >= 2
    assert {"start", "start_ray", "start_ranks", "start_engines", "start_reward_workers"} <= summary["seconds"].keys()
    assert steps_of(directory) == list(range(summary["steps"] + 1))
    assert (directory / "curves.png").stat().st_size > 10_000 and summary["go_on"] in (directory / "report.html").read_text()
    return summary


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        # The actor's name is its process title; the server is the one with the module on its command line.
        pytest.param("ray::TrainerWorker", r"WorkerDiedError: Megatron rank \d died", id="rank"),
        pytest.param(
            "megatron_rl.engines.sglang_server", r"SGLang server at http\S+ died \(killed by signal 9\)", id="engine that stays away"
        ),
    ],
)
def test_death_of_a_process_surfaces_and_leaves_nothing(
    task: Path, tmp_path: Path, start: Callable[..., Any], pattern: str, message: str
) -> None:
    run = start(*rl_arguments(task, tmp_path / "run", "run.num_steps=1000", "run.save_interval=0", *NO_RESTARTS))
    run.wait_for("  1/1000")
    run.members(pattern)[0].kill()
    assert run.wait() == 1, run.output
    assert re.search(message, run.output), run.output
    assert run.survivors() == []
    assert re.match(f"failed: .*{message}", json.loads((tmp_path / "run" / "summary.json").read_text())["status"])


@pytest.mark.slow
def test_a_run_whose_ray_dies_goes_on_from_its_checkpoint(task: Path, tmp_path: Path, start: Callable[..., Any]) -> None:
    """Its control service: a question to it blocks until Ray ends the driver with a status and words of its own."""
    directory = tmp_path / "run"
    run = start(*rl_arguments(task, directory, "run.num_steps=1000", "run.save_interval=1"))
    run.wait_for("  2/1000")
    run.members("gcs/gcs_server")[0].kill()
    assert run.wait() == 75, run.output
    sentence = r"megatron-rl: (Ray's control service at \S+ is gone); the same command with --resume continues after step (\d+)"
    ended = re.fullmatch(sentence, run.output.splitlines()[-1])
    assert ended is not None, run.output
    assert "rpc_client.h" not in run.output and "Traceback" not in run.output
    assert run.survivors() == []
    summary = json.loads((directory / "summary.json").read_text())
    # Of the last step trained the checkpoint may not have been complete.
    assert summary["status"] == f"failed: WorkerDiedError: {ended[1]}" and 2 <= int(ended[2]) <= summary["steps"] <= int(ended[2]) + 1
    assert max(path.name for path in (directory / "checkpoints").iterdir()) == f"step-{int(ended[2]):06d}"
    again = start(*rl_arguments(task, directory, f"run.num_steps={summary['steps'] + 1}", "run.save_interval=1"), "--resume")
    assert again.wait() == 0, again.output
    assert steps_of(directory) == list(range(summary["steps"] + 2))


@pytest.mark.slow
def test_the_run_goes_on_without_an_engine_that_stays_away(task: Path, tmp_path: Path, start: Callable[..., Any]) -> None:
    """Killed in the middle of a rollout, which its reward function keeps going."""
    words = (
        "run.num_steps=4",
        "run.save_interval=0",
        "eval.interval=0",
        "reward.function=tests.e2e.one_by_one:slow_score",
        "reward.args.seconds=0.05",
        "rollout.num_engines=2",
        *NO_RESTARTS,
    )
    run = start(*rl_arguments(task, tmp_path / "run", *words))
    run.wait_for("\n1/4 ")
    run.members("megatron_rl.engines.sglang_server")[0].kill()
    assert run.wait() == 0, run.output
    assert re.search("note: the run goes on with 1 of 2 engines, because one ended: .*killed by signal 9", run.output), run.output
    steps = metrics(tmp_path / "run")
    assert [steps[step]["weights/version"] for step in range(5)] == [0, 1, 2, 3, 4]
    assert all(steps[step]["train/log_prob_diff"] <= 1e-4 for step in range(1, 5)), "every engine gets every version"
    assert run.survivors() == []


@pytest.mark.slow
def test_an_engine_that_answers_nonsense_is_replaced(task: Path, tmp_path: Path, start: Callable[..., Any]) -> None:
    words = ("run.num_steps=4", "run.save_interval=0", "rollout.function=tests.e2e.lying_engine:rollout")
    run = start(*rl_arguments(task, tmp_path / "run", *words))
    assert run.wait() == 0, run.output
    fault = r"engine 0 is started again.* was ended: the engine at http\S+ gave an answer of another form than SGLang's \(KeyError"
    assert re.search(fault, run.output) and "engine 0 is back after" in run.output, run.output
    steps = metrics(tmp_path / "run")
    assert [steps[step]["weights/version"] for step in range(5)] == [0, 1, 2, 3, 4]
    assert sum(steps[step]["engine/restarts"] for step in range(1, 5)) == 1
    assert all(steps[step]["train/log_prob_diff"] <= 1e-4 and steps[step]["rollout/failures"] == 0 for step in range(1, 5))
    assert run.survivors() == []


@pytest.mark.slow
def test_a_reward_that_keeps_failing_stops_with_its_traceback(task: Path, tmp_path: Path, start: Callable[..., Any]) -> None:
    run = start(*rl_arguments(task, tmp_path / "run", "run.num_steps=5"), "--reward", "tests.e2e.failing_reward:score")
    assert run.wait() == 2, run.output
    assert "more than reward.max_error_rate 5.0%" in run.output
    assert "this grader is broken" in run.output
    assert run.survivors() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(("weights.transport=disk", "rollout.num_engines=2"), id="disk, two engines"),
        pytest.param(("rollout.num_engines=2", "training.topology.tp=2", "training.topology.sequence_parallel=true"), id="broadcast, tp2"),
        pytest.param(
            ("training.optimizer_steps_per_batch=2", "training.optimizer.use_distributed_optimizer=true"), id="two optimizer steps"
        ),
    ],
)
def test_engines_follow_the_trainer(task: Path, tmp_path: Path, start: Callable[..., Any], overrides: tuple[str, ...]) -> None:
    directory = tmp_path / "run"
    run = start(*rl_arguments(task, directory, "run.num_steps=3", *overrides))
    assert run.wait() == 0, run.output
    steps = metrics(directory)
    assert all(steps[step]["train/log_prob_diff"] <= 1e-4 for step in (1, 2, 3))
    assert steps[3]["weights/version"] == 3
    assert run.survivors() == []


@pytest.mark.slow
def test_the_best_checkpoint_stays_where_a_run_gets_no_better(task: Path, tmp_path: Path, start: Callable[..., Any]) -> None:
    """The first step is far too large, so that the last evaluations are worse than an earlier one."""
    directory, best = tmp_path / "run", ("eval.sets.greedy.keep_best=reward", "eval.sets.greedy.stop_after=2")
    few = ("run.num_steps=9", "run.save_interval=1", "run.keep_checkpoints=1", "eval.interval=1", "training.optimizer.lr=0.1")
    run = start(*rl_arguments(task, directory, *best, *few, "training.schedule.warmup_steps=3"))
    assert run.wait() == 0, run.output
    rows = metrics(directory)
    rewards = {step: row["eval/greedy/reward"] for step, row in rows.items()}
    kept = max(rewards, key=lambda step: rewards[step])
    assert kept + 2 == max(rows) < 9, rewards
    reason = f"the set greedy got no better in 2 evaluations since step {kept}"
    assert reason in " ".join(run.output.split()), run.output
    left = {int(path.name.removeprefix("step-")) for path in (directory / "checkpoints").glob("step-*")}
    assert left == {kept, max(rows)} - {0}
