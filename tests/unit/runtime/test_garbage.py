import atexit
import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.runtime import trainers
from megatron_rl.runtime.trainers import spare_what_is_loaded


@pytest.fixture(autouse=True)
def spare_again() -> Iterator[None]:
    """Otherwise every later collection of this process would walk all that was ever imported."""
    yield
    gc.freeze()


class Node:
    """A part of a cycle."""

    other: "Node"


def test_loaded_objects_are_frozen_and_garbage_is_not_kept() -> None:
    node = Node()
    node.other = node
    seen = weakref.ref(node)
    del node
    spare_what_is_loaded()
    assert seen() is None
    assert gc.get_freeze_count() > 10_000
    assert len(gc.get_objects()) < 10_000


def test_the_end_of_python_collects_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    at_end: list[Any] = []
    monkeypatch.setattr(atexit, "register", at_end.append)
    spare_what_is_loaded()
    for call in at_end:
        call()
    assert gc.get_freeze_count() == 0


def test_a_rank_spares_what_it_has_loaded_when_it_has_started() -> None:
    worker: Any = trainers.TrainerWorker.__ray_metadata__.modified_class()  # type: ignore[attr-defined]
    assert worker.start(lambda **_: SimpleNamespace(dp_rank=3), rank=0, init_method="") == 3
    assert gc.get_freeze_count() > 10_000
