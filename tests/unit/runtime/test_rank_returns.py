"""After which errors all ranks are started again, how often, and what is said; ranks and the start of a run are stand-ins."""

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.errors import DeadlineError, UserError, WorkerDiedError
from megatron_rl.runtime import rank_returns
from megatron_rl.runtime.rank_returns import RankReturns, RanksLostError
from megatron_rl.runtime.start import RunStart

DIED = WorkerDiedError("Megatron rank 1 died")
LATE = DeadlineError("training of step 3 did not finish")
IDLE: list[str] = []


class Start:
    """A run's start, whose ranks have died or are at `stacks`."""

    def __init__(self, *, died: bool = True, stacks: Sequence[list[str] | None] = ()) -> None:
        self.ray: Future[None] = Future()
        self.ranks = SimpleNamespace(has_died=died, stacks=lambda: stacks)
        self.engines_stay, self.num_lives = True, 1

    def end_life(self) -> None:
        self.num_lives += 1


def make_returns(directory: Path, *, limit: int = 2) -> tuple[RankReturns, list[str]]:
    said: list[str] = []
    return RankReturns(limit, directory=directory, note=said.append), said


def fail(returns: RankReturns, start: Any, error: BaseException) -> None:
    with returns.noticing(start):
        raise error


def test_dead_ranks_are_started_so_often_an_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [1000.0]
    monkeypatch.setattr(rank_returns, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    returns, said = make_returns(tmp_path)
    for _ in range(2):
        with pytest.raises(RanksLostError):
            fail(returns, Start(), DIED)
        now_s[0] += 60
    with pytest.raises(WorkerDiedError):
        fail(returns, Start(), DIED)
    now_s[0] += 3600 - 119
    with pytest.raises(RanksLostError):
        fail(returns, Start(), DIED)
    assert "1 of runtime.restarts 2 within an hour" in said[0] and "Megatron rank 1 died" in said[0]
    assert ["2 of" in words for words in said] == [False, True, True]


@pytest.mark.parametrize(
    ("start", "error"),
    [
        (Start(died=False), DIED),
        (Start(), UserError("a mistake")),
        (Start(), SystemExit(143)),
        (Start(died=False, stacks=[IDLE, IDLE]), LATE),
    ],
)
def test_other_errors_end_the_run(tmp_path: Path, start: Any, error: BaseException) -> None:
    returns, said = make_returns(tmp_path)
    with pytest.raises(type(error)):
        fail(returns, start, error)
    assert said == []


def test_no_ranks_start_without_ray(tmp_path: Path) -> None:
    start = Start()
    start.ray.set_exception(WorkerDiedError("Ray's control service is gone"))
    with pytest.raises(WorkerDiedError):
        fail(make_returns(tmp_path)[0], start, DIED)


def test_ranks_that_hang_are_named_with_their_stacks(tmp_path: Path) -> None:
    returns, said = make_returns(tmp_path)
    with pytest.raises(RanksLostError):
        fail(returns, Start(died=False, stacks=[["train (step.py:1)", "all_reduce (c10d.py:2)"], None, IDLE]), LATE)
    assert "Megatron rank 0 is in all_reduce (c10d.py:2); Megatron rank 1 does not answer; Megatron rank 2 is idle" in said[0]
    kept = (tmp_path / "logs" / "rank-stacks.txt").read_text()
    assert "Megatron rank 0\ntrain (step.py:1)\nall_reduce (c10d.py:2)\n" in kept and "Megatron rank 1\ndoes not answer" in kept


def test_a_rank_that_was_stopped_between_calls_is_found(tmp_path: Path) -> None:
    with pytest.raises(RanksLostError):
        fail(make_returns(tmp_path)[0], Start(died=False, stacks=[IDLE, None]), LATE)


def test_a_start_that_fails_counts_and_is_repeated(tmp_path: Path) -> None:
    returns, said = make_returns(tmp_path)
    start: Any = Start()
    starts = iter([DIED, None])

    def begin(*, resume: bool) -> Any:
        assert resume
        error = next(starts)
        if error is not None:
            raise error
        return SimpleNamespace(engines_have_weights=False)

    with pytest.raises(RanksLostError):
        fail(returns, start, DIED)
    run = returns.bring_back(start, begin, after=SimpleNamespace(trained_steps=3))  # type: ignore[arg-type]
    assert run.engines_have_weights and start.num_lives == 3
    assert "the ranks are back after" in said[-1] and "3 trained steps to be done again" in said[-1]
    assert "2 of runtime.restarts 2" in said[1]


def test_ray_is_watched_after_a_life_of_shared_devices() -> None:
    """The end of engines forgets everything that is watched."""
    watched = list[str]()
    start: Any = RunStart.__new__(RunStart)
    start.watchdog = SimpleNamespace(forget=watched.clear, watch=lambda name, future: watched.append(name))
    start.ranks, start.life, start.ray, start.engines_stay = SimpleNamespace(end=lambda: None), ExitStack(), Future(), False
    start._engines = SimpleNamespace(stop=watched.clear)
    start.end_life()
    assert watched == ["Ray"] and start._engines is None
