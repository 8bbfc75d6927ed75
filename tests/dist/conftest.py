"""Launcher of short-lived gloo ranks: one process per rank, a hard deadline, and nobody left behind.

A test module defines `def work(rank, world_size, init_method, *args) -> Any` at module level and calls the fixture
`run_ranks(work, world_size, *args, timeout_s=...)`, which returns the ranks' results in order. Arguments and results are
pickled, so they must not be of classes that the test module itself defines.
"""

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

POLL_S = 0.05
GRACE_S = 2.0
RunRanks = Callable[..., list[Any]]
MATRIX = pytest.StashKey[list[Any]]()


class RankFailure(AssertionError):
    """A rank raised, died or ran past the deadline; the message holds the tail of its output."""


def _start(directory: Path, rank: int) -> subprocess.Popen[bytes]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "")}
    with (directory / f"rank{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, __file__, str(directory), str(rank)],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()


def _tails(directory: Path, ranks: list[int]) -> str:
    return "\n".join(f"--- rank {rank}\n{(directory / f'rank{rank}.log').read_text(errors='replace')[-3000:]}" for rank in ranks)


def _wait(processes: list[subprocess.Popen[bytes]], directory: Path, timeout_s: float) -> None:
    """Return when every rank ended well; raise RankFailure at the first that did not, or at the deadline."""
    deadline = time.monotonic() + timeout_s
    while True:
        codes = [process.poll() for process in processes]
        if any(code not in (None, 0) for code in codes):
            # The peers of a rank that fails often fail for its sake: give the first cause time to show.
            time.sleep(GRACE_S)
            failed = {rank: process.poll() for rank, process in enumerate(processes) if process.poll() not in (None, 0)}
            raise RankFailure(f"ranks ended with codes {failed}\n{_tails(directory, list(failed))}")
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            slow = [rank for rank, code in enumerate(codes) if code is None]
            raise RankFailure(f"ranks {slow} still ran after {timeout_s:g} s\n{_tails(directory, slow)}")
        time.sleep(POLL_S)


@pytest.fixture
def run_ranks(tmp_path_factory: pytest.TempPathFactory) -> RunRanks:
    """The launcher: `run_ranks(function, world_size, *args, timeout_s=120.0)` gives the list of the ranks' results."""

    def run(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0) -> list[Any]:
        directory = tmp_path_factory.mktemp("ranks")
        call = {"file": function.__code__.co_filename, "name": function.__qualname__, "world_size": world_size, "args": args}
        (directory / "call.pickle").write_bytes(pickle.dumps(call))
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(world_size):
                processes.append(_start(directory, rank))
            _wait(processes, directory, timeout_s)
        finally:
            _stop(processes)
        return [pickle.loads((directory / f"result{rank}.pickle").read_bytes()) for rank in range(world_size)]

    return run


@pytest.fixture
def matrix(request: pytest.FixtureRequest) -> list[Any]:
    """The rows of the layout matrix, (case, differences), which the end of the session prints."""
    return request.config.stash.setdefault(MATRIX, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the layout matrix, and write it to the file that MATRIX_FILE names."""
    rows = config.stash.get(MATRIX, [])
    if not rows:
        return
    from layout_report import markdown_table

    terminalreporter.section("layout matrix")
    lines = markdown_table(rows)
    for line in lines:
        terminalreporter.write_line(line)
    if path := os.environ.get("MATRIX_FILE"):
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _rank_main(directory: Path, rank: int) -> None:
    """Body of a rank: load the test file by its path, call the function, leave its result."""
    import importlib.util

    import torch

    torch.set_num_threads(1)
    root = Path(__file__).resolve().parents[2]
    sys.path += [str(root / "tools"), str(root / "tests/rehearsal")]
    call = pickle.loads((directory / "call.pickle").read_bytes())
    spec = importlib.util.spec_from_file_location("rank_module", call["file"])
    assert spec is not None and spec.loader is not None, f"cannot load {call['file']}"
    module = importlib.util.module_from_spec(spec)
    sys.modules["rank_module"] = module
    spec.loader.exec_module(module)
    function = vars(module)[call["name"]]
    result = function(rank, call["world_size"], f"file://{directory / 'rendezvous'}", *call["args"])
    (directory / f"result{rank}.pickle").write_bytes(pickle.dumps(result))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _rank_main(Path(sys.argv[1]), int(sys.argv[2]))
