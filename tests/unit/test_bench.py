"""The benchmarks under tools/bench still run; their figures are for people."""

import dataclasses
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_rl.algorithms.log_prob import TORCH_ROWS

BENCH = Path(__file__).parents[2] / "tools" / "bench"
GRPO = BENCH / "grpo.py"
TRAINING = BENCH / "training.py"


def test_packing_is_compared_with_what_is_possible() -> None:
    command = [sys.executable, str(TRAINING), "--only", "packing", "--sequences", "64", "--longest", "1024"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("64 sequences of at most 1,024 tokens, 8 data-parallel ranks")
    assert [line.split()[0] for line in done.stdout.splitlines()[2:]] == ["uniform", "uniform", "log-normal", "log-normal", "long", "long"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_nothing_is_measured_and_one_sentence_says_so() -> None:
    done = subprocess.run([sys.executable, str(BENCH / "gpu.py")], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "gpu: nothing was measured, because this machine has no GPU that torch can use; run it on one with CUDA.\n"


def test_kernels_are_measured_beside_what_is_published(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With the clock and the kernels replaced, as neither is here without a GPU; the rest is the benchmark's own."""
    monkeypatch.syspath_prepend(str(BENCH))
    gpu = importlib.import_module("gpu")
    calls = []
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    monkeypatch.setattr(gpu, "measured", lambda call, repeats=1: (calls.append(call()), (12.0, 3.0))[1])
    monkeypatch.setattr(gpu, "row_maths_on_gpus", lambda: (dataclasses.replace(TORCH_ROWS, name="triton"), TORCH_ROWS))
    monkeypatch.setattr(gpu, "other_sizes", lambda vocab: [(3, vocab, 4)])
    gpu.bench_kernels(tokens=6, vocab=20, hidden=8)
    printed = capsys.readouterr().out
    assert "differ by 0.0e+00 of the hidden states' gradient and 0.0e+00 of the weight's" in printed
    assert "  triton                             12.0 ms    3.0 GiB" in printed and "Liger" in printed and "167 ms" in printed
    assert "3 tokens, 20 x 4" in printed and len(calls) == 9


def test_a_peer_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\necho trl accelerate\n")
    bare.chmod(0o755)
    for peer, message in ((str(bare), "cannot import trl, accelerate; make its environment"), (str(tmp_path / "none"), "does not run")):
        done = subprocess.run([sys.executable, str(GRPO), "--peer", peer], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 1
        assert message in done.stderr
