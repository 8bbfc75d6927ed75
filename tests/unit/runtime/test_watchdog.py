import asyncio
import concurrent.futures
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from ray.exceptions import OutOfMemoryError, RayActorError

from megatron_rl.errors import DeadlineError, EngineError, UserError, WorkerDiedError
from megatron_rl.runtime import watchdog as module
from megatron_rl.runtime.watchdog import Watchdog

Future = concurrent.futures.Future


@pytest.fixture
def watchdog() -> Iterator[Watchdog]:
    """One that watches nobody yet."""
    with Watchdog() as made:
        yield made


def finished(value: object) -> Future:
    future: Future = Future()
    future.set_result(value)
    return future


class Call:
    """What stands for a call of an actor: it has a future."""

    def __init__(self, future: Future) -> None:
        self.future = lambda: future


async def answer(value: int) -> int:
    await asyncio.sleep(0)
    return value


def test_results_come_in_order_whatever_they_come_from(watchdog: Watchdog) -> None:
    assert watchdog.wait_for_all([finished(1), answer(2), Call(finished(3))], name="work", owner="part", timeout_s=1) == [1, 2, 3]
    assert watchdog.wait(answer(4), name="work", owner="part", timeout_s=1) == 4


def test_the_deadline_names_the_wait_and_who_is_missing(watchdog: Watchdog) -> None:
    with pytest.raises(DeadlineError, match=r"weight sync did not finish within 0 s, still waiting for: engine 1, engine 2$"):
        watchdog.wait_for_all([finished(1), Future(), Future()], name="weight sync", owner="engine", timeout_s=0.05)
    with pytest.raises(DeadlineError, match=r"weight sync did not finish within 0 s, .*: engine 0; see model\.deadline_s$"):
        watchdog.wait_for_all([Future()], name="weight sync", owner="engine", timeout_s=0.05, see="model.deadline_s")


def test_a_coroutine_past_its_deadline_is_named_and_cancelled(watchdog: Watchdog) -> None:
    ended = threading.Event()

    async def endless() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    with pytest.raises(DeadlineError, match=r"rollout of step 3 did not finish within 0 s, still waiting for: the engines$"):
        watchdog.wait(endless(), name="rollout of step 3", owner="the engines", timeout_s=0.05)
    assert ended.wait(5)


