"""Training under a layout, and comparing what came out with the training of one rank.

`run_cases` is the body of a rank: it trains case after case in one process, because importing megatron-core takes seconds.
"""

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from layout_table import LAYOUTS, OBJECTIVES, Case, Layout

SEEDS = (1, 2, 3)
FLOOR = 0.1
"""Metrics below it are compared as if they were that large: signed means of log-prob differences cancel, their rounding does not."""
NOT_COMPARED = frozenset({"train/num_micro_batches"})
"""Micro-batches differ with the layout."""
LOSSES = ("train/loss", "train/value_loss")
GRADIENT_NORMS = ("train/grad_norm", "train/critic_grad_norm")
# Adam's first update is the sign of a gradient above eps: eps stands above the rounding noise of gradients that cancel.
OPTIMIZER = {"lr": 1e-3, "clip_grad": 0.5, "weight_decay": 0.01, "adam_eps": 1e-6}
LENGTHS = (9, 5, 4, 12, 1, 90, 11, 6)
PROMPTS = (3, 2, 3, 4, 1, 5, 3, 2)
MASKED, ONE_TOKEN_RESPONSE, LONGEST = 1, 2, 5
Outcome = dict[str, Any]


def make_batch(
    seed: int,
    *,
    vocab: int = 32,
    lengths: Sequence[int] = LENGTHS,
    prompts: Sequence[int] = PROMPTS,
    trajectories: Sequence[int] | None = None,
) -> Any:
    """A TrainBatch of ragged sequences in two groups of four, each a trajectory unless `trajectories` numbers them.

    One is fully masked, one has a response of one token, one is a single token, one is longer than the others together; the
    latter two come with `LENGTHS` only.
    """
    from megatron_rl.types import TrainBatch

    random = np.random.default_rng(seed)
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    total = sum(lengths)
    mask = random.random(total) < 0.8
    for row, prompt in enumerate(prompts):
        mask[cu_seqlens[row] : cu_seqlens[row] + prompt] = False
    mask[cu_seqlens[MASKED] : cu_seqlens[MASKED + 1]] = False
    mask[cu_seqlens[ONE_TOKEN_RESPONSE + 1] - 1] = True
    owners = np.arange(len(lengths)) if trajectories is None else np.array(trajectories)
    return TrainBatch(
        tokens=random.integers(0, vocab, total),
        cu_seqlens=cu_seqlens,
        prompt_lengths=np.array(prompts),
        loss_mask=mask,
        rollout_log_probs=np.where(mask, random.normal(-3.4, 0.3, total), 0.0),
        weight_versions=np.where(mask, 0, -1),
        rewards=random.random(len(lengths))[owners],
        group_ids=np.array([0, 0, 0, 0, 1, 1, 1, 1]),
        truncated=np.array([True, False] * 4),
        trajectory_ids=owners,
    )


def batch_with_record(seed: int, *, num_layers: int, num_experts: int, top_k: int) -> Any:
    """A batch whose sequences, but for one, have experts of all tokens but the last, at random."""
    batch = make_batch(seed)
    random = np.random.default_rng(seed)
    experts = random.random((len(batch.tokens), num_layers, num_experts)).argsort(-1)[..., :top_k].astype(np.uint8)
    routed = np.ones(len(batch.tokens), np.bool_)
    routed[batch.cu_seqlens[1:] - 1] = False
    routed[batch.cu_seqlens[3] : batch.cu_seqlens[4]] = False
    return dataclasses.replace(batch, routed_experts=experts, routed=routed)


def make_settings(
    model: str,
    directory: Path,
    layout: Layout,
    *,
    objective: Mapping[str, Any],
    training: Mapping[str, Any] | None = None,
    dtype: str = "float32",
) -> Any:
    """Settings of a training of `objective` under `layout`; `training` has further fields of that section."""
    from megatron_rl.algorithms.objective import expand_preset
    from megatron_rl.config.settings import Settings

    section = {
        "topology": {"num_ranks": layout.num_ranks, **layout.topology},
        "max_tokens_per_micro_batch": layout.budget,
        "schedule": {"decay_style": "cosine", "decay_steps": 20, "warmup_steps": 2},
        "ddp": dict(layout.ddp),
        **(training or {}),
    }
    section["optimizer"] = {**OPTIMIZER, **layout.optimizer, **section.get("optimizer", {})}
    return Settings.model_validate(
        {
            "run": {"directory": directory / "run"},
            "model": {"path": model, "dtype": dtype, "megatron": dict(layout.megatron)},
            "data": {"train": "unused.jsonl"},
            "objective": expand_preset(objective),
            "training": section,
        }
    )


def make_trainer(settings: Any, rank: int, init_method: str) -> Any:
    """The Trainer of this rank."""
    from megatron_rl.training.trainer import Trainer

    return Trainer.of(settings, rank=rank, init_method=init_method)


