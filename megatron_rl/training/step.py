"""One optimizer step: losses of its micro-batches, gradients, update, metrics."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor, distributed

from megatron_rl.algorithms.log_prob import TokenStatistics
from megatron_rl.algorithms.loss import LossInputs, compute_loss
from megatron_rl.algorithms.objective import Objective
from megatron_rl.observe.metrics import Last, Mean, Metric, Sum
from megatron_rl.training import passes
from megatron_rl.training.before_step import look_before_step, make_step_statistics
from megatron_rl.training.controllers import Controllers, StepMeasurements, StepObjective
from megatron_rl.training.dump import dump_micro_batch
from megatron_rl.training.loss_inputs import loss_inputs
from megatron_rl.training.micro_batch import MicroBatch
from megatron_rl.training.optimizer import optimizer_step
from megatron_rl.training.sequence_sum import SequenceSum
from megatron_rl.training.token_data import TokenData
from megatron_rl.types import StepTotals

_METRIC_NAMES: Mapping[str, tuple[str, ...]] = {
    "kl_k3": ("train/kl_k3", "train/kl_reference"),
    "policy_kl": ("train/ppo_kl",),
    "ratio_mean": ("train/ratio",),
    "rollout_ratio_mean": ("train/off_policy_ratio",),
    "rollout_ratio_square": ("train/off_policy_ratio_square",),
}
"""Names of the loss's metrics in the table of metrics, where they are not train/NAME."""


@dataclass(frozen=True, slots=True, eq=False)
class Report:
    """What a micro-batch's loss leaves behind: `loss`, this rank's share, and metrics as (sum, weight) pairs, all still tensors."""

    loss: Tensor
    metrics: Mapping[str, tuple[Tensor, Tensor]]


