"""Routers do the same under every layout: recorded experts, load of the experts, and the gradients of the routers' own losses."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from layout_runs import (
    Outcome,
    batch_with_record,
    check_ranks_agree,
    compare,
    make_settings,
    make_trainer,
    merged_metrics,
    outcome_of,
    shards_of,
)
from layout_table import DISTRIBUTED, RECOMPUTED, SEQUENCE_PARALLEL, Layout

TOLERANCE = 1e-5
NUM_EXPERTS, TOP_K, NUM_LAYERS = 6, 2, 4
QWEN3 = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": TOP_K,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden": 32,
    "layers": NUM_LAYERS,
}
# Sigmoid scores, a bias and shared experts; the first layer is dense, so that records have a layer less than the model.
GLM4 = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "n_routed_experts": NUM_EXPERTS,
    "num_experts_per_tok": TOP_K,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "hidden": 32,
    "layers": NUM_LAYERS,
}
# Large enough that a wrong weight of any sequence is seen in the gradient.
LOSSES = {"moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.05}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
EXPERT_PARALLEL = {"ep": 2}
ONE = "one"
TWO_RANKS: dict[str, Layout] = {
    ONE: Layout(),
    "one, micro-batches of 10": Layout(budget=10),
    "one, one micro-batch, recompute": Layout(budget=1000, megatron=RECOMPUTED),
    "dp2 distopt": Layout(2, optimizer=DISTRIBUTED),
    "ep2, experts recomputed": Layout(2, EXPERT_PARALLEL, megatron=SELECTIVE),
    "tp2 sp": Layout(2, SEQUENCE_PARALLEL),
    "cp2 recompute": Layout(2, {"cp": 2}, megatron=RECOMPUTED),
    "pp2": Layout(2, {"pp": 2}),
    "pp2 vpp2 recompute": Layout(2, {"pp": 2, "vpp": 2}, megatron=RECOMPUTED),
}
FOUR_RANKS: dict[str, Layout] = {
    ONE: Layout(),
    "tp2 ep2 etp1 sp recompute": Layout(4, {**SEQUENCE_PARALLEL, "ep": 2, "etp": 1}, megatron=RECOMPUTED),
    "tp2 cp2 sp": Layout(4, {**SEQUENCE_PARALLEL, "cp": 2}),
    "pp2 ep2, experts recomputed": Layout(4, {"pp": 2, "ep": 2}, megatron=SELECTIVE),
    "cp2 ep2 dp2": Layout(4, {"cp": 2, "ep": 2}),
    "pp2 vpp2 cp2": Layout(4, {"pp": 2, "vpp": 2, "cp": 2}),
}


def run_layouts(
    rank: int, world_size: int, init_method: str, model: str, directory: str, layouts: dict[str, Layout], num_layers: int
) -> dict[str, Outcome]:
    """Two batches of two optimizer steps under each layout, so that old log-probs are asked for as well."""
    from megatron_rl.training.topology import shutdown

    outcomes = {}
    for number, (name, layout) in enumerate(layouts.items()):
        if rank >= layout.num_ranks:
            continue
        print(f"layout {name}", flush=True)
        layout = dataclasses.replace(layout, megatron={**layout.megatron, **LOSSES})
        training = {"routing_replay": True, "optimizer_steps_per_batch": 2}
        settings = make_settings(model, Path(directory), layout, objective={"kl": {"coef": 0.05}}, training=training)
        trainer = make_trainer(settings, rank, f"{init_method}-{number}")
        metrics = []
        for seed in (1, 2):
            shards = shards_of(batch_with_record(seed, num_layers=num_layers, num_experts=NUM_EXPERTS, top_k=TOP_K), settings, seed=seed)
            metrics += trainer.train_shard(shards[trainer.dp_rank])
        log_probs = trainer.log_probs(batch_with_record(7, num_layers=num_layers, num_experts=NUM_EXPERTS, top_k=TOP_K))
        outcomes[name] = outcome_of(trainer, metrics, log_probs=[log_probs], whole=rank == 0)
        shutdown()
    return outcomes


def assert_layouts_agree(results: Sequence[dict[str, Outcome]], layouts: dict[str, Layout]) -> None:
    base = [results[0][ONE]]
    steps = merged_metrics(base)
    for step in steps:
        assert 0.2 < step["train/routing_replayed"] < 1
        assert step["train/routing_changed"] > 0.5, "random experts are others than the model's own"
        assert step["train/expert_load_max"] > 1
        assert step["train/aux_loss"] > 0.9 and step["train/router_z_loss"] > 0
    for name in layouts:
        outcomes = [result[name] for result in results if name in result]
        difference = compare(outcomes, base)
        print(f"{name}: {difference}")
        assert difference.largest <= TOLERANCE, f"{name}: {difference}"
        check_ranks_agree(outcomes)
        for got, want in zip(merged_metrics(outcomes), steps, strict=True):
            for key in ("train/expert_load_max", "train/expert_load_min", "train/expert_idle_fraction", "train/routing_replayed"):
                assert got[key] == want[key], f"{name} {key}"


def test_routers_do_the_same_under_every_layout(run_ranks: Callable[..., Any], tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    results = run_ranks(run_layouts, 2, str(tiny_model(**QWEN3)), str(tmp_path), TWO_RANKS, NUM_LAYERS, timeout_s=240)
    assert_layouts_agree(results, TWO_RANKS)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "num_layers"), [(QWEN3, NUM_LAYERS), (GLM4, NUM_LAYERS - 1)], ids=["qwen3", "glm4"])
def test_routers_do_the_same_on_four_ranks(
    run_ranks: Callable[..., Any], tiny_model: Callable[..., Path], tmp_path: Path, model: dict[str, Any], num_layers: int
) -> None:
    results = run_ranks(run_layouts, 4, str(tiny_model(**model)), str(tmp_path), FOUR_RANKS, num_layers, timeout_s=480)
    assert_layouts_agree(results, FOUR_RANKS)
