"""Plans of public models on layouts that no machine here could hold."""

from collections.abc import Callable
from dataclasses import replace
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.algorithms.objective import Objective
from megatron_rl.config.settings import Settings, WeightSettings
from megatron_rl.errors import UserError
from megatron_rl.models.weight_table import tensor_shapes
from megatron_rl.planning.gpus import GIB, GPUS
from megatron_rl.planning.records import RunPlan
from megatron_rl.planning.run_plan import _rank_host, plan_layouts, plan_run
from megatron_rl.weights.bucket import BUCKET_BYTES

pytestmark = pytest.mark.usefixtures("shared_process")

FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def uneven(first: int, last: int) -> dict[str, int]:
    return {"num_layers_in_first_pipeline_stage": first, "num_layers_in_last_pipeline_stage": last}


def planned(spec: Any, *variants: Settings, gpu: str = "H100-80") -> list[RunPlan]:
    """The plans of several settings, all measured by one process."""
    # Vocabularies here need no padding, so the stages hold the model and nothing else. A tied head is a copy; the routers' biases are in
    # the checkpoint, but no parameters, as they are not trained by gradients.
    biases = spec.moe.num_experts * (spec.num_layers - spec.moe.num_dense_layers) if spec.moe is not None and spec.moe.expert_bias else 0
    whole = sum(prod(shape) for _, shape in tensor_shapes(spec))
    plans = []
    for plan in plan_layouts(variants, spec, gpu=GPUS[gpu], num_nodes=None):
        assert isinstance(plan, RunPlan), plan
        tied = spec.vocab_size * spec.hidden_size if spec.tie_embeddings and len(plan.stages) > 1 else 0
        assert sum(stage.stage_parameters for stage in plan.stages) == whole + tied - biases
        plans.append(plan)
    return plans


