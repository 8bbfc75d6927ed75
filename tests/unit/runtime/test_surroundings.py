"""What a run makes its transport of weights from."""

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.config.load import load_settings
from megatron_rl.runtime import start
from megatron_rl.runtime.placement import Needs, place
from megatron_rl.weights.transport import Surroundings

WORDS = ["run.directory=run", "model.path=model", "data.train=train.jsonl", "reward.function=package.module:reward"]
WORDS += ["training.topology.num_ranks=4", "rollout.num_engines=2", "rollout.sglang.tp_size=2"]


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Mapping[str, Sequence[int]]]:
    """`beside(urls, colocate=True)`: the ranks beside the engines at `urls`, of two engines at a and b."""
    monkeypatch.setattr(start, "read_model_spec", lambda path: None)
    monkeypatch.setattr(start, "exported_specs", lambda spec, dtype: ())

    def run(urls: Sequence[str], *, colocate: bool) -> Mapping[str, Sequence[int]]:
        settings = load_settings(None, [*WORDS, f"runtime.colocate={str(colocate).lower()}"])
        made: list[Surroundings] = []
        monkeypatch.setattr(start, "TRANSPORTS", {settings.weight_transport: made.append})
        needs = Needs.of(settings.training.topology, settings.rollout, colocate=colocate, device_kind="cuda")
        placement = place(needs, nodes=[8])
        reservation: Any = SimpleNamespace(device_kind="cuda", placement=placement)
        addresses: Any = [SimpleNamespace(url=url, hosts=()) for url in ("a", "b")]
        start.make_transport(settings, SimpleNamespace(free_address=None), reservation, addresses, urls)  # type: ignore[arg-type]
        assert made[0].num_engines == len(urls) and made[0].ranks_per_engine == 2
        return made[0].ranks_beside

    return run


def test_every_engine_is_beside_the_ranks_on_its_own_gpus(beside: Callable[..., Mapping[str, Sequence[int]]]) -> None:
    assert beside(["a", "b"], colocate=True) == {"a": (0, 1), "b": (2, 3)}


def test_an_engine_that_left_is_beside_nobody(beside: Callable[..., Mapping[str, Sequence[int]]]) -> None:
    """A rank would wait for it to take what it offers."""
    assert beside(["b"], colocate=True) == {"b": (2, 3)}


def test_engines_with_devices_of_their_own_share_none(beside: Callable[..., Mapping[str, Sequence[int]]]) -> None:
    assert beside(["a", "b"], colocate=False) == {}
