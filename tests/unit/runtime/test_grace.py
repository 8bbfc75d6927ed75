import signal
from collections.abc import Iterator
from typing import Any

import pytest
from run_parts import MakeRun, Ranks

from megatron_rl.runtime.grace import ENDING, PASSED_ON, Grace, finishing_first

TERM, AGAIN = signal.SIGTERM, PASSED_ON[signal.SIGTERM]


@pytest.fixture(autouse=True)
def grace(hangup_heard: None) -> Iterator[Grace]:
    before = [signal.getsignal(number) for number in (*ENDING, *PASSED_ON.values())]
    with Grace() as handler:
        yield handler
    assert [signal.getsignal(number) for number in (*ENDING, *PASSED_ON.values())] == before


def raised(*numbers: int) -> int | str | None:
    """The status with which these signals end what goes on, one after the other; None when none does."""
    try:
        for number in numbers:
            signal.raise_signal(number)
    except SystemExit as error:
        return error.code
    return None


@pytest.mark.parametrize("number", [*ENDING, *PASSED_ON.values()])
def test_a_signal_ends_what_nothing_defers(number: int) -> None:
    asked = {passed: number for number, passed in PASSED_ON.items()}.get(number, number)
    assert raised(number) == 128 + asked


def test_a_signal_waits_for_the_end_of_what_is_being_done() -> None:
    done = []
    with pytest.raises(SystemExit) as caught, finishing_first():
        with finishing_first():
            assert raised(TERM) is None
        done.append(True)
    assert done == [True] and caught.value.code == 128 + TERM


def test_a_request_that_comes_by_both_ways_is_one() -> None:
    assert raised(TERM) == 128 + TERM
    with finishing_first():
        assert raised(AGAIN) is None
    assert raised(AGAIN) == 128 + TERM


@pytest.mark.parametrize("second", [(TERM,), (signal.SIGINT,), (AGAIN, TERM), (AGAIN, AGAIN)])
def test_a_second_request_does_not_wait(second: tuple[int, ...]) -> None:
    with pytest.raises(SystemExit), finishing_first():
        assert raised(TERM) is None
        for number in second:
            signal.raise_signal(number)
        pytest.fail("went on")


def test_a_third_request_leaves_the_end_alone() -> None:
    assert raised(TERM) == raised(TERM) == 128 + TERM
    assert raised(TERM, signal.SIGINT, AGAIN, AGAIN, AGAIN) is None


def test_a_failure_is_not_hidden_by_an_earlier_signal() -> None:
    with pytest.raises(ValueError, match="broken"), finishing_first():
        signal.raise_signal(TERM)
        raise ValueError("broken")


def test_an_ignored_signal_stays_ignored() -> None:
    """As nohup does it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Grace():
            assert raised(signal.SIGHUP) is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_nothing_is_deferred_without_a_grace() -> None:
    before = signal.signal(TERM, lambda *_: pytest.fail("at once"))
    try:
        with pytest.raises(pytest.fail.Exception, match="at once"), finishing_first():
            signal.raise_signal(TERM)
            raise AssertionError("deferred")
    finally:
        signal.signal(TERM, before)


def test_a_step_that_is_asked_to_end_keeps_its_tokens_values(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run, kept, train = make_run("run.num_steps=9"), [], Ranks.train
    run.begin(step=0)

    def asked(self: Ranks, *batch: Any, **how: Any) -> Any:
        signal.raise_signal(TERM)
        return train(self, *batch, **how)

    async def keep(values: Any) -> None:
        kept.append(values)

    monkeypatch.setattr(Ranks, "train", asked)
    monkeypatch.setattr(run._manager, "keep", keep)
    batch = run.next_batch(0)
    with pytest.raises(SystemExit):
        run.train(batch, step=0)
    assert len(kept) == 1 and run.trained_steps == 1