def shards_of(batch: Any, settings: Any, *, seed: int = 0) -> Sequence[Any]:
    """The batch's shards, one for each data-parallel rank."""
    from megatron_rl.data.packing import make_shards
    from megatron_rl.training.topology import Topology

    training, topology = settings.training, Topology.of(settings.training.topology)
    return make_shards(
        batch,
        dp=topology.dp,
        optimizer_steps=training.optimizer_steps_per_batch,
        max_tokens_per_micro_batch=training.max_tokens_per_micro_batch,
        seed=seed,
        cp=topology.cp,
    )


def train_batches(
    trainer: Any, settings: Any, seeds: Sequence[int] = SEEDS, *, trajectories: Sequence[int] | None = None
) -> list[dict[str, Any]]:
    """This rank's share of the metrics of every optimizer step, on one batch for each seed."""
    steps = []
    for seed in seeds:
        steps += trainer.train_shard(shards_of(make_batch(seed, trajectories=trajectories), settings, seed=seed)[trainer.dp_rank])
    return steps


def weights_of(trainer: Any) -> dict[str, np.ndarray]:
    """Whole tensors of policy and critic by Hugging Face names; the critic's head only where this rank holds it."""
    import dataclasses

    from megatron_rl.models.build import complete_parameters
    from megatron_rl.models.hf_weights import export_hf_weights
    from megatron_rl.models.read_spec import read_model_spec

    weights = {f"policy {name}": tensor.float().numpy().copy() for name, tensor in trainer.weights()}
    if trainer.critic is None:
        return weights
    chunks = trainer.critic.model.chunks
    # As one with tied embeddings, whose export asks for no language model head.
    spec = dataclasses.replace(read_model_spec(trainer._model_settings.path), tie_embeddings=True)
    with complete_parameters(chunks):
        backbone = export_hf_weights([chunk.module for chunk in chunks], spec)
        weights |= {f"critic {name}": tensor.float().numpy().copy() for name, tensor in backbone}
        if chunks[-1].module.post_process:
            weights["critic head"] = chunks[-1].module.output_layer.weight.detach().float().numpy().copy()
    return weights


def arrangement(trainer: Any) -> dict[str, Any]:
    """How this process is arranged, asked of megatron-core and of the objects that were built, not of the settings."""
    from megatron.core import parallel_state as state
    from megatron.core.optimizer import ChainedOptimizer, DistributedOptimizer

    model = trainer._model
    optimizer = model.optimizer
    parts = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return {
        "tp": state.get_tensor_model_parallel_world_size(),
        "pp": state.get_pipeline_model_parallel_world_size(),
        "vpp": len(model.chunks),
        "cp": state.get_context_parallel_world_size(),
        "dp": state.get_data_parallel_world_size(),
        "ep": state.get_expert_model_parallel_world_size(),
        "etp": state.get_expert_tensor_parallel_world_size(),
        "sequence_parallel": model.chunks[0].config.sequence_parallel,
        "distributed_optimizer": all(isinstance(part, DistributedOptimizer) for part in parts),
        "recompute": model.chunks[0].config.recompute_granularity is not None,
        "num_parameters": sum(parameter.numel() for chunk in model.chunks for parameter in chunk.parameters()),
    }


def wanted_arrangement(layout: Layout) -> dict[str, Any]:
    """What `arrangement` is to find, without the number of parameters."""
    sizes = {name: layout.topology.get(name, 1) for name in ("tp", "pp", "vpp", "cp", "ep")}
    return {
        **sizes,
        "dp": layout.num_ranks // (sizes["tp"] * sizes["pp"] * sizes["cp"]),
        "etp": layout.topology.get("etp") or sizes["tp"],
        "sequence_parallel": layout.topology.get("sequence_parallel", False),
        "distributed_optimizer": bool(layout.optimizer),
        "recompute": bool(layout.megatron.get("recompute_granularity")),
    }


def outcome_of(trainer: Any, metrics: list[dict[str, Any]], *, log_probs: Sequence[np.ndarray] = (), whole: bool = True) -> Outcome:
    """What a rank knows after its steps. Tensors that are not `whole` and that rank 0 has too are told by their digest alone."""
    weights = weights_of(trainer)
    digests = {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in weights.items()}
    kept = weights if whole else {name: array for name, array in weights.items() if name == "critic head"}
    return {"metrics": metrics, "weights": kept, "digests": digests, "log_probs": list(log_probs), "arrangement": arrangement(trainer)}


def run_cases(
    rank: int, world_size: int, init_method: str, models: dict[str, str], directory: str, cases: Sequence[Case]
) -> dict[Case, Outcome]:
    """Train three batches under each case. A layout of fewer ranks than there are is run by the first ranks alone."""
    from megatron_rl.training.topology import shutdown

    outcomes = {}
    for number, case in enumerate(cases):
        if rank >= case.num_ranks:
            continue
        # The last line of a rank that dies says where.
        print(f"case {case}", flush=True)
        wanted = OBJECTIVES[case.objective]
        settings = make_settings(
            models[case.model],
            Path(directory) / f"{world_size}-{number}",
            LAYOUTS[case.layout],
            objective=wanted.objective,
            training=wanted.training,
            dtype=case.dtype,
        )
        trainer = make_trainer(settings, rank, f"{init_method}-{number}")
        before = trainer.log_probs(make_batch(7))
        metrics = train_batches(trainer, settings, trajectories=wanted.trajectories)
        outcomes[case] = outcome_of(trainer, metrics, log_probs=[before, trainer.log_probs(make_batch(7))], whole=rank == 0)
        shutdown()
    return outcomes


