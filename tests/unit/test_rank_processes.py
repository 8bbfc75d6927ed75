"""Processes of the acceptance, and how they end."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from megatron_rl.acceptance import rank_processes
from megatron_rl.acceptance.node import Node
from megatron_rl.acceptance.rank_processes import Ranks, Remote


def test_new_ranks_do_not_meet_where_others_have_met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[str] = []

    class Silent:
        def __init__(self, make: Any, **_: Any) -> None:
            """No process."""

        def call(self, method: str, **arguments: Any) -> Any:
            met.extend([arguments["init_method"]] if "init_method" in arguments else [])
            return SimpleNamespace(result=lambda timeout: 0.1)

    monkeypatch.setattr(rank_processes, "Remote", Silent)
    settings = SimpleNamespace(training=SimpleNamespace(topology=SimpleNamespace(num_ranks=1)))
    for _ in range(2):
        ranks = Ranks(1, directory=tmp_path)
        ranks.all_reduce(num_bytes=4, repeats=1)
        ranks.open(settings)  # type: ignore[arg-type]
        ranks.open(settings)  # type: ignore[arg-type]
    assert len(met) == len(set(met)) == 6


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """In the place of a process that is made: this one."""
    process, context = MagicMock(pid=os.getpid()), MagicMock()
    context.Pipe.return_value, context.Process.return_value = (MagicMock(), MagicMock()), process
    monkeypatch.setattr(rank_processes.multiprocessing, "get_context", lambda _: context)
    return process


def test_ctrl_c_is_left_to_the_process_that_ends_the_others(process: MagicMock) -> None:
    inherited, before = list[Any](), signal.getsignal(signal.SIGINT)
    process.start.side_effect = lambda: inherited.append(signal.getsignal(signal.SIGINT))
    Remote(dict)
    assert (inherited, signal.getsignal(signal.SIGINT)) == ([signal.SIG_IGN], before)


def test_what_a_dead_rank_said_last_is_known(process: MagicMock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever finds a broken connection does not know why it broke."""
    monkeypatch.setattr(rank_processes, "DYING_S", 0.0)
    node = Node("cpu", num_gpus=2, directory=tmp_path)
    assert node.deaths() == [], "no rank was asked for anything"
    ranks = node.ranks
    assert node.deaths() == []
    ranks._all[1]._process = MagicMock(is_alive=lambda: False)
    (tmp_path / "rank-1.log").write_text("".join(f"line {number}\n" for number in range(20)))
    (said,) = node.deaths()
    first, *others = said.splitlines()
    assert (first, others) == (f"Megatron rank 1 died, the end of {tmp_path}/rank-1.log:", [f"line {number}" for number in range(8, 20)])
