"""ppo's critic under every layout: the same values, losses, gradient norms and weights, of policy and critic, as on one rank.

All layouts of a test run one after the other in one pair of processes, because importing megatron-core takes seconds.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

RELATIVE = 1e-5
# Signed means of log-prob differences cancel: their rounding is that of log-probs of size 4 in float32.
ABSOLUTE = 1e-6
# Micro-batches differ with the layout.
NOT_COMPARED = {"train/num_micro_batches"}
Outcome = dict[str, Any]

# A KL in the rewards, sequence means and a bootstrapped end, so that each is looked at under every layout.
PPO = {
    "kl_reward_coef": 0.05,
    "kl_control": {"target": 0.01, "horizon": 100},
    "value_clip": 0.1,
    "entropy_coef": 0.01,
    "advantage": {"estimator": "ppo", "gamma": 0.95, "lam": 0.9, "bootstrap_truncated": True},
}
# Adam's first update is the sign of a gradient above eps: eps stands above the rounding noise of gradients that cancel.
OPTIMIZER = {"lr": 1e-3, "clip_grad": 0.5, "weight_decay": 0.01, "adam_eps": 1e-6}
DISTRIBUTED = {"use_distributed_optimizer": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"topology": {"num_ranks": 1}},
    "dp2": {"topology": {"num_ranks": 2}},
    "dp2 distributed optimizer": {"topology": {"num_ranks": 2}, "optimizer": DISTRIBUTED},
    "dp2 overlapped": {
        "topology": {"num_ranks": 2},
        "ddp": {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 20000},
        "optimizer": DISTRIBUTED,
    },
    "tp2": {"topology": {"num_ranks": 2, "tp": 2}},
    "tp2 sp": {"topology": {"num_ranks": 2, "tp": 2, "sequence_parallel": True}},
    "cp2": {"topology": {"num_ranks": 2, "cp": 2}},
    "pp2": {"topology": {"num_ranks": 2, "pp": 2}},
    "pp2 vpp2": {"topology": {"num_ranks": 2, "pp": 2, "vpp": 2}},
}


def make_batch(seed: int) -> Any:
    """Ragged sequences: one fully masked, one with a response of one token, one longer than the others together."""
    from megatron_rl.types import TrainBatch

    random = np.random.default_rng(seed)
    lengths, prompts = np.array([9, 5, 4, 12, 7, 90, 11, 6]), [3, 2, 3, 4, 2, 5, 3, 2]
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    total = int(lengths.sum())
    mask = random.random(total) < 0.8
    for row, prompt in enumerate(prompts):
        mask[cu_seqlens[row] : cu_seqlens[row] + prompt] = False
    mask[cu_seqlens[1] : cu_seqlens[2]] = False
    mask[cu_seqlens[3] - 1] = True
    return TrainBatch(
        tokens=random.integers(0, 32, total),
        cu_seqlens=cu_seqlens,
        prompt_lengths=np.array(prompts),
        loss_mask=mask,
        rollout_log_probs=np.where(mask, random.normal(-3.4, 0.3, total), 0.0),
        weight_versions=np.where(mask, 0, -1),
        rewards=random.random(len(lengths)),
        group_ids=np.array([0, 0, 0, 0, 1, 1, 1, 1]),
        truncated=np.array([True, False] * 4),
    )


def make_settings(model: str, directory: Path, training: dict[str, Any]) -> Any:
    from megatron_rl.config.settings import Settings

    training = {
        "max_tokens_per_micro_batch": 24,
        "optimizer_steps_per_batch": 2,
        "schedule": {"decay_style": "cosine", "decay_steps": 20, "warmup_steps": 2},
        **training,
        "optimizer": {**OPTIMIZER, **training.get("optimizer", {})},
        "critic": {"optimizer": {"lr": 2e-3}},
    }
    return Settings.model_validate(
        {
            "run": {"directory": directory / "run"},
            "model": {"path": model},
            "data": {"train": "unused.jsonl"},
            "objective": PPO,
            "training": training,
        }
    )


def make_trainer(settings: Any, rank: int, init_method: str) -> Any:
    from megatron_rl.training.trainer import Trainer

    return Trainer(settings, rank=rank, init_method=init_method)


def train_batches(trainer: Any, settings: Any, seeds: list[int]) -> list[dict[str, Any]]:
    """Metrics of this rank for every optimizer step."""
    from megatron_rl.data.packing import make_shards
    from megatron_rl.training.topology import Topology

    topology = Topology.of(settings.training.topology)
    steps = []
    for seed in seeds:
        shards = make_shards(
            make_batch(seed),
            dp=topology.dp,
            optimizer_steps=settings.training.optimizer_steps_per_batch,
            max_tokens_per_micro_batch=settings.training.max_tokens_per_micro_batch * topology.cp,
            seed=seed,
            cp=topology.cp,
        )
        steps += trainer.train(shards[trainer.dp_rank])
    return steps


def outcome_of(trainer: Any, metrics: list[dict[str, Any]]) -> Outcome:
    """What a rank knows after its steps; whole tensors of the critic under Hugging Face names, and its head where this rank has it."""
    from megatron_rl.models.weights import export_hf_weights
    from megatron_rl.training.trained_model import complete_parameters

    chunks = trainer.critic.model.chunks
    weights = {f"policy {name}": tensor.numpy().copy() for name, tensor in trainer.weights()}
    with complete_parameters(chunks):
        backbone = without_head(trainer)
        weights |= {f"critic {name}": tensor.numpy().copy() for name, tensor in export_hf_weights([c.module for c in chunks], backbone)}
        if chunks[-1].module.post_process:
            weights["critic head"] = chunks[-1].module.output_layer.weight.detach().numpy().copy()
    return {"metrics": metrics, "weights": weights}


def without_head(trainer: Any) -> Any:
    """The model's architecture as one with tied embeddings, whose export asks for no head."""
    import dataclasses

    from megatron_rl.models.spec import read_model_spec

    return dataclasses.replace(read_model_spec(trainer._settings.model.path), tie_embeddings=True)


