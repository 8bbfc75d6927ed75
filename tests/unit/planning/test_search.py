import types
from collections.abc import Callable
from typing import Any

import pytest

from megatron_rl.config.gpus import GIB, GPUS
from megatron_rl.config.settings import Settings, TopologySettings
from megatron_rl.planning import search
from megatron_rl.planning.search import Candidate, candidates
from megatron_rl.training.topology import Topology

GPU = GPUS["H100-80"]


def listed(spec: Any, settings: Settings, num_gpus: int) -> list[tuple[Candidate, Topology]]:
    found = sorted(candidates(settings, spec, gpu=GPU, num_gpus=num_gpus), key=lambda candidate: candidate.cost_s)
    return [(candidate, Topology.of(candidate.settings.training.topology)) for candidate in found]


def test_candidates_divide_the_model_and_the_gpus(model_spec: Callable[[str], Any], run_settings: Callable[..., Settings]) -> None:
    found = listed(model_spec("Qwen3-30B-A3B"), run_settings(), 64)
    assert {topology.ep for _, topology in found} == {1, 2, 4, 8, 16, 32, 64}
    assert len({(candidate.settings.training.topology, bool(candidate.settings.model.megatron)) for candidate, _ in found}) == len(found)
    for candidate, topology in found:
        assert topology.num_ranks == 64 == topology.tp * topology.pp * topology.cp * topology.dp
        assert topology.tp <= 8, "tensor parallelism stays inside a node"
        assert topology.sequence_parallel == (topology.tp > 1)
        assert candidate.num_bytes > 0 and candidate.cost_s > 0


def test_what_is_not_split_costs_least_and_needs_most(model_spec: Callable[[str], Any], run_settings: Callable[..., Settings]) -> None:
    found = listed(model_spec("Qwen3-8B"), run_settings(), 8)
    best, topology = found[0]
    assert topology.dp == 8 and not best.settings.model.megatron
    assert best.num_bytes == max(candidate.num_bytes for candidate, _ in found)
    recomputed = next(candidate for candidate, other in found if other == topology and candidate.settings.model.megatron)
    assert recomputed.cost_s > best.cost_s and recomputed.num_bytes < best.num_bytes


def test_a_teacher_decides_which_layouts_are_likely(
    model_spec: Callable[[str], Any], run_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is divided as the policy is, and its weights count where they are more than the activations."""
    policy, teacher, settings = model_spec("Qwen3-4B"), model_spec("Qwen3-30B-A3B"), run_settings(megatron=search.FULL_RECOMPUTE)
    plain, distilled = {}, {}
    for found, spec in ((plain, None), (distilled, teacher)):
        monkeypatch.setattr(search, "teacher_spec", lambda _objective, _model, spec=spec: spec)
        found.update({one.settings.training.topology: one.num_bytes for one, _ in listed(policy, settings, 36)})
    assert {topology.pp for topology in plain} - {topology.pp for topology in distilled} == {9, 18, 36}, "of 36 layers, and of 48"
    assert all(num_bytes >= plain[topology] for topology, num_bytes in distilled.items())
    alone = TopologySettings(num_ranks=36)
    assert distilled[alone] > 2 * 30e9 > plain[alone]


def test_recompute_that_the_user_set_is_not_varied(model_spec: Callable[[str], Any], run_settings: Callable[..., Settings]) -> None:
    fields = {"recompute_granularity": "selective"}
    found = listed(model_spec("Qwen3-4B"), run_settings(megatron=fields), 4)
    assert all(candidate.settings.model.megatron == fields for candidate, _ in found)


def test_a_number_of_gpus_that_divides_nothing(model_spec: Callable[[str], Any], run_settings: Callable[..., Settings]) -> None:
    assert {(topology.tp, topology.pp, topology.cp) for _, topology in listed(model_spec("Qwen3-4B"), run_settings(), 31)} == {(1, 1, 1)}


def test_what_makes_a_layout_fit_is_found_by_trying(
    model_spec: Callable[[str], Any], run_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each lever is tried on top of those before; the first plan that fits ends the list. The plans are made up."""
    tried: list[Settings] = []

    def peaks(variants: list[Settings], *_: Any, **__: Any) -> list[Any]:
        tried[:] = variants
        return [types.SimpleNamespace(peak=peak * GIB) for peak in sizes[: len(variants)]]

    monkeypatch.setattr(search, "plan_layouts", peaks)
    settings = run_settings(num_ranks=4, tp=2)
    settings = settings.model_copy(update={"training": settings.training.model_copy(update={"optimizer": {}})})
    sizes = [200, 100, 70, 50]
    words = [
        "training.optimizer.use_distributed_optimizer=true",
        "model.megatron.recompute_granularity=full model.megatron.recompute_method=uniform model.megatron.recompute_num_layers=1",
        "training.max_tokens_per_micro_batch=8192",
        "training.topology.tp=4 training.topology.sequence_parallel=true",
    ]
    assert search.remedy(settings, model_spec("Qwen3-8B"), gpu=GPU) == (
        f"the trainer fits (70.0 GiB on the fullest rank) with {' '.join(words[:3])}"
    )
    assert [one.training.optimizer for one in tried] == [{"use_distributed_optimizer": True}] * 4
    assert [bool(one.model.megatron) for one in tried] == [False, True, True, True]
    assert [one.training.max_tokens_per_micro_batch for one in tried] == [16384, 16384, 8192, 8192]
    assert [one.training.topology.tp for one in tried] == [2, 2, 2, 4]
    sizes = [200] * 4
    assert search.remedy(settings, model_spec("Qwen3-8B"), gpu=GPU) == f"tried on top of each other without success: {', '.join(words)}"


@pytest.mark.parametrize(
    ("num_ranks", "layout", "lever"),
    [
        (16, {}, "ep=8 training.topology.etp=1"),  # Within a node of 8, and a divisor of 128 experts.
        (12, {"tp": 2}, "ep=4 training.topology.etp=1"),
        (16, {"etp": 2, "tp": 2}, "ep=4 training.topology.etp=2"),
        (16, {"pp": 4, "ep": 2}, "ep=4 training.topology.etp=1"),
        (8, {"ep": 8, "etp": 1}, None),
    ],
)
def test_experts_are_divided_first(
    model_spec: Callable[[str], Any],
    run_settings: Callable[..., Settings],
    monkeypatch: pytest.MonkeyPatch,
    num_ranks: int,
    layout: dict[str, int],
    lever: str | None,
) -> None:
    monkeypatch.setattr(search, "plan_layouts", lambda variants, *_, **__: [types.SimpleNamespace(peak=200 * GIB)] * len(variants))
    text = search.remedy(run_settings(num_ranks=num_ranks, **layout), model_spec("Qwen3-30B-A3B"), gpu=GPU)
    first = text.removeprefix("tried on top of each other without success: ").partition(", ")[0]
    assert first == f"training.topology.{lever}" if lever else first.startswith("model.megatron.recompute"), text
