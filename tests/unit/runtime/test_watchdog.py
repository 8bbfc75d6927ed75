import concurrent.futures
import threading

import pytest

from megatron_rl.errors import DeadlineError, EngineError, UserError, WorkerDiedError
from megatron_rl.runtime.watchdog import Watchdog

Future = concurrent.futures.Future


def finished(value: object) -> Future:
    future: Future = Future()
    future.set_result(value)
    return future


def test_results_come_in_order() -> None:
    assert Watchdog().wait([finished(1), finished(2)], name="work", timeout_s=1) == [1, 2]


def test_the_deadline_names_the_wait_and_who_is_missing() -> None:
    with pytest.raises(DeadlineError, match="weight sync did not finish within 0 s, still waiting for: engine 1"):
        Watchdog().wait([finished(1), Future()], name="weight sync", timeout_s=0.05, blame={0: "engine 0", 1: "engine 1"})


def test_the_death_of_a_watched_actor_ends_a_wait_for_somebody_else_at_once() -> None:
    watchdog, vital = Watchdog(), Future()
    watchdog.watch("engine 0", vital)
    threading.Timer(0.1, vital.set_exception, [EngineError("engine died, its log ends with: boom")]).start()
    # Otherwise the wait would end in a DeadlineError.
    with pytest.raises(EngineError, match="boom"):
        watchdog.wait([Future()], name="rollout", timeout_s=30)


def test_the_death_behind_a_failed_call_is_told_although_the_call_fails_first() -> None:
    watchdog, vital = Watchdog(), Future()
    watchdog.watch("engine 0", vital)
    refused: Future = Future()
    refused.set_exception(EngineError("the engine cannot be reached for /pause_generation"))
    threading.Timer(0.3, vital.set_exception, [EngineError("engine died (killed by signal 9)")]).start()
    with pytest.raises(EngineError, match="killed by signal 9"):
        watchdog.wait([refused], name="weight sync", timeout_s=30)


def test_a_failed_call_without_a_death_behind_it_is_told_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_rl.runtime.watchdog.CAUSE_S", 0.05)
    watchdog, refused = Watchdog(), Future()
    watchdog.watch("engine 0", Future())
    refused.set_exception(EngineError("cannot be reached"))
    with pytest.raises(EngineError, match="cannot be reached"):
        watchdog.wait([refused], name="weight sync", timeout_s=30)


@pytest.mark.timeout(60)
def test_a_mistake_of_the_user_is_told_without_looking_for_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_rl.runtime.watchdog.CAUSE_S", 3600.0)
    watchdog, mistaken = Watchdog(), Future()
    watchdog.watch("engine 0", Future())
    mistaken.set_exception(UserError("no such reward"))
    with pytest.raises(UserError, match="no such reward"):
        watchdog.wait([mistaken], name="rollout", timeout_s=30)


def test_a_watched_actor_that_ends_quietly_is_an_error_too() -> None:
    watchdog = Watchdog()
    watchdog.watch("Megatron rank 3", finished(None))
    with pytest.raises(WorkerDiedError, match="Megatron rank 3 ended"):
        watchdog.wait([Future()], name="training", timeout_s=30)


def test_the_first_failure_does_not_wait_for_the_others() -> None:
    broken: Future = Future()
    broken.set_exception(RuntimeError("rank 1 broke"))
    with pytest.raises(RuntimeError, match="rank 1 broke"):
        Watchdog().wait([Future(), broken], name="training", timeout_s=30)


def test_nobody_is_watched_after_forget() -> None:
    watchdog = Watchdog()
    watchdog.watch("engine 0", finished(None))
    watchdog.forget()
    assert watchdog.wait([finished(5)], name="stop", timeout_s=1) == [5]