def test_an_end_past_its_deadline_is_named(watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSE_S", 0.05)

    @asynccontextmanager
    async def opened() -> AsyncIterator[int]:
        yield 1
        await asyncio.sleep(3600)

    with pytest.raises(DeadlineError, match=r"the end of opening did not finish within 0\.05 s, still waiting for: it$"):  # noqa: SIM117
        with watchdog.entered(opened(), name="opening", owner="it", timeout_s=5):
            pass


def test_code_that_exits_on_the_event_loop_ends_the_wait_for_it(watchdog: Watchdog) -> None:
    async def leave() -> None:
        sys.exit(3)

    with pytest.raises(SystemExit):
        watchdog.wait(leave(), name="rollout", owner="the engines", timeout_s=30)
    assert watchdog.wait(answer(4), name="work", owner="part", timeout_s=30) == 4


def test_a_wait_that_fails_cancels_what_it_waited_for() -> None:
    ended = threading.Event()

    async def endless() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    with Watchdog() as watchdog:
        vital: Future = Future()
        watchdog.watch("engine 0", vital)
        threading.Timer(0.05, vital.set_exception, [EngineError("boom")]).start()
        with pytest.raises(EngineError):
            watchdog.wait(endless(), name="rollout", owner="the engines", timeout_s=30)
        assert ended.wait(10)


def test_the_death_of_a_watched_actor_ends_every_wait_at_once(watchdog: Watchdog) -> None:
    vital: Future = Future()
    watchdog.watch("engine 0", vital)
    threading.Timer(0.1, vital.set_exception, [EngineError("engine died, its log ends with: boom")]).start()
    # Otherwise the wait would end in a DeadlineError.
    with pytest.raises(EngineError, match="boom"):
        watchdog.wait_for_all([Future()], name="rollout", owner="part", timeout_s=30)


def test_the_death_behind_a_failed_call_is_reported(watchdog: Watchdog) -> None:
    vital: Future = Future()
    watchdog.watch("engine 0", vital)
    refused: Future = Future()
    refused.set_exception(EngineError("the engine cannot be reached for /pause_generation"))
    threading.Timer(0.3, vital.set_exception, [EngineError("engine died (killed by signal 9)")]).start()
    with pytest.raises(EngineError, match="killed by signal 9"):
        watchdog.wait_for_all([refused], name="weight sync", owner="engine", timeout_s=30)


def test_a_failed_call_without_a_death_behind_it_is_told_itself(watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_rl.runtime.watchdog.CAUSE_S", 0.05)

    async def refused() -> None:
        raise EngineError("cannot be reached")

    watchdog.watch("engine 0", Future())
    with pytest.raises(EngineError, match="cannot be reached"):
        watchdog.wait(refused(), name="weight sync", owner="engine", timeout_s=30)


@pytest.mark.timeout(60)
def test_a_mistake_of_the_user_is_raised_without_a_search(watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_rl.runtime.watchdog.CAUSE_S", 3600.0)

    async def mistaken() -> None:
        raise UserError("no such reward")

    watchdog.watch("engine 0", Future())
    with pytest.raises(UserError, match="no such reward"):
        watchdog.wait(mistaken(), name="rollout", owner="the engines", timeout_s=30)


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_death_ends_the_wait_unless_the_run_continues(watchdog: Watchdog, goes_on: bool) -> None:
    """What is asked may itself wait, and is asked once."""
    asked: list[str] = []

    def go_on(error: Exception) -> bool:
        asked.append(f"{type(error).__name__}: {error}")
        return bool(watchdog.wait(answer(goes_on), name="leaving", owner="the engines", timeout_s=5))

    vital: Future = Future()
    watchdog.watch("engine 0", vital, goes_on=go_on)
    vital.set_exception(EngineError("boom"))
    work: Future = Future()
    threading.Timer(0.1, work.set_result, [7]).start()
    if goes_on:
        assert watchdog.wait_for_all([work], name="rollout", owner="part", timeout_s=30) == [7]
        assert watchdog.wait(answer(4), name="rollout", owner="part", timeout_s=30) == 4
    else:
        with pytest.raises(EngineError, match="boom"):
            watchdog.wait_for_all([work], name="rollout", owner="part", timeout_s=30)
    assert asked == ["EngineError: boom"]


@pytest.mark.parametrize("vital", [False, True])
def test_a_step_outlasts_an_engine_lost_for_good(watchdog: Watchdog, vital: bool) -> None:
    """The next wait ends by it, and nobody is asked again. The death of a rank ends each."""
    asked, died, work = list[str](), Future(), Future()
    died.set_exception(EngineError("boom"))
    watchdog.watch("engine 0", died, goes_on=None if vital else lambda error: bool(asked.append(str(error))))
    threading.Timer(0.1, work.set_result, [7]).start()
    if not vital:
        assert watchdog.wait_for_all([work], name="training", owner="Megatron rank", timeout_s=30, outlasts=True) == [7]
    for _ in range(2):
        with pytest.raises(EngineError, match="boom"):
            watchdog.wait_for_all([Future()], name="training", owner="part", timeout_s=30, outlasts=vital)
    assert asked == ["boom"] * (not vital)


def test_work_failed_by_a_death_ends_with_that_death(watchdog: Watchdog) -> None:
    vital, refused = Future(), Future()
    watchdog.watch("engine 0", vital, goes_on=lambda error: True)
    refused.set_exception(EngineError("the engine cannot be reached for /pause_generation"))
    threading.Timer(0.1, vital.set_exception, [EngineError("engine died (killed by signal 9)")]).start()
    with pytest.raises(EngineError, match="killed by signal 9"):
        watchdog.wait_for_all([refused], name="weight sync", owner="engine", timeout_s=30)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            RayActorError(
                error_msg="The actor died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits. There are more."
            ),
            r"Megatron rank 1 died: its process ended \(SYSTEM_ERROR: Worker unexpectedly exits\)$",
        ),
        (
            # As Ray 2.60 words it.
            OutOfMemoryError(
                "2 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 127.0.0.1, ID: 55) was 3.94GB used "
                "/ 23.54GB limit (0.167469)\nOOM kill reason: Memory usage 4228935680B exceeded threshold of 252765008B"
            ),
            r"Megatron rank 1 died: its process was ended by Ray, because the machine runs out of memory \(3.94GB used / 23.54GB\)$",
        ),
    ],
)
def test_a_killed_process_is_named_as_a_death_in_one_sentence(watchdog: Watchdog, error: Exception, sentence: str) -> None:
    vital: Future = Future()
    vital.set_exception(error)
    watchdog.watch("Megatron rank 1", vital)
    with pytest.raises(WorkerDiedError, match=sentence):
        watchdog.wait_for_all([Future()], name="training", owner="Megatron rank", timeout_s=30)


