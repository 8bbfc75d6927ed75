"""The routers' side of an optimizer step: denominators of their losses before, metrics after."""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config

from megatron_rl.config.settings import ModelSettings, TrainingSettings
from megatron_rl.errors import UserError
from megatron_rl.models.experts.moe_fields import balance_coefficient, num_mixture_layers
from megatron_rl.models.experts.routed_tokens import RouterReport, RouterStep
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.observe.metrics import Max, Mean, Metric, Min
from megatron_rl.training.collectives import sum_over_ranks
from megatron_rl.types import StepTotals, TrainBatch


def check_routing_replay(model: ModelSettings, training: TrainingSettings, spec: ModelSpec) -> None:
    """Raise UserError for a replay of recorded experts in a model without experts."""
    if training.routing_replay and spec.moe is None:
        raise UserError(
            f"training.routing_replay is true, but {spec.architecture} at {model.path} has no experts to which tokens are routed; "
            "set it to false"
        )


def check_record(batch: TrainBatch, spec: ModelSpec) -> None:
    """Raise ValueError when the experts in `batch` do not fit the model."""
    experts, moe = batch.routed_experts, spec.moe
    if experts is None:
        return
    if moe is None:
        raise ValueError(f"TrainBatch.routed_experts is given, but {spec.architecture} has no experts")
    needed = (spec.num_layers - moe.num_dense_layers, moe.num_experts_per_token)
    if experts.shape[1:] != needed:
        raise ValueError(f"TrainBatch.routed_experts has [layers, experts of a token] {experts.shape[1:]}, the model has {needed}")
    if experts.size and experts.max() >= moe.num_experts:
        raise ValueError(f"TrainBatch.routed_experts names expert {experts.max()}, the model has 0 to {moe.num_experts - 1}")


class ExpertLoad:
    """The routers of this rank's model in one optimizer step; nothing in a model without experts."""

    def __init__(self, chunk: torch.nn.Module, totals: StepTotals, *, device: torch.device, replays: bool = False) -> None:
        """`chunk` is any of the model's; `totals` gives the denominators of the routers' losses; `replays` whether experts are replayed."""
        self._config: TransformerConfig = get_model_config(chunk)
        self._replays = replays
        self.step: RouterStep | None = None
        if self._config.num_moe_experts is not None:
            self.step = RouterStep(
                num_sequences=totals.num_sequences,
                num_tokens=totals.num_sequence_tokens,
                balance_coef=balance_coefficient(self._config),
                z_coef=self._config.moe_z_loss_coeff or 0.0,
                num_layers=num_mixture_layers(self._config),
                num_experts=self._config.num_moe_experts,
                device=device,
            )

    def metrics(self) -> dict[str, Metric]:
        """Return the step's metrics, equal on every rank. Collective over all ranks."""
        if self.step is None:
            return {}
        return router_metrics(self.step.reduce(sum_over_ranks), top_k=self._config.moe_router_topk, replays=self._replays)


def router_metrics(report: RouterReport, *, top_k: int, replays: bool) -> dict[str, Metric]:
    """Return a step's router metrics: replayed tokens with `replays`, losses where a coefficient is set."""
    mean = report.load.mean(dim=1, keepdim=True)
    share = report.load / mean
    idle = float((report.load == 0).sum())
    metrics: dict[str, Metric] = {
        "train/expert_load_max": Max(float(share.max())),
        "train/expert_load_min": Min(float(share.min())),
        "train/expert_idle_fraction": Mean(idle, float(report.load.numel())),
    }
    if report.balance_loss is not None:
        metrics["train/aux_loss"] = Mean(report.balance_loss, 1.0)
    if report.z_loss is not None:
        metrics["train/router_z_loss"] = Mean(report.z_loss, 1.0)
    if replays:
        metrics["train/routing_replayed"] = Mean(report.replayed, float(report.load.sum()) / top_k)
        metrics["train/routing_changed"] = Mean(report.changed, report.replayed)
        metrics["train/routing_reordered"] = Mean(report.reordered, report.replayed)
    return metrics
