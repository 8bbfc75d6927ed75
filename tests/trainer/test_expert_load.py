"""The routers' metrics of a step, and records that are not of the model."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl.algorithms.rounding_limits import Expected, Limits
from megatron_rl.data.packing import make_shards
from megatron_rl.errors import UserError
from megatron_rl.models.experts.routed_tokens import RouterReport
from megatron_rl.models.read_spec import read_model_spec
from megatron_rl.observe.metrics import check_metrics, metric_values
from megatron_rl.training.expert_load import check_record, router_metrics
from megatron_rl.training.trainer import Trainer
from megatron_rl.types import TrainBatch

MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


def test_load_is_told_of_the_worst_layer_relative_to_its_mean() -> None:
    load = torch.tensor([[4.0, 4.0, 6.0, 2.0], [0.0, 9.0, 5.0, 2.0]], dtype=torch.float64)
    report = RouterReport(load=load, replayed=12.0, changed=3.0, reordered=2.0, balance_loss=1.5, z_loss=None)
    metrics = router_metrics(report, top_k=2, replays=True)
    check_metrics(metrics)
    assert metric_values(metrics) == {
        "train/aux_loss": 1.5,
        "train/expert_idle_fraction": 1 / 8,
        "train/expert_load_max": 9 / 4,
        "train/expert_load_min": 0.0,
        "train/routing_changed": 3 / 12,
        "train/routing_reordered": 2 / 12,
        "train/routing_replayed": 12 / 16,
    }


def make_batch(tokens: list[list[int]], **record: Any) -> TrainBatch:
    """These sequences, each with a prompt of two tokens."""
    lengths = np.array([len(row) for row in tokens])
    total, num_sequences = int(lengths.sum()), len(lengths)
    return TrainBatch(
        tokens=np.concatenate(tokens),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]),
        prompt_lengths=np.full(num_sequences, 2),
        loss_mask=np.concatenate([np.arange(length) >= 2 for length in lengths]),
        rollout_log_probs=np.zeros(total),
        weight_versions=np.full(total, -1),
        rewards=np.zeros(num_sequences),
        group_ids=np.arange(num_sequences),
        truncated=np.zeros(num_sequences),
        **record,
    )


def batch_with(experts: Any) -> TrainBatch:
    return make_batch([[5, 6, 7]], routed_experts=experts, routed=np.ones(3))


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (np.zeros((3, 3, 2), np.uint8), r"\(3, 2\), the model has \(2, 2\)"),
        (np.zeros((3, 2, 1), np.uint8), r"\(2, 1\), the model has \(2, 2\)"),
        (np.full((3, 2, 2), (1, 4), np.uint8), "names expert 4, the model has 0 to 3"),
    ],
)
def test_records_of_another_model_are_refused(tiny_model: Callable[..., Path], experts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_record(batch_with(experts), read_model_spec(tiny_model(**MOE, layers=2)))


def test_a_record_has_the_layers_with_experts_only(tiny_model: Callable[..., Path]) -> None:
    spec = read_model_spec(tiny_model(family="glm4_moe", layers=3, vocab=33))
    check_record(batch_with(np.full((3, 2, 4), (0, 7, 1, 2), np.uint8)), spec)
    with pytest.raises(ValueError, match=r"\(3, 4\), the model has \(2, 4\)"):
        check_record(batch_with(np.full((3, 3, 4), (0, 7, 1, 2), np.uint8)), spec)


def test_records_without_experts_in_the_model_are_refused(tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="Qwen3ForCausalLM has no experts"):
        check_record(batch_with(np.zeros((3, 2, 2), np.uint8)), read_model_spec(tiny_model()))


ROWS = [[3, 9, 4, 4, 30], [8, 2, 17], [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17], [1, 2]]


def test_balance_loss_is_coefficient_times_mean_over_sequences(
    make_trainer: Callable[..., Trainer], tiny_model: Callable[..., Path]
) -> None:
    """Gradient norm and metrics of a supervised step against transformers in float64; the last sequence has nothing to train on."""
    import transformers

    path = tiny_model(**MOE, layers=2, tied=False, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[])
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager")
    log_probs, balance, z_loss, num_tokens = [], torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64), 0
    for row in ROWS[:-1]:
        output = model(torch.tensor([row]), output_router_logits=True)
        targets = torch.tensor(row[2:])[:, None]
        log_probs.append(output.logits[0, 1:-1].log_softmax(-1).gather(1, targets)[:, 0])
        num_tokens += len(row)
        for logits in output.router_logits:
            scores = logits.softmax(-1)
            chosen = torch.zeros_like(scores).scatter(1, scores.topk(2).indices, 1.0)
            balance = balance + (4 / (2 * len(row)) * chosen.sum(0) * scores.mean(0)).sum() / 3
            z_loss = z_loss + logits.logsumexp(-1).square().sum()
    z_loss = z_loss / num_tokens
    (-torch.cat(log_probs).mean() + 0.3 * balance + 0.02 * z_loss).backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])

    supervised = {"policy_loss": "sft", "aggregation": "token_mean"}
    trainer = make_trainer(path, supervised, megatron={"moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.02})
    batch = make_batch(ROWS)
    shard = make_shards(batch, dp=1, optimizer_steps=1, max_tokens_per_micro_batch=12, seed=0)[0]
    metrics = metric_values(trainer.train_shard(shard)[0])
    assert metrics["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    assert metrics["train/aux_loss"] == pytest.approx(balance.item() / 2, rel=1e-5)
    assert metrics["train/router_z_loss"] == pytest.approx(z_loss.item() / 2, rel=1e-5)


def test_a_loss_without_a_coefficient_is_not_reported(make_trainer: Callable[..., Trainer], tiny_model: Callable[..., Path]) -> None:
    shard = make_shards(make_batch(ROWS), dp=1, optimizer_steps=1, max_tokens_per_micro_batch=12, seed=0)[0]
    metrics = make_trainer(tiny_model(**MOE, layers=2), {"policy_loss": "sft"}).train_shard(shard)[0]
    assert "train/expert_load_max" in metrics
    assert not metrics.keys() & {"train/aux_loss", "train/router_z_loss"}


def test_only_the_policy_replays_and_only_when_asked_to(make_trainer: Callable[..., Trainer], tiny_model: Callable[..., Path]) -> None:
    path = tiny_model(**MOE, layers=2, norm_topk_prob=True)
    free = make_batch(ROWS)
    experts = np.random.default_rng(0).random((len(free.tokens), 2, 4)).argsort(-1)[..., :2].astype(np.uint8)
    recorded = dataclasses.replace(free, routed_experts=experts, routed=np.ones(len(experts), np.bool_))
    trainer = make_trainer(path, routing_replay=True, reference_interval=1)
    own = trainer.log_probs(free)
    assert np.abs(trainer.log_probs(recorded) - own).max() > 0.01
    np.testing.assert_array_equal(trainer.log_probs(recorded, reference=True), own)
    np.testing.assert_array_equal(make_trainer(path).log_probs(recorded), own)


def test_tokens_without_the_engines_experts_need_not_agree(make_trainer: Callable[..., Trainer], tiny_model: Callable[..., Path]) -> None:
    """As those of answers over an update of the weights: the trainer routes them, so that only larger limits would hold."""
    trainer = make_trainer(tiny_model(**MOE, layers=2, norm_topk_prob=True), routing_replay=True, optimizer={"lr": 0.0})
    batch = make_batch(ROWS)
    experts = np.random.default_rng(0).random((len(batch.tokens), 2, 4)).argsort(-1)[..., :2].astype(np.uint8)
    # The engine's record of the first sequence is lost.
    routed = np.repeat(np.arange(batch.num_sequences), batch.lengths) > 0
    batch = dataclasses.replace(batch, routed_experts=experts, routed=np.ones(len(routed), np.bool_))
    engine = np.where(batch.loss_mask, trainer.log_probs(batch), 0.0).astype(np.float32)
    batch = dataclasses.replace(batch, rollout_log_probs=engine, weight_versions=np.where(batch.loss_mask, 0, -1), routed=routed)
    expected = Expected(version=0, limits=Limits(median=1e-4, outlier=1e-4, share=0.0))

    def clipped(batch: TrainBatch) -> float:
        shard = make_shards(batch, dp=1, optimizer_steps=1, max_tokens_per_micro_batch=12, seed=0)[0]
        return metric_values(trainer.train_shard(shard, expected=expected)[0])["train/log_prob_diff_clipped"]

    assert clipped(batch) < 1e-5
    assert clipped(dataclasses.replace(batch, rollout_log_probs=engine - 1.0 * (routed & batch.loss_mask))) == pytest.approx(1e-4)


def test_a_model_without_experts_cannot_replay(make_trainer: Callable[..., Trainer], tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match=r"training\.routing_replay is true, but Qwen3ForCausalLM at .* has no experts"):
        make_trainer(tiny_model(), routing_replay=True)
