"""The launcher of ranks itself: results in order, failures and deadlines reported, nobody left behind."""

import os
import time
from collections.abc import Callable
from typing import Any

import pytest


def _report(rank: int, world_size: int, init_method: str, value: int) -> tuple[int, int, int]:
    return rank, world_size, value


def _fail_on_rank_one(rank: int, world_size: int, init_method: str) -> int:
    if rank == 1:
        raise RuntimeError("told to fail")
    time.sleep(600)
    return os.getpid()


def test_results_come_in_rank_order(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(_report, 2, 7, timeout_s=60) == [(0, 2, 7), (1, 2, 7)]


def test_failure_of_one_rank_ends_all(run_ranks: Callable[..., list[Any]]) -> None:
    # Otherwise it would be the deadline that ends them.
    with pytest.raises(AssertionError, match=r"ranks ended with codes \{1: 1\}[\s\S]*told to fail"):
        run_ranks(_fail_on_rank_one, 2, timeout_s=60)
