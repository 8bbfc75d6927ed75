"""One optimizer step in two halves, each with metrics: gradients, then the update. The critic shares both.

Legend: N trainable tokens of a micro-batch.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from megatron_rl.algorithms.aggregation import LossInputs
from megatron_rl.algorithms.coefficients import Coefficients, ControlState
from megatron_rl.algorithms.log_prob import TokenStatistics
from megatron_rl.algorithms.loss import LossOutput, compute_loss
from megatron_rl.algorithms.objective import Objective
from megatron_rl.algorithms.policy_loss import Clip
from megatron_rl.algorithms.rounding_limits import Expected
from megatron_rl.algorithms.selection import step_statistics
from megatron_rl.checkpoints.optimizer_shards import parts_of
from megatron_rl.models.build import TrainedModel
from megatron_rl.models.experts.routed_tokens import RouterStep
from megatron_rl.models.hf_weights import expert_biases
from megatron_rl.observe.metrics import Last, Max, Mean, Metric, Sum
from megatron_rl.system.device import to_device
from megatron_rl.training import passes
from megatron_rl.training.advantages import TokenData
from megatron_rl.training.collectives import gather_on_last_stage, sum_over_ranks, sum_sequences
from megatron_rl.training.dump import dump_micro_batch
from megatron_rl.training.expert_load import ExpertLoad
from megatron_rl.training.micro_batch import MicroBatch
from megatron_rl.training.sampled_tokens import CLIPPED, LARGEST, sampled_metrics
from megatron_rl.training.topology import Place
from megatron_rl.types import StepTotals

_METRIC_NAMES: Mapping[str, tuple[str, ...]] = {
    "kl_k3": ("train/kl_k3", "train/kl_reference"),
    "policy_kl": ("train/ppo_kl",),
    "ratio_mean": ("train/ratio",),
    "rollout_ratio_mean": ("train/off_policy_ratio",),
    "rollout_ratio_square": ("train/off_policy_ratio_square",),
}
"""Names of the loss's metrics in the table of metrics, where they are not train/NAME."""

