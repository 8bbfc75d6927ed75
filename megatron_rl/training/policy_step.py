"""One optimizer step of the policy in two halves, each with metrics: gradients, then the update."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.algorithms.aggregation import LossInputs
from megatron_rl.algorithms.coefficients import Coefficients, ControlState
from megatron_rl.algorithms.log_prob import TokenStatistics
from megatron_rl.algorithms.loss import compute_loss
from megatron_rl.algorithms.objective import Objective
from megatron_rl.algorithms.policy_loss import Clip
from megatron_rl.algorithms.selection import StepStatistics, step_statistics
from megatron_rl.device import to_device
from megatron_rl.models.build import TrainedModel
from megatron_rl.observe.metrics import Last, Mean, Metric, Sum
from megatron_rl.training import passes
from megatron_rl.training.advantages import TokenData
from megatron_rl.training.collectives import SequenceSum, gather_on_last_stage, sum_over_ranks
from megatron_rl.training.dump import dump_suspects
from megatron_rl.training.expert_load import ExpertLoad
from megatron_rl.training.micro_batch import MicroBatch
from megatron_rl.training.weight_update import Gradients, Report, StepGradients, apply_gradients, compute_gradients, share_of_metrics
from megatron_rl.types import Ints, StepTotals

_METRIC_NAMES: Mapping[str, tuple[str, ...]] = {
    "kl_k3": ("train/kl_k3", "train/kl_reference"),
    "policy_kl": ("train/ppo_kl",),
    "ratio_mean": ("train/ratio",),
    "rollout_ratio_mean": ("train/off_policy_ratio",),
    "rollout_ratio_square": ("train/off_policy_ratio_square",),
}
"""Names of the loss's metrics in the table of metrics, where they are not train/NAME."""