def test_nobody_is_asked_about_an_actor_that_ends_quietly(watchdog: Watchdog) -> None:
    watchdog.watch("engine 0", finished(None), goes_on=lambda error: True)
    with pytest.raises(WorkerDiedError, match="engine 0 ended although nobody asked it to"):
        watchdog.wait_for_all([Future()], name="rollout", owner="part", timeout_s=30)


def test_a_watched_actor_that_ends_quietly_is_an_error_too(watchdog: Watchdog) -> None:
    watchdog.watch("Megatron rank 3", finished(None))
    with pytest.raises(WorkerDiedError, match="Megatron rank 3 ended"):
        watchdog.wait_for_all([Future()], name="training", owner="Megatron rank", timeout_s=30)


def test_the_first_failure_does_not_wait_for_the_others(watchdog: Watchdog) -> None:
    broken: Future = Future()
    broken.set_exception(RuntimeError("rank 1 broke"))
    with pytest.raises(RuntimeError, match="rank 1 broke"):
        watchdog.wait_for_all([Future(), broken], name="training", owner="Megatron rank", timeout_s=30)


def test_nobody_is_watched_after_forget(watchdog: Watchdog) -> None:
    watchdog.watch("engine 0", finished(None))
    watchdog.forget()
    assert watchdog.wait_for_all([finished(5)], name="stop", owner="engine", timeout_s=1) == [5]


def test_an_asynchronous_context_is_always_left(watchdog: Watchdog) -> None:
    log: list[str] = []

    @asynccontextmanager
    async def opened() -> AsyncIterator[str]:
        log.append(f"opened in {threading.current_thread().name}")
        yield "value"
        log.append("closed")

    with pytest.raises(KeyboardInterrupt), watchdog.entered(opened(), name="opening", owner="it", timeout_s=5) as value:
        assert value == "value" and log == ["opened in rollout-loop"]
        raise KeyboardInterrupt
    assert log[1:] == ["closed"]


