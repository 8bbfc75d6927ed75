"""A model that is trained: its chunks on this rank with gradient buffers, its optimizer, its learning rate over steps."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_rl.config.derived import dtype_name
from megatron_rl.config.settings import ModelSettings, TrainingSettings
from megatron_rl.device import Device, prepare_megatron
from megatron_rl.errors import UserError
from megatron_rl.models.build import PolicyModel, build_model
from megatron_rl.models.freezing import freeze
from megatron_rl.models.hf_weights import load_hf_weights
from megatron_rl.models.megatron_config import resolve_attention, transformer_config
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.parameter_marks import mark_parameters
from megatron_rl.models.value_head import replace_heads
from megatron_rl.training.collectives import true_on_ranks
from megatron_rl.training.optimizer import build_optimizer, build_scheduler, make_configs, wrap_ddp

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, eq=False)
class TrainedModel:
    """`chunks`, one for each virtual pipeline stage of this rank, and what changes their weights."""

    chunks: Sequence[DistributedDataParallel]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler

    @property
    def lr(self) -> float:
        """Learning rate of the coming optimizer step."""
        return float(self.optimizer.param_groups[0]["lr"])


def build_trained_model(
    model: ModelSettings,
    training: TrainingSettings,
    spec: ModelSpec,
    *,
    device: Device,
    optimizer: Mapping[str, Any],
    total_steps: int | None,
    with_value_head: bool = False,
    with_weights: bool = True,
) -> TrainedModel:
    """The model of `model.path` with its weights, trained by an optimizer of the fields `optimizer` for `total_steps` optimizer steps.

    `with_value_head` makes it a critic: one value for each position in place of logits. Without weights, which then need not be there,
    only sizes can be asked. Collective; megatron's parallel state must
    be initialised. Raises UserError for what does not fit the model, the layout or the installed megatron-core.
    """
    dtype = model_dtype(model, device)
    attention = resolve_attention(model.attention)
    config = transformer_config(spec, topology=training.topology, dtype=dtype, overrides=model.megatron, attention=attention)
    chunks = build_model(spec, config, attention=attention)
    mark_parameters(chunks, spec)
    if with_weights:
        load_hf_weights(chunks, spec, model.path)
    # Before a critic's head takes the name of the head that it replaces, which may be tied to frozen embeddings.
    freeze(chunks, spec, training.frozen)
    if with_value_head:
        replace_heads(chunks)
    # Building a model imports more of megatron-core, which the shims have to reach too.
    prepare_megatron(device)
    optimizer_config, ddp_config = make_configs(optimizer, training.ddp, dtype=dtype)
    if training.frozen and optimizer_config.use_distributed_optimizer:
        _check_ranks_train(chunks)
    wrapped = wrap_ddp(chunks, config, ddp_config)
    built = build_optimizer(optimizer_config, wrapped)
    scheduler = build_scheduler(built, optimizer_config, training.schedule, total_steps=total_steps)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = built.scale_loss
    return TrainedModel(wrapped, built, scheduler)


def _check_ranks_train(chunks: Sequence[PolicyModel]) -> None:
    """Raise UserError, on every rank, when one of them has no weight to train: its distributed optimizer could not be saved. Collective."""
    trainable = any(parameter.requires_grad for chunk in chunks for parameter in chunk.parameters())
    if not true_on_ranks(trainable):
        raise UserError(
            "training.frozen leaves a pipeline stage with nothing to train, which megatron-core's distributed optimizer cannot save; "
            "set training.optimizer.use_distributed_optimizer to false, freeze less, or choose another training.topology.pp"
        )


def model_dtype(model: ModelSettings, device: Device) -> torch.dtype:
    """The parameters' dtype that `model.dtype` means on `device`."""
    return DTYPES[dtype_name(model, device_kind=device.kind)]


@contextmanager
def complete_parameters(chunks: Sequence[DistributedDataParallel]) -> Iterator[None]:
    """Inside, every parameter is gathered and stays so: needed to read or replace weights while their gather overlaps the forward."""
    overlapping = [chunk for chunk in chunks if chunk.use_forward_hook]
    for chunk in overlapping:
        chunk.disable_forward_pre_hook(param_sync=True)
    try:
        yield
    finally:
        for chunk in overlapping:
            chunk.enable_forward_pre_hook()
