"""Fixtures shared by all tests: a tiny model directory, made by code; public models by their config.json, and settings for them."""

import atexit
import gc
import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from megatron_rl.config.settings import Settings

CONFIGS = Path(__file__).parent / "data" / "configs"


def pytest_configure() -> None:
    """Take SIGINT even where a shell has started the tests in the background and so told them, and all their children, to ignore it.

    The millions of objects that torch, transformers and megatron-core make while they are imported are not searched for garbage again and
    again: neither while tests are collected, which takes half as long again otherwise, nor later.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()
    # Libraries that look for leaks at the end of Python see everything as it is. Not before: pytest searches twice when it ends.
    atexit.register(gc.unfreeze)


def pytest_collection_finish() -> None:
    """From here on there is garbage, little of it in cycles: the search begins with every 20,000 new objects, not with every 700."""
    gc.enable()
    gc.freeze()
    gc.set_threshold(20_000)


@pytest.fixture(scope="session")
def te_sources(request: pytest.FixtureRequest) -> Callable[..., tuple[str, ...]]:
    """`te_sources(pair)`: where megatron-core and TransformerEngine's Python half of a pair are, see `te_sources.unpacked`."""
    from te_sources import unpacked

    return lambda pair: unpacked(pair, request.config.cache.mkdir("transformer_engine"))


@pytest.fixture(scope="session")
def written_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`write_tiny_model`, called once for the same options; nobody changes what it wrote."""
    directory, written = tmp_path_factory.mktemp("models"), dict[str, Path]()

    def find(*, family: str = "qwen3", **options: Any) -> Path:
        from megatron_rl.doctor.tiny_models import write_tiny_model
        from tests.tiny_families import FAMILIES

        key = repr((family, sorted(options.items())))
        if key not in written:
            written[key] = write_tiny_model(directory / str(len(written)), family=FAMILIES[family], **options)
        return written[key]

    return find


@pytest.fixture
def tiny_model(tmp_path: Path, written_models: Callable[..., Path]) -> Callable[..., Path]:
    """Make a model directory: `tiny_model(family="qwen3", seed=0, hidden=64, layers=2, vocab=32, tied=True, **config)` returns its path.

    See `write_tiny_model`; `name` is that of the directory, which the test may change.
    """

    def make(*, name: str = "model", **options: Any) -> Path:
        return shutil.copytree(written_models(**options), tmp_path / name)

    return make


@pytest.fixture
def model_spec() -> "Callable[[str], Any]":
    """`model_spec("Qwen3-8B")` reads tests/data/configs/Qwen3-8B.json."""
    from megatron_rl.models.read_spec import parse_model_spec

    return lambda name: parse_model_spec(json.loads((CONFIGS / f"{name}.json").read_text()), origin=name)


@pytest.fixture
def run_settings() -> "Callable[..., Settings]":
    """`run_settings(num_ranks=8, tp=2, megatron={...}, sglang={...}, ...)`: 1024 + 7168 tokens, 512 sequences, distributed optimizer."""

    Fields = dict[str, Any] | None

    def make(*, megatron: Fields = None, sglang: Fields = None, runtime: Fields = None, **topology: Any) -> "Settings":
        from megatron_rl.config.settings import Settings

        return Settings.model_validate(
            {
                "run": {"directory": "unused"},
                "model": {"path": "unused", "megatron": megatron or {}},
                "data": {"train": "unused"},
                "rollout": {"sampling": {"max_response_tokens": 7168}, "sglang": sglang or {}},
                "training": {"topology": topology, "optimizer": {"use_distributed_optimizer": True}},
                "runtime": runtime or {},
            }
        )

    return make


@pytest.fixture
def read_all():
    """`read_all(path, dtype)` gives every tensor of the checkpoint at `path` by its name, quantised ones in `dtype`."""
    from contextlib import closing

    from megatron_rl.checkpoints.stored_weights import in_order, open_weights

    def read(path, dequantised_dtype=None):
        with closing(open_weights(path, dequantised_dtype=dequantised_dtype)) as source:
            return {name: source.read(name) for name in in_order(source)}

    return read