def run_layouts(rank: int, world_size: int, init_method: str, model: str, directory: str, names: list[str]) -> dict[str, Outcome]:
    """Three batches of two optimizer steps under each layout; a layout of one rank is run by rank 0 alone."""
    from megatron_rl.training.topology import shutdown

    outcomes = {}
    for name in names:
        if rank >= LAYOUTS[name]["topology"]["num_ranks"]:
            continue
        settings = make_settings(model, Path(directory), LAYOUTS[name])
        trainer = make_trainer(settings, rank, f"{init_method}-{name}")
        outcomes[name] = outcome_of(trainer, train_batches(trainer, settings, [1, 2, 3]))
        shutdown()
    return outcomes


def merged(outcomes: list[Outcome]) -> list[dict[str, float]]:
    from megatron_rl.observe.metrics import check_metrics, merge_metrics

    steps = [merge_metrics(step) for step in zip(*(outcome["metrics"] for outcome in outcomes), strict=True)]
    for step in steps:
        check_metrics(step)
    return [{key: metric.value for key, metric in step.items()} for step in steps]


def assert_same(name: str, outcomes: list[Outcome], base: list[Outcome]) -> None:
    for got, want in zip(merged(outcomes), merged(base), strict=True):
        assert got.keys() == want.keys()
        for key in want.keys() - NOT_COMPARED:
            assert math.isclose(got[key], want[key], rel_tol=RELATIVE, abs_tol=ABSOLUTE), f"{name} {key}: {got[key]} against {want[key]}"
    weights = {key: array for outcome in base for key, array in outcome["weights"].items()}
    assert {key for outcome in outcomes for key in outcome["weights"]} == weights.keys()
    for outcome in outcomes:
        for key, array in outcome["weights"].items():
            difference = np.linalg.norm(array - weights[key]) / np.linalg.norm(weights[key])
            assert difference <= RELATIVE, f"{name} {key}: relative difference {difference}"


def test_layouts_agree(run_ranks: Callable[..., list[Any]], tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    results = run_ranks(run_layouts, 2, str(tiny_model(layers=4)), str(tmp_path), list(LAYOUTS), timeout_s=240)
    base = [results[0]["one"]]
    for step in merged(base):
        assert step["train/critic_skipped_steps"] == step["train/skipped_steps"] == 0
        assert step["train/critic_grad_norm"] > 0.01 and step["train/value_loss"] > 0.01
    assert merged(base)[-1]["train/value_clip_fraction"] > 0, "the value clip has something to do"
    for name in LAYOUTS:
        assert_same(name, [result[name] for result in results if name in result], base)


RESUMES = {
    "dp2": ("dp2", "dp2"),
    "dp2 distributed optimizer": ("dp2 distributed optimizer", "dp2 distributed optimizer"),
    "pp2 vpp2": ("pp2 vpp2", "pp2 vpp2"),
    "tp2 sp": ("tp2 sp", "tp2 sp"),
    "tp2 to pp2": ("tp2", "pp2"),
}


def resume(rank: int, world_size: int, init_method: str, model: str, directory: str) -> dict[str, dict[str, Outcome]]:
    """For each case two batches, a checkpoint and a third batch, and the third again by a fresh trainer, of another layout maybe."""
    from megatron_rl.training.topology import shutdown

    outcomes = {}
    for name, (saved_as, loaded_as) in RESUMES.items():
        path = Path(directory) / name
        settings, later = (make_settings(model, path, LAYOUTS[layout]) for layout in (saved_as, loaded_as))
        straight = make_trainer(settings, rank, f"{init_method}-{name}-straight")
        train_batches(straight, settings, [1, 2])
        straight.save(path / "checkpoint")
        want = outcome_of(straight, train_batches(straight, settings, [3]))
        shutdown()
        resumed = make_trainer(later, rank, f"{init_method}-{name}-resumed")
        resumed.load(path / "checkpoint")
        outcomes[name] = {"straight": want, "resumed": outcome_of(resumed, train_batches(resumed, later, [3]))}
        shutdown()
    return outcomes


def test_a_resumed_critic_goes_on_bit_for_bit(run_ranks: Callable[..., list[Any]], tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    results = run_ranks(resume, 2, str(tiny_model(layers=4)), str(tmp_path), timeout_s=240)
    for name, (saved_as, loaded_as) in RESUMES.items():
        straight, resumed = ([result[name][which] for result in results] for which in ("straight", "resumed"))
        if saved_as != loaded_as:
            assert_same(name, resumed, straight)
            continue
        for got, want in zip(resumed, straight, strict=True):
            assert got["metrics"] == want["metrics"], name
            for key, array in want["weights"].items():
                np.testing.assert_array_equal(got["weights"][key], array, err_msg=f"{name} {key}")
