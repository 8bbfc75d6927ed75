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


@pytest.mark.timeout(240)
def test_kill_and_go_on(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source, target = tiny_model(layers=32, hidden=128, name="source"), tmp_path / "ours"
    command = [sys.executable, "-m", "megatron_rl", "convert", str(source), str(target), "--max-shard-size", "100KB"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    journal = tmp_path / ".ours.partial/.journal"
    deadline = time.monotonic() + 120
    while len(list(journal.glob("*.json"))) < 5:
        assert process.poll() is None and time.monotonic() < deadline, "the conversion ended before it could be killed"
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not target.exists()
    partial = tmp_path / ".ours.partial"
    finished = {record.stem: (partial / record.stem).stat().st_ino for record in journal.glob("*.json")}
    subprocess.run(command, check=True, timeout=120)
    kept = {name for name, number in finished.items() if (target / name).stat().st_ino == number}
    assert kept == set(finished), "what was finished is not written again"
    back = [sys.executable, "-m", "megatron_rl", "convert", str(target), str(tmp_path / "back")]
    subprocess.run(back, check=True, timeout=120)
    original, returned = load_file(source / "model.safetensors"), load_file(tmp_path / "back/model.safetensors")
    assert returned.keys() == original.keys() and all(torch.equal(returned[name], tensor) for name, tensor in original.items())
