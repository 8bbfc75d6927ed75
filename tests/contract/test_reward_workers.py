"""What a reward function is promised of the processes that call it: isolation, a time limit, a log, and nothing left behind."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from pebble import ProcessFuture, ProcessPool

from megatron_rl.config.settings import RewardSettings
from megatron_rl.errors import UserError
from megatron_rl.rewards.runner import RewardRunner
from megatron_rl.types import Prompt, Reward, RewardOutcome, Sample, StopReason

MODULE = "rewards_under_test"


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in this folder, where a user's module is found without being on the Python path."""
    monkeypatch.chdir(Path(__file__).parent)
    yield


def make_sample(response: str, *, label: str | None = "4", metadata: dict[str, int] | None = None) -> Sample:
    prompt = Prompt(id="p", token_ids=np.array([1]), text="2+2=", label=label, metadata={"a": 1, "b": 2})
    empty = np.empty(0)
    return Sample(
        group_id="p",
        index=0,
        prompt=prompt,
        response_ids=empty,
        loss_mask=empty,
        rollout_log_probs=empty,
        weight_versions=empty,
        stop_reason=StopReason.STOP,
        response_text=response,
        metadata=metadata or {},
    )


def make_runner(name: str, **options: float) -> RewardRunner:
    return RewardRunner(RewardSettings(function=f"{MODULE}:{name}", **options))


def score_all(runner: RewardRunner, samples: list[Sample]) -> list[Reward]:
    async def work() -> list[Reward]:
        return await asyncio.gather(*map(runner.score, samples))

    return asyncio.run(work())


@pytest.mark.parametrize("name", ["exact", "exact_later"])
def test_a_right_and_a_wrong_answer_are_scored(name: str) -> None:
    with make_runner(name) as runner:
        assert runner.probe(make_sample("").prompt, response="4").value == 1.0
        assert [reward.value for reward in score_all(runner, [make_sample("4"), make_sample("5")])] == [1.0, 0.0]


def test_a_worker_has_the_users_keys_and_not_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SEARCH_KEY", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, "secret")
    with make_runner("keys") as runner:
        assert [reward.value for reward in score_all(runner, [make_sample("")])] == [10.0]


def test_a_clock_set_forward_is_no_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> Reward:
        runner.find_form()
        call = asyncio.create_task(runner.score(make_sample("2")))
        await asyncio.sleep(0.5)
        now_s = time.time()
        monkeypatch.setattr(time, "time", lambda: now_s + 3600)
        return await call

    with make_runner("waits") as runner:
        assert asyncio.run(work()).outcome is RewardOutcome.SCORED


def test_parts_of_a_reward_are_recorded_beside_it() -> None:
    with make_runner("parts") as runner:
        (reward,) = score_all(runner, [make_sample("abc")])
    assert reward.value == 0.5
    assert reward.components == {"format": 1.0, "length": 3.0}


def test_metadata_of_prompt_and_rollout_reach_the_function() -> None:
    with make_runner("echo_metadata") as runner:
        values = [reward.value for reward in score_all(runner, [make_sample(""), make_sample("", metadata={"b": 7})])]
    assert values == [12.0, 17.0]


def test_errors_and_timeouts_are_outcomes_and_the_rest_is_scored() -> None:
    responses = ["fine", "raise", "hang", "exit", "nan", "none", "text", "fine"]
    with make_runner("by_response", timeout_s=0.5) as runner:
        rewards = score_all(runner, [make_sample(response) for response in responses])
    outcomes = [reward.outcome for reward in rewards]
    error, scored = RewardOutcome.ERROR, RewardOutcome.SCORED
    assert outcomes == [scored, error, RewardOutcome.TIMEOUT, error, error, error, error, scored]
    messages = [reward.message for reward in rewards]
    assert "no such answer" in messages[1] and "by_response" in messages[1]
    assert "0.5 s" in messages[2]
    assert "exit status 3" in messages[3]
    assert "finite" in messages[4]
    assert "None of type NoneType, needs a number" in messages[5]


