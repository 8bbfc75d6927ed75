"""What is left of the memory that a rank shares with an engine when the rank is killed."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from megatron_rl.system.leftovers import remove_leftovers

KILLED = """
import os, signal, sys, tempfile, torch
tempfile.tempdir = sys.argv[1]
from megatron_rl.system.leftovers import Scratch
from megatron_rl.weights.ipc import allocate_shared, shared_files
flat = allocate_shared(1 << 20, torch.device("cpu"))
places = shared_files(flat)
Scratch.make().note(places)
helper = [int(pid) for pid in open(f"/proc/self/task/{os.getpid()}/children").read().split()]
print(places[0], places[1], flush=True)
for pid in [*helper, os.getpid()]:
    os.kill(pid, signal.SIGKILL)
"""


def test_what_a_kill_leaves_is_removed_at_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's helper removes the file of a process that dies, unless it dies with it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
    places = [Path(word) for word in output.split()]
    assert [place.exists() for place in places] == [True, True]
    removed = remove_leftovers()
    assert not any(place.exists() for place in places)
    assert {str(place) for place in places} < set(removed)