def test_something_is_done_while_a_coroutine_is_waited_for(watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MEANWHILE_S", 0.01)
    done: list[int] = []

    async def until_done(count: int) -> int:
        while len(done) < count:
            await asyncio.sleep(0.001)
        return count

    assert watchdog.wait(until_done(3), name="rollout", owner="the engines", timeout_s=30, meanwhile=lambda: done.append(1)) == 3
    with pytest.raises(DeadlineError, match="rollout did not finish within 0 s"):
        watchdog.wait(until_done(10**6), name="rollout", owner="the engines", timeout_s=0.1, meanwhile=lambda: done.append(1))

    def fail() -> None:
        raise UserError("the disk is full")

    with pytest.raises(UserError, match="the disk is full"):
        watchdog.wait(until_done(10**6), name="rollout", owner="the engines", timeout_s=30, meanwhile=fail)
    watchdog.watch("Megatron rank 0", failed := Future())
    failed.set_exception(RayActorError())
    with pytest.raises(WorkerDiedError, match="Megatron rank 0"):
        watchdog.wait(until_done(10**6), name="rollout", owner="the engines", timeout_s=30, meanwhile=lambda: done.append(1))


def test_a_coroutine_whose_wait_is_left_is_cancelled() -> None:
    began, ended = threading.Event(), threading.Event()

    async def work() -> None:
        began.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    def leave(*_: object, **__: object) -> None:
        assert began.wait(10)
        raise SystemExit(143)

    with Watchdog() as watchdog:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
            patch.setattr(watchdog, "_wait", leave)
            watchdog.wait(work(), name="a rollout", owner="the engines", timeout_s=60)
        assert ended.wait(10)


def test_a_plug_in_that_blocks_the_event_loop_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is released by the note, the second only after the deadline."""
    monkeypatch.setattr(module, "MEANWHILE_S", 0.01)
    monkeypatch.setattr(module, "NAMED_S", 0.0)
    notes, began, released = list[str](), threading.Event(), threading.Event()

    async def block() -> None:
        began.set()
        assert released.wait(30)

    async def rollout(name: str) -> None:
        await asyncio.create_task(block(), name=name)

    def note(text: str) -> None:
        notes.append(text)
        if len(notes) == 1:
            released.set()

    def wait(name: str, *, timeout_s: float) -> None:
        work = asyncio.run_coroutine_threadsafe(rollout(name), watchdog._loop)
        assert began.wait(30)
        watchdog.wait_for_all([work], name="rollout", owner="engine", timeout_s=timeout_s)

    with Watchdog(note=note) as watchdog:
        wait("rollout.function my:rollout for prompt 0-3", timeout_s=30)
        began.clear()
        released.clear()
        with pytest.raises(DeadlineError, match="still waiting for: engine 0; another has kept the event loop for"):
            wait("another", timeout_s=0.1)
        released.set()
    first, second = notes
    assert first.startswith("rollout.function my:rollout for prompt 0-3 has kept the event loop for") and "asyncio.to_thread" in first
    assert "threading.py:" in first and second.startswith("another")


def test_a_coroutine_ends_with_the_death_of_a_watched_actor(watchdog: Watchdog) -> None:
    """A new life of the run must not meet a sync of the one before."""
    ended, died = threading.Event(), Future()

    async def sync() -> None:
        try:
            died.set_exception(RayActorError())
            await asyncio.Event().wait()
        finally:
            ended.set()

    watchdog.watch("Megatron rank 0", died)
    with pytest.raises(WorkerDiedError):
        watchdog.wait(sync(), name="weight sync", owner="the engines", timeout_s=30)
    assert ended.wait(timeout=30)


def test_a_wait_is_late_against_its_usual_time_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LATE_S", 0.2)
    monkeypatch.setattr(module, "MEANWHILE_S", 0.02)
    late: list[module.OpenWait] = []
    with Watchdog(late=late.append) as watchdog:
        # The first of a kind has no usual time.
        assert watchdog.wait(asyncio.sleep(0.4, 7), name="save of step 1", owner="rank", timeout_s=9) == 7
        for step in range(2, 5):
            watchdog.wait(finished(step), name=f"training of step {step}", owner="rank", timeout_s=9)
        assert watchdog.wait(asyncio.sleep(0.1, 7), name="training of step 5", owner="rank", timeout_s=9) == 7
        assert late == []
        with pytest.raises(DeadlineError):
            watchdog.wait_for_all([finished(1), Future(), Future()], name="training of step 6", owner="rank", timeout_s=0.6)
        (wait,) = late
        assert (wait.name, wait.owners, wait.timeout_s) == ("training of step 6", ("rank 1", "rank 2"), 0.6)
        assert wait.seconds > 0.2 and wait.state().late and wait.usual_s is not None and wait.usual_s < 0.2
        assert watchdog.open_waits == []


def test_what_is_told_of_a_late_wait_delays_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LATE_S", 0.05)
    monkeypatch.setattr(module, "MEANWHILE_S", 0.02)
    told, go_on = list[str](), threading.Event()

    def late(wait: module.OpenWait) -> None:
        told.append(wait.name)
        go_on.wait(timeout=2)

    with Watchdog(late=late) as watchdog:
        for step in range(1, 4):
            watchdog.wait(finished(step), name=f"training of step {step}", owner="rank", timeout_s=9)
        for step in (4, 5, 6):
            with pytest.raises(DeadlineError):
                watchdog.wait_for_all([Future()], name=f"training of step {step}", owner="rank", timeout_s=0.3)
            assert told == ["training of step 4", "training of step 6"][: 1 + (step == 6)], "one at a time"
            if step == 5:
                go_on.set()
                watchdog.forget()
                assert all(thread.name != "late wait" for thread in threading.enumerate()), "Ray may end"


@pytest.mark.parametrize(
    ("seconds", "late_after_s"), [([5.0, 6.0, 7.0], 36.0), ([1.0, 1.0, 90.0], 180.0), ([0.1] * 9, 20.0), ([5.0] * 2, 900.0)]
)
def test_the_bound_of_a_late_wait(watchdog: Watchdog, seconds: list[float], late_after_s: float) -> None:
    watchdog._seconds["sync to version N"].extend(seconds)
    with watchdog._opened({Future(): "engine 0"}, name="sync to version 12", timeout_s=900.0, see="") as wait:
        assert watchdog.open_waits == [wait] and wait.late_after_s == late_after_s
    assert len(watchdog._seconds["sync to version N"]) == len(seconds) + 1


def test_a_wait_that_fails_says_nothing_about_the_usual_time(watchdog: Watchdog) -> None:
    failed: Future = Future()
    failed.set_exception(UserError("no"))
    with pytest.raises(UserError):
        watchdog.wait(failed, name="work", owner="part", timeout_s=1)
    assert watchdog.open_waits == [] and not watchdog._seconds["work"]