@pytest.fixture
def task_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the number of calls of every task that a worker is given."""
    real, sizes = ProcessPool.schedule, list[int]()

    def schedule(pool: ProcessPool, function: Any, **options: Any) -> Any:
        sizes.append(len(options["kwargs"]["samples"]))
        return real(pool, function, **options)

    monkeypatch.setattr(ProcessPool, "schedule", schedule)
    return sizes


def test_quick_calls_share_a_worker_and_keep_their_order(task_sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_rl.rewards.runner.TASK_S", 60.0)
    with make_runner("exact") as runner:
        score_all(runner, [make_sample("4")] * 2)
        assert task_sizes == [1, 1], "nothing is known of the first calls"
        rewards = score_all(runner, [make_sample(response) for response in ("4", "5", "4") * 50])
        later = score_all(runner, [make_sample("5")] * 3)
    assert [reward.value for reward in rewards] == [1.0, 0.0, 1.0] * 50
    assert [reward.value for reward in later] == [0.0] * 3
    assert task_sizes[2:] == [64, 64, 22, 3]


def test_slow_calls_go_to_the_workers_one_by_one(task_sizes: list[int]) -> None:
    with make_runner("waits") as runner:
        score_all(runner, [make_sample("0.03")])
        score_all(runner, [make_sample("0.03")] * 3)
    assert task_sizes == [1, 1, 1, 1]


@pytest.mark.parametrize("bad", ["hang", "exit", "raise"])
def test_calls_that_share_a_worker_have_separate_outcomes(bad: str, task_sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_rl.rewards.runner.TASK_S", 60.0)
    with make_runner("by_response", timeout_s=0.5) as runner:
        score_all(runner, [make_sample("fine")] * 2)
        rewards = score_all(runner, [make_sample(response) for response in ["fine", bad, "nan", "fine"]])
    outcome = RewardOutcome.TIMEOUT if bad == "hang" else RewardOutcome.ERROR
    assert [reward.outcome for reward in rewards] == [RewardOutcome.SCORED, outcome, RewardOutcome.ERROR, RewardOutcome.SCORED]
    assert task_sizes == [1, 1, 4] if bad == "raise" else [1, 1, 4, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("no_such_module:score", "cannot be imported.*No module named 'no_such_module'"),
        (f"{MODULE}:no_such_function", "has no no_such_function; it has: exact, "),
        (f"{MODULE}:NOT_A_FUNCTION", "is a int, needs a function"),
        (f"{MODULE}.exact", "needs the form package.module:function"),
        (f"{MODULE}:wrong_names", r"signature \(prompt, answer\) but is called as \(sample=..\)"),
        (f"{MODULE}:parts_without_total", "needs the key 'reward'"),
        ("megatron_rl.rewards.math:score", "holds no mathematical expression"),
    ],
)
def test_a_function_that_cannot_work_is_found_by_the_probe(function: str, message: str) -> None:
    with RewardRunner(RewardSettings(function=function)) as runner, pytest.raises(UserError, match=message):
        runner.probe(make_sample("", label="").prompt)


@pytest.mark.parametrize("response", ["raise", "nan", "none", "exit", "hang"])
def test_a_failing_probe_is_an_error(response: str) -> None:
    with make_runner("by_response", timeout_s=0.5) as runner, pytest.raises(UserError, match="gave no reward for a probe"):
        runner.probe(make_sample("").prompt, response=response)


def test_arguments_come_from_settings_and_experts_stay_behind() -> None:
    sample = replace(make_sample("4"), routed_experts=np.zeros((1, 1, 1), np.uint8))
    with RewardRunner(RewardSettings(function=f"{MODULE}:weighted", args={"weight": 2.5})) as runner:
        assert runner.probe(sample.prompt).value == 2.5
        assert score_all(runner, [sample])[0].value == 2.5
    with make_runner("weighted") as runner, pytest.raises(UserError, match=r"reward\.args\.weight is missing"):
        runner.probe(sample.prompt)


def test_workers_import_nothing_heavy() -> None:
    with make_runner("heavy_modules") as runner:
        assert score_all(runner, [make_sample("")])[0].value == 0.0


def test_a_thousand_rewards_come_in_order() -> None:
    with make_runner("exact") as runner:
        rewards = score_all(runner, [make_sample(response) for response in ("4", "5", "5", "4") * 256])
    assert [reward.value for reward in rewards] == [1.0, 0.0, 0.0, 1.0] * 256


def test_the_death_of_idle_workers_costs_no_reward() -> None:
    with make_runner("worker") as runner:
        (first,) = score_all(runner, [make_sample("")])
        assert first.value is not None
        for _ in range(2):
            os.kill(int(first.value), signal.SIGKILL)
            rewards = score_all(runner, [make_sample("")] * 20)
            assert {reward.outcome for reward in rewards} == {RewardOutcome.SCORED}
            assert first.value not in {reward.value for reward in rewards}
            first = rewards[0]


def test_a_batch_whose_workers_are_always_killed_gives_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = []

    def broken(pool: ProcessPool, *args: object, **options: object) -> ProcessFuture[Reward]:
        tasks.append(pool)
        future: ProcessFuture[Reward] = ProcessFuture()
        future.set_exception(BrokenProcessPool("All workers expired"))
        return future

    monkeypatch.setattr("megatron_rl.rewards.runner.TASK_S", 60.0)
    with make_runner("exact") as runner:
        score_all(runner, [make_sample("")])
        monkeypatch.setattr(ProcessPool, "schedule", broken)
        rewards = score_all(runner, [make_sample("")] * 4)
    assert {reward.outcome for reward in rewards} == {RewardOutcome.ERROR}
    assert {reward.message for reward in rewards} == {"the reward workers were killed before this call was at work, in 3 attempts"}
    assert len(tasks) == 3, "that of all four, three times"


def test_a_call_that_a_broken_pool_forgot_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    real, forgotten = ProcessPool.schedule, []

    def forget_first(pool: ProcessPool, *args: Any, **options: Any) -> Any:
        if forgotten:
            return real(pool, *args, **options)
        forgotten.append(pool)
        pool.stop()
        return ProcessFuture()

    with make_runner("exact") as runner:
        score_all(runner, [make_sample("")])
        monkeypatch.setattr(ProcessPool, "schedule", forget_first)
        assert score_all(runner, [make_sample("4")])[0].value == 1.0


@pytest.mark.parametrize("end", ["hang", "exit", "close"])
def test_no_process_that_a_reward_started_outlives_its_worker(end: str, tmp_path: Path) -> None:
    noted = tmp_path / "pids"
    with make_runner("leaves_processes", timeout_s=1.0) as runner:
        score_all(runner, [make_sample(end, label=str(noted))])
        pids = [int(pid) for pid in noted.read_text().split()]
        # The second has left the session; nobody knows it any more when its parent has ended by itself.
        known, unknown = (pids[:1], pids[1:]) if end == "exit" else (pids, [])
        if end != "close":
            assert not psutil.wait_procs(running(known), timeout=10)[1]
        left = running(unknown)
        assert len(left) == len(unknown)
        for process in left:
            process.kill()
    assert not psutil.wait_procs(running(pids), timeout=10)[1]


def running(pids: list[int]) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]


def test_a_killed_driver_ends_its_workers_and_their_processes(tmp_path: Path) -> None:
    noted = tmp_path / "pids"
    script = (
        "if __name__ == '__main__':\n"
        "    import asyncio, sys, test_reward_workers\n"
        "    runner = test_reward_workers.make_runner('leaves_processes')\n"
        "    asyncio.run(runner.score(test_reward_workers.make_sample('', label=sys.argv[1])))\n"
        "    print('scored', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    (tmp_path / "driver.py").write_text(script)
    command = [sys.executable, str(tmp_path / "driver.py"), str(noted)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    driver = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert driver.stdout is not None
    assert driver.stdout.readline() == "scored\n"
    children = [psutil.Process(int(pid)) for pid in noted.read_text().split()]
    driver.kill()
    driver.communicate(timeout=10)
    assert not psutil.wait_procs(children, timeout=10)[1]


def test_what_a_reward_prints_goes_to_the_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "logs" / "rewards.log"
    with RewardRunner(RewardSettings(function=f"{MODULE}:prints"), log_path=log) as runner:
        score_all(runner, [make_sample("one"), make_sample("two")])
    assert sorted(log.read_text().splitlines()) == ["printed: one", "printed: two", "warned: one", "warned: two"]
    assert capfd.readouterr() == ("", "")


def test_without_a_log_prints_of_a_reward_stay_out_of_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    with make_runner("prints") as runner:
        score_all(runner, [make_sample("one")])
    printed = capfd.readouterr()
    assert printed.out == "" and sorted(printed.err.splitlines()) == ["printed: one", "warned: one"]


def test_failures_print_nothing_and_begin_with_what_happened(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    responses = ["raise", "exit", "raise", "hang", "raise", "fine"]
    with RewardRunner(RewardSettings(function=f"{MODULE}:by_response", timeout_s=0.5), log_path=tmp_path / "rewards.log") as runner:
        rewards = score_all(runner, [make_sample(response) for response in responses])
        gc.collect()
    assert caplog.text == "", "asyncio prints 14 lines for each failure that nobody has asked for"
    assert rewards[0].message.splitlines()[:2] == ["KeyError: 'no such answer'", "Traceback (most recent call last):"]


HUGE = (
    "reward.function rewards_under_test:by_response returned a number that no float holds "
    "(int too large to convert to float), needs a finite number"
)


@pytest.mark.parametrize(
    ("response", "message"),
    [("sys.exit", "SystemExit: 3"), ("interrupt", "KeyboardInterrupt"), ("huge", HUGE)],
)
def test_an_exit_an_interrupt_or_a_huge_number_is_an_error(response: str, message: str) -> None:
    with make_runner("by_response") as runner:
        worker, error, fine = score_all(runner, [make_sample("fine"), make_sample(response), make_sample("fine")])
    assert (worker.value, fine.value, error.outcome) == (1.0, 1.0, RewardOutcome.ERROR)
    assert error.message.splitlines()[0] == message


@pytest.mark.parametrize(("response", "outcome"), [("fine", RewardOutcome.SCORED), ("hang", RewardOutcome.TIMEOUT)])
def test_a_daemon_of_a_reward_ends_with_its_worker(tmp_path: Path, response: str, outcome: RewardOutcome) -> None:
    with make_runner("makes_a_daemon", timeout_s=5.0) as runner:
        (reward,) = score_all(runner, [make_sample(response, label=str(tmp_path / "pid"))])
        assert reward.outcome is outcome
        daemon = int((tmp_path / "pid").read_text())
    _, alive = psutil.wait_procs([psutil.Process(daemon)] if psutil.pid_exists(daemon) else [], timeout=10)
    assert not alive


def test_a_worker_that_is_stopped_while_idle_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_rl.rewards.runner.NAMED_S", 0.1)
    monkeypatch.setattr("megatron_rl.rewards.runner.REWARD_TAKE_S", 20.0)
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        # From now on without patience; a worker that starts on a busy machine takes seconds.
        monkeypatch.setattr("megatron_rl.rewards.runner.REWARD_TAKE_S", 0.1 if "(stopped)" in text else 20.0)

    with RewardRunner(RewardSettings(function=f"{MODULE}:worker"), note=note) as runner:
        (first,) = score_all(runner, [make_sample("")])
        assert first.value is not None
        os.kill(int(first.value), signal.SIGSTOP)
        notes.clear()
        rewards = score_all(runner, [make_sample("") for _ in range(3)])
    assert all(reward.value not in (None, first.value) for reward in rewards)
    named, replaced = (
        [text for text in notes if "(stopped)" in text],
        [text for text in notes if "are replaced: none has taken a call" in text],
    )
    assert f"processes: {int(first.value)} (stopped)" in named[0] and replaced