class StepRunner:
    """Runs optimizer steps one after the other; owns what changes from one to the next besides weights and moments."""

    def __init__(self, objective: Objective, model: TrainedModel, *, dump_directory: Path | None, seed: int, frozen_steps: int = 0) -> None:
        """Set up the steps of a policy.

        `frozen_steps` is for a policy with an untrained critic: the first optimizer steps, without
        change of weights. Micro-batches that break a step are written to `dump_directory`; nowhere
        when None.
        """
        self._objective = objective
        self._model = model
        self._dump_directory = dump_directory
        self._seed = seed
        self._frozen_steps = frozen_steps
        self._controls = ControlState.first(objective)
        self._num_steps = 0

    @property
    def num_steps(self) -> int:
        """Count the optimizer steps so far, skipped ones included."""
        return self._num_steps

    @property
    def kl_reward_coef(self) -> float:
        """Return the present coefficient of the KL in the rewards."""
        return self._controls.kl_reward_coef(self._objective)

    def state(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return {"num_steps": self._num_steps, "controllers": self._controls.plain()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` gave."""
        self._num_steps = int(state["num_steps"])
        self._controls = ControlState.restored(self._objective, state["controllers"])

    def forward_backward(
        self, policy: passes.Policy, micro_batches: Sequence[MicroBatch], totals: StepTotals, data: TokenData
    ) -> StepGradients:
        """Compute the whole step's gradient, for `apply` to update the weights by. Begins the next optimizer step; no weight changes."""
        self._num_steps += 1
        counts = {"train/num_tokens": Sum(totals.num_tokens), "train/num_sequences": Sum(totals.num_sequences)}
        if totals.num_trajectories != totals.num_sequences:
            counts["train/num_trajectories"] = Sum(totals.num_trajectories)
        if not totals.num_tokens:
            return StepGradients(None, micro_batches, totals, data, _agreed_metrics(policy, counts))
        objective, coefficients, loss = self._prepare(policy, micro_batches, totals, data)
        load = ExpertLoad(policy.chunks[0], totals, device=micro_batches[0].input_ids.device, replays=policy.replays_routing)
        gradients = compute_gradients(
            self._model,
            micro_batches,
            loss,
            place=policy.place,
            measure=("entropy", "kl_per_sequence"),
            replay=policy.replays_routing,
            router_step=load.step,
        )
        agreed = _agreed_metrics(policy, {**counts, **_coefficients(objective, coefficients), **load.metrics()})
        own = share_of_metrics(gradients.reports, policy.place, loss="loss", names=_METRIC_NAMES)
        metrics = {**agreed, **own, **_micro_batch_count(policy, gradients)}
        return StepGradients(gradients, micro_batches, totals, data, metrics)

    def apply(self, policy: passes.Policy, waiting: StepGradients) -> dict[str, Metric]:
        """Update the weights once by the gradient of `forward_backward`; return added metrics.

        The share is this rank's. Nothing is updated for a step without trainable tokens, nor when a
        loss or gradient is not finite on any rank.
        """
        if waiting.gradients is None:
            return _agreed_metrics(policy, {"train/skipped_steps": Sum(1)})
        frozen = self._num_steps <= self._frozen_steps
        done = apply_gradients(self._model, waiting.gradients, place=policy.place, frozen=frozen)
        if done.sound and not frozen:
            means = waiting.gradients.means
            self._controls = self._controls.updated(
                self._objective, entropy=means["entropy"], kl=means["kl_per_sequence"], num_sequences=waiting.totals.num_trajectories
            )
        dump_suspects(self._dump_directory, f"optimizer-step-{self._num_steps:06d}", waiting, done, temperature=policy.temperature)
        metrics = {
            "train/grad_norm": Mean(done.grad_norm, 1.0),
            "train/lr": Last(done.lr),
            "train/skipped_steps": Sum(int(not done.sound)),
        }
        return _agreed_metrics(policy, metrics)

    def _prepare(
        self, policy: passes.Policy, micro_batches: Sequence[MicroBatch], totals: StepTotals, data: TokenData
    ) -> tuple[Objective, Coefficients, passes.LossFunction]:
        """Return the step's objective and coefficients, and the micro-batches' loss.

        A pass before the step runs first, where needed.
        """
        before = statistics = None
        if self._objective.needs_step_statistics or self._objective.needs_entropy_before_step:
            before = look_before_step(policy, micro_batches)
        objective, coefficients = self._controls.of_step(self._objective, None if before is None else before.entropy)
        if before is not None and self._objective.needs_step_statistics:
            seed = self._seed + self._num_steps
            statistics = make_step_statistics(objective, before, policy, micro_batches, data, num_tokens=totals.num_tokens, seed=seed)
        seen = None if before is None else before.seen
        sequence_sum = SequenceSum(policy.place.cp_group)

        def loss(number: int, hidden: Tensor) -> tuple[Tensor, Report]:
            micro_batch = micro_batches[number]
            current = policy.statistics(hidden, micro_batch, with_entropy=True)
            inputs = loss_inputs(micro_batch, current, data, seen=None if seen is None else seen[number])
            output = compute_loss(
                objective,
                inputs,
                num_tokens=totals.num_tokens,
                num_sequences=totals.num_trajectories,
                coefficients=coefficients,
                sequence_sum=sequence_sum,
                statistics=statistics,
            )
            # Without predictions the share must still depend on the head, whose gradient other ranks wait for.
            share = output.loss if len(micro_batch.positions) else output.loss + current.log_prob.sum()
            return share, Report(output.loss.detach(), {**output.metrics, **_differences(inputs, micro_batch, data)})

        return objective, coefficients, loss


@dataclass(frozen=True, slots=True, eq=False)
class BeforeStep:
    """`seen` the policy's statistics of each micro-batch before the step, on the last pipeline stage; `entropy` their mean, nats."""

    seen: Sequence[TokenStatistics]
    entropy: float | None


def look_before_step(policy: passes.Policy, micro_batches: Sequence[MicroBatch]) -> BeforeStep:
    """Make one forward pass over the micro-batches of a step, before the step's first gradient.

    Collective; `entropy` is the mean over the tokens of all ranks, the same on every rank.
    """
    seen = passes.statistics(policy, micro_batches)
    pair = torch.zeros(2, dtype=torch.float64, device=micro_batches[0].input_ids.device)
    if policy.place.reports:
        for statistics in seen:
            assert statistics.entropy is not None, "this pass computes entropies"
            pair[0] += statistics.entropy.double().sum()
            pair[1] += len(statistics.entropy)
    total, count = sum_over_ranks(pair).tolist()
    return BeforeStep(seen, total / count if count else None)


def make_step_statistics(
    objective: Objective,
    before: BeforeStep,
    policy: passes.Policy,
    micro_batches: Sequence[MicroBatch],
    data: TokenData,
    *,
    num_tokens: int,
    seed: int,
) -> StepStatistics | None:
    """Return thresholds and denominators of the step on the last pipeline stage, None on others.

    Collective over the last stage's dp and cp ranks.
    """
    if not policy.place.last_stage:
        return None
    inputs = [loss_inputs(micro_batch, seen, data) for micro_batch, seen in zip(micro_batches, before.seen, strict=True)]
    device = micro_batches[0].input_ids.device
    return step_statistics(
        objective,
        inputs,
        num_tokens=num_tokens,
        sequence_sum=SequenceSum(policy.place.cp_group),
        gather=lambda values: gather_on_last_stage(values.to(device)),
        seed=seed,
    )


def loss_inputs(
    micro_batch: MicroBatch, statistics: TokenStatistics, data: TokenData, *, seen: TokenStatistics | None = None
) -> LossInputs:
    """Return inputs [N] of trainable tokens only, so every mask entry is True.

    `seen` are the statistics of the pass before the step.
    """
    current = statistics.log_prob.detach()
    rollout = data.rollout_log_probs

    def of_sequences(values: Ints | None) -> Tensor | None:
        return None if values is None else to_device(values[micro_batch.rows], current.device)

    return LossInputs(
        log_probs=statistics.log_prob,
        entropy=statistics.entropy,
        varentropy=statistics.varentropy,
        old_log_probs=current if data.old_log_probs is None else micro_batch.pick(data.old_log_probs),
        rollout_log_probs=None if rollout is None else micro_batch.pick(rollout),
        ref_log_probs=None if data.ref_log_probs is None else micro_batch.pick(data.ref_log_probs),
        advantages=micro_batch.pick(data.advantages),
        loss_mask=torch.ones_like(current, dtype=torch.bool),
        sequence_index=micro_batch.sequence_index,
        sequence_tokens=micro_batch.sequence_tokens,
        kl_mask=None if data.kl_mask is None else micro_batch.pick(data.kl_mask, dtype=torch.bool),
        token_keys=micro_batch.pick(data.token_keys, dtype=torch.int64),
        selection_log_probs=None if seen is None else seen.log_prob,
        selection_entropy=None if seen is None else seen.entropy,
        trajectory_ids=of_sequences(data.trajectory_ids),
        trajectory_tokens=of_sequences(data.trajectory_tokens),
    )


def _differences(inputs: LossInputs, micro_batch: MicroBatch, data: TokenData) -> dict[str, tuple[Tensor, Tensor]]:
    """Return mean |engine - trainer| log-prob of engine tokens, and old - teacher of all."""
    assert inputs.old_log_probs is not None, "loss_inputs gives them"
    pairs = {}
    if inputs.rollout_log_probs is not None:
        generated = micro_batch.pick(data.weight_versions, dtype=torch.int64) >= 0
        difference = (inputs.rollout_log_probs - inputs.old_log_probs).abs()
        pairs["log_prob_diff"] = (torch.where(generated, difference, 0.0).sum(), generated.sum())
    if data.teacher_log_probs is not None:
        to_teacher = inputs.old_log_probs - micro_batch.pick(data.teacher_log_probs)
        pairs["teacher_kl"] = (to_teacher.sum(), torch.ones_like(to_teacher).sum())
    return pairs


def _agreed_metrics(policy: passes.Policy, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Metrics that are equal on all ranks, reported by one rank."""
    return dict(metrics) if policy.place.reports_alone else {}


def _coefficients(objective: Objective, coefficients: Coefficients) -> dict[str, Metric]:
    """Return the coefficients used by the objective."""
    metrics: dict[str, Metric] = {}
    if objective.entropy is not None and objective.entropy.has_bonus:
        metrics["train/entropy_coef"] = Last(coefficients.entropy)
    if objective.kl is not None:
        metrics["train/kl_loss_coef"] = Last(coefficients.kl_loss)
    if objective.adapts_clip_high and isinstance(objective.policy_loss, Clip) and objective.policy_loss.high is not None:
        metrics["train/clip_high"] = Last(objective.policy_loss.high)
    return metrics


def _micro_batch_count(policy: passes.Policy, gradients: Gradients) -> dict[str, Metric]:
    """Count micro-batches on context-parallel rank 0 alone: the other ranks have the same ones."""
    return {"train/num_micro_batches": Sum(len(gradients.reports) if policy.place.cp_rank == 0 else 0)} if policy.place.reports else {}
