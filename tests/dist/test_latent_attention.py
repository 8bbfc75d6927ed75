"""Latent attention under every layout: DeepSeek-V3's log-probs equal those of transformers, and training those of one rank."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from layout_runs import Outcome, compare, make_batch, make_settings, make_trainer, outcome_of, train_batches
from layout_table import BASE, Layout
from parity_runs import OBJECTIVE, TOLERANCE, run_and_compare

YARN = {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 32, "mscale": 0.707, "mscale_all_dim": 1.0}
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "head_dim": 8,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 2.5,
    "tied": False,
    "layers": 3,
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {**DEEPSEEK, "q_lora_rank": 20, "rope_scaling": YARN, "first_k_dense_replace": 3},
    "experts": {**DEEPSEEK, "q_lora_rank": 20, "rope_scaling": YARN, "first_k_dense_replace": 1},
    "no query latent": {**DEEPSEEK, "q_lora_rank": None, "rope_interleave": False, "first_k_dense_replace": 3},
}
UNEVEN = {"num_layers_in_first_pipeline_stage": 2, "num_layers_in_last_pipeline_stage": 1}
UP_RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}
LAYOUTS: dict[str, Layout] = {
    BASE: Layout(),
    "dp2": Layout(2),
    "tp2": Layout(2, {"tp": 2}),
    "tp2 sp": Layout(2, {"tp": 2, "sequence_parallel": True}, megatron=UP_RECOMPUTED),
    "cp2": Layout(2, {"cp": 2}),
    "pp2": Layout(2, {"pp": 2}, megatron=UNEVEN),
    "cp2 recomputed": Layout(2, {"cp": 2}, megatron=UP_RECOMPUTED),
    "tp2 cp2": Layout(4, {"tp": 2, "cp": 2}),
    "tp2 pp2 sp": Layout(4, {"tp": 2, "pp": 2, "sequence_parallel": True}, megatron=UNEVEN),
    "tp4": Layout(4, {"tp": 4}),
}
GATE = [("dense", name) for name in ("dp2", "tp2", "tp2 sp", "cp2", "pp2")]
GATE += [("experts", name) for name in ("tp2 sp", "pp2")] + [("no query latent", "tp2")]
# Experts need sequence parallelism where there is tensor parallelism.
WIDE = [("experts", name) for name in ("dp2", "cp2", "cp2 recomputed", "tp2 pp2 sp")]
WIDE += [("no query latent", name) for name in ("tp2 sp", "cp2", "pp2")]
WIDE += [("dense", name) for name in ("cp2 recomputed", "tp2 cp2", "tp2 pp2 sp", "tp4")] + [("no query latent", "tp2 pp2 sp")]


@pytest.mark.timeout(300)
def test_two_rank_layouts(run_ranks: Callable[..., list[Any]], tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    run_and_compare(run_ranks, tiny_model, tmp_path, models=MODELS, layouts=LAYOUTS, cases=GATE, num_ranks=2)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_ranks", (2, 4))
def test_more_layouts(run_ranks: Callable[..., list[Any]], tiny_model: Callable[..., Path], tmp_path: Path, num_ranks: int) -> None:
    cases = [case for case in WIDE if LAYOUTS[case[1]].num_ranks == num_ranks]
    run_and_compare(run_ranks, tiny_model, tmp_path, models=MODELS, layouts=LAYOUTS, cases=cases, num_ranks=num_ranks)


def resume(rank: int, world_size: int, init_method: str, model: str, directory: str, layouts: list[Layout]) -> dict[str, Outcome]:
    """A third batch after two others under the first layout, and after loading what was saved before it under each layout."""
    from megatron_rl.training.topology import shutdown

    outcomes = {}
    settings = make_settings(model, Path(directory), layouts[0], objective=OBJECTIVE)
    trainer = make_trainer(settings, rank, f"{init_method}-saved")
    train_batches(trainer, settings, [1, 2])
    trainer.save(Path(directory) / "checkpoint")
    outcomes["straight"] = outcome_of(trainer, train_batches(trainer, settings, [3]), log_probs=[trainer.log_probs(make_batch(7))])
    shutdown()
    for number, layout in enumerate(layouts):
        settings = make_settings(model, Path(directory), layout, objective=OBJECTIVE)
        trainer = make_trainer(settings, rank, f"{init_method}-{number}")
        trainer.load(Path(directory) / "checkpoint")
        metrics = train_batches(trainer, settings, [3])
        outcomes[f"resumed {number}"] = outcome_of(trainer, metrics, log_probs=[trainer.log_probs(make_batch(7))])
        shutdown()
    return outcomes


@pytest.mark.timeout(200)
def test_a_checkpoint_goes_on_under_any_layout(
    run_ranks: Callable[..., list[Any]], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    layouts = [LAYOUTS[name] for name in ("tp2", "tp2 sp", "pp2")]
    results = run_ranks(resume, 2, str(tiny_model(**MODELS["dense"])), str(tmp_path), layouts, timeout_s=150)
    straight = [result["straight"] for result in results]
    for number in range(len(layouts)):
        differences = compare([result[f"resumed {number}"] for result in results], straight)
        assert differences.largest <= (0 if number == 0 else TOLERANCE), f"resumed {number}: {differences}"
