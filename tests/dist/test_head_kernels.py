"""The Triton kernels compute what they should, on a GPU or in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import torch

CASES = Path(__file__).with_name("kernel_cases.py")


def test_kernels_against_float64() -> None:
    """Triton decides at its import whether it interprets, so a process of its own does; on a GPU it runs the kernels themselves."""
    # Without plug-ins, whose imports take as long as the kernels.
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-c",
        os.devnull,
        "--rootdir",
        str(CASES.parent),
        "--noconftest",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore::RuntimeWarning",
        str(CASES),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
