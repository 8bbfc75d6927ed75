"""The benchmarks under tools/bench still run; their figures are for people."""

import subprocess
import sys
from pathlib import Path

GRPO = Path(__file__).parents[2] / "tools" / "bench" / "grpo.py"
TRAINING = Path(__file__).parents[2] / "tools" / "bench" / "training.py"


def test_packing_is_compared_with_what_is_possible() -> None:
    command = [sys.executable, str(TRAINING), "--only", "packing", "--sequences", "64", "--longest", "1024"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("64 sequences of at most 1,024 tokens, 8 data-parallel ranks")
    assert [line.split()[0] for line in done.stdout.splitlines()[2:]] == ["uniform", "uniform", "log-normal", "log-normal", "long", "long"]


def test_a_peer_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\necho trl accelerate\n")
    bare.chmod(0o755)
    for peer, message in ((str(bare), "cannot import trl, accelerate; make its environment"), (str(tmp_path / "none"), "does not run")):
        done = subprocess.run([sys.executable, str(GRPO), "--peer", peer], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 1
        assert message in done.stderr
