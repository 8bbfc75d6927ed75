"""A conversion that is killed with SIGKILL leaves no target, and the same command completes it without writing the finished files again."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

NUM_WHOLE, NUM_THREADS = 5, 2
HELD = f"""
import dataclasses, sys, threading
from megatron_rl.cli import main
from megatron_rl.convert import resumable

def half(file):
    file.write(b"half")
    threading.Event().wait()

def held(partial, job, report):
    return write(partial, job if next(whole, None) is not None else dataclasses.replace(job, write=half), report)

whole, write = iter(range({NUM_WHOLE})), resumable._write
resumable._write, resumable.NUM_THREADS = held, {NUM_THREADS}
sys.exit(main(sys.argv[1:]))
"""
"""The command line, which begins every file but the first ones and does not go on."""


@pytest.mark.timeout(240)
def test_kill_and_go_on(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source, target = tiny_model(layers=8, hidden=128, name="source"), tmp_path / "ours"
    words = ["convert", str(source), str(target), "--max-shard-size", "100KB"]
    process = subprocess.Popen([sys.executable, "-c", HELD, *words], stdout=subprocess.DEVNULL)
    partial = tmp_path / ".ours.partial"
    journal = partial / ".journal"
    deadline = time.monotonic() + 120
    while len(list(journal.glob("*.json"))) < NUM_WHOLE or len(list(partial.glob("*.unfinished"))) < NUM_THREADS:
        assert process.poll() is None and time.monotonic() < deadline, "the conversion did not come to the files at which it is held"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not target.exists()
    finished = {record.stem: (partial / record.stem).stat().st_ino for record in journal.glob("*.json")}
    subprocess.run([sys.executable, "-m", "megatron_rl", *words], check=True, timeout=120)
    kept = {name for name, number in finished.items() if (target / name).stat().st_ino == number}
    assert kept == set(finished), "what was finished is not written again"
    back = [sys.executable, "-m", "megatron_rl", "convert", str(target), str(tmp_path / "back")]
    subprocess.run(back, check=True, timeout=120)
    original, returned = load_file(source / "model.safetensors"), load_file(tmp_path / "back/model.safetensors")
    assert returned.keys() == original.keys() and all(torch.equal(returned[name], tensor) for name, tensor in original.items())
