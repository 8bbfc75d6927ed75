"""Models by the numbers of their public config.json, and settings for them."""

import json
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.settings import Settings
from megatron_rl.planning import measurement, run_plan

CONFIGS = Path(__file__).parents[2] / "data" / "configs"


@pytest.fixture
def model_spec() -> Callable[[str], Any]:
    """`model_spec("Qwen3-8B")` reads tests/data/configs/Qwen3-8B.json."""
    from megatron_rl.models.read_spec import parse_model_spec

    return lambda name: parse_model_spec(json.loads((CONFIGS / f"{name}.json").read_text()), origin=name)


@pytest.fixture
def run_settings() -> Callable[..., Settings]:
    """`run_settings(num_ranks=8, tp=2, megatron={...}, runtime={...}, ...)`: 1024 + 7168 tokens, 512 sequences, distributed optimizer."""

    def make(*, megatron: dict[str, Any] | None = None, runtime: dict[str, Any] | None = None, **topology: Any) -> Settings:
        return Settings.model_validate(
            {
                "run": {"directory": "unused"},
                "model": {"path": "unused", "megatron": megatron or {}},
                "data": {"train": "unused"},
                "rollout": {"sampling": {"max_response_tokens": 7168}},
                "training": {"topology": topology, "optimizer": {"use_distributed_optimizer": True}},
                "runtime": runtime or {},
            }
        )

    return make


@pytest.fixture(scope="session")
def measuring_process() -> Iterator[Executor]:
    """One process that measures for all tests, as most of the time of one is spent on imports."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=measurement.prepare) as process:
        yield process


@pytest.fixture
def shared_process(measuring_process: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of this test are measured in the process that all tests share."""

    def measure(jobs: Sequence[measurement.Job]) -> list[measurement.Answer]:
        return list(measuring_process.map(measurement.answer, jobs))

    monkeypatch.setattr(run_plan, "measure", measure)