def test_a_dense_model_by_hand(model_spec: Callable[[str], Any], run_settings: Callable[..., Settings]) -> None:
    """Qwen3-4B, tied embeddings, 12 layers, on tp 2 x pp 2 x dp 2: 2 bytes of weights, 4 of gradients, 12 / dp of optimizer each."""
    spec = replace(model_spec("Qwen3-4B"), num_layers=12)
    [plan] = planned(spec, run_settings(num_ranks=8, tp=2, pp=2, sequence_parallel=True, megatron=FULL_RECOMPUTE))
    for stage in plan.stages:
        assert stage.num_layers == 6
        assert stage.parameters == pytest.approx(2 * stage.num_parameters, rel=1e-3)
        assert stage.gradients == pytest.approx(4 * stage.num_parameters, rel=1e-3)
        assert stage.optimizer == pytest.approx(6 * stage.num_parameters, rel=1e-3)
    first, last = plan.stages
    assert (first.in_flight, last.in_flight) == (2, 1)
    # Full recompute keeps each layer's input, half of it on each tensor-parallel rank; the embedding keeps its output before that.
    hidden = 16384 * spec.hidden_size * 2
    assert first.activations == pytest.approx(2 * (6 * hidden // 2 + hidden), rel=0.02)
    # A chunk of the logits and the three float32 planes of the torch path.
    assert first.logits == 0 and last.logits > 1.6 * GIB
    # Two micro-batches in flight weigh more than the logits in chunks.
    assert last.total < first.total < GPUS["H100-80"].memory_bytes and plan.fits
    assert plan.verdict.startswith(f"fits: {plan.peak / GIB:.1f} of 79.6 GiB on the fullest rank (stage 0)")
    assert plan.num_nodes == 2


def test_memory_that_is_shared_with_an_engine_is_two_buckets(
    model_spec: Callable[[str], Any], run_settings: Callable[..., Settings]
) -> None:
    spec = replace(model_spec("Qwen3-4B"), num_layers=1)
    by_ipc = run_settings(num_ranks=1, runtime={"colocate": True})
    by_disk = by_ipc.model_copy(update={"weights": WeightSettings(transport="disk")})
    shared, written = planned(spec, by_ipc, by_disk)
    assert shared.handover - written.handover == 2 * BUCKET_BYTES


def test_recompute_and_sequence_parallelism_save_what_they_promise(
    model_spec: Callable[[str], Any], run_settings: Callable[..., Settings]
) -> None:
    spec = replace(model_spec("Qwen3-8B"), num_layers=12)
    plans = planned(
        spec,
        run_settings(num_ranks=8, tp=4, sequence_parallel=True),
        run_settings(num_ranks=8, tp=4, sequence_parallel=True, megatron=FULL_RECOMPUTE),
        run_settings(num_ranks=8, tp=4, megatron=FULL_RECOMPUTE),
    )
    everything, full, unsharded = (plan.stages[0] for plan in plans)
    assert everything.activations > 5 * full.activations
    layer_input = 16384 * spec.hidden_size * 2
    assert unsharded.activations - full.activations == pytest.approx(12 * layer_input * 3 // 4, rel=0.1)
    assert everything.state == full.state == unsharded.state


def test_impossible_layouts_are_refused_in_the_topologys_words(
    model_spec: Callable[[str], Any], run_settings: Callable[..., Settings]
) -> None:
    with pytest.raises(UserError, match=r"num_layers 36 is not divisible by pp·vpp 5"):
        plan_run(run_settings(num_ranks=5, pp=5), model_spec("Qwen3-4B"), gpu=GPUS["H100-80"], num_nodes=None)


def test_a_refused_layout_leaves_the_others_their_plans(model_spec: Callable[[str], Any], run_settings: Callable[..., Settings]) -> None:
    misspelled = run_settings(num_ranks=2, megatron={"recompute_granularty": "full"})
    spec = replace(model_spec("Qwen3-4B"), num_layers=2)
    undivided, unknown, plan = plan_layouts(
        [run_settings(num_ranks=5, pp=5), misspelled, run_settings(num_ranks=2)], spec, gpu=GPUS["H100-80"], num_nodes=None
    )
    assert isinstance(undivided, str) and "num_layers 2 is not divisible by pp·vpp 5" in undivided
    assert isinstance(unknown, str) and "TransformerConfig; did you mean model.megatron.recompute_granularity" in unknown
    assert isinstance(plan, RunPlan) and plan.fits


# Model, GPU, layout, megatron's fields; GiB of the fullest rank and whether it fits. Reserved memory is in it.
LARGE = {
    "Qwen3-30B-A3B on 64": ("Qwen3-30B-A3B", "H100-80", {"num_ranks": 64, "tp": 2, "pp": 2, "ep": 8, "etp": 1}, {}, 25.7, True),
    "Qwen3-235B on 128": (
        "Qwen3-235B-A22B",
        "H100-80",
        {"num_ranks": 128, "tp": 4, "pp": 8, "ep": 16, "etp": 1},
        uneven(11, 11),
        41.8,
        True,
    ),
    "GLM-4.5-Air on 64": ("GLM-4.5-Air", "H100-80", {"num_ranks": 64, "tp": 4, "pp": 2, "ep": 8, "etp": 1}, {}, 67.1, True),
    "GLM-4.5 on 256": ("GLM-4.5", "H100-80", {"num_ranks": 256, "tp": 4, "pp": 4, "ep": 16, "etp": 1}, {}, 62.1, True),
    "DeepSeek-V3 on 512": ("DeepSeek-V3", "H100-80", {"num_ranks": 512, "tp": 8, "pp": 8, "ep": 32, "etp": 1}, uneven(7, 6), 42.9, True),
    "DeepSeek-V3 on 1024": (
        "DeepSeek-V3",
        "H200-141",
        {"num_ranks": 1024, "tp": 8, "pp": 16, "ep": 64, "etp": 1},
        uneven(3, 2),
        23.6,
        True,
    ),
    "Qwen3-235B on 64": ("Qwen3-235B-A22B", "H100-80", {"num_ranks": 64, "tp": 4, "pp": 2, "ep": 16, "etp": 1}, {}, 96.8, False),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_large_models(model_spec: Callable[[str], Any], run_settings: Callable[..., Settings], name: str) -> None:
    model, gpu, topology, fields, peak, fits = LARGE[name]
    settings = run_settings(**topology, sequence_parallel=True, megatron={**FULL_RECOMPUTE, **fields}, runtime={"num_gpus_per_engine": 8})
    [plan] = planned(model_spec(model), settings, gpu=gpu)
    print("\n".join(plan.lines()))
    assert plan.peak / GIB == pytest.approx(peak, abs=0.1)
    assert (plan.peak <= plan.gpu.memory_bytes) == fits


def test_host_memory_holds_a_reference_only_where_one_is_read(run_settings: Callable[..., Settings]) -> None:
    policy = SimpleNamespace(reference=7 * GIB, parameters=GIB, optimizer=GIB)
    settings = run_settings()
    with_kl = settings.model_copy(update={"objective": Objective(kl_loss_coef=0.1)})
    without, kept = (_rank_host(variant, policy, [policy]) for variant in (settings, with_kl))  # type: ignore[arg-type, list-item]
    assert kept - without == 7 * GIB
