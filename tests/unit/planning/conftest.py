"""Models by the numbers of their public config.json, and settings for them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.settings import Settings

CONFIGS = Path(__file__).parents[2] / "data" / "configs"


@pytest.fixture
def model_spec() -> Callable[[str], Any]:
    """`model_spec("Qwen3-8B")` reads tests/data/configs/Qwen3-8B.json."""
    from megatron_rl.models.reading import parse_model_spec

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
