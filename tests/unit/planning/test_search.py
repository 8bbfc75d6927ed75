from collections.abc import Callable
from typing import Any

import pytest

from megatron_rl.config.settings import Settings
from megatron_rl.errors import UserError
from megatron_rl.planning import GPUS, best_layouts
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


def test_recompute_that_the_user_set_is_not_varied(model_spec: Callable[[str], Any], run_settings: Callable[..., Settings]) -> None:
    fields = {"recompute_granularity": "selective"}
    found = listed(model_spec("Qwen3-4B"), run_settings(megatron=fields), 4)
    assert all(candidate.settings.model.megatron == fields for candidate, _ in found)


def test_a_number_of_gpus_that_divides_nothing(model_spec: Callable[[str], Any], run_settings: Callable[..., Settings]) -> None:
    """With 31 GPUs every size is 1, so a model that one GPU cannot hold has no layout."""
    assert {(topology.tp, topology.pp, topology.cp) for _, topology in listed(model_spec("Qwen3-4B"), run_settings(), 31)} == {(1, 1, 1)}
    with pytest.raises(UserError, match=r"no layout of 1 GPUs of type H100-80 fits; by estimate the smallest, 1 ranks = tp 1"):
        best_layouts(run_settings(), model_spec("Qwen3-8B"), gpu=GPU, num_gpus=1)


def test_the_best_layouts_fit_and_come_in_order(model_spec: Callable[[str], Any], run_settings: Callable[..., Settings]) -> None:
    found = best_layouts(run_settings(), model_spec("Qwen3-8B"), gpu=GPU, num_gpus=8, keep=1)
    [(settings, plan)] = found
    assert plan.fits and plan.layout == str(Topology.of(settings.training.topology))
