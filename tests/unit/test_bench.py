"""The benchmarks under tools/bench still run; their figures are for people."""

import subprocess
import sys
from pathlib import Path

TRAINING = Path(__file__).parents[2] / "tools" / "bench" / "training.py"


def test_packing_is_compared_with_what_is_possible() -> None:
    command = [sys.executable, str(TRAINING), "--only", "packing", "--sequences", "64", "--longest", "1024"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("64 sequences of at most 1,024 tokens, 8 data-parallel ranks")
    assert [line.split()[0] for line in done.stdout.splitlines()[2:]] == ["uniform", "uniform", "log-normal", "log-normal", "long", "long"]
