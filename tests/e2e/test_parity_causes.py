"""Causes of a breach of parity that only a real engine's checksums or a real mixture can show, made on purpose in tiny models."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from test_engine_weights import PROMPTS, SAMPLING, make_trainer, serving, sync, talking

from megatron_rl.algorithms.rounding_limits import FLOAT32
from megatron_rl.errors import ParityError
from megatron_rl.training.topology import shutdown
from megatron_rl.training.trainer import Trainer
from megatron_rl.weights.diagnosis import likeliest, weights_apart
from megatron_rl.weights.parity import check_probe, sample_probe, weight_checksums

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
MIXTURE = {"family": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 1, "norm_topk_prob": False}


class Served:
    """An engine of `model`, with a trainer of `trained` beside it."""

    def __init__(self, parts: Any, trained: Path, directory: Path) -> None:
        self._runner, self._client, self._pool = parts
        self._model, self._directory = trained, directory
        self.trainer: Trainer = make_trainer(trained, directory / trained.name)

    def sync(self, *, version: int) -> None:
        self._runner.run(sync(self.trainer, self._client, version=version, model=self._model, directory=self._directory))

    def cause(self, *, tied: bool = False, mixture: bool = False, publish: Callable[[], None] = lambda: None) -> str:
        """The gate's cause for tokens of the engine, whose checksums are compared with those after `publish`."""
        probe = self._runner.run(sample_probe(PROMPTS, self._pool, sampling=SAMPLING))
        with pytest.raises(ParityError):
            check_probe(probe, self.trainer.own_log_probs, limits=FLOAT32, replays=False)

        def weights(urls: Sequence[str]) -> str | None:
            before = self._runner.run(weight_checksums(self._pool))
            publish()
            after = self._runner.run(weight_checksums(self._pool))
            return weights_apart(before[urls[0]], after[urls[0]], tied=tied)

        options: dict[str, Any] = {"replays": False, "mixture": mixture, "weights": weights}
        return likeliest(probe, self.trainer.own_log_probs, limits=FLOAT32, scoring=FLOAT32, **options) or "agree"


@contextmanager
def served(model: Path, trained: Path, directory: Path) -> Iterator[Served]:
    with serving(model, directory / "engine.log") as address, talking(address) as parts:
        try:
            yield Served(parts, trained, directory)
        finally:
            shutdown()


def test_weights_of_an_earlier_version_are_stale(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    old, new = (tiny_model(name=f"model{seed}", seed=seed, tied=False) for seed in (0, 1))
    with served(old, new, tmp_path) as engine:
        found = engine.cause(publish=lambda: engine.sync(version=1))
        assert "stale weights, since another sync of the same version changed 19 of 19 weights" in found, found


@pytest.mark.parametrize("engine_ties", [True, False])
def test_embeddings_tied_on_one_side_are_named(tiny_model: Callable[..., Path], tmp_path: Path, engine_ties: bool) -> None:
    """A head that the engine takes from the embedding, or one of its own, where config.json says otherwise."""
    trained = tiny_model(name="trained", tied=not engine_ties)
    model = tiny_model(name="served", tied=False)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": engine_ties}))
    with served(model, trained, tmp_path) as engine:
        engine.sync(version=1)
        found = engine.cause(tied=not engine_ties, publish=lambda: engine.sync(version=1))
        assert "tied embeddings on one side alone, since" in found, found


def test_experts_chosen_by_other_rows_are_routing(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Two rows of the last router are exchanged in the engine: few tokens go to other experts."""
    trained, model = (tiny_model(name=name, tied=False, **MIXTURE) for name in ("trained", "served"))
    tensors = load_file(model / "model.safetensors")
    (name,) = [name for name in tensors if name.endswith("layers.1.mlp.gate.weight")]
    tensors[name][[2, 3]] = tensors[name][[3, 2]]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with served(model, trained, tmp_path) as engine:
        found = engine.cause(mixture=True)
        assert "routing, since few tokens differ much" in found and "training.routing_replay" in found, found
