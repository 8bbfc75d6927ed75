"""The body of a rank: load the test file by its path, call the function, leave its result."""

import importlib.util
import multiprocessing
import os
import pickle
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def rank_main(directory: Path, rank: int, variables: Mapping[str, str]) -> None:
    """Run the call in `directory` as this rank, with these variables; the output goes to the rank's log."""
    os.setsid()
    threading.Thread(target=_die_with_the_tests, daemon=True).start()
    os.environ.clear()
    os.environ.update(variables)
    with (directory / f"rank{rank}.log").open("wb") as log, open(os.devnull, "rb") as nothing:
        for number, file in enumerate((nothing, log, log)):
            os.dup2(file.fileno(), number)
    _call(directory, rank)


def _die_with_the_tests() -> None:
    """End this rank when the process of the tests ends; the parent is a fork server, which outlives it."""
    tests = multiprocessing.parent_process()
    assert tests is not None
    tests.join()
    os._exit(1)


def _call(directory: Path, rank: int) -> None:
    import torch

    torch.set_num_threads(1)
    root = Path(__file__).resolve().parents[2]
    sys.path += [str(root / "tools"), str(root / "tests/rehearsal")]
    call = pickle.loads((directory / "call.pickle").read_bytes())
    calls: list[Any] | None = None
    if call["nccl_rules"]:
        import nccl_rules
        import pretended_gpu

        pretended_gpu.pretend()
        calls = nccl_rules.record()
    spec = importlib.util.spec_from_file_location("rank_module", call["file"])
    assert spec is not None and spec.loader is not None, f"cannot load {call['file']}"
    module = importlib.util.module_from_spec(spec)
    sys.modules["rank_module"] = module
    spec.loader.exec_module(module)
    function = vars(module)[call["name"]]
    result = function(rank, call["world_size"], f"file://{directory / 'rendezvous'}", *call["args"])
    (directory / f"result{rank}.pickle").write_bytes(pickle.dumps(result))
    if calls is not None:
        (directory / f"calls{rank}.pickle").write_bytes(pickle.dumps(calls))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
