"""Calls that fail: the log, and the share at which they end the run."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl.errors import UserError
from megatron_rl.observe.failures import FailureLog
from megatron_rl.types import Failure

ERROR = Failure("error", "KeyError: 'a'", "KeyError: 'a'\nTraceback: first")
TIMEOUT = Failure("timeout", "no reward after 5 s", "no reward after 5 s")


def log_in(directory: Path) -> FailureLog:
    return FailureLog(
        path=directory / "rewards.log",
        calls="reward calls",
        owner="reward.function a:b",
        setting="reward.max_error_rate",
        max_error_rate=0.1,
    )


def test_failures_are_noted_by_what_happened_and_traced_once(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    log.note([TIMEOUT, ERROR, ERROR], total=6, step=1)
    log.note([ERROR], total=1, step=2)
    log.note([], total=1, step=3)
    assert (tmp_path / "rewards.log").read_text().splitlines() == [
        "step 1: 2 of 6 reward calls: KeyError: 'a'", "KeyError: 'a'", "Traceback: first",
        "step 1: 1 of 6 reward calls: no reward after 5 s", "no reward after 5 s",
        "step 2: 1 of 1 reward calls: KeyError: 'a'",
    ]  # fmt: skip


def test_a_failure_that_is_new_in_the_run_is_said(tmp_path: Path) -> None:
    """Also where far too few calls fail to end the run."""
    said: list[str] = []
    log = replace(log_in(tmp_path), say=said.append)
    log.note([TIMEOUT, ERROR, ERROR], total=100, step=1)
    log.note([ERROR], total=100, step=2)
    (sentence,) = said
    assert all(part in sentence for part in ("step 1", "2 of 100 reward calls", "KeyError: 'a'", "1 other cause", str(tmp_path)))


def test_a_log_whose_directory_is_gone_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"logs/rewards\.log cannot be written: its directory was deleted or moved .*; start the run again"):
        log_in(tmp_path / "logs").note([ERROR], total=1, step=1)


def test_a_share_above_the_rate_shows_causes_and_the_first(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    log.check([ERROR, TIMEOUT], total=20)
    log.check([], total=0)
    message = (
        r"2 of 19 reward calls failed \(1 timeout, 1 error\) = 10\.5%, more than reward\.max_error_rate 10\.0%; mend "
        r"reward\.function a:b, or raise reward\.max_error_rate\n1 x no reward after 5 s\n1 x KeyError: 'a'\nthe first failure is:\nno "
    )
    with pytest.raises(UserError, match=message):
        log.check([TIMEOUT, ERROR], total=19)
