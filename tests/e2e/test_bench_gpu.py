"""The benchmark of GPUs, rehearsed on the CPU: every part runs with real ranks, engines and a run, in small sizes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a rehearsal is for machines without a GPU")
@pytest.mark.timeout(900)
def test_every_part_runs_in_a_rehearsal() -> None:
    command = [sys.executable, "tools/bench/gpu.py", "--rehearse"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=880, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    # What is measured, and what has been published of it.
    for said in ("Triton and torch differ", "Liger", "small, 256 packed tokens", "MFU", "Megatron-LM's README"):
        assert said in done.stdout, done.stdout
    for said in ("broadcast", "disk", "ipc", "s/GB; peak in buckets", "slime", "to generation", "to training", "response tokens/s"):
        assert said in done.stdout, done.stdout
