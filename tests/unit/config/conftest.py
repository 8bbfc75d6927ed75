"""Settings to start from."""

from collections.abc import Callable
from typing import Any

import pytest

from megatron_rl.config.load import apply_overrides, validate_settings
from megatron_rl.config.settings import Settings

SMALLEST: dict[str, Any] = {"run": {"directory": "runs/x"}, "model": {"path": "model"}, "data": {"train": "train.jsonl"}}


@pytest.fixture
def settings_with() -> Callable[..., Settings]:
    """The smallest valid settings with overrides on top."""

    def make(*overrides: str) -> Settings:
        return validate_settings(apply_overrides(SMALLEST, overrides), origin="test")

    return make
