"""The trial of a node of GPUs, on the CPU: two ranks, the real SGLang server and real runs go through every line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.doctor.trial import RESULT_FILE

pytestmark = pytest.mark.slow


@pytest.mark.timeout(1200)
def test_every_line_holds_on_the_cpu(tmp_path: Path, start: Callable[..., Any]) -> None:
    run = start("doctor", "--gpu", "--on-cpu", "--directory", tmp_path)
    assert run.wait(1100) == 0, run.output
    (result,) = tmp_path.glob(f"*/{RESULT_FILE}")
    written = json.loads(result.read_text())
    levels = {check["promise"]: check["level"] for check in written["checks"]}
    assert written["complete"] and "broken" not in levels.values()
    assert sum(promise.startswith("a run of") for promise in levels) == 3
    assert run.survivors() == []