def merged_metrics(outcomes: Sequence[Outcome]) -> list[dict[str, float]]:
    """The metrics of every step from the shares of all ranks; each is in the table of metrics."""
    from megatron_rl.observe.metrics import check_metrics, merge_metrics, metric_values

    steps = [merge_metrics(step) for step in zip(*(outcome["metrics"] for outcome in outcomes), strict=True)]
    for step in steps:
        check_metrics(step)
    return [metric_values(step) for step in steps]


@dataclass(frozen=True, slots=True)
class Differences:
    """The largest relative difference of each quantity, over all steps; of log-probs the largest difference in nats.

    `worst_metric` and `worst_weight` are the names where `metrics` and `weights` were found.
    """

    loss: float
    metrics: float
    grad_norm: float
    log_probs: float
    weights: float
    worst_metric: str = ""
    worst_weight: str = ""

    def beyond(self, tolerance: "Differences") -> list[str]:
        """The quantities that differ by more than in `tolerance`."""
        quantities = ("loss", "metrics", "grad_norm", "log_probs", "weights")
        return [name for name in quantities if not getattr(self, name) <= getattr(tolerance, name)]

    @property
    def largest(self) -> float:
        """The largest of all."""
        return max(self.loss, self.metrics, self.grad_norm, self.log_probs, self.weights)


def relative_difference(got: float, want: float) -> float:
    """|got - want| / |want|, with `FLOOR` below the divisor; infinity for a number that is not finite."""
    return _or_infinite(abs(got - want) / max(abs(want), FLOOR))


def _or_infinite(difference: float) -> float:
    """A NaN would be passed over by `max`."""
    return difference if math.isfinite(difference) else math.inf


def compare(outcomes: Sequence[Outcome], base: Sequence[Outcome]) -> Differences:
    """How far `outcomes` of all ranks of a layout are from those of all ranks of the `base`."""
    steps, base_steps = merged_metrics(outcomes), merged_metrics(base)
    metrics: dict[str, float] = {}
    for got, want in zip(steps, base_steps, strict=True):
        assert got.keys() == want.keys(), f"metrics {sorted(got.keys() ^ want.keys())} are not on both sides"
        for name in want.keys() - NOT_COMPARED:
            metrics[name] = max(metrics.get(name, 0.0), relative_difference(got[name], want[name]))
    wanted = {name: array for outcome in base for name, array in outcome["weights"].items()}
    weights: dict[str, float] = {}
    for name, array in (entry for outcome in outcomes for entry in outcome["weights"].items()):
        distance = np.linalg.norm(array.astype(np.float64) - wanted[name])
        error = _or_infinite(float(distance / max(np.linalg.norm(wanted[name].astype(np.float64)), 1e-12)))
        weights[name] = max(weights.get(name, 0.0), error)
    assert weights.keys() == wanted.keys(), f"weights {sorted(weights.keys() ^ wanted.keys())} are not on both sides"
    others = {name: value for name, value in metrics.items() if name not in LOSSES + GRADIENT_NORMS}
    worst_metric, worst_weight = max(others, key=others.__getitem__), max(weights, key=weights.__getitem__)
    return Differences(
        loss=max(metrics[name] for name in LOSSES if name in metrics),
        metrics=others[worst_metric],
        grad_norm=max(metrics[name] for name in GRADIENT_NORMS if name in metrics),
        log_probs=_largest_log_prob_difference(outcomes, base),
        weights=weights[worst_weight],
        worst_metric=worst_metric,
        worst_weight=worst_weight,
    )


def _largest_log_prob_difference(outcomes: Sequence[Outcome], base: Sequence[Outcome]) -> float:
    """In nats, over all ranks, each of which has all log-probs."""
    pairs = [pair for outcome in outcomes for pair in zip(outcome["log_probs"], base[0]["log_probs"], strict=True)]
    return max((_or_infinite(float(np.abs(got - want).max())) for got, want in pairs), default=0.0)


def check_ranks_agree(outcomes: Sequence[Outcome]) -> None:
    """Every rank that gathers a tensor gets the same bits."""
    digests: dict[str, set[str]] = {}
    for outcome in outcomes:
        for name, digest in outcome["digests"].items():
            digests.setdefault(name, set()).add(digest)
    assert digests, "no rank gathered a weight"
    assert not [name for name, found in digests.items() if len(found) > 1], "ranks gathered different weights"
