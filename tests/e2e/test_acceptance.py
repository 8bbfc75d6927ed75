"""The acceptance of a node of GPUs, on the CPU: two ranks and the real SGLang server go through every line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.acceptance.verdict import RESULT_FILE

pytestmark = pytest.mark.slow


@pytest.mark.timeout(900)
def test_every_line_passes_on_the_cpu(tmp_path: Path, start: Callable[..., Any]) -> None:
    run = start("doctor", "--gpu", "--on-cpu", "--directory", tmp_path)
    assert run.wait() == 0, run.output
    (result,) = tmp_path.glob(f"*/{RESULT_FILE}")
    written = json.loads(result.read_text())
    assert written["passed"] and len(written["lines"]) == 15
    assert run.survivors() == []