class StepRunner:
    """Runs optimizer steps one after the other; owns what changes from one to the next besides weights and moments."""

    def __init__(
        self, objective: Objective, *, optimizer: MegatronOptimizer, scheduler: OptimizerParamScheduler, dump_directory: Path, seed: int
    ) -> None:
        self._objective = objective
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._dump_directory = dump_directory
        self._seed = seed
        self._controllers = Controllers(objective)
        self._num_steps = 0

    def state(self) -> dict[str, Any]:
        """Plain values that a checkpoint keeps."""
        return {"num_steps": self._num_steps, "controllers": self._controllers.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` gave."""
        self._num_steps = int(state["num_steps"])
        self._controllers.restore(state["controllers"])

    def run(self, policy: passes.Policy, micro_batches: Sequence[MicroBatch], totals: StepTotals, data: TokenData) -> dict[str, Metric]:
        """Update the weights once by the whole step's gradient; this rank's share of the step's metrics.

        Nothing is updated for a step without trainable tokens, nor when a loss or gradient is not finite on any rank.
        """
        self._num_steps += 1
        if not totals.num_tokens:
            return _agreed_metrics(policy, totals, {"train/skipped_steps": Sum(1)})
        lr = float(self._optimizer.param_groups[0]["lr"])
        self._optimizer.zero_grad()
        present, reports = self._backward(policy, micro_batches, totals, data)
        finite, measured = _measure(reports, policy, device=micro_batches[0].input_ids.device)
        updated, grad_norm = optimizer_step(self._optimizer) if finite else (False, math.nan)
        if updated:
            self._scheduler.step(1)
            self._controllers.update(measured, num_sequences=totals.num_sequences)
        elif policy.place.reports:
            # A gradient that is not finite although all losses are can come from any micro-batch.
            suspects = [index for index, report in enumerate(reports) if finite or not bool(report.loss.isfinite())]
            for index in suspects:
                self._dump(policy, micro_batches[index], index, data, loss=float(reports[index].loss), grad_norm=grad_norm)
        agreed = {"train/grad_norm": Mean(grad_norm, 1.0), "train/lr": Last(lr), "train/skipped_steps": Sum(int(not updated))}
        return {**_agreed_metrics(policy, totals, {**agreed, **_coefficients(present)}), **_own_metrics(policy, reports)}

    def _backward(
        self, policy: passes.Policy, micro_batches: Sequence[MicroBatch], totals: StepTotals, data: TokenData
    ) -> tuple[StepObjective, list[Report]]:
        """Gradients of the step, after the pass before it where the objective wants one."""
        before = statistics = None
        if self._objective.needs_step_statistics or self._controllers.needs_current_entropy:
            before = look_before_step(policy, micro_batches)
        present = self._controllers.present(None if before is None else before.entropy)
        if before is not None and self._objective.needs_step_statistics:
            seed = self._seed + self._num_steps
            statistics = make_step_statistics(
                present.objective, before, policy, micro_batches, data, num_tokens=totals.num_tokens, seed=seed
            )
        seen = {} if before is None else {id(part): part_seen for part, part_seen in zip(micro_batches, before.seen, strict=False)}
        sequence_sum = SequenceSum(policy.place.cp_group)

        def loss(micro_batch: MicroBatch, current: TokenStatistics) -> tuple[Tensor, Report]:
            inputs = loss_inputs(micro_batch, current, data, seen=seen.get(id(micro_batch)))
            output = compute_loss(
                present.objective,
                inputs,
                num_tokens=totals.num_tokens,
                num_sequences=totals.num_sequences,
                entropy_coef=present.entropy_coef,
                kl_loss_coef=present.kl_loss_coef,
                sequence_sum=sequence_sum,
                statistics=statistics,
            )
            return output.loss, Report(output.loss.detach(), {**output.metrics, **_rollout_difference(inputs, micro_batch, data)})

        return present, passes.forward_backward(policy, micro_batches, loss)

    def _dump(
        self, policy: passes.Policy, micro_batch: MicroBatch, index: int, data: TokenData, *, loss: float, grad_norm: float
    ) -> None:
        name = f"step-{self._num_steps:06d}-rank-{distributed.get_rank()}-micro-batch-{index}"
        dump_micro_batch(self._dump_directory / name, micro_batch, data, loss=loss, grad_norm=grad_norm, temperature=policy.temperature)


def _rollout_difference(inputs: LossInputs, micro_batch: MicroBatch, data: TokenData) -> dict[str, tuple[Tensor, Tensor]]:
    """Mean |engine - trainer| log-prob over the tokens that an engine made."""
    assert inputs.rollout_log_probs is not None and inputs.old_log_probs is not None, "loss_inputs gives both"
    generated = micro_batch.pick(data.weight_versions, dtype=torch.int64) >= 0
    difference = (inputs.rollout_log_probs - inputs.old_log_probs).abs()
    return {"log_prob_diff": (torch.where(generated, difference, 0.0).sum(), generated.sum())}


def _measure(reports: Sequence[Report], policy: passes.Policy, *, device: torch.device) -> tuple[bool, StepMeasurements]:
    """Whether all losses of the step are finite, and its means, over all ranks. Collective; the same on every rank."""
    shares = torch.zeros(5, dtype=torch.float64, device=device)
    if policy.place.reports:
        zero = torch.zeros((), device=device)
        for report in reports:
            pairs = [report.metrics.get(name, (zero, zero)) for name in ("entropy", "kl_per_sequence")]
            shares += torch.stack([(~report.loss.isfinite()).double(), *(value.double() for pair in pairs for value in pair)])
    distributed.all_reduce(shares)
    broken, entropy, entropy_weight, kl, kl_weight = shares.tolist()
    measured = StepMeasurements(
        entropy=entropy / entropy_weight if entropy_weight else None, kl_per_sequence=kl / kl_weight if kl_weight else None
    )
    return not broken, measured


def _agreed_metrics(policy: passes.Policy, totals: StepTotals, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """What all ranks agree on, told by one of them."""
    if not policy.place.speaks:
        return {}
    counts = {"train/num_tokens": Sum(totals.num_tokens), "train/num_sequences": Sum(totals.num_sequences)}
    return {**counts, **metrics}


def _coefficients(present: StepObjective) -> dict[str, Metric]:
    """Coefficients that the objective uses."""
    metrics: dict[str, Metric] = {}
    if present.objective.has_entropy_bonus:
        metrics["train/entropy_coef"] = Last(present.entropy_coef)
    if present.objective.kl_loss_coef:
        metrics["train/kl_loss_coef"] = Last(present.kl_loss_coef)
    if present.objective.adapts_clip_high and present.objective.clip_high is not None:
        metrics["train/clip_high"] = Last(present.objective.clip_high)
    return metrics


def _own_metrics(policy: passes.Policy, reports: Sequence[Report]) -> dict[str, Metric]:
    """This rank's metrics: sums over its micro-batches, read from the device at once."""
    if not policy.place.reports:
        return {}
    names = list(reports[0].metrics)
    rows = [[report.loss, *(value for name in names for value in report.metrics[name])] for report in reports]
    sums = torch.stack([torch.stack([value.double() for value in row]) for row in rows]).sum(dim=0).tolist()
    # The loss is the sum of all shares: one rank gives it the weight, the others only their share.
    metrics: dict[str, Metric] = {"train/loss": Mean(sums[0], float(policy.place.speaks))}
    # Counted by context-parallel rank 0 alone, as its peers have the same micro-batches.
    metrics["train/num_micro_batches"] = Sum(len(reports) if policy.place.cp_rank == 0 else 0)
    for index, name in enumerate(names):
        for full_name in _METRIC_NAMES.get(name, (f"train/{name}",)):
            metrics[full_name] = Mean(sums[1 + 2 * index], sums[2 + 2 * index])
    return metrics
