"""Fixtures shared by all tests: a tiny model directory, made by code."""

import gc
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def pytest_configure() -> None:
    """Take SIGINT even where a shell has started the tests in the background and so told them, and all their children, to ignore it.

    The millions of objects that torch, transformers and megatron-core make while they are imported are not searched for garbage again and
    again: neither while tests are collected, which takes half as long again otherwise, nor later.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()


def pytest_collection_finish() -> None:
    """From here on there is garbage."""
    gc.enable()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Libraries that look for leaks at the end of Python see everything as it is."""
    gc.unfreeze()


@pytest.fixture
def tiny_model(tmp_path: Path) -> Callable[..., Path]:
    """Make a model directory: `tiny_model(family="qwen3", seed=0, hidden=64, layers=2, vocab=32, tied=True, **config)` returns its path.

    See `write_tiny_model`; `name` is that of the directory.
    """

    def make(*, name: str = "model", **options: Any) -> Path:
        from megatron_rl.acceptance.tiny_models import write_tiny_model

        return write_tiny_model(tmp_path / name, **options)

    return make
