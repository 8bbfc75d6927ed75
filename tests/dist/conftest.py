"""Launcher of short-lived gloo ranks: one process per rank, a hard deadline, and nobody left behind.

A test module defines `def work(rank, world_size, init_method, *args) -> Any` at module level and calls the fixture
`run_ranks(work, world_size, *args, timeout_s=...)`, which returns the ranks' results in order. Arguments and results are
pickled, so they must not be of classes that the test module itself defines. Ranks are forks of one process that has imported what nearly
all of them import; the mark `fresh_ranks` gives each a new interpreter.

With `--nccl-rules` every rank takes itself for one with a GPU, and what NCCL would not bear fails the test: tests/rehearsal. Tests
without ranks are left out then, and those that the mark `not_under_nccl_rules` names are skipped for its reason.
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from rank_process import rank_main

POLL_S = 0.05
GRACE_S = 2.0
RunRanks = Callable[..., list[Any]]
MATRIX = pytest.StashKey[list[Any]]()
LAYOUT_CHANGES = pytest.StashKey[dict[tuple[str, str, str], float]]()


class RankFailure(AssertionError):
    """A rank raised, died or ran past the deadline; the message holds the tail of its output."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --nccl-rules."""
    parser.addoption("--nccl-rules", action="store_true", help="hold every collective of all ranks against NCCL's rules")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks."""
    config.addinivalue_line("markers", "fresh_ranks: its ranks change what is imported, so each begins with nothing imported")
    config.addinivalue_line("markers", "not_under_nccl_rules(reason): its ranks cannot run on a pretended GPU under NCCL's rules")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --nccl-rules: leave out what starts no ranks, and skip what cannot run so."""
    if not _under_nccl_rules(config):
        return
    with_ranks = [item for item in items if isinstance(item, pytest.Function) and "run_ranks" in item.fixturenames]
    config.hook.pytest_deselected(items=[item for item in items if item not in with_ranks])
    items[:] = with_ranks
    for item in items:
        for mark in item.iter_markers("not_under_nccl_rules"):
            item.add_marker(pytest.mark.skip(reason=mark.kwargs["reason"]))


def _under_nccl_rules(config: pytest.Config) -> bool:
    # Where this folder is only met on the way, its options come too late to be known.
    return bool(config.getoption("--nccl-rules", default=False))


def _start(directory: Path, rank: int, *, warm: bool) -> BaseProcess:
    context = multiprocessing.get_context("forkserver" if warm else "spawn")
    if warm:
        # What pytest itself is started from, and what nearly every rank imports for seconds.
        context.set_forkserver_preload(["pytest", "transformers", "megatron_rl.training.trainer"])
    variables = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "")}
    process = context.Process(target=rank_main, args=(directory, rank, variables))
    process.start()
    return process


def _stop(processes: list[BaseProcess]) -> None:
    for process in processes:
        if process.exitcode is None:
            # A rank that is too young to lead a group has nobody below it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
    for process in processes:
        process.join()


def _tails(directory: Path, ranks: list[int]) -> str:
    return "\n".join(f"--- rank {rank}\n{(directory / f'rank{rank}.log').read_text(errors='replace')[-3000:]}" for rank in ranks)


def _wait(processes: list[BaseProcess], directory: Path, timeout_s: float) -> None:
    """Return when every rank ended well; raise RankFailure at the first that did not, or at the deadline."""
    deadline = time.monotonic() + timeout_s
    while True:
        codes = [process.exitcode for process in processes]
        if any(code not in (None, 0) for code in codes):
            # The peers of a rank that fails often fail for its sake: give the first cause time to show.
            time.sleep(GRACE_S)
            failed = {rank: process.exitcode for rank, process in enumerate(processes) if process.exitcode not in (None, 0)}
            raise RankFailure(f"ranks ended with codes {failed}\n{_tails(directory, list(failed))}")
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            slow = [rank for rank, code in enumerate(codes) if code is None]
            raise RankFailure(f"ranks {slow} still ran after {timeout_s:g} s\n{_tails(directory, slow)}")
        time.sleep(POLL_S)


@pytest.fixture
def run_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunRanks:
    """The launcher: `run_ranks(function, world_size, *args, timeout_s=120.0)` gives the list of the ranks' results."""

    def run(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0) -> list[Any]:
        directory = tmp_path_factory.mktemp("ranks")
        nccl_rules = _under_nccl_rules(request.config)
        call = {"file": function.__code__.co_filename, "name": function.__qualname__, "world_size": world_size, "args": args}
        call["nccl_rules"] = nccl_rules
        (directory / "call.pickle").write_bytes(pickle.dumps(call))
        warm = not nccl_rules and request.node.get_closest_marker("fresh_ranks") is None
        processes: list[BaseProcess] = []
        try:
            for rank in range(world_size):
                processes.append(_start(directory, rank, warm=warm))
            _wait(processes, directory, timeout_s)
        finally:
            _stop(processes)
        if nccl_rules:
            _check_nccl_rules(directory, world_size)
        return [pickle.loads((directory / f"result{rank}.pickle").read_bytes()) for rank in range(world_size)]

    return run


def _check_nccl_rules(directory: Path, world_size: int) -> None:
    from nccl_rules import broken_rules

    broken = broken_rules([pickle.loads((directory / f"calls{rank}.pickle").read_bytes()) for rank in range(world_size)])
    assert not broken, "\n".join(broken)


@pytest.fixture
def matrix(request: pytest.FixtureRequest) -> list[Any]:
    """The rows of the layout matrix, (case, differences), which the end of the session prints."""
    return request.config.stash.setdefault(MATRIX, [])


@pytest.fixture
def layout_changes(request: pytest.FixtureRequest) -> dict[tuple[str, str, str], float]:
    """The largest difference by (model, layout that saved, layout that went on), which the end of the session prints."""
    return request.config.stash.setdefault(LAYOUT_CHANGES, {})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the tables, and write each to the file that MATRIX_FILE or LAYOUT_CHANGES_FILE names."""
    from layout_report import changes_table, markdown_table

    rows, changes = config.stash.get(MATRIX, []), config.stash.get(LAYOUT_CHANGES, {})
    if rows:
        _report(terminalreporter, "layout matrix", markdown_table(rows), file=os.environ.get("MATRIX_FILE"))
    if changes:
        _report(terminalreporter, "layout changes", changes_table(changes), file=os.environ.get("LAYOUT_CHANGES_FILE"))


def _report(terminalreporter: pytest.TerminalReporter, title: str, lines: list[str], *, file: str | None) -> None:
    terminalreporter.section(title)
    for line in lines:
        terminalreporter.write_line(line)
    if file:
        Path(file).write_text("\n".join(lines) + "\n", encoding="utf-8")
