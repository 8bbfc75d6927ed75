"""One update of a model's weights by the gradient of a whole optimizer step; what policy and critic have in common."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, distributed

from megatron_rl.models.experts.routed_tokens import RouterStep
from megatron_rl.models.weights import expert_biases
from megatron_rl.observe.metrics import Mean, Metric
from megatron_rl.training import passes
from megatron_rl.training.micro_batch import MicroBatch
from megatron_rl.training.optimizer import optimizer_step
from megatron_rl.training.topology import Place
from megatron_rl.training.trained_model import TrainedModel


@dataclass(frozen=True, slots=True, eq=False)
class Report:
    """What a micro-batch's loss leaves behind: `loss`, this rank's share, and metrics as (sum, weight) pairs, all still tensors."""

    loss: Tensor
    metrics: Mapping[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """What an optimizer step did.

    `sound`: all losses and the gradient were finite, on all ranks, or else nothing was updated. `lr` is the rate it was done at,
    `grad_norm` that before clipping, `means` the metrics asked for over all ranks (None: nothing measured), the same on every rank.
    `reports` of this rank's micro-batches on the last stage; `suspects` those that may have broken the step.
    """

    sound: bool
    lr: float
    grad_norm: float
    means: Mapping[str, float | None]
    reports: Sequence[Report]
    suspects: tuple[int, ...]


def update(
    model: TrainedModel,
    micro_batches: Sequence[MicroBatch],
    loss: passes.LossFunction,
    *,
    place: Place,
    measure: Sequence[str] = (),
    frozen: bool = False,
    replay: bool = False,
    router_step: RouterStep | None = None,
) -> Update:
    """Update the weights once by the gradient of `loss`, whose reports are `Report`s, over all micro-batches of all ranks.

    `measure` names metrics whose means are wanted. A `frozen` model is left as it is, and its learning rate is 0. `replay` and
    `router_step` are for the routers of a mixture of experts, see `passes.forward_backward`. Collective.
    """
    lr = 0.0 if frozen else model.lr
    model.optimizer.zero_grad()
    biases = [bias for chunk in model.chunks for _, bias in expert_biases(chunk)]
    biases_before = [bias.clone() for bias in biases]
    reports: list[Report] = passes.forward_backward(model.chunks, micro_batches, loss, replay=replay, router_step=router_step)
    finite, means = _measure(reports if place.reports else [], measure, device=micro_batches[0].input_ids.device)
    sound, grad_norm = optimizer_step(model.optimizer, frozen=frozen) if finite else (False, math.nan)
    if frozen or not sound:
        # megatron-core moves them together with its sums of gradients, whatever becomes of these.
        for bias, before in zip(biases, biases_before, strict=True):
            bias.copy_(before)
    suspects: tuple[int, ...] = ()
    if sound and not frozen:
        model.scheduler.step(1)
    if not sound and place.reports:
        # A gradient that is not finite although all losses are can come from any micro-batch.
        suspects = tuple(index for index, report in enumerate(reports) if finite or not bool(report.loss.isfinite()))
    return Update(sound=sound, lr=lr, grad_norm=grad_norm, means=means, reports=reports, suspects=suspects)


def _measure(reports: Sequence[Report], names: Sequence[str], *, device: torch.device) -> tuple[bool, dict[str, float | None]]:
    """Whether all losses of the step are finite, and the means of the metrics `names`, over all ranks. Collective."""
    shares = torch.zeros(1 + 2 * len(names), dtype=torch.float64, device=device)
    zero = torch.zeros((), device=device)
    for report in reports:
        pairs = [report.metrics.get(name, (zero, zero)) for name in names]
        shares += torch.stack([(~report.loss.isfinite()).double(), *(value.double() for pair in pairs for value in pair)])
    distributed.all_reduce(shares)
    broken, *sums = shares.tolist()
    pairs_of = zip(names, sums[::2], sums[1::2], strict=True)
    return not broken, {name: total / weight if weight else None for name, total, weight in pairs_of}


def share_of_metrics(reports: Sequence[Report], place: Place, *, loss: str, names: Mapping[str, tuple[str, ...]]) -> dict[str, Metric]:
    """This rank's share of the metrics: sums over its micro-batches, read from the device at once.

    The loss is called train/`loss`, other metrics as `names` has it or else train/NAME.
    """
    if not place.reports:
        return {}
    own = list(reports[0].metrics)
    rows = [[report.loss, *(value for name in own for value in report.metrics[name])] for report in reports]
    sums = torch.stack([torch.stack([value.double() for value in row]) for row in rows]).sum(dim=0).tolist()
    # The loss is the sum of all shares: one rank gives it the weight, the others only their share.
    metrics: dict[str, Metric] = {f"train/{loss}": Mean(sums[0], float(place.speaks))}
    for index, name in enumerate(own):
        for full_name in names.get(name, (f"train/{name}",)):
            metrics[full_name] = Mean(sums[1 + 2 * index], sums[2 + 2 * index])
    return metrics
