"""What a trainer does besides a plain step, under two-rank layouts: the head in chunks, frozen weights, recompute, a teacher.

All trainings of this file run one after the other in one pair of processes, because importing megatron-core takes seconds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layout_runs import Outcome, compare, make_batch, make_settings, make_trainer, outcome_of, train_batches
from layout_table import BASE, LAYOUTS, OBJECTIVES, RECOMPUTED, SEQUENCE_PARALLEL, Layout

TOLERANCE = 1e-5
VOCAB = 33
LAYERS = 4
TEACHER = {"name": "teacher", "seed": 3, "hidden": 32, "layers": 2, "vocab": VOCAB}
BLOCK = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}
# Of four layers the first two and half of the third: under pp2 nothing is left to train on the first stage.
FROZEN = ["model.embed_tokens.*", "model.layers.[01].*", "*.layers.2.mlp.*", "model.norm.weight"]
EMBEDDING = ["model.embed_tokens.weight"]


@dataclass(frozen=True, slots=True)
class Feature:
    """A training under `layout` that is to equal the one called `base`; `chunk` rows of the head at once, all when None.

    With `then` the second batch is trained by a trainer of that layout, from a checkpoint of the first.
    """

    base: str
    layout: Layout
    objective: str = "grpo"
    tied: bool = False
    chunk: int | None = None
    frozen: list[str] = field(default_factory=list)
    distilled: bool = False
    then: Layout | None = None
    slow: bool = False


def frozen(layout: Layout, *, slow: bool = False) -> Feature:
    return Feature("frozen", layout, frozen=FROZEN, slow=slow)


FEATURES: dict[str, Feature] = {
    "plain": Feature("plain", LAYOUTS[BASE]),
    "plain tied": Feature("plain tied", LAYOUTS[BASE], tied=True),
    "chunks": Feature("plain", LAYOUTS[BASE], chunk=3),
    "chunks, dp2 distopt overlap": Feature("plain tied", LAYOUTS["dp2 distopt overlap"], chunk=3, tied=True, slow=True),
    "chunks, tp2 sp": Feature("plain tied", LAYOUTS["tp2 sp"], chunk=3, tied=True),
    "chunks, tp2": Feature("plain", LAYOUTS["tp2"], chunk=3, slow=True),
    "chunks, pp2 vpp2": Feature("plain", LAYOUTS["pp2 vpp2"], chunk=3),
    "chunks, cp2": Feature("plain", LAYOUTS["cp2"], chunk=3, slow=True),
    "recompute in blocks, tp2 sp": Feature("plain", Layout(2, SEQUENCE_PARALLEL, megatron=BLOCK)),
    "recompute in blocks, pp2": Feature("plain", Layout(2, {"pp": 2}, megatron=BLOCK), slow=True),
    "recompute attention and mlp, tp2 sp": Feature("plain", Layout(2, SEQUENCE_PARALLEL, megatron=SELECTIVE), slow=True),
    "recompute attention and mlp, cp2": Feature("plain", Layout(2, {"cp": 2}, megatron=SELECTIVE), slow=True),
    "frozen": frozen(Layout()),
    "frozen, dp2 distopt overlap": frozen(LAYOUTS["dp2 distopt overlap"], slow=True),
    "frozen, tp2 sp recompute": frozen(Layout(2, SEQUENCE_PARALLEL, megatron=RECOMPUTED)),
    "frozen, pp2": frozen(Layout(2, {"pp": 2}), slow=True),
    "frozen, pp2, resumed as tp2": Feature("frozen", Layout(2, {"pp": 2}), frozen=FROZEN, then=LAYOUTS["tp2"]),
    "frozen embedding": Feature("frozen embedding", Layout(), "ppo", tied=True, frozen=EMBEDDING),
    "frozen embedding, pp2": Feature("frozen embedding", Layout(2, {"pp": 2}), "ppo", tied=True, frozen=EMBEDDING),
    "teacher": Feature("teacher", Layout(), "ppo", distilled=True),
    "teacher, tp2 sp": Feature("teacher", LAYOUTS["tp2 sp"], "ppo", distilled=True),
    "teacher, pp2": Feature("teacher", LAYOUTS["pp2"], "ppo", distilled=True, slow=True),
    "teacher, cp2": Feature("teacher", LAYOUTS["cp2"], "ppo", distilled=True, slow=True),
}


def settings_of(feature: Feature, layout: Layout, models: Mapping[str, str], directory: Path) -> Any:
    """Settings of the feature's training under `layout`."""
    wanted = OBJECTIVES[feature.objective]
    settings = make_settings(
        models["tied" if feature.tied else "untied"],
        directory,
        layout,
        objective={**wanted.objective, **({"distillation_coef": 0.5} if feature.distilled else {})},
        training={**wanted.training, "frozen": feature.frozen},
    )
    if not feature.distilled:
        return settings
    return settings.model_copy(update={"model": settings.model.model_copy(update={"teacher": Path(models["teacher"])})})


