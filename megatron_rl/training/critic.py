"""The critic of ppo: a separate model of expected returns. Legend: T tokens of a batch, N trainable ones of a micro-batch."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.algorithms.aggregation import Sequences
from megatron_rl.algorithms.loss import LossOutput
from megatron_rl.algorithms.objective import Objective
from megatron_rl.algorithms.return_advantage import GaeAdvantage, ValueLoss
from megatron_rl.config.settings import TrainingSettings
from megatron_rl.models.build import TrainedModel, complete_parameters
from megatron_rl.observe.metrics import Mean, Metric
from megatron_rl.training import passes
from megatron_rl.training.advantages import TokenData
from megatron_rl.training.collectives import sum_over_data_parallel, sum_sequences
from megatron_rl.training.expert_load import ExpertLoad
from megatron_rl.training.micro_batch import MicroBatch
from megatron_rl.training.optimizer import OPTIMIZER_DEFAULTS
from megatron_rl.training.step import Gradients, apply_gradients, compute_gradients, share_of_metrics
from megatron_rl.training.topology import Place
from megatron_rl.types import Floats, StepTotals, TrainBatch

LR_FACTOR = 10.0
"""A critic starts from a head of zeros, a policy from a trained model: published recipes of ppo give it about ten times the rate."""

_CONSTANT_TOLERANCE = 1e-6


def critic_optimizer(training: TrainingSettings) -> dict[str, Any]:
    """Return the fields of the critic's optimizer: the policy's, `LR_FACTOR` times the rates, and its own on top."""
    policy = {**OPTIMIZER_DEFAULTS, **training.optimizer}
    rates = {name: LR_FACTOR * policy[name] for name in ("lr", "min_lr") if isinstance(policy[name], int | float)}
    return {**training.optimizer, **rates, **training.critic.optimizer}


def value_loss(objective: Objective) -> ValueLoss:
    """Return the critic's loss, through the aggregation and with the value clip of the policy's `objective`."""
    assert isinstance(objective.advantage, GaeAdvantage), "a critic is trained for gae"
    return ValueLoss(
        aggregation=objective.aggregation,
        max_response_length=objective.max_response_length,
        value_clip=objective.advantage.value_clip,
    )


class Critic:
    """One rank's share of the critic. Methods are collective over all ranks."""

    def __init__(
        self, build: Callable[..., TrainedModel], objective: Objective, training: TrainingSettings, *, place: Place, dumps: Path | None
    ) -> None:
        """Take the model of `build`, which is `build_trained_model` without an optimizer."""
        self.model = build(optimizer=critic_optimizer(training), with_value_head=True)
        self._loss = value_loss(objective)
        self._place, self._dumps = place, dumps

    def state_values(self, micro_batches: Sequence[MicroBatch], *, num_tokens: int) -> Floats:
        """Return values [T] of the states behind each of `num_tokens` tokens, all of which are in the micro-batches."""
        with complete_parameters(self.model.chunks):
            return passes.state_values(self.model.chunks, micro_batches, self._place, num_tokens=num_tokens)

    def forward_backward(self, micro_batches: Sequence[MicroBatch], totals: StepTotals, data: TokenData, *, number: int) -> Gradients:
        """Compute the gradient of the whole optimizer step `number`. No weight changes."""
        waiting = Gradients(number=number, totals=totals, micro_batches=micro_batches, data=data, metrics={})
        if not totals.num_tokens:
            return waiting
        sequence_sum = partial(sum_sequences, group=self._place.cp_group)

        def loss(number: int, values: Tensor) -> tuple[Tensor, LossOutput]:
            assert data.old_values is not None and data.returns is not None, "a critic learns from old values and returns"
            micro_batch, values = micro_batches[number], values.squeeze(-1)
            # Trainable tokens only, so that every entry of the mask is True.
            mask = torch.ones_like(values, dtype=torch.bool)
            share, metrics = self._loss.share(
                Sequences(micro_batch.sequence_index, mask, micro_batch.sequence_tokens, sequence_sum),
                values=values,
                old_values=micro_batch.pick(data.old_values),
                returns=micro_batch.pick(data.returns),
                num_tokens=totals.num_tokens,
                num_trajectories=totals.num_trajectories,
            )
            return share, LossOutput(share.detach(), metrics)

        load = ExpertLoad(self.model.chunks[0], totals, device=micro_batches[0].input_ids.device)
        gradients = compute_gradients(self.model, waiting, loss, place=self._place, router_step=load.step)
        metrics = share_of_metrics(gradients.reports, self._place, loss="value_loss", names={})
        return dataclasses.replace(gradients, metrics=metrics)

    def apply(self, gradients: Gradients) -> dict[str, Metric]:
        """Update the weights once, as `PolicySteps.apply`; return this rank's share of the metrics."""
        if not gradients.totals.num_tokens:
            return {}
        return apply_gradients(self.model, gradients, place=self._place, dumps=self._dumps, prefix="critic_")[1]

    def judge(self, batch: TrainBatch, data: TokenData) -> dict[str, Metric]:
        """Return this rank's share of metrics: the old values' fit to the returns."""
        assert data.old_values is not None and data.returns is not None, "a critic is judged by old values and returns"
        explained = explained_variance(
            returns=torch.from_numpy(data.returns),
            values=torch.from_numpy(data.old_values),
            mask=torch.from_numpy(batch.loss_mask.copy()),
            all_reduce_sum=sum_over_data_parallel,
        )
        return {"train/explained_variance": Mean(explained, 1.0)} if explained is not None and self._place.reports_alone else {}


def explained_variance(*, returns: Tensor, values: Tensor, mask: Tensor, all_reduce_sum: Callable[[Tensor], Tensor]) -> float | None:
    """Return 1 - Var(returns - values) / Var(returns) over the `mask` of all ranks, [T] each; None for constant returns."""
    columns = torch.stack([returns[mask].double(), (returns[mask] - values[mask]).double()])
    sums = all_reduce_sum(torch.cat([columns.sum(1), torch.tensor([float(columns.shape[1])], dtype=torch.float64)]))
    count = sums[2].clamp(min=1)
    means = sums[:2] / count
    total, left = all_reduce_sum((columns - means.unsqueeze(1)).square().sum(1)).tolist()
    return 1.0 - left / total if total > float(count * (_CONSTANT_TOLERANCE * means[0]).square()) else None
