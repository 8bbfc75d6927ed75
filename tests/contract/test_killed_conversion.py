"""A conversion that is killed with SIGKILL leaves no target, and the same command completes it anew."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

NUM_WHOLE = 5
HELD = f"""
import sys, threading
from megatron_rl.cli import main
from megatron_rl.checkpoints import manifest

def held(path):
    if next(whole, None) is None:
        threading.Event().wait()
    return entry_of(path)

whole, entry_of = iter(range({NUM_WHOLE})), manifest.entry_of
manifest.entry_of = held
sys.exit(main(sys.argv[1:]))
"""
"""The command line, which writes a few files and does not go on."""


@pytest.mark.timeout(240)
def test_a_killed_conversion_is_done_anew(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source, target = tiny_model(layers=8, hidden=128, name="source"), tmp_path / "ours"
    words = ["convert", str(source), str(target), "--max-shard-size", "100KB"]
    process = subprocess.Popen([sys.executable, "-c", HELD, *words], stdout=subprocess.DEVNULL)
    partial = tmp_path / ".ours.partial"
    deadline = time.monotonic() + 120
    while len(list(partial.glob("*.distcp"))) <= NUM_WHOLE:
        assert process.poll() is None and time.monotonic() < deadline, "the conversion did not come to the file at which it is held"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not target.exists()
    (partial / "__999_0.distcp").write_bytes(b"half")
    subprocess.run([sys.executable, "-m", "megatron_rl", *words, "--verify"], check=True, timeout=120)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "source"] and not (target / "__999_0.distcp").exists()
    back = [sys.executable, "-m", "megatron_rl", "convert", str(target), str(tmp_path / "back")]
    subprocess.run(back, check=True, timeout=120)
    original, returned = load_file(source / "model.safetensors"), load_file(tmp_path / "back/model.safetensors")
    assert returned.keys() == original.keys() and all(torch.equal(returned[name], tensor) for name, tensor in original.items())
