"""One update of a model's weights by the gradient of a whole optimizer step, in two halves; what policy and critic have in common."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.models.build import TrainedModel
from megatron_rl.models.experts.routed_tokens import RouterStep
from megatron_rl.models.hf_weights import expert_biases
from megatron_rl.observe.metrics import Mean, Metric
from megatron_rl.training import passes
from megatron_rl.training.advantages import TokenData
from megatron_rl.training.collectives import sum_over_ranks
from megatron_rl.training.micro_batch import MicroBatch
from megatron_rl.training.optimizer import optimizer_step
from megatron_rl.training.topology import Place
from megatron_rl.types import StepTotals


@dataclass(frozen=True, slots=True, eq=False)
class Report:
    """The report of a micro-batch's loss: `loss`, this rank's share, and (sum, weight) metrics as
    tensors.
    """

    loss: Tensor
    metrics: Mapping[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class Gradients:
    """Facts about the gradients in a model's buffers before the update.

    `finite`: all losses were, on all ranks. `means` are the requested metrics over all ranks (None:
    nothing measured), the same on every rank. `reports` of this rank's micro-batches on the last
    stage. `moved_biases`: routers' biases, and their values after the step.
    """

    finite: bool
    means: Mapping[str, float | None]
    reports: Sequence[Report]
    moved_biases: Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class StepGradients:
    """An optimizer step with computed gradients in the model's buffers, and the inputs of the
    gradients.

    `gradients` None: the step has no trainable token. `metrics` are this rank's share of the
    metrics known so far.
    """

    gradients: Gradients | None
    micro_batches: Sequence[MicroBatch]
    totals: StepTotals
    data: TokenData
    metrics: Mapping[str, Metric]


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """The outcome of an optimizer step.

    `sound`: all losses and the gradient were finite, on all ranks, or else nothing was updated.
    `lr` is the learning rate of the step, `grad_norm` the norm before clipping. `suspects` are the
    micro-batches of this rank that may have broken the step.
    """

    sound: bool
    lr: float
    grad_norm: float
    suspects: tuple[int, ...]


def compute_gradients(
    model: TrainedModel,
    micro_batches: Sequence[MicroBatch],
    loss: passes.LossFunction,
    *,
    place: Place,
    measure: Sequence[str] = (),
    replay: bool = False,
    router_step: RouterStep | None = None,
) -> Gradients:
    """Replace the model's gradients by the gradient of `loss` over all micro-batches of all ranks.

    The reports of `loss` are `Report`s. `measure` names metrics with a requested mean. `replay` and
    `router_step` are for the routers of a mixture of experts, see `passes.forward_backward`. No
    weight changes. Collective.
    """
    model.optimizer.zero_grad()
    biases = [bias for chunk in model.chunks for _, bias in expert_biases(chunk)]
    before = [bias.clone() for bias in biases]
    reports: list[Report] = passes.forward_backward(model.chunks, micro_batches, loss, replay=replay, router_step=router_step)
    finite, means = _measure(reports if place.reports else [], measure, device=micro_batches[0].input_ids.device)
    # megatron-core moves the biases together with its sums of gradients; the biases have to move with the weights.
    moved = [(bias, bias.clone()) for bias in biases]
    for bias, old in zip(biases, before, strict=True):
        bias.copy_(old)
    return Gradients(finite=finite, means=means, reports=reports, moved_biases=moved)


def apply_gradients(model: TrainedModel, gradients: Gradients, *, place: Place, frozen: bool = False) -> Update:
    """Update the weights once by the gradients of `compute_gradients`.

    A `frozen` model is left unchanged at a learning rate of 0. Nothing is updated when a loss or
    the gradient is not finite on any rank. Collective.
    """
    lr, reports = 0.0 if frozen else model.lr, gradients.reports
    sound, grad_norm = optimizer_step(model.optimizer, frozen=frozen) if gradients.finite else (False, math.nan)
    suspects: tuple[int, ...] = ()
    if sound and not frozen:
        for bias, moved in gradients.moved_biases:
            bias.copy_(moved)
        model.scheduler.step(1)
    if not sound and place.reports:
        # A gradient that is not finite despite finite losses can come from any micro-batch.
        suspects = tuple(index for index, report in enumerate(reports) if gradients.finite or not bool(report.loss.isfinite()))
    return Update(sound=sound, lr=lr, grad_norm=grad_norm, suspects=suspects)


def _measure(reports: Sequence[Report], names: Sequence[str], *, device: torch.device) -> tuple[bool, dict[str, float | None]]:
    """Return True when all losses of the step are finite, and the means of the metrics `names`.

    Both are over all ranks. Collective.
    """
    shares = torch.zeros(1 + 2 * len(names), dtype=torch.float64, device=device)
    zero = torch.zeros((), device=device)
    for report in reports:
        pairs = [report.metrics.get(name, (zero, zero)) for name in names]
        shares += torch.stack([(~report.loss.isfinite()).double(), *(value.double() for pair in pairs for value in pair)])
    broken, *sums = sum_over_ranks(shares).tolist()
    pairs_of = zip(names, sums[::2], sums[1::2], strict=True)
    return not broken, {name: total / weight if weight else None for name, total, weight in pairs_of}


def share_of_metrics(reports: Sequence[Report], place: Place, *, loss: str, names: Mapping[str, tuple[str, ...]]) -> dict[str, Metric]:
    """Return this rank's share of the metrics: sums over micro-batches, read from the device at
    once.

    The loss is called train/`loss`; `names` gives the other names, else train/NAME.
    """
    if not place.reports:
        return {}
    own = list(reports[0].metrics)
    rows = [[report.loss, *(value for name in own for value in report.metrics[name])] for report in reports]
    sums = torch.stack([torch.stack([value.double() for value in row]) for row in rows]).sum(dim=0).tolist()
    # The loss is the sum of all shares: one rank gives the weight, the others only their share.
    metrics: dict[str, Metric] = {f"train/{loss}": Mean(sums[0], float(place.reports_alone))}
    for index, name in enumerate(own):
        for full_name in names.get(name, (f"train/{name}",)):
            metrics[full_name] = Mean(sums[1 + 2 * index], sums[2 + 2 * index])
    return metrics
