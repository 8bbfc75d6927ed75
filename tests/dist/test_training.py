"""Layouts change nothing: the same weights and batches give the same losses, metrics, gradient norms and weights under every layout.

All layouts of a test run one after the other in one pair of processes, because importing megatron-core takes seconds.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

RELATIVE = 1e-5
# Signed means of log-prob differences cancel: their rounding is that of log-probs of size 4 in float32.
ABSOLUTE = 1e-6
Outcome = dict[str, Any]

GRPO = {"kl_loss_coef": 0.05, "entropy_coef": 0.01}
SUPERVISED = {"policy_loss": "sft", "aggregation": "token_mean"}
DISTRIBUTED_OPTIMIZER = {"optimizer": {"use_distributed_optimizer": True}}


def make_batch(seed: int, vocab: int = 32) -> Any:
    """Ragged sequences: one fully masked, one with a response of one token, one longer than the others together."""
    from megatron_rl.types import TrainBatch

    random = np.random.default_rng(seed)
    lengths = np.array([9, 5, 4, 12, 7, 90, 11, 6])
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    total = int(lengths.sum())
    mask = random.random(total) < 0.8
    for row, prompt in enumerate([3, 2, 3, 4, 2, 5, 3, 2]):
        mask[cu_seqlens[row] : cu_seqlens[row] + prompt] = False
    mask[cu_seqlens[1] : cu_seqlens[2]] = False
    mask[cu_seqlens[3] - 1] = True
    return TrainBatch(
        tokens=random.integers(0, vocab, total),
        cu_seqlens=cu_seqlens,
        prompt_lengths=[3, 2, 3, 4, 2, 5, 3, 2],
        loss_mask=mask,
        rollout_log_probs=np.where(mask, random.normal(-3.4, 0.3, total), 0.0),
        weight_versions=np.where(mask, 0, -1),
        rewards=random.random(len(lengths)),
        group_ids=[0, 0, 0, 0, 1, 1, 1, 1],
        truncated=np.zeros(len(lengths)),
    )


def make_settings(model: str, directory: Path, *, objective: dict[str, Any], training: dict[str, Any]) -> Any:
    from megatron_rl.config.settings import Settings

    training = {"max_tokens_per_micro_batch": 24, **{key: value for key, value in training.items() if key != "objective"}}
    # Adam's first update is the sign of a gradient above eps: eps stands above the rounding noise of gradients that cancel.
    optimizer = {"lr": 1e-3, "clip_grad": 0.5, "weight_decay": 0.01, "adam_eps": 1e-6}
    training["optimizer"] = {**optimizer, **training.get("optimizer", {})}
    training["schedule"] = {"decay_style": "cosine", "decay_steps": 20, "warmup_steps": 2}
    return Settings.model_validate(
        {
            "run": {"directory": directory / "run"},
            "model": {"path": model},
            "data": {"train": "unused.jsonl"},
            "objective": objective,
            "training": training,
        }
    )


def make_trainer(settings: Any, rank: int, init_method: str) -> Any:
    from megatron_rl.training.trainer import Trainer

    return Trainer(settings, rank=rank, init_method=init_method)


def train_steps(trainer: Any, settings: Any, seeds: list[int]) -> list[dict[str, Any]]:
    """Metrics of this rank for every optimizer step."""
    from megatron_rl.data.packing import make_shards

    topology = settings.training.topology
    model_ranks = topology.tp * topology.pp * topology.cp
    steps = []
    for seed in seeds:
        shards = make_shards(
            make_batch(seed),
            dp=topology.num_ranks // model_ranks,
            optimizer_steps=settings.training.optimizer_steps_per_batch,
            max_tokens_per_micro_batch=settings.training.max_tokens_per_micro_batch * topology.cp,
            seed=seed,
            cp=topology.cp,
        )
        steps += trainer.train(shards[trainer.dp_rank])
    return steps


def run_layouts(
    rank: int, world_size: int, init_method: str, model: str, directory: str, objective: dict[str, Any], layouts: dict[str, dict[str, Any]]
) -> dict[str, Outcome]:
    """Three batches under each layout, which may bring an objective of its own; a layout of one rank is run by rank 0 alone."""
    from megatron_rl.training.topology import shutdown

    outcomes = {}
    for name, training in layouts.items():
        if rank >= training["topology"]["num_ranks"]:
            continue
        settings = make_settings(model, Path(directory), objective=training.get("objective", objective), training=training)
        trainer = make_trainer(settings, rank, f"{init_method}-{name}")
        before = trainer.log_probs(make_batch(7))
        metrics = train_steps(trainer, settings, [1, 2, 3])
        weights = {key: tensor.numpy().copy() for key, tensor in trainer.weights()}
        outcomes[name] = {"log_probs": before, "metrics": metrics, "weights": weights}
        shutdown()
    return outcomes


def merged(outcomes: list[dict[str, Outcome]], name: str) -> list[dict[str, float]]:
    from megatron_rl.observe.metrics import check_metrics, merge_metrics

    shares = [outcome[name]["metrics"] for outcome in outcomes if name in outcome]
    steps = [merge_metrics(step) for step in zip(*shares, strict=True)]
    for step in steps:
        check_metrics(step)
    return [{key: metric.value for key, metric in step.items()} for step in steps]


def assert_same(outcomes: list[dict[str, Outcome]], name: str, base: str) -> None:
    for got, want in zip(merged(outcomes, name), merged(outcomes, base), strict=True):
        del got["train/num_micro_batches"], want["train/num_micro_batches"]
        assert got.keys() == want.keys()
        for key in want:
            assert math.isclose(got[key], want[key], rel_tol=RELATIVE, abs_tol=ABSOLUTE), f"{name} {key}: {got[key]} against {want[key]}"
    for outcome in (outcome[name] for outcome in outcomes if name in outcome):
        np.testing.assert_allclose(outcome["log_probs"], outcomes[0][base]["log_probs"], rtol=0, atol=RELATIVE, err_msg=name)
        for key, want_array in outcomes[0][base]["weights"].items():
            difference = np.linalg.norm(outcome["weights"][key] - want_array) / np.linalg.norm(want_array)
            assert difference <= RELATIVE, f"{name} {key}: relative difference {difference}"


LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"topology": {"num_ranks": 1}},
    "one in small micro-batches": {"topology": {"num_ranks": 1}, "max_tokens_per_micro_batch": 10},
    "dp2": {"topology": {"num_ranks": 2}},
    "dp2 distributed optimizer": {"topology": {"num_ranks": 2}, **DISTRIBUTED_OPTIMIZER},
    "dp2 overlapped": {
        "topology": {"num_ranks": 2},
        "ddp": {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 20000},
        **DISTRIBUTED_OPTIMIZER,
    },
    "tp2": {"topology": {"num_ranks": 2, "tp": 2}},
    "tp2 sp": {"topology": {"num_ranks": 2, "tp": 2, "sequence_parallel": True}},
    "cp2": {"topology": {"num_ranks": 2, "cp": 2}},
    "pp2": {"topology": {"num_ranks": 2, "pp": 2}},
    "pp2 vpp2": {"topology": {"num_ranks": 2, "pp": 2, "vpp": 2}},
}


@pytest.mark.parametrize(("objective", "tied"), [(GRPO, True), (SUPERVISED, False)], ids=["grpo", "sft"])
def test_layouts_agree(
    run_ranks: Callable[..., list[Any]], tiny_model: Callable[..., Path], tmp_path: Path, objective: dict[str, Any], tied: bool
) -> None:
    model = tiny_model(layers=4, tied=tied)
    outcomes = run_ranks(run_layouts, 2, str(model), str(tmp_path), objective, LAYOUTS, timeout_s=240)
    base = merged(outcomes, "one")
    assert all(step["train/grad_norm"] > 0.01 for step in base)
    for name in LAYOUTS:
        assert_same(outcomes, name, "one")


# Each leans on something that must be summed or chosen over the whole step, whatever the layout.
OBJECTIVES: dict[str, dict[str, Any]] = {
    "sequence ratios, rejection out of the denominators": {
        "ratio_level": "sequence",
        "off_policy_correction": {"mode": "mask", "low": 0.5, "high": 2.0, "keep_rejected_in_denominator": False},
        "kl_loss_coef": 0.1,
        "kl_control": {"target": 0.01, "horizon": 100},
    },
    "top entropy, controlled": {
        "aggregation": "token_mean",
        "top_entropy_fraction": 0.5,
        "entropy_control": {"rule": "paper", "target": 4.0, "delta": 0.1, "initial": 0.2},
        "advantage": {"estimator": "rloo"},
    },
    "KL in the rewards": {
        "kl_reward_coef": 0.1,
        "advantage": {"estimator": "reinforce_plus_plus_baseline", "gamma": 0.9},
        "policy_loss": "kl_cov",
        "kl_cov_fraction": 0.1,
    },
    "geometric mean": {
        "policy_loss": "gmpo",
        "aggregation": "sequence_mean_token_sum_norm",
        "zero_variance": "mask_kl",
        "kl_loss_coef": 0.1,
    },
}


def test_objectives_agree(run_ranks: Callable[..., list[Any]], tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    chosen = ("one", "dp2 distributed optimizer", "cp2", "pp2")
    cases = {
        f"{layout}, {name}": {**LAYOUTS[layout], "objective": objective, "optimizer_steps_per_batch": 2}
        for name, objective in OBJECTIVES.items()
        for layout in chosen
    }
    outcomes = run_ranks(run_layouts, 2, str(tiny_model()), str(tmp_path), {}, cases, timeout_s=240)
    for name in OBJECTIVES:
        assert all(step["train/skipped_steps"] == 0 for step in merged(outcomes, f"one, {name}"))
        for layout in chosen[1:]:
            assert_same(outcomes, f"{layout}, {name}", f"one, {name}")


def resume(
    rank: int, world_size: int, init_method: str, model: str, directory: str, cases: dict[str, Any]
) -> dict[str, dict[str, Outcome]]:
    """For each case three steps at once, and two steps, a checkpoint, a fresh trainer (of another layout, maybe) and the third step."""
    from megatron_rl.training.topology import shutdown

    def outcome(trainer: Any, metrics: Any) -> Outcome:
        weights = {name: tensor.numpy().copy() for name, tensor in trainer.weights()}
        return {"metrics": metrics, "weights": weights, "log_probs": np.zeros(1)}

    outcomes = {}
    for name, (training, loaded_as) in cases.items():
        path = Path(directory) / name
        settings = make_settings(model, path, objective=GRPO, training=training)
        later = make_settings(model, path, objective=GRPO, training=loaded_as)
        straight = make_trainer(settings, rank, f"{init_method}-{name}-straight")
        train_steps(straight, settings, [1, 2])
        straight.save(path / "checkpoint")
        want = outcome(straight, train_steps(straight, settings, [3]))
        shutdown()
        resumed = make_trainer(later, rank, f"{init_method}-{name}-resumed")
        resumed.load(path / "checkpoint")
        outcomes[name] = {"straight": want, "resumed": outcome(resumed, train_steps(resumed, later, [3]))}
        shutdown()
    return outcomes


RESUMES = {
    "dp2": (LAYOUTS["dp2"], LAYOUTS["dp2"]),
    "dp2 distributed optimizer": (LAYOUTS["dp2 distributed optimizer"], LAYOUTS["dp2 distributed optimizer"]),
    "tp2 sp": (LAYOUTS["tp2 sp"], LAYOUTS["tp2 sp"]),
    "dp2 distributed optimizer to tp2": (LAYOUTS["dp2 distributed optimizer"], {**LAYOUTS["tp2"], **DISTRIBUTED_OPTIMIZER}),
    "tp2 to pp2": (LAYOUTS["tp2"], LAYOUTS["pp2"]),
}


def test_two_steps_a_checkpoint_and_a_third_are_three_steps(
    run_ranks: Callable[..., list[Any]], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    results = run_ranks(resume, 2, str(tiny_model()), str(tmp_path), RESUMES, timeout_s=240)
    for name, (training, loaded_as) in RESUMES.items():
        outcomes = [result[name] for result in results]
        assert [path.name for path in (tmp_path / name).iterdir()] == ["checkpoint"]
        if training != loaded_as:
            assert_same(outcomes, "resumed", "straight")
            continue
        for outcome in outcomes:
            assert outcome["resumed"]["metrics"] == outcome["straight"]["metrics"], name
            for key, want in outcome["straight"]["weights"].items():
                np.testing.assert_array_equal(outcome["resumed"]["weights"][key], want, err_msg=f"{name} {key}")


LONGEST = 5


def edge_cases(rank: int, world_size: int, init_method: str, model: str, directory: str) -> Outcome:
    """Two data-parallel ranks with one sequence between them, then with a token of infinite embedding on one of them."""
    from megatron_rl.data.packing import make_shards
    from megatron_rl.observe.metrics import Metric
    from megatron_rl.training.topology import shutdown
    from megatron_rl.types import TrainBatch

    settings = make_settings(model, Path(directory), objective=SUPERVISED, training=LAYOUTS["dp2"])
    trainer = make_trainer(settings, rank, init_method)

    def train(batch: TrainBatch) -> dict[str, Metric]:
        shards = make_shards(batch, dp=2, optimizer_steps=1, max_tokens_per_micro_batch=24, seed=0)
        return trainer.train(shards[trainer.dp_rank])[0]

    def weights() -> dict[str, Any]:
        return {name: tensor.numpy().copy() for name, tensor in trainer.weights()}

    batch = make_batch(1, vocab=31)
    outcome: Outcome = {"one sequence": train(batch.select(np.array([LONGEST]))), "before": weights()}
    tokens = batch.tokens.copy()
    tokens[batch.cu_seqlens[LONGEST] + 2] = 31
    fields = {name: getattr(batch, name) for name in TrainBatch.__slots__}
    outcome["poisoned"] = train(TrainBatch(**{**fields, "tokens": tokens}))
    outcome["after"] = weights()
    shutdown()
    return outcome


def test_ranks_without_sequences_join_and_a_non_finite_loss_on_one_rank_stops_all(
    run_ranks: Callable[..., list[Any]], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    from safetensors.numpy import load_file, save_file

    from megatron_rl.observe.metrics import merge_metrics

    model = tiny_model(tied=False)
    tensors = load_file(model / "model.safetensors")
    tensors["model.embed_tokens.weight"][31] = np.inf
    save_file(tensors, model / "model.safetensors")
    outcomes = run_ranks(edge_cases, 2, str(model), str(tmp_path), timeout_s=120)
    alone = merge_metrics([outcome["one sequence"] for outcome in outcomes])
    assert alone["train/skipped_steps"].value == 0
    assert alone["train/num_sequences"].value == 1
    assert math.isfinite(alone["train/grad_norm"].value) and alone["train/grad_norm"].value > 0
    assert merge_metrics([outcome["poisoned"] for outcome in outcomes])["train/skipped_steps"].value == 1
    for outcome in outcomes:
        for name, want in outcomes[0]["before"].items():
            np.testing.assert_array_equal(outcome["before"][name], want, err_msg=name)
            np.testing.assert_array_equal(outcome["after"][name], want, err_msg=name)
    dumped = {path.stem for path in (tmp_path / "run" / "dumps").iterdir()}
    assert len(dumped) == 1, f"one micro-batch of one rank is broken, but {sorted(dumped)} were written"