def run_features(
    rank: int, world_size: int, init_method: str, models: Mapping[str, str], directory: str, names: Sequence[str]
) -> dict[str, Outcome]:
    """Two batches under each feature of `names`; a layout of one rank is run by rank 0 alone."""
    from megatron_rl.algorithms import head_statistics
    from megatron_rl.training.topology import shutdown

    outcomes = {}
    everything = head_statistics._CHUNK_LOGITS["cpu"]
    for number, name in enumerate(names):
        feature = FEATURES[name]
        if rank >= feature.layout.num_ranks:
            continue
        print(f"case {name}", flush=True)
        columns = -(-VOCAB // feature.layout.topology.get("tp", 1))
        head_statistics._CHUNK_LOGITS["cpu"] = everything if feature.chunk is None else feature.chunk * columns
        settings = settings_of(feature, feature.layout, models, Path(directory) / f"{number}")
        trainer = make_trainer(settings, rank, f"{init_method}-{number}")
        before = trainer.log_probs(make_batch(7))
        metrics = train_batches(trainer, settings, [1])
        if feature.then is not None:
            trainer.save(Path(directory) / f"{number}-checkpoint")
            shutdown()
            settings = settings_of(feature, feature.then, models, Path(directory) / f"{number}")
            trainer = make_trainer(settings, rank, f"{init_method}-{number}-resumed")
            trainer.load(Path(directory) / f"{number}-checkpoint")
        metrics += train_batches(trainer, settings, [2])
        outcomes[name] = outcome_of(trainer, metrics, log_probs=[before, trainer.log_probs(make_batch(7))])
        shutdown()
    return outcomes


def named(wanted: Callable[[str], bool]) -> list[Any]:
    """Test parameters for the features whose names are `wanted`."""
    return [pytest.param(name, marks=pytest.mark.slow if FEATURES[name].slow else ()) for name in FEATURES if wanted(name)]


@pytest.fixture(scope="module")
def known() -> dict[str, list[Outcome]]:
    """Outcomes of the selected features, once they were run."""
    return {}


@pytest.fixture
def outcomes(
    request: pytest.FixtureRequest,
    known: dict[str, list[Outcome]],
    run_ranks: Callable[..., list[Any]],
    tiny_model: Callable[..., Path],
    tmp_path: Path,
) -> dict[str, list[Outcome]]:
    """The outcomes of each selected feature's ranks, and of those that it is compared with."""
    if not known:
        selected = [item.callspec.params["name"] for item in request.session.items if item.path == request.path and "[" in item.name]
        names = list(dict.fromkeys([*(FEATURES[name].base for name in selected), *selected]))
        models = {name: str(tiny_model(name=name, layers=LAYERS, vocab=VOCAB, tied=name == "tied")) for name in ("tied", "untied")}
        models["teacher"] = str(tiny_model(**TEACHER))
        ranks = run_ranks(run_features, 2, models, str(tmp_path), names, timeout_s=280)
        known.update({name: [rank[name] for rank in ranks if name in rank] for name in names})
    return known


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", named(lambda name: FEATURES[name].base != name))
def test_the_layout_and_the_feature_change_nothing(outcomes: dict[str, list[Outcome]], name: str) -> None:
    differences = compare(outcomes[name], outcomes[FEATURES[name].base])
    assert differences.largest <= TOLERANCE, differences


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", named(lambda name: bool(FEATURES[name].frozen)))
def test_frozen_weights_stay_and_no_others(outcomes: dict[str, list[Outcome]], name: str, tiny_model: Callable[..., Path]) -> None:
    from safetensors.numpy import load_file

    feature = FEATURES[name]
    initial = load_file(tiny_model(layers=LAYERS, vocab=VOCAB, tied=feature.tied) / "model.safetensors")
    for key, array in outcomes[name][0]["weights"].items():
        _, _, tensor = key.partition(" ")
        if tensor != "head":
            is_frozen = any(fnmatchcase(tensor, pattern) for pattern in feature.frozen)
            assert np.array_equal(array, initial[tensor]) == is_frozen, key


def test_all_features_are_different_trainings() -> None:
    assert len({repr(asdict(feature)) for feature in FEATURES.values()}) == len(FEATURES)