_OF_TOKENS = ("old_log_probs", "rollout_log_probs", "current_share", "ref_log_probs", "advantages", "kl_mask", "token_keys")
"""Fields of TokenData that are the loss's inputs of the same names."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Gradients:
    """Gradients in a model's buffers that wait for the update, and their inputs; `number` counts optimizer steps from 1.

    `metrics` are this rank's share, `reports` those of its micro-batches on the last stage.
    `finite`: all losses of all ranks were. `sums` are those of measured metrics over all ranks,
    with weights. `moved_biases` are routers' biases with their values after the step.
    """

    number: int
    totals: StepTotals
    micro_batches: Sequence[MicroBatch]
    data: TokenData
    metrics: Mapping[str, Metric]
    reports: Sequence[LossOutput] = ()
    finite: bool = True
    sums: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    moved_biases: Sequence[tuple[Tensor, Tensor]] = ()

    def mean(self, name: str) -> float | None:
        """Return the mean of a measured metric, None without a measurement."""
        total, weight = self.sums[name]
        return total / weight if weight else None


class PolicySteps:
    """The policy's optimizer steps, one after the other, with the state that they change besides weights and moments."""

    def __init__(
        self, objective: Objective, model: TrainedModel, policy: passes.Policy, *, dumps: Path | None, seed: int, frozen_steps: int = 0
    ) -> None:
        """Set up the steps of `policy`, which is `model` as a distribution; the first `frozen_steps` change no weights."""
        self._objective, self._model, self._policy, self._dumps = objective, model, policy, dumps
        self._seed, self._frozen_steps = seed, frozen_steps
        self.controls = ControlState.first(objective)
        self.num_steps = 0

    def state(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return {"num_steps": self.num_steps, "controllers": self.controls.plain()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`."""
        self.num_steps = int(state["num_steps"])
        self.controls = ControlState.restored(self._objective, state["controllers"])

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], totals: StepTotals, data: TokenData, *, expected: Expected | None = None
    ) -> Gradients:
        """Begin the next optimizer step and compute its gradient. No weight changes.

        Raises ParityError, on every rank, for log-probs of the rollout other than `expected`.
        """
        self.num_steps += 1
        policy, counts = self._policy, {"train/num_tokens": Sum(totals.num_tokens), "train/num_sequences": Sum(totals.num_sequences)}
        if totals.num_trajectories != totals.num_sequences:
            counts["train/num_trajectories"] = Sum(totals.num_trajectories)
        waiting = Gradients(
            number=self.num_steps, totals=totals, micro_batches=micro_batches, data=data, metrics=_agreed(policy.place, counts)
        )
        if not totals.num_tokens:
            return waiting
        objective, coefficients, loss = self._loss(micro_batches, totals, data, expected)
        load = ExpertLoad(policy.chunks[0], totals, device=micro_batches[0].input_ids.device, replays=policy.replays_routing)
        gradients = compute_gradients(
            self._model,
            waiting,
            loss,
            place=policy.place,
            measure=("entropy", "kl_per_sequence", "log_prob_diff", CLIPPED),
            replay=policy.replays_routing,
            router_step=load.step,
        )
        if expected is not None:
            expected.check(*gradients.sums[CLIPPED], mean=gradients.mean("log_prob_diff"))
        agreed = _agreed(policy.place, {**counts, **_coefficients(objective, coefficients), **load.metrics()})
        own = share_of_metrics(gradients.reports, policy.place, loss="loss", names=_METRIC_NAMES)
        if policy.place.reports:
            # The other context-parallel ranks have the same micro-batches.
            own["train/num_micro_batches"] = Sum(len(gradients.reports) if policy.place.cp_rank == 0 else 0)
        return dataclasses.replace(gradients, metrics={**agreed, **own})

    def apply(self, gradients: Gradients) -> dict[str, Metric]:
        """Update the weights once, unless no token is trainable or a loss or gradient is not finite; return added metrics."""
        place = self._policy.place
        if not gradients.totals.num_tokens:
            return _agreed(place, {"train/skipped_steps": Sum(1)})
        frozen = gradients.number <= self._frozen_steps
        sound, metrics = apply_gradients(
            self._model, gradients, place=place, dumps=self._dumps, temperature=self._policy.temperature, frozen=frozen
        )
        if sound and not frozen:
            entropy, kl = gradients.mean("entropy"), gradients.mean("kl_per_sequence")
            self.controls = self.controls.updated(
                self._objective, entropy=entropy, kl=kl, num_trajectories=gradients.totals.num_trajectories
            )
        return metrics

    def _loss(
        self, micro_batches: Sequence[MicroBatch], totals: StepTotals, data: TokenData, expected: Expected | None
    ) -> tuple[Objective, Coefficients, passes.LossFunction]:
        """Return the step's objective, coefficients and loss, after a pass before the step where needed."""
        policy, statistics, entropy = self._policy, None, None
        sequence_sum = partial(sum_sequences, group=policy.place.cp_group)
        seen: Sequence[TokenStatistics | None] = [None] * len(micro_batches)
        if looks := self._objective.needs_step_statistics or self._objective.needs_entropy_before_step:
            seen, entropy = look_before_step(policy, micro_batches)
        objective, coefficients = self.controls.of_step(self._objective, entropy)
        if looks and self._objective.needs_step_statistics and policy.place.last_stage:
            looked_at = zip(micro_batches, seen, strict=True)
            statistics = step_statistics(
                objective,
                [loss_inputs(micro_batch, before, data) for micro_batch, before in looked_at if before is not None],
                num_tokens=totals.num_tokens,
                sequence_sum=sequence_sum,
                gather=lambda values: gather_on_last_stage(values.to(micro_batches[0].input_ids.device)),
                seed=self._seed + self.num_steps,
            )

        def loss(number: int, hidden: Tensor) -> tuple[Tensor, LossOutput]:
            micro_batch = micro_batches[number]
            current = policy.statistics(micro_batch, hidden, with_entropy=True)
            inputs = loss_inputs(micro_batch, current, data, seen=seen[number])
            output = compute_loss(
                objective,
                inputs,
                num_tokens=totals.num_tokens,
                num_trajectories=totals.num_trajectories,
                coefficients=coefficients,
                sequence_sum=sequence_sum,
                statistics=statistics,
            )
            if data.record is not None and policy.place.reports:
                data.record.add(micro_batch, inputs, output.clipped)
            # Without predictions the share must still depend on the head, whose gradient other ranks wait for.
            share = output.loss if len(micro_batch.positions) else output.loss + current.log_prob.sum()
            measured = {**output.metrics, **sampled_metrics(inputs, micro_batch, data, expected, current=current)}
            return share, LossOutput(output.loss.detach(), measured)

        return objective, coefficients, loss


def look_before_step(policy: passes.Policy, micro_batches: Sequence[MicroBatch]) -> tuple[list[TokenStatistics], float | None]:
    """Return each micro-batch's statistics before the step on the last stage, and the mean entropy, nats. Collective."""
    seen = passes.statistics(policy, micro_batches)
    pair = torch.zeros(2, dtype=torch.float64, device=micro_batches[0].input_ids.device)
    if policy.place.reports:
        for statistics in seen:
            assert statistics.entropy is not None, "this pass computes entropies"
            pair[0] += statistics.entropy.double().sum()
            pair[1] += len(statistics.entropy)
    total, count = sum_over_ranks(pair).tolist()
    return seen, total / count if count else None


def loss_inputs(
    micro_batch: MicroBatch, statistics: TokenStatistics, data: TokenData, *, seen: TokenStatistics | None = None
) -> LossInputs:
    """Return inputs [N] of trainable tokens, so every mask entry is True; `seen` is of the pass before the step."""
    current = statistics.log_prob.detach()
    given = {name: values for name in _OF_TOKENS if (values := getattr(data, name)) is not None}
    of_sequences = {name: values for name in ("trajectory_ids", "trajectory_tokens") if (values := getattr(data, name)) is not None}
    return LossInputs(
        log_probs=statistics.log_prob,
        entropy=statistics.entropy,
        varentropy=statistics.varentropy,
        loss_mask=torch.ones_like(current, dtype=torch.bool),
        sequence_index=micro_batch.sequence_index,
        sequence_tokens=micro_batch.sequence_tokens,
        selection_log_probs=None if seen is None else seen.log_prob,
        selection_entropy=None if seen is None else seen.entropy,
        **{"old_log_probs": current, **{name: micro_batch.pick(values) for name, values in given.items()}},
        **{name: to_device(values[micro_batch.rows], current.device) for name, values in of_sequences.items()},
    )


def _coefficients(objective: Objective, coefficients: Coefficients) -> dict[str, Metric]:
    metrics: dict[str, Metric] = {}
    if objective.entropy is not None and objective.entropy.has_bonus:
        metrics["train/entropy_coef"] = Last(coefficients.entropy)
    if objective.kl is not None:
        metrics["train/kl_loss_coef"] = Last(coefficients.kl_loss)
    if objective.adapts_clip_high and isinstance(objective.policy_loss, Clip) and objective.policy_loss.high is not None:
        metrics["train/clip_high"] = Last(objective.policy_loss.high)
    return metrics


def _agreed(place: Place, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Return metrics that are equal on all ranks, on the one rank that reports them."""
    return dict(metrics) if place.reports_alone else {}


def compute_gradients(
    model: TrainedModel,
    waiting: Gradients,
    loss: passes.LossFunction,
    *,
    place: Place,
    measure: Sequence[str] = (),
    replay: bool = False,
    router_step: RouterStep | None = None,
) -> Gradients:
    """Replace the model's gradients by those of `loss` over all micro-batches of all ranks; return `waiting` completed.

    The reports of `loss` are `LossOutput`s, and `measure` names metrics whose mean is asked for.
    `passes.forward_backward` describes `replay` and `router_step`. No weight changes. Collective.
    """
    model.optimizer.zero_grad()
    biases = [bias for chunk in model.chunks for _, bias in expert_biases(chunk)]
    before = [bias.clone() for bias in biases]
    reports: list[LossOutput] = passes.forward_backward(model.chunks, waiting.micro_batches, loss, replay=replay, router_step=router_step)
    finite, sums = _measure(reports if place.reports else [], measure, device=waiting.micro_batches[0].input_ids.device)
    # megatron-core moves the biases together with its sums of gradients; the biases have to move with the weights.
    moved = [(bias, bias.clone()) for bias in biases]
    for bias, old in zip(biases, before, strict=True):
        bias.copy_(old)
    return dataclasses.replace(waiting, reports=reports, finite=finite, sums=sums, moved_biases=moved)


def _measure(reports: Sequence[LossOutput], names: Sequence[str], *, device: torch.device) -> tuple[bool, dict[str, tuple[float, float]]]:
    """Return True when all losses are finite, and sums of the metrics `names` with weights. Collective over all ranks."""
    shares = torch.zeros(1 + 2 * len(names), dtype=torch.float64, device=device)
    zero = torch.zeros((), device=device)
    for report in reports:
        pairs = [report.metrics.get(name, (zero, zero)) for name in names]
        shares += torch.stack([(~report.loss.isfinite()).double(), *(value.double() for pair in pairs for value in pair)])
    broken, *sums = sum_over_ranks(shares).tolist()
    return not broken, dict(zip(names, zip(sums[::2], sums[1::2], strict=True), strict=True))


def apply_gradients(
    model: TrainedModel,
    gradients: Gradients,
    *,
    place: Place,
    dumps: Path | None,
    prefix: str = "",
    temperature: float = 1.0,
    frozen: bool = False,
) -> tuple[bool, dict[str, Metric]]:
    """Update the weights once; return True for finite losses and gradient, and metrics named with `prefix`. Collective.

    Otherwise nothing is updated, on any rank, and the micro-batches that may be the cause are
    written to the directory `dumps`. A `frozen` model is left unchanged.
    """
    lr = 0.0 if frozen else model.lr
    sound, grad_norm = optimizer_step(model.optimizer, frozen=frozen) if gradients.finite else (False, math.nan)
    if sound and not frozen:
        for bias, moved in gradients.moved_biases:
            bias.copy_(moved)
        model.scheduler.step(1)
    if not sound and place.reports and dumps is not None:
        title = f"{prefix.replace('_', '-')}optimizer-step-{gradients.number:06d}"
        for index, report in enumerate(gradients.reports):
            # A gradient that is not finite despite finite losses can come from any micro-batch.
            if gradients.finite or not bool(report.loss.isfinite()):
                path = dumps / f"{title}-rank-{torch.distributed.get_rank()}-micro-batch-{index}"
                micro_batch, loss = gradients.micro_batches[index], float(report.loss)
                dump_micro_batch(path, micro_batch, gradients.data, loss=loss, grad_norm=grad_norm, temperature=temperature)
    names = {"grad_norm": Mean(grad_norm, 1.0), "lr": Last(lr), "skipped_steps": Sum(int(not sound))}
    return sound, _agreed(place, {f"train/{prefix}{name}": metric for name, metric in names.items()})


def optimizer_step(optimizer: MegatronOptimizer, *, frozen: bool = False) -> tuple[bool, float]:
    """Clip and apply finite gradients, unless `frozen`; return soundness, and the norm before clipping. Collective."""
    found_inf = optimizer.prepare_grads()
    grad_norm = float(optimizer.get_grad_norm())
    if found_inf or not math.isfinite(grad_norm):
        return False, grad_norm
    if frozen:
        return True, grad_norm
    for part in parts_of(optimizer):
        parameters = part.get_parameters()
        if parameters and part.config.clip_grad > 0:
            clip_grad_by_total_norm_fp32(
                parameters,
                max_norm=part.config.clip_grad,
                total_norm=grad_norm,
                use_decoupled_grad=part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
            )
    return bool(optimizer.step_with_ready_grads()), grad_norm


def share_of_metrics(reports: Sequence[LossOutput], place: Place, *, loss: str, names: Mapping[str, tuple[str, ...]]) -> dict[str, Metric]:
    """Return this rank's share of the metrics, read from the device at once; `names` where they are not train/NAME."""
    if not place.reports:
        return {}
    own = list(reports[0].metrics)
    rows = [[report.loss, *(value for name in own for value in report.metrics[name])] for report in reports]
    table = torch.stack([torch.stack([value.double() for value in row]) for row in rows])
    sums, largest = torch.stack([table.sum(dim=0), table.amax(dim=0)]).tolist()
    # The loss is the sum of all shares: one rank gives the weight, the others only their share.
    metrics: dict[str, Any] = {f"train/{loss}": Mean(sums[0], float(place.reports_alone))}
    for index, name in enumerate(own):
        for full_name in names.get(name, (f"train/{name}",)):
            metrics[full_name] = Mean(sums[1 + 2 * index], sums[2 + 2 * index])
    if (found := metrics.pop(f"train/{LARGEST}", None)) is not None and found.weight:
        metrics[f"train/{LARGEST}"] = Max(largest[1 + 2 * own.index(LARGEST)])
    return metrics
